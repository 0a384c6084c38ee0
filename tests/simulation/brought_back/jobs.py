"""Faults of jobs: wrong requeues, missing requeues, wrong submissions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch import requeue, scheduler, submission
from launch.requeue import Requeuer
from launch.scheduler import RecordedJob
from runner.cli.start import start
from runner.config.composition import Composed
from runner.rundir import attempt_log, lease
from runner.rundir.attempt_log import AttemptLog
from runner.system import files
from simulation.brought_back.fault import Fault


def _looks_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requeue, "STATE_CHECKS", 1)


def _any_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requeuer, "_is_another", lambda self, found: False)
    _in_script(patch, 'if is_another_job "$record" "$script"; then', "if false; then")


def _earlier_start_takes_over(patch: pytest.MonkeyPatch) -> None:
    for module in (lease, attempt_log):
        patch.setattr(module, "is_later_start", lambda record, job: False)


def _no_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttemptLog, "check_budgets", lambda self, max_timeouts=None: None)


def _asks_once(patch: pytest.MonkeyPatch) -> None:
    real = Requeuer._ask_until_queued

    def ask(self: Requeuer, pause_s: float, max_refusals: float = math.inf) -> str | None:
        return real(self, pause_s, 1) or "asked"

    patch.setattr(Requeuer, "_ask_until_queued", ask)


def _no_timer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requeue, "KILL_MARGIN_S", -1e6)


def _in_script(patch: pytest.MonkeyPatch, old: str, new: str) -> None:
    real = requeue.script_lines

    def lines(*given: Any) -> list[str]:
        text = "\n".join(real(*given))
        assert old in text
        return text.replace(old, new).split("\n")

    patch.setattr(requeue, "script_lines", lines)


def _script_does_nothing(patch: pytest.MonkeyPatch) -> None:
    _in_script(patch, "trap requeue_unless_decided EXIT", "")


def _script_asks_once(patch: pytest.MonkeyPatch) -> None:
    _in_script(patch, "try <= REQUEUE_TRIES", "try <= 1")


def _one_verdict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requeue, "verdict_file", lambda folder, mark, restarts: folder / f"{mark}.verdict")
    _in_script(patch, ".${SLURM_RESTART_COUNT:-0}.verdict", ".verdict")


def _restarts_ignored(patch: pytest.MonkeyPatch) -> None:
    real = requeue.ended_by

    def ended_by(job: Mapping[str, str], restart_count: int) -> str | None:
        return real({**job, "Restarts": "0"}, restart_count)

    patch.setattr(requeue, "ended_by", ended_by)


def _preemption_is_cancellation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requeue, "_ended_at_preemption", lambda job: False)


def _requeues_cancelled(patch: pytest.MonkeyPatch) -> None:
    real = scheduler.requeue
    patch.setattr(scheduler, "requeue", lambda job_id, only_running: real(job_id, False))


def _same_id_same_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedJob, "is_same", lambda self, *_: True)


def _no_notes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(submission, "settle", lambda runs: [])


def _no_lease_of_submissions(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def submitting(jobs: list[Composed], guards: dict[Path, files.Guard]) -> Iterator[None]:
        for job in jobs:
            files.make_dirs(job.run_dir)
            guards[job.run_dir] = files.Guard("submission-00000001", lambda: None)
        yield

    patch.setattr(start, "_submitting", submitting)


def _fault(name: str, what: str, told_in: str, apply: Any) -> Fault:
    return Fault(name, "jobs", what, told_in, apply)


FAULTS = [
    _fault(
        "state-looked-at-once",
        "a signal is explained by the job's state although that may change after it",
        "docs/slurm.md, Rank 0",
        _looks_once,
    ),
    _fault("any-job", "a job that has come to the same id is requeued", "docs/slurm.md", _any_job),
    _fault(
        "earlier-start-takes-over",
        "an earlier start of a job takes the lease from a later one",
        "docs/slurm.md, The batch script",
        _earlier_start_takes_over,
    ),
    _fault("no-budget", "attempts without progress are not counted", "docs/slurm.md, Budgets", _no_budget),
    _fault("asks-once", "a refused requeue is not asked for again", "docs/slurm.md, Rank 0", _asks_once),
    _fault("no-timer", "nothing requeues a job whose save takes too long", "docs/slurm.md, The timer", _no_timer),
    _fault(
        "script-does-nothing",
        "the batch script does not requeue a job whose rank was killed",
        "docs/slurm.md, The batch script",
        _script_does_nothing,
    ),
    _fault(
        "script-asks-once",
        "the batch script asks Slurm once",
        "docs/slurm.md, The batch script",
        _script_asks_once,
    ),
    _fault("one-verdict", "all starts of a job share a verdict", "docs/slurm.md, The batch script", _one_verdict),
    _fault(
        "restarts-ignored",
        "a job that was requeued meanwhile is taken for one that was cancelled",
        "docs/slurm.md, Rank 0",
        _restarts_ignored,
    ),
    _fault(
        "preemption-is-cancellation",
        "a job that is cancelled to make room is taken for one that its user cancelled",
        "docs/slurm.md, Rank 0",
        _preemption_is_cancellation,
    ),
    _fault(
        "requeues-cancelled",
        "a job that is cancelled while it saves is requeued",
        "docs/slurm.md, Rank 0",
        _requeues_cancelled,
    ),
    _fault("same-id-same-job", "a job is known by its id alone", "docs/slurm.md, Stop and resume", _same_id_same_job),
    _fault(
        "no-notes",
        "a job that nobody recorded is not looked for",
        "docs/slurm.md, Stop and resume",
        _no_notes,
    ),
    _fault(
        "no-lease-of-submissions",
        "two commands submit the same run at once",
        "docs/slurm.md, Stop and resume",
        _no_lease_of_submissions,
    ),
]

"""Evaluations of saved checkpoints: the bits that the run records, each once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import here
import pytest
from fake_job import FakeJob
from runs import PACED, PATIENCE_S, ROOT, Run

from runner.checkpoint.files import reading
from runner.config.composition import Composer
from runner.config.identity import evaluation_digest
from runner.rundir import evaluations
from runner.rundir.evaluations import Request
from runner.rundir.find import find_runs
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import files
from runner.training.evaluate import Work, attempt

HELD_OUT = [
    "data=mixture",
    "eval.sets.few={sources: [prose], batches: 1, every_steps: 2}",
    "eval.metrics.seen._target_=torchmetrics.MeanMetric",
    "eval.metrics.seen.takes={value: loss}",
]
KINDS: dict[str, list[str]] = {
    "dropout": ["model.dropout=0.5"],
    "an average": ["train.ema_decay=0.5"],
    "several sets": HELD_OUT,
    "a batch norm": ["model=own", "model._target_=custom.Normed", "+model.vocab_size=256", "+model.width=8"],
    "bfloat16": ["train.precision=bfloat16"],
    "a task with a state": [
        *("data=own", "+data.sources.a._target_=custom_tasks.Points", "task=own", "task._target_=custom_tasks.Centred"),
        *("+data.eval_sources.a={_target_: custom_tasks.Points, size: 20, seed: 1}", "model=own"),
        "model._target_=custom_tasks.Pair",
    ],
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run with checkpoints of steps 2, 4 and 6."""
    return here.trained(tmp_path_factory.mktemp("evaluate") / "run", PACED)


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def own(run: Path) -> dict[int, dict[str, Any]]:
    """Return the run's own evaluation records by step."""
    return {each["step"]: each for each in lines(run / "metrics.jsonl") if any("eval" in key for key in each)}


def results(run: Path) -> list[dict[str, Any]]:
    """Return the results that `runner evaluate` has added, in the order of the steps."""
    return [json.loads(file.read_text()) for file in sorted((run / "evaluations").glob("step_*.json"))]


def added(run: Path) -> dict[int, dict[str, Any]]:
    """Return the results added with the run's own settings, by step; each step once."""
    found = [each for each in results(run) if "settings" not in each]
    assert len({each["step"] for each in found}) == len(found)
    return {each.pop("step"): each for each in found}


def without_step(records: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        step: {key: value for key, value in each.items() if key.startswith("eval")} for step, each in records.items()
    }


@pytest.mark.parametrize(
    "kind", [kind if kind == "dropout" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_results_are_bit_identical_to_those_of_the_run(tmp_path: Path, kind: str) -> None:
    run = here.trained(tmp_path / "run", *KINDS[kind])
    assert here.command("evaluate", run, "--step", "all") == 0
    assert without_step(added(run)) == without_step(own(run))
    assert set(added(run)) == {2, 4, 6}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_of_two_ranks_evaluates_a_run_on_two_ranks(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*here.SHORT, *HELD_OUT, "strategy=fsdp", "train.ema_decay=0.5"], ranks=2)
    run.finish()
    request = requested(run.path)
    code = (
        "import sys\nsys.path.insert(0, 'tests/support')\nfrom fake_job import FakeJob\n"
        "from runner.training.evaluate import attempt\n"
        f"sys.exit(attempt({str(request.directory(RunDir(run.path)))!r}, FakeJob()))"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*launch, sys.executable, "-c", code],
        cwd=ROOT,
        env=Run.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert without_step(added(run.path)) == without_step(own(run.path))
    assert set(added(run.path)) == {2, 4, 6}

    # If the disk of one machine refuses a checkpoint, all ranks skip it and evaluate the others.
    for file in (run.path / "evaluations").glob("step_*.json"):
        file.unlink()
    refuses = (
        "import errno, os\nfrom runner.system import files\nreal = files.stat\n"
        "def stat(path, *rest, **more):\n"
        "    if os.environ['RANK'] == '1' and 'step_00000004' in str(path): raise OSError(errno.ESTALE, 'Stale')\n"
        "    return real(path, *rest, **more)\n"
        "files.stat = stat\nopened = files.open_regular\n"
        "files.open_regular = lambda path, **more: (stat(path), opened(path, **more))[1]\n"
    )
    done = subprocess.run(
        [*launch, sys.executable, "-c", code.replace("from fake_job", refuses + "from fake_job")],
        cwd=ROOT,
        env=Run.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert set(added(run.path)) == {2, 6}
    assert done.stderr.count("error: ") >= 1
    assert "PeerError" not in done.stderr


def requested(run: Path, *overrides: str, step: str = "all") -> Request:
    """Return a submitted evaluation, without its job."""
    plain = Composer().recompose(run, overrides).plain
    request = Request(evaluation_digest(plain), step, overrides, plain)
    directory = request.directory(RunDir(run))
    directory.mkdir(parents=True)
    with Lease.acquire(RunDir(directory).submission) as lease:
        request.write(directory, lease.guard)
    return request


@pytest.mark.slow
def test_checkpoint_is_evaluated_once_per_settings(run: Path, capsys: Any) -> None:
    for words, now, before in (
        (["--step", "4"], 1, 0),
        (["--step", "all", "run.threads=1", "train.device=cpu", "eval.batches=2"], 2, 1),  # as it is
        (["eval.batches=1"], 1, 0),
        (["--step", "6", "eval.batches=1", "eval.every_steps=1"], 0, 1),
    ):
        assert here.command("evaluate", run, *words) == 0
        assert f"{now} evaluated now, {before} before" in capsys.readouterr().out
    assert sorted((each["step"], each.get("overrides", [])) for each in results(run)) == [
        (2, []),
        (4, []),
        (6, []),
        (6, ["eval.batches=1"]),
    ]


@pytest.mark.slow
def test_a_run_that_is_resumed_with_other_evaluations_keeps_both(run: Path) -> None:
    assert here.command("evaluate", run, "--step", "6") == 0
    assert here.command("resume", run, "eval.batches=1", "train.steps=8") == 0
    assert here.command("evaluate", run, "--step", "6") == 0
    assert [each["step"] for each in results(run)] == [6, 6]


def evaluating(run: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runner", "evaluate", str(run), *words],
        cwd=ROOT,
        env={**Run.environment(), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def held(run: Path, batches: int) -> dict[str, str]:
    """Return the environment of an evaluation that idles after this many batches."""
    env = Run(run, []).hold(batches)
    return {**env, "HELD_IN": "evaluation", "HELD_S": "1000"}


def wait(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None or condition(), process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle_the_same_command_continues(run: Path, signum: int) -> None:
    """Stop in the first of two batches of the second checkpoint."""
    process = evaluating(run, "--step", "all", **held(run, 2))
    wait(Run(run, []).idles, process)
    assert list(added(run)) == [2]
    before = here.contents(run / "evaluations")
    process.send_signal(signum)
    Run(run, []).release()
    _, err = process.communicate(timeout=PATIENCE_S)
    if signum != signal.SIGKILL:
        assert process.returncode == 75, err
        assert "interrupted after 1 of 3 checkpoints: rerun the command for the others" in err
    assert here.command("evaluate", run, "--step", "all") == 0
    assert before.items() <= here.contents(run / "evaluations").items()
    assert without_step(added(run)) == without_step(own(run))


def test_a_preempted_job_continues_after_its_requeue(run: Path, capsys: Any) -> None:
    request = requested(run)
    directory = request.directory(RunDir(run))
    job = FakeJob(early_signal=signal.SIGUSR2)
    assert at(directory, job) == 75
    assert (job.requeued, job.verdicts, job.starts) == (["preempted"], 1, 0)
    assert not added(run)
    job = FakeJob(restart_count=1)
    assert at(directory, job) == 0
    assert job.starts == 4  # after each checkpoint, and once there was none left
    assert without_step(added(run)) == without_step(own(run))
    assert at(directory, FakeJob(restart_count=2)) == 0
    assert len(results(run)) == 3


def at(directory: Path, job: FakeJob) -> int:
    """Yield an attempt in this process; restore its signal handlers and stop flag."""
    from runner.system.signals import STOP, STOP_SIGNALS

    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        return attempt(directory, job)
    finally:
        STOP.signum = None
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def test_a_request_that_is_gone_or_malformed_ends_its_job(run: Path, capsys: Any) -> None:
    directory = requested(run).directory(RunDir(run))
    (directory / "request.json").write_text('{"settings": 3}')
    assert at(directory, FakeJob()) == 2
    assert "request.json is malformed: rerun the command, which writes it" in capsys.readouterr().err
    (directory / "request.json").unlink()
    assert at(directory, FakeJob()) == 2
    assert "request.json is malformed" in capsys.readouterr().err
    assert not added(run)


def test_corrupt_checkpoint_is_left_out_of_all(run: Path, capsys: Any) -> None:
    file = run / "checkpoints" / "step_00000004" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert here.command("evaluate", run, "--step", "4") == 1
    assert "step_00000004 is corrupt" in capsys.readouterr().err
    assert here.command("evaluate", run, "--step", "all") == 1
    assert "warning: step 4 is left out: " in capsys.readouterr().err
    assert set(added(run)) == {2, 6}


@contextmanager
def unreadable(run: Path, monkeypatch: pytest.MonkeyPatch, times: int, whole: bool = False) -> Iterator[None]:
    """Refuse `times` reads of the manifest of step 4; with `whole`, every look at its directory, too."""
    real, look, refused = files.open_regular, files.stat, list(range(times))

    def stat(path: Any, **options: Any) -> Any:
        if whole and Path(path) == run / "checkpoints" / "step_00000004":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return look(path, **options)

    def opened(path: str | Path, **options: Any) -> BinaryIO:
        if Path(path) == run / "checkpoints" / "step_00000004" / "manifest.json" and refused:
            refused.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_regular", opened)
        patch.setattr(files, "stat", stat)
        patch.setattr(reading, "PAUSES_S", (0.0, 0.0))
        yield


@pytest.mark.parametrize("whole", [False, True])
def test_an_error_of_the_disk_leaves_no_checkpoint_out(
    run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The others are evaluated, the command fails, and a rerun completes the evaluation."""
    words = ["evaluate", run, "--step", "all"]
    with unreadable(run, monkeypatch, 1000, whole=whole):
        assert here.command(*words) == 1
    error = capsys.readouterr().err
    assert error.count("warning: step 4 is left for the next time: ") == 1
    assert "manifest.json cannot be read (Input/output error, EIO; tried 3 times)" in error.splitlines()[-1]
    assert set(added(run)) == {2, 6}
    with unreadable(run, monkeypatch, 2):
        assert here.command(*words) == 0
    assert without_step(added(run)) == without_step(own(run))


def test_job_refused_a_checkpoint_by_the_disk_is_started_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt counts as begun only if it has evaluated a checkpoint, or found all done."""
    directory, reasons = requested(run).directory(RunDir(run)), list[str | None]()

    def yield_verdict(job: FakeJob, reason: str | None = None) -> bool:
        reasons.append(reason)
        return True

    monkeypatch.setattr(FakeJob, "yield_verdict", yield_verdict)
    for starts in (2, 0):
        job = FakeJob()
        with unreadable(run, monkeypatch, 1000):
            assert at(directory, job) == 1
        assert job.starts == starts
    line = f"{run}/checkpoints/step_00000004/manifest.json cannot be read (Input/output error"
    assert [str(reason).startswith(line) for reason in reasons] == [True, True], reasons
    assert set(added(run)) == {2, 6}


def test_checkpoint_with_a_damaged_manifest_is_named(run: Path, capsys: Any) -> None:
    (run / "checkpoints" / "step_00000006" / "manifest.json").write_text("{")
    assert here.command("evaluate", run, "--step", "all") == 1
    assert "warning: step 6 is left out: " in capsys.readouterr().err
    assert set(added(run)) == {2, 4}
    assert here.command("evaluate", run, "--step", "last") == 0
    assert "step_00000006 is corrupt (manifest.json is not JSON" in capsys.readouterr().err


def test_full_disk_is_one_line_and_a_rerun_continues(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = files.write_atomic, [1]

    def write(path: Path, *arguments: Any, **more: Any) -> None:
        if path.parent.name == "evaluations" and not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        if path.parent.name == "evaluations":
            room.pop()
        real(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", write)
        assert here.command("evaluate", run, "--step", "all") == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert "evaluations cannot be written (No space left on device)" in line
    assert set(added(run)) == {2}
    assert here.command("evaluate", run, "--step", "all") == 0
    assert "2 evaluated now, 1 before" in capsys.readouterr().out
    assert without_step(added(run)) == without_step(own(run))


def test_results_of_another_command_are_not_counted(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Work._evaluate

    def evaluate(work: Work, step: int) -> bool:
        if step == 2:
            evaluations.add(work.run, {"step": 4, "eval_loss": 1.0, "digest": work.request.settings})
        return original(work, step)

    monkeypatch.setattr(Work, "_evaluate", evaluate)
    assert here.command("evaluate", run, "--step", "all") == 0
    assert "2 evaluated now, 0 before, 1 by another command; results in" in capsys.readouterr().out


def test_checkpoint_deleted_before_its_evaluation_is_skipped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Work._evaluate

    def evaluate(work: Work, step: int) -> bool:
        shutil.rmtree(run / "checkpoints" / "step_00000004", ignore_errors=True)
        return original(work, step)

    monkeypatch.setattr(Work, "_evaluate", evaluate)
    assert here.command("evaluate", run, "--step", "all") == 0
    assert set(added(run)) == {2, 6}


def test_the_records_of_the_run_stay_those_of_one_run(run: Path, capsys: Any) -> None:
    """Neither status nor report mistakes an evaluation for a run; a report includes its results."""
    requested(run)
    assert here.command("evaluate", run, "--step", "all", "eval.batches=1") == 0
    assert [found.path for found in find_runs(run.parent)] == [run]
    assert [found.path for found in find_runs(run / "evaluations")] == []
    capsys.readouterr()
    assert here.command("report", run.parent, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    settings = next(each["settings"] for each in results(run))
    assert row["metrics"]["eval_loss"]["last"] == own(run)[6]["eval_loss"]
    assert f"eval_loss@{settings}" in row["metrics"]
    assert not any("digest" in name for name in row["metrics"])

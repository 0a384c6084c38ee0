"""Several ranks on this machine, started by the command itself: `launcher.ranks`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import PACED, PATIENCE_S, TINY, Run, assert_same_run

from launch.local import LocalLauncher
from launch.rank_processes import RankProcesses
from runner.rundir.paths import RunDir

GLOBAL_BATCH = 12
COMMON = [
    *TINY,
    PACED,
    "data=mixture",
    "sampler=elastic",
    f"train.global_batch_size={GLOBAL_BATCH}",
    "train.batch_size=1",
    "train.steps=40",
    "eval.every_steps=0",
    "checkpoint.every_steps=6",
    "train.device=cpu",
]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def records(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.records() if "loss" in record]


def ranks_of(run: Run) -> list[psutil.Process]:
    """Return the processes of the ranks, in order. The command starts other processes as well, such as git."""
    assert run.process is not None
    found = []
    for child in psutil.Process(run.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if "runner.training.attempt" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda rank: rank.pid)


def held_at(run: Run, step: int, ranks: int | str) -> None:
    """Start an attempt with `launcher.ranks=ranks`, and return once it idles after `step`."""
    count = ranks if isinstance(ranks, int) else most(ranks)
    run.overrides = [*COMMON, f"launcher.ranks={ranks}"]
    run.hold_at(step + 1, calls=GLOBAL_BATCH // count, **NO_GPU)
    run.start()
    assert run.wait_until(lambda run: len(records(run)) >= step and run.idles()), run.wait()
    if ranks != 1:
        assert len(ranks_of(run)) == count


def most(ranks: str) -> int:
    """Return the number of ranks for a range such as 1-4 on this machine, which has no GPU here."""
    first, last = map(int, ranks.split("-"))
    return min(max(len(os.sched_getaffinity(0)), first), last)


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    """Return whether all of them end within the patience of the tests. A zombie counts as left."""
    _, alive = psutil.wait_procs(list(processes), timeout=PATIENCE_S)
    return not alive


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_killed_on_one_three_and_two_ranks_is_identical(tmp_path: Path) -> None:
    """Make attempts with 1, 3, 2, 2, 3, 2 ranks and all free ranks, each ended in another way."""
    whole = Run(tmp_path / "whole", COMMON, env=NO_GPU)
    whole.finish()
    run = Run(tmp_path / "run", COMMON)

    held_at(run, 5, 1)
    run.send(signal.SIGKILL)
    run.wait()

    # The command is killed: no rank outlives it.
    held_at(run, 9, 3)
    ranks = ranks_of(run)
    run.send(signal.SIGKILL)
    assert all_gone(ranks)
    run.wait()

    # One rank is lost: the others notice, and rank 0 records the end.
    held_at(run, 14, 2)
    ranks = ranks_of(run)
    ranks[1].kill()
    run.release()
    status, output = run.wait()
    assert status == 1, output
    assert "error: rank 1 was ended by SIGKILL" in output
    assert all_gone(ranks)
    assert run.attempts()[-1]["cause"] == "crash"

    # Rank 0 is lost, and with it the only writer.
    held_at(run, 19, 2)
    ranks = ranks_of(run)
    ranks[0].kill()
    status, output = run.wait()
    assert status == 128 + signal.SIGKILL, output
    assert "error: rank 0 was ended by SIGKILL" in output
    assert all_gone(ranks)

    for signum, count, step in ((signal.SIGTERM, 3, 25), (signal.SIGINT, 2, 31)):
        held_at(run, step, count)
        ranks = ranks_of(run)
        run.send(signum)  # not released: the ranks might be done before the command passes the signal on
        status, output = run.wait()
        assert status == 75, output
        assert f"interrupted ({signum.name}): saved at step" in output
        assert "Traceback" not in output
        assert all_gone(ranks)
        ended = run.attempts()[-1]
        assert (ended["cause"], ended["ranks"], ended["steps_lost"]) == ("interrupted", count, 0)

    run.overrides = [*COMMON, "launcher.ranks=1-4"]
    output = run.finish()
    now = most("1-4")
    changed = "" if now == 2 else " (2 before)"
    assert f" of 40 on {now} ranks{changed} in " in output or now == 1
    assert [attempt["ranks"] for attempt in run.attempts()] == [1, 3, 2, 2, 3, 2, now]
    assert [r["step"] for r in records(run)] == list(range(1, 41))
    assert_same_run(run, whole)
    last = "…, 3, 2, 3, 2" if now == 2 else f"…, 2, 3, 2, {now}"
    for command, shown in (("status", "ranks"), ("report", last)):
        assert shown in output_of("-m", "runner", command, str(tmp_path))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """As in one process, committed checkpoints stay, and nothing is awaited."""
    run = Run(tmp_path / "run", COMMON, env={"HELD_S": "1000"})
    held_at(run, 3, 2)
    ranks = ranks_of(run)
    status, output = run.send_until_the_end(signal.SIGINT)
    assert status not in (0, 75), output
    assert all_gone(ranks)
    run.finish()


@pytest.mark.slow
def test_a_signal_while_the_ranks_start_stops_them_in_order(tmp_path: Path) -> None:
    """The interpreters have no handlers yet: the signal waits, and is neither lost nor fatal."""
    run = Run(tmp_path / "run", [*COMMON, "launcher.ranks=2"])
    run.env = {**run.hold(3), **NO_GPU}
    run.start()
    assert run.wait_until(lambda run: len(ranks_of(run)) == 2), run.wait()
    run.send(signal.SIGINT)
    run.release()
    status, output = run.wait()
    assert status == 75, output
    assert "Traceback" not in output
    assert "(SIGINT): stopped before the first step" in output


@pytest.mark.slow
def test_each_run_of_a_sweep_has_its_ranks(tmp_path: Path) -> None:
    """Run two at a time, with two ranks each."""
    sweep = [*COMMON, "train.steps=6", f"run.root={tmp_path}", "launcher.slots=2", "launcher.gpus=[]"]
    output_of("-m", "runner", "-m", "seed=1,2", *sweep, "launcher.ranks=2")
    runs = [Run(path.parent, []) for path in tmp_path.glob("*/attempts.jsonl")]
    assert len(runs) == 2
    for run in runs:
        assert [attempt["ranks"] for attempt in run.attempts()] == [2]
        assert [record["step"] for record in records(run)] == list(range(1, 7))
        assert RunDir(run.path).rank_log(1).exists()


def output_of(*words: str) -> str:
    """Return the output of a Python command, which must succeed."""
    process = psutil.Popen(
        [sys.executable, *words],
        stdout=-1,
        stderr=-2,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**Run.environment(), **NO_GPU},
    )
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return str(output)


def test_too_few_gpus_is_an_error_and_cores_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU serves one rank only; cores serve any number."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    assert [LocalLauncher(ranks=ranks).ranks_for(1) for ranks in (1, "1-2", "2-8", 3)] == [1, 2, 3, 3]
    assert [LocalLauncher(ranks="1-8", gpus=[2, 3]).ranks_for(slots) for slots in (1, 2)] == [2, 1]
    assert LocalLauncher(ranks="2-8").check([tmp_path]) == []
    (error,) = LocalLauncher(ranks="4-8").check([tmp_path])
    assert "launcher.ranks=4-8: 4 ranks need a GPU each and 3 are visible: set launcher.ranks=3" in error
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = len(os.sched_getaffinity(0))
    assert LocalLauncher(ranks=f"1-{cores + 5}").ranks_for(1) == cores
    assert LocalLauncher(ranks=f"{cores + 5}-{cores + 9}").ranks_for(1) == cores + 5
    assert LocalLauncher(ranks=cores + 5).check([tmp_path]) == []
    assert LocalLauncher(ranks=2, gpus=[]).check([tmp_path]) == []


def test_launcher_ranks_are_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank of torchrun would start as many ranks again."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (error,) = LocalLauncher(ranks=2).check([tmp_path])
    assert error == "launcher.ranks=2 starts the ranks itself: run the command without torchrun"
    assert LocalLauncher().check([tmp_path]) == []


def test_the_preview_of_several_ranks_is_a_command_to_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the attempt that torchrun would start."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = LocalLauncher(ranks=3, command=["python", "-m", "a"]).preview([tmp_path])
    assert shown == f"python -m torch.distributed.run --standalone --nproc-per-node=3 -m a {tmp_path}"


Start = Callable[..., RankProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def started(code: str, log: Path | None = None, grace_s: float = 600.0) -> RankProcesses:
        head = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"
        head += "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"  # an attempt does so once it handles signals
        # One write, since rank 0 and the copies of the others' lines share the output: `print` makes several where
        # PYTHONUNBUFFERED is set, and they would mix.
        head += "def say(*values): sys.stderr.write(' '.join(map(str, values)) + chr(10))\n"
        command = [sys.executable, "-c", head + code]
        return RankProcesses(command, RunDir(tmp_path), 3, os.environ, log, grace_s)

    return started


def status_of(attempt: RankProcesses) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while (status := attempt.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return status


def test_rank_0_prints_and_the_others_show_their_errors(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three progress bars in one terminal are unreadable; an error must be visible, whichever rank has it."""
    code = "print('out', rank, flush=True); say('err', rank); sys.exit(3 * (rank == 0))"
    assert status_of(start(code)) == 3
    shown = capfd.readouterr()
    assert shown.out == "out 0\n"
    assert sorted(shown.err.splitlines()) == ["err 0", "err 1", "err 2"]
    log = tmp_path / "local.out"
    assert status_of(start(code, log)) == 3
    assert sorted(log.read_text().splitlines()) == ["err 0", "err 1", "err 2", "out 0"]
    assert capfd.readouterr() == ("", "")
    assert sorted(RunDir(tmp_path).rank_log(2).read_text().splitlines()) == ["err 2", "err 2", "out 2", "out 2"]


def test_ranks_know_their_place(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    """Compare the variables with those of torchrun. The port is the same for all ranks."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert status_of(start(f"say(*[os.environ[name] for name in {names!r}])")) == 0
    lines = sorted(line.split() for line in capfd.readouterr().err.splitlines())
    assert [line[:5] for line in lines] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({line[5] for line in lines}) == 1


def test_a_rank_that_does_not_follow_the_others_is_killed(start: Start) -> None:
    """Otherwise the command would wait for ever for a rank that hangs."""
    attempt = start("time.sleep(3600 * (rank == 2)); sys.exit(1)", grace_s=0.1)
    assert status_of(attempt) == 1
    assert attempt.losses() == ["rank 2 did not end after another one had, and was killed"]


def test_without_rank_0_the_others_are_killed(start: Start) -> None:
    """Only rank 0 writes: the others have nothing left to do."""
    attempt = start("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(3600)")
    assert status_of(attempt) == 128 + signal.SIGKILL
    (line,) = attempt.losses()
    assert line.startswith("rank 0 was ended by SIGKILL")

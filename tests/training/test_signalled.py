"""A signal that also reaches a compiler: the failure that it causes is the stop, and no crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from runs import PATIENCE_S, ROOT, TINY, Run
from tiny_attempts import STEPS, TinyJob, TinySession, tiny_attempts
from torch import nn
from torch._inductor.exc import CppCompileError, InductorError

from runner.errors import ExitStatus, TrainingError
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.paths import RunDir
from runner.system.signals import STOP
from runner.training import attempt as training_attempt
from runner.training.model import build


def compilation() -> Exception:
    """Return the exception that torch raises when a signal has ended g++."""
    child = subprocess.CalledProcessError(-signal.SIGTERM, "g++")
    compiler = CppCompileError(["g++"], "")
    compiler.__cause__ = child
    return InductorError(compiler, None)


FAILURES = {
    "a compilation": (compilation(), True),
    "a child process": (subprocess.CalledProcessError(-signal.SIGTERM, "ptxas"), True),
    "a pool": (BrokenProcessPool("A process in the process pool was terminated abruptly"), True),
    "a bug": (ValueError("a bug"), False),
    "an error of the user's": (TrainingError("the loss is nan"), False),
}


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_of_compilers_while_stopping_is_the_stop(
    what: str, stopped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error, of_child = FAILURES[what]
    run = RunDir(tmp_path / "run")
    run.path.mkdir()

    def fail(session: TinySession) -> None:
        if session.step == STEPS:
            if stopped:
                STOP.signum = signal.SIGTERM
            raise RuntimeError("while it is handled") from error

    save = TinySession._save

    def save_once(session: TinySession) -> bool:
        fail(session)
        return save(session)

    with tiny_attempts() as patch:
        patch.setattr(STOP, "signum", None)
        patch.setattr(TinySession, "_save", save_once)
        status = training_attempt.attempt(run.path, TinyJob(0))
    ended, printed = ended_attempts(run)[-1], capsys.readouterr()
    if stopped and of_child:
        assert (status, ended["cause"]) == (ExitStatus.INTERRUPTED, "interrupted")
        assert printed.err.count("warning: SIGTERM also ended a process that this one was waiting for") == 1
        assert f"({type(error).__name__})" in printed.err
        assert "Traceback" not in printed.err
        assert f"stopped at step {STEPS}, last saved at step {STEPS - 1}; rerun" in printed.out
    else:
        assert (status, ended["cause"]) == (ExitStatus.FAILED, "crash")
        assert "Traceback" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_records_a_crash_when_a_child_of_one_was_ended(failing: int, tmp_path: Path) -> None:
    """The other one is in a collective of the same step."""
    run = Run(
        tmp_path / "run",
        [*TINY, "train.loss._target_=signalled_child.loss", "launcher.ranks=2", "train.device=cpu", "train.steps=9"],
        {"FAIL_RANK": str(failing)},
    )
    run.env |= run.hold(2)
    run.start()
    assert run.wait_until(Run.idles)
    run.send(signal.SIGTERM)
    status, output = run.wait()
    assert status == 75, output
    assert "Traceback" not in output
    ended = run.attempts()[-1]
    assert (ended["cause"], ended["exit"]) == ("interrupted", 75)
    assert output.count("also ended a process") == 1
    run.finish()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own use
def test_the_probe_of_cpu_features_survives_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would mistake a killed trial program for a CPU with fewer features, and compile other kernels."""
    tried = []

    def try_programs() -> None:
        tried.append(subprocess.run(["/bin/sh", "-c", "kill -TERM $$; kill -HUP $$; exit 3"], check=False).returncode)

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", try_programs)
    build.compiled(nn.Linear(1, 1), torch.device("cpu"))
    assert tried == [3]


POOL = """
import signal, time
import psutil, torch
from runner.training.model import build
if __name__ == "__main__":
    build.compiled(torch.nn.Linear(1, 1), torch.device("cuda"))  # which compiles nothing yet
    from torch._inductor.async_compile import AsyncCompile
    pool = AsyncCompile.process_pool()
    assert pool.submit(int, 7).result() == 7  # the workers have started
    last = pool.submit(int, 8)
    for child in psutil.Process().children(recursive=True):
        child.send_signal(signal.SIGTERM)
    print(last.result(120), pool.submit(int, 9).result(120))
"""


@pytest.mark.slow
def test_compilation_does_not_wait_for_ended_workers() -> None:
    """The test does not end the workers, because Inductor does not notice the end of the process that starts them."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", POOL], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.stdout == "8 9\n", done.stderr


def compilers(parent: int) -> list[str]:
    """Return the kernels that g++ is compiling for a process."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.Error):
                found += [word for word in child.cmdline() if word.endswith(".main.cpp")]
    return found


@pytest.mark.promise("a signal reaches the compilers of torch.compile: no crash is recorded, a rerun trains")
def test_signal_to_the_group_while_compiling_is_no_crash(tmp_path: Path) -> None:
    """Send it as Slurm does. No file of a killed compiler makes the rerun fail."""
    run = Run(tmp_path / "run", [*TINY, "train.compile=true", "train.steps=2", "eval.every_steps=0"])
    env = {**run.environment(), "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "runner", *run.words()]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + PATIENCE_S
        while not compilers(process.pid):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        status = process.wait(PATIENCE_S)
    printed = (tmp_path / "output").read_text()
    assert status == 75, printed
    assert "Traceback" not in printed
    assert run.attempts()[-1]["cause"] == "interrupted"
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

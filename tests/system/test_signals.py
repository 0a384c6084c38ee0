"""The stop flag and its listener, in processes that receive real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from runs import ROOT

from runner.system import signals

HEAD = """
import os, signal, sys, threading, time
from runner.system.signals import StopFlag
flag = StopFlag()
flag.install()
heard = lambda signum: print("heard", signal.Signals(signum).name, flush=True)
"""
# One C call that lets other threads run, but no handler: about half a minute.
LONG_CALL = """
import hashlib
flag.listen(heard, later=lambda signum: None)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
"""
EARLY = """
os.kill(os.getpid(), signal.SIGUSR2)
assert flag.name == "SIGUSR2"
flag.listen(heard, later=lambda signum: None)
flag.wait_for_listener()
os.kill(os.getpid(), signal.SIGTERM)
assert flag.name == "SIGUSR2"
"""
CHILD = """
flag.listen(heard, later=lambda signum: None)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(bool(flag))
assert os.waitpid(child, 0)[1] == 0
assert not flag
flag.wait_for_listener()  # nothing to wait for
os.kill(os.getpid(), signal.SIGUSR1)
flag.wait_for_listener()
"""
LATER = """
flag.listen(heard, later=lambda signum: print("then", signal.Signals(signum).name, flush=True))
os.kill(os.getpid(), signal.SIGUSR2)
flag.wait_for_listener()
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
assert flag.name == "SIGUSR2"
time.sleep(1000)
"""
IGNORED = """
for change in (flag.uninstall, flag.install):
    change()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag
print("ignored", flush=True)
"""
# After the atexit functions, the interpreter tears down its modules, and the default handlers are back.
AT_THE_END = """
class Late:
    def __init__(self):
        self.os, self.sleep = os, time.sleep

    def __del__(self):
        self.os.write(1, b"ending\\n")
        self.sleep(1.0)

late = Late()
"""


def start(code: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    command = [*words, sys.executable, "-c", HEAD + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)


def test_listener_gets_a_signal_the_main_thread_cannot_handle() -> None:
    """A compilation or a long kernel delays Python's handlers, but the cause is noted."""
    with start(LONG_CALL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "heard SIGTERM\n"
        process.kill()


def test_a_signal_before_the_listener_reaches_it_once() -> None:
    with start(EARLY) as process:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    assert output == "heard SIGUSR2\n"


def test_later_signals_have_a_separate_listener() -> None:
    """The first signal decides the cause; a later one may leave less time."""
    with start(LATER) as process:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(3)]
        process.kill()
    assert heard == ["heard SIGUSR2\n", "then SIGTERM\n", "then SIGUSR1\n"]


def test_a_signal_to_a_forked_child_does_not_reach_its_parent() -> None:
    with start(CHILD) as process:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    assert output == "heard SIGUSR1\n"


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_ctrl_c_reports_at_once_and_the_second_one_ends(rank: str | None) -> None:
    """The main thread is in one C call for longer than this test takes. Rank 0 reports for all ranks."""
    env = {key: value for key, value in os.environ.items() if key != "RANK"} | ({} if rank is None else {"RANK": rank})
    with start(LONG_CALL, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "heard SIGINT\n"  # after the message
        first = "" if rank == "1" else process.stderr.readline() + process.stderr.readline()
        os.kill(process.pid, signal.SIGINT)
        second = process.stderr.read()
        assert process.wait(400) == 128 + signal.SIGINT
    told = (first.strip(), second.strip())
    assert told == (("", "") if rank == "1" else (signals.FIRST_INTERRUPT, signals.SECOND_INTERRUPT))


def test_a_process_is_quiet_if_its_parent_reports_ctrl_c() -> None:
    with start("flag.quiet = True" + LONG_CALL, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in ("ready\n", "heard SIGINT\n"):
            assert process.stdout.readline() == line
            os.kill(process.pid, signal.SIGINT)
        assert process.stderr.read() == ""
        assert process.wait(400) == 128 + signal.SIGINT


def test_nohup_is_respected() -> None:
    """A process that was started to ignore SIGHUP ignores it, and so do its children."""
    with start(IGNORED, "nohup", stderr=subprocess.DEVNULL) as process:
        output, _ = process.communicate(timeout=400)
    assert (process.returncode, output) == (0, "ignored\n")


def test_a_process_that_is_stopped_by_its_terminal_knows_it() -> None:
    with start("os.kill(os.getpid(), signal.SIGHUP); print(flag.name)") as process:
        output, _ = process.communicate(timeout=400)
    assert (process.returncode, output) == (0, "SIGHUP\n")


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS)
@pytest.mark.slow
def test_signal_at_interpreter_shutdown_keeps_the_status(signum: signal.Signals) -> None:
    """A scheduler that signals twice must not make a finished run a failed one."""
    with start(AT_THE_END) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        os.kill(process.pid, signum)
        process.communicate(timeout=400)
    assert process.returncode == 0

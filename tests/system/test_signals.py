"""The stop flag and its listener, in processes that receive real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from runs import ROOT

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


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HEAD + code], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_the_listener_gets_a_signal_that_the_main_thread_cannot_handle() -> None:
    """A compilation or a long kernel delays Python's own handlers; the cause is noted nevertheless."""
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


def test_signals_after_the_first_one_have_a_listener_of_their_own() -> None:
    """The first one decides the cause; a later one may leave less time."""
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


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_during_interpreter_shutdown_does_not_change_the_exit_status(signum: signal.Signals) -> None:
    """A scheduler that signals twice must not turn a finished run into a failed one."""
    with start(AT_THE_END) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        os.kill(process.pid, signum)
        process.communicate(timeout=400)
    assert process.returncode == 0

"""The stop flag and its listener, in processes that really get signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from runs import ROOT

HEAD = """
import os, signal, sys, threading, time
from runner.signals import StopFlag
flag = StopFlag()
flag.install()
heard = lambda signum: print("heard", signal.Signals(signum).name, flush=True)
"""
# One call of C that lets other threads run, and no handler: about half a minute.
LONG_CALL = """
import hashlib
flag.at_signal(heard)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
"""
EARLY = """
os.kill(os.getpid(), signal.SIGUSR2)
assert flag.name == "SIGUSR2"
flag.at_signal(heard)
flag.settle()
os.kill(os.getpid(), signal.SIGTERM)
assert flag.name == "SIGUSR2"
"""
CHILD = """
flag.at_signal(heard)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(bool(flag))
assert os.waitpid(child, 0)[1] == 0
assert not flag
flag.settle()  # nothing to wait for
os.kill(os.getpid(), signal.SIGUSR1)
flag.settle()
"""
# After all that atexit calls, the interpreter takes its modules apart, and the default handlers are back.
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


def test_the_listener_hears_a_signal_that_the_main_thread_cannot_take() -> None:
    """A compilation or a long kernel keeps Python's own handlers waiting: the cause is noted all the same."""
    with start(LONG_CALL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "heard SIGTERM\n"
        process.kill()


def test_a_signal_that_came_before_the_listener_is_heard_once() -> None:
    with start(EARLY) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output == "heard SIGUSR2\n"


def test_a_signal_to_a_forked_child_is_none_to_its_parent() -> None:
    with start(CHILD) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output == "heard SIGUSR1\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_while_the_interpreter_ends_does_not_change_its_status(signum: signal.Signals) -> None:
    """A scheduler that signals twice must not make a failure of a run that has finished."""
    with start(AT_THE_END) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        os.kill(process.pid, signum)
        process.communicate(timeout=60)
    assert process.returncode == 0

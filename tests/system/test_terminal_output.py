"""The output of a process after its terminal is closed, or after its reader has exited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT
from window import Window

OUTLIVE = """
import signal, sys, time
from runner.system.terminal import flush_output, outlive_terminal
closed = []
signal.signal(signal.SIGHUP, lambda *_: closed.append(True))
outlive_terminal()
print("ready", flush=True)
"""
AFTER = """
while not closed:
    time.sleep(0.01)
for stream in (sys.stdout, sys.stderr):
    print("into nothing", file=stream)
    stream.flush()
from rich.console import Console
Console(file=sys.stderr).print("into nothing")
open(sys.argv[1], "w").write("survived")
sys.exit(75)
"""
UNREAD = """
sys.stdin.readline()
for stream in (sys.stdout, sys.stderr):
    stream.write("left in a buffer, perhaps")
flush_output()
sys.exit(75)
"""


def test_prints_to_a_closed_terminal_do_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    window = Window([sys.executable, "-c", OUTLIVE + AFTER, str(mark)], ROOT, os.environ)
    try:
        window.wait_until(lambda: "ready" in window.shown)
        window.close()
        assert window.status() == 75
    finally:
        window.end()
    assert mark.read_text() == "survived"


@pytest.mark.parametrize("both", [False, True])
def test_unread_output_does_not_change_the_exit_status(both: bool) -> None:
    """Close standard output alone, or both, as with `2>&1 | tee`."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTLIVE + UNREAD],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(400) == 75

"""The stacks of a process's threads are available at any time."""

from __future__ import annotations

import subprocess
import sys

from runs import ROOT

COLLECTING = """
import gc, threading
from runner.system import stacks

for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
gc.set_threshold(1)
for _ in range(50):
    cycle = []
    cycle += [cycle, threading.local()]
    cycle[1].value = 1
    del cycle
    modules = stacks.running_modules()
    assert len(stacks.of_threads()) == 21
assert "runner.system.stacks" in modules
assert gc.isenabled()
"""


def test_garbage_collection_during_a_stack_dump_is_no_deadlock() -> None:
    """In Python 3.11.2 it was one, on each look of the hang watch: the process stopped, and no signal helped."""
    subprocess.run([sys.executable, "-c", COLLECTING], cwd=ROOT, check=True, timeout=60)

"""Run the simulation's command in a new process, so that a seed always gives the same story."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]


def command(*words: str, timeout: float = 500, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` with the modules of tests/."""
    variables = {**os.environ, "PYTHONPATH": f"{CLONE}:{CLONE / 'tests'}", **environment}
    line = [sys.executable, "-m", *words]
    return subprocess.run(line, env=variables, capture_output=True, text=True, check=False, timeout=timeout)

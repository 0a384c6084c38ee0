"""Derive a seed from the commit, so that a rerun of the tests repeats a failure."""

from __future__ import annotations

import subprocess
from functools import cache
from random import SystemRandom

from runs import ROOT


@cache
def new_seed() -> int:
    """Return a seed below 2**32 that follows from the commit, or a random one outside of git."""
    try:
        words = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout[:8], 16)
    except (OSError, subprocess.CalledProcessError):
        return SystemRandom().randrange(2**32)

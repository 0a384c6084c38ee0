"""A seed that is new in each commit: what failed with it is played again by running the tests again."""

from __future__ import annotations

import subprocess
from functools import cache
from random import SystemRandom

from runs import ROOT


@cache
def new_seed() -> int:
    """A seed that follows from the commit, below 2**32; a random one where there is none."""
    try:
        words = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout[:8], 16)
    except (OSError, subprocess.CalledProcessError):
        return SystemRandom().randrange(2**32)

"""Shared by all tests: one deterministic Hypothesis profile, and no leftovers in the environment."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings
from new_seeds import new_seed

# Fixtures that several modules share: command lines that start nothing; a cluster and its reference runs.
pytest_plugins = ["cli_fixtures", "jobs"]

settings.register_profile(
    "runner",
    derandomize=True,  # the same cuts in every run; a failure is reproducible by running the test again
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("runner")

# Children inherit it: two busy processes on two cores, and the same bits whatever else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# In the background of a script Ctrl-C is ignored, and children would inherit that: tests interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Printed once per run: with it, what failed is played again."""
    return f"simulation: new schedules from seed {new_seed()} on"

"""Configure all tests: one deterministic Hypothesis profile, and no leftovers in the environment."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from cost import Costs
from durations import Durations
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from new_seeds import new_seed
from progress import Progress

# Shared fixtures: command lines that start nothing; a cluster and its reference runs.
pytest_plugins = ["cli_fixtures", "isolation", "jobs", "references"]

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
# Variables of a job, or of a Git hook, that runs the tests.
FOREIGN = "RANK WORLD_SIZE LOCAL_ MASTER_ TORCHELASTIC_ SLURM_ SBATCH_ GIT_DIR GIT_INDEX_FILE GIT_WORK_TREE"
FOREIGN += " RUNNER_TRUST HYDRA_FULL_ERROR COLUMNS"
for name in [name for name in os.environ if name.startswith(tuple(FOREIGN.split()))]:
    del os.environ[name]

# In the background of a script Ctrl-C is ignored, and children would inherit that: tests interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same under nohup.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the tiers: see CONTRIBUTING.md."""
    group = parser.getgroup("tiers")
    group.addoption("--shard", metavar="K/N", help="run shard K of N of similar length, such as 2/4")
    group.addoption("--costs", metavar="N", type=int, help="list the N tests that take the most CPU time")
    group.addoption("--unlimited", action="store_true", help="let fast tests take as long as they like")
    group.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests in the processes that run them; report from the process that the user started."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(unlimited=config.getoption("unlimited")))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


@pytest.fixture(scope="session", autouse=True)
def table_of_characters() -> None:
    """Let Hypothesis make its table of all characters first: in a new clone a test would lose a second to it."""
    st.text().validate()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one shard; put promises and slow tests first, and tests on a cluster in one process."""
    if shard := config.getoption("shard"):
        number, _, count = shard.partition("/")
        if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(f"--shard={shard} must be K/N with K from 1 to N, such as 2/4")
        mine = Durations.read().shard([item.nodeid for item in items], int(number), int(count))
        config.hook.pytest_deselected(items=[item for item, kept in zip(items, mine, strict=True) if not kept])
        items[:] = [item for item, kept in zip(items, mine, strict=True) if kept]
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm"))
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("promise", "slow")))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: a full collection then takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Return the header, printed once per run, with which a failure can be reproduced."""
    return f"simulation: new schedules from seed {new_seed()} on"

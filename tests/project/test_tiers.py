"""Check the tiers of the test suite: fast tests stay fast, and four shards contain all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import durations
import pytest
from durations import Durations
from hypothesis import given
from hypothesis import strategies as st

SUPPORT = Path(durations.__file__).parent
CONFTEST = """
import cost
import pytest

cost.FAIL_S = 0.06

def pytest_configure(config):
    config.pluginmanager.register(cost.Costs())

@pytest.fixture(scope="session")
def shared():
    busy(0.15)

def busy(seconds):
    import time
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass
"""
TESTS = """
import subprocess
import sys
import pytest
from conftest import busy

def test_cheap(shared):  # what others use, too, is not its own cost
    pass

def test_dear():
    busy(0.15)

def test_dear_child():
    words = [sys.executable, "-c", "import time\\nwhile time.process_time() < 0.15: pass"]
    subprocess.run(words, check=True)

@pytest.mark.slow
def test_marked():
    busy(0.15)

@pytest.mark.promise("shown")
def test_promise():
    busy(0.15)
"""


@pytest.mark.slow
def test_unmarked_test_that_takes_long_fails(tmp_path: Path) -> None:
    """Count CPU seconds, with children. Marked tests and shared fixtures have no limit."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  promise(shown)\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [line.partition("::")[2].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert failed == ["test_dear", "test_dear_child"], done.stdout + done.stderr


@given(
    seconds=st.lists(st.floats(0, 60), min_size=1, max_size=30),
    count=st.integers(1, 6),
)
def test_shards_contain_every_test_once(seconds: list[float], count: int) -> None:
    """Check that each test is in one shard, and that no shard is longer than its part plus its longest test."""
    names = [f"test_it.py::test_{number}" for number in range(len(seconds))]
    known = Durations(dict(zip(names, seconds, strict=True)), 0.1)
    shards = [known.shard(names, number, count) for number in range(1, count + 1)]
    assert [sum(kept) for kept in zip(*shards, strict=True)] == [1] * len(names)
    for kept in shards:
        length = sum(each for each, mine in zip(seconds, kept, strict=True) if mine)
        assert length <= sum(seconds) / count + max(seconds) + 1e-6


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("tests/a/test_it.py::test_x", "tests/a/test_it.py::test_x"),
        ("tests/a/test_it.py::TestX::test_x[a-[b]]", "tests/a/test_it.py::TestX::test_x"),
        ("tests/a/test_it.py::test_x[1@2]@slurm", "tests/a/test_it.py::test_x"),
    ],
)
def test_cases_of_a_function_have_its_duration(name: str, function: str) -> None:
    assert durations.function_of(name) == function
    assert Durations({function: 7.0}, 0.1).of(name) == 7.0

"""Where the time of an attempt went: recorded by the attempt, or by the next one if it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rundir.attempt_log import AttemptLog, ended_attempts
from runner.rundir.paths import RunDir
from runner.rundir.time_account import ACTIVITIES, MAX_SAVES, TimeAccount, closed, latest, lived_s
from runner.system import clock

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.floats() | st.integers() | st.just(10**400) | JSON
STATES = st.fixed_dictionaries(
    {
        "seconds": st.dictionaries(st.sampled_from(ACTIVITIES), NUMBERS) | JSON,
        "trained": st.dictionaries(st.integers(-5, 10**20).map(str) | st.text(max_size=3), NUMBERS) | JSON,
    }
)


class Clocks:
    """A wall clock and a monotonic clock that a test moves; the wall clock may be set to anything."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.monotonic, self.wall = 1000.0, 1.7e9
        patch.setattr(clock, "monotonic", lambda: self.monotonic)
        patch.setattr(clock, "wall", lambda: self.wall)

    def passes(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def begin(path: Path, account: TimeAccount | None = None, last_sign: dict[str, Any] | None = None) -> AttemptLog:
    return AttemptLog.begin(RunDir(path), {"nodes": 1}, 100, lambda record: "killed", account, last_sign or {})


def commit(path: Path, step: int) -> None:
    """Make a checkpoint with the parts that the records look at."""
    folder = RunDir(path).checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"step": step, "sha256": ""}))


@pytest.mark.parametrize("jump", [-3e7, 3e7])
def test_a_wall_clock_that_is_set_changes_no_duration(tmp_path: Path, clocks: Clocks, jump: float) -> None:
    log = begin(tmp_path, TimeAccount(since=clocks.monotonic - 5))
    log.account.switch("steps")
    clocks.passes(10)
    clocks.wall += jump
    with log.account.doing("evaluation"):
        clocks.passes(20)
    log.end("cancelled", 75)
    assert ended_attempts(log.run)[-1]["seconds"] == {"start": 5, "steps": 10, "evaluation": 20}


def test_the_steps_up_to_the_newest_checkpoint_are_kept(tmp_path: Path, clocks: Clocks) -> None:
    """The last of three saves was not committed: the steps after the second have to be repeated."""
    log = begin(tmp_path)
    log.account.switch("steps")
    for step in (10, 20, 30):
        clocks.passes(step)
        log.update(step=step)
        log.account.saving(step)
        with log.account.doing("save"):
            clocks.passes(1)
        if step < 30:
            commit(tmp_path, step)
    clocks.passes(7)
    log.end("crash", 1)
    line = ended_attempts(log.run)[-1]
    assert (line["seconds"]["steps"], line["kept_s"], line["seconds"]["save"], line["saves"]) == (67, 30, 3, 3)


@pytest.mark.parametrize(
    ("trained", "start", "checkpoint", "kept"),
    [
        ({}, 0, 0, 0.0),  # nothing was saved
        ({}, 40, 40, 0.0),  # only what it began with
        ({}, 40, 50, 60.0),  # saved and committed after the state was written
        ({"50": 20.0}, 40, 50, 20.0),
        ({"50": 20.0}, 40, 40, 0.0),  # never committed
        ({"50": 20.0}, 40, 60, 60.0),
        ({"50": 20.0, "60": 90.0}, 40, 60, 60.0),  # no more than there was
        ({"x": 20.0, "-1": 3.0, "50": float("nan")}, 40, 40, 0.0),
    ],
)
def test_a_checkpoint_decides_the_time_that_is_kept(
    trained: dict[str, float], start: int, checkpoint: int, kept: float
) -> None:
    assert closed({"seconds": {"steps": 60.0}, "trained": trained}, start, checkpoint)["kept_s"] == kept


@pytest.mark.parametrize(("end_step", "kept"), [(50, 60.0), (51, 20.0), (None, 20.0)])
def test_attempt_that_ends_at_its_save_repeats_nothing(end_step: int | None, kept: float) -> None:
    """A killed attempt may have been in the middle of the next step."""
    assert closed({"seconds": {"steps": 60.0}, "trained": {"50": 20.0}}, 40, 50, end_step)["kept_s"] == kept


def test_only_the_latest_saves_are_remembered() -> None:
    account = TimeAccount()
    for step in range(100):
        account.saving(step)
    assert list(account.state()["trained"]) == [str(step) for step in range(100 - MAX_SAVES, 100)]


def test_killed_attempt_is_closed_at_its_last_sign_of_life(tmp_path: Path, clocks: Clocks) -> None:
    """During a long step, the heartbeat is newer than status.json, which the training thread writes."""
    log = begin(tmp_path)
    log.account.switch("steps")
    clocks.passes(100)
    log.update(force=True)
    with log.account.doing("evaluation"):
        clocks.passes(500)
        sign = json.loads(json.dumps(log.sign()))
    begin(tmp_path, last_sign=sign)
    assert ended_attempts(log.run)[-1]["seconds"] == {"start": 0, "steps": 100, "evaluation": 500}


@pytest.mark.parametrize(
    "sign",
    [{}, {"attempt": 2, "time": {"seconds": {"steps": 1e6}}}, {"attempt": 1, "time": None}, {"attempt": 1, "time": 3}],
)
def test_without_a_heartbeat_of_its_own_the_status_counts(tmp_path: Path, clocks: Clocks, sign: dict[str, Any]) -> None:
    log = begin(tmp_path)
    log.account.switch("steps")
    clocks.passes(100)
    log.update(force=True)
    begin(tmp_path, last_sign=sign)
    assert ended_attempts(log.run)[-1]["seconds"] == {"start": 0, "steps": 100}


def test_an_attempt_that_left_nothing_gets_no_invented_account(tmp_path: Path) -> None:
    log = begin(tmp_path)
    log.run.status.unlink()
    begin(tmp_path)
    assert "seconds" not in ended_attempts(log.run)[-1]


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        # Killed on Friday, resumed on Monday: the wall clock tells when the record was closed.
        ({"started": 1e9, "ended": 1e9 + 250_000, "seconds": {"start": 10.0, "steps": 3590.0}}, 3600.0),
        ({"started": 1e9, "ended": 1e9 + 50}, 50.0),
        ({"started": 1e9, "ended": 1e9 - 50}, 0.0),
        ({"started": True, "ended": "later"}, None),
        ({}, None),
    ],
)
def test_the_duration_of_an_attempt_is_its_own_count(line: dict[str, Any], seconds: float | None) -> None:
    """The duration determines the rate of kills, from which an adaptive cadence follows."""
    assert lived_s(line) == seconds


@given(states=st.lists(STATES | JSON, max_size=3), start=st.integers(0, 10**9), checkpoint=st.integers(0, 10**9))
def test_damaged_states_give_no_account_or_one_of_durations(states: list[Any], start: int, checkpoint: int) -> None:
    found = latest(1, *({"attempt": 1, "time": state} for state in states))
    line = closed(found, start, checkpoint)
    assert set(line) - {"saves"} in (set(), {"seconds", "kept_s", "trained"})
    if line:
        assert all(0 <= seconds < 1e14 for seconds in line["seconds"].values())
        assert 0 <= line["kept_s"] <= line["seconds"].get("steps", 0.0) + 1e-3

"""Check where the hours of every node went: the buckets add up to the whole time, for any attempts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import timed
from hypothesis import given
from hypothesis import strategies as st
from properties import given_in_tiers
from runs import TINY, Run

from runner.cli.look import report
from runner.report import goodput
from runner.report.runs import RunResults, read_run
from runner.report.tables import goodput_table, week_table
from runner.rundir.lease import read_carried
from runner.rundir.paths import RunDir
from runner.rundir.time_account import ACTIVITIES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SECONDS = st.dictionaries(st.sampled_from(ACTIVITIES), st.floats(0, 1e7), min_size=1)
DAMAGED = st.fixed_dictionaries(
    {},
    optional={
        "seconds": st.dictionaries(st.sampled_from(ACTIVITIES), JSON) | JSON,
        "trained": st.dictionaries(st.integers(-5, 10**20).map(str) | st.text(max_size=3), JSON) | JSON,
        "start_step": JSON,
        "checkpoint_step": JSON,
        **dict.fromkeys(("kept_s", "nodes", "queue_s", "hold_s", "started"), JSON | st.floats(0, 1e12)),
    },
)
MONDAY = 1_763_337_600.0  # 2025-11-17 00:00 UTC, the first second of 2025-W47
DAY = 86_400.0


def allocated(seconds: dict[str, float]) -> float:
    return sum(value for bucket, value in seconds.items() if bucket not in goodput.WAITING)


@given(seconds=SECONDS, kept=st.floats(0, 2e7), nodes=st.integers(1, 64))
def test_buckets_of_an_attempt_add_up_to_its_node_time(seconds: dict[str, float], kept: float, nodes: int) -> None:
    found = goodput.of_attempt({"seconds": seconds, "kept_s": kept, "nodes": nodes, "queue_s": 7.0, "hold_s": 3.0})
    assert list(found) == list(goodput.BUCKETS)
    assert allocated(found) == pytest.approx(nodes * sum(seconds.values()))
    assert (found["queue"], found["hold"]) == (7.0 * nodes, 3.0 * nodes)
    shares = goodput.shares(found)
    assert sum(shares.values()) == pytest.approx(1.0 if sum(seconds.values()) else 0.0)
    assert not set(shares) & set(goodput.WAITING)


@given_in_tiers(attempts=st.lists(DAMAGED, max_size=4), few=15, many=300)
def test_damaged_records_give_finite_buckets_and_no_traceback(attempts: list[dict[str, Any]]) -> None:
    seconds = goodput.of_run(goodput.resumed(attempts))
    shares, weeks = goodput.shares(seconds), goodput.by_week(attempts)
    assert all(0 <= value < float("inf") for value in seconds.values())
    assert sum(shares.values()) == pytest.approx(1.0 if allocated(seconds) else 0.0)
    assert goodput_table(seconds)
    assert week_table(weeks)


@given(
    attempts=st.lists(
        st.fixed_dictionaries(
            {
                "started": st.floats(0, 4e9),
                "seconds": SECONDS,
                "kept_s": st.floats(0, 1e7),
                "queue_s": st.floats(0, 1e6),
                "nodes": st.integers(1, 9),
            }
        ),
        max_size=4,
    )
)
def test_the_weeks_add_up_to_the_run(attempts: list[dict[str, Any]]) -> None:
    by_week = goodput.by_week(attempts)
    assert goodput.total(by_week.values()) == pytest.approx(goodput.of_run(attempts), rel=1e-6, abs=1e-3)


def test_attempt_over_several_weeks_is_divided_by_time() -> None:
    """Divide an attempt with three days in the first week, seven in the second and four in the third."""
    line = {"started": MONDAY + 4 * DAY, "seconds": {"steps": 14 * DAY}, "kept_s": 14 * DAY, "queue_s": 60.0}
    weeks = goodput.by_week([line])
    assert {week: seconds["useful"] / DAY for week, seconds in weeks.items()} == pytest.approx(
        {"2025-W47": 3.0, "2025-W48": 7.0, "2025-W49": 4.0}
    )
    assert [seconds["queue"] for seconds in weeks.values()] == [60.0, 0.0, 0.0]


def test_the_week_of_new_year_is_the_iso_week() -> None:
    line = {"started": 1_767_225_600.0, "seconds": {"steps": 1.0}}  # 2026-01-01, a Thursday
    assert list(goodput.by_week([line])) == ["2026-W01"]


def made(path: Path, *, status: dict[str, Any] | None = None, steps: int = 20) -> RunResults:
    """Return a run on two nodes. Its first attempt lost unsaved steps. Its second has no recorded end."""
    run = RunDir(path)
    (run.path / "checkpoints").mkdir(parents=True)
    run.config.write_text("seed: 0\n")
    ended = {"attempt": 1, "cause": "killed", "nodes": 2, "start_step": 0, "checkpoint_step": 10, "started": MONDAY}
    ended |= {"seconds": {"start": 5.0, "steps": 100.0}, "kept_s": 60.0, "queue_s": 30.0, "hold_s": 2.0}
    run.attempts.write_text(json.dumps(ended) + "\n")
    run.attempt.write_text(json.dumps({"attempt": 2, "nodes": 2, "start_step": 10, "started": MONDAY, "queue_s": 1.0}))
    if status is not None:
        run.status.write_text(json.dumps(status))
    for step in (10, steps):
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / "manifest.json").write_text(json.dumps({"step": step, "sha256": ""}))
    results = read_run(run, path.parent, 100)
    assert results.reason is None
    return results


TIME = {"attempt": 2, "time": {"seconds": {"start": 1.0, "steps": 50.0}, "trained": {"20": 30.0}}}


@pytest.mark.parametrize(("state", "repeated"), [("running", 0.0), ("requeued", 20.0), ("interrupted", 20.0)])
def test_steps_of_a_live_run_may_still_be_saved(tmp_path: Path, state: str, repeated: float) -> None:
    run = made(tmp_path / "run", status=TIME)
    run.state = state
    seconds = {bucket: value for bucket, value in run.seconds.items() if value}
    useful, lost = 2 * (60.0 + 50.0 - repeated), 2 * (40.0 + repeated)
    assert seconds == {"queue": 62.0, "hold": 4.0, "start": 12.0, "useful": useful, "repeated": lost}


def test_steps_behind_a_corrupt_checkpoint_count_once() -> None:
    """Resume the second attempt at 10 instead of 20, and the third at 30. The repeated time is known to the second."""
    trained = {"10": 4.0, "20": 9.0}
    first = {"start_step": 0, "checkpoint_step": 20, "seconds": {"steps": 9.5}, "kept_s": 9.0, "trained": trained}
    second = {"start_step": 10, "checkpoint_step": 30, "seconds": {"steps": 8.0}, "kept_s": 8.0, "trained": {}}
    third = {"start_step": 30, "checkpoint_step": 40, "seconds": {"steps": 5.0}, "kept_s": 5.0}
    found = goodput.of_run(goodput.resumed([first, second, third]))
    assert (found["useful"], found["repeated"]) == (4.0 + 8.0 + 5.0, 5.5)
    # All checkpoints were removed, and the run began anew.
    found = goodput.of_run(goodput.resumed([first, second, third, {**first, "kept_s": 9.5}]))
    assert (found["useful"], found["repeated"]) == (9.5, 9.5 + 8.0 + 5.0)


@pytest.mark.parametrize("status", [None, {}, {"attempt": 1, "time": TIME["time"]}, {"attempt": 2, "time": "?"}])
def test_attempt_without_an_account_is_named_not_guessed(
    tmp_path: Path, status: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", status=status)
    assert allocated(run.seconds) == 2 * 105.0
    report.main([str(tmp_path)])
    assert "1 attempts left no account of their time, and are not in the table" in capsys.readouterr().out


def test_a_run_that_has_not_begun_has_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("seed: 0\n")
    report.main([str(tmp_path)])
    assert "node time" not in capsys.readouterr().out
    report.main([str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["goodput"]) == set(goodput.BUCKETS)
    assert not any(found["goodput"].values())
    assert found["weeks"] == {}


def test_json_has_seconds_by_run_and_week(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        made(tmp_path / name, status=TIME)
    report.main([str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    runs = [run["goodput"] for run in found["runs"]]
    assert [allocated(run) for run in runs] == [2 * (105.0 + 51.0)] * 2
    assert found["goodput"] == pytest.approx(goodput.total(runs))
    assert goodput.total(found["weeks"].values()) == pytest.approx(found["goodput"])
    assert found["attempts_without_account"] == 0


# ---- a recount by hand, with attempts that are really killed -------------------------------------------------------

STEPS, EVAL, SAVE = 36, 8, 10
HELD = (14, 25, 31)  # an attempt idles after so many steps until a signal
SLOW = ("start", "data", "save", "evaluation", "end")  # each named like its bucket


class Recount:
    """A run of four attempts, its events, and the lifetimes of its processes, measured from outside."""

    def __init__(self, path: Path) -> None:
        self.file = path / "events.jsonl"
        words = ["train.loss._target_=timed.loss", "data.sources.code._target_=timed.Text"]
        words += ["+callbacks.kept._target_=timed.Kept", f"train.steps={STEPS}", f"eval.every_steps={EVAL}"]
        self.run = Run(path / "run", [*TINY, *words, f"checkpoint.every_steps={SAVE}", "checkpoint.mode=sync"])
        self.run.env = {"EVENTS_FILE": str(self.file)}
        self.lives: list[float] = []
        for held, signum in zip(HELD, (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), strict=True):
            self.run.hold_at(held)
            self._live(signum)
        self.run.release()
        self._live(None)
        self.attempts = self.run.attempts()

    def _live(self, signum: int | None) -> None:
        began = time.monotonic()
        process = self.run.start()
        if signum is not None:
            assert self.run.wait_until(lambda run: run.idles() and self._is_known(process.pid))
            self.run.send(signum)
            self.run.release()
        output = self.run.wait()[1]
        assert process.returncode in (0, 75, -signal.SIGKILL), output
        self.lives.append(time.monotonic() - began)

    def _is_known(self, pid: int) -> bool:
        """Return whether the last heartbeat is later than the last event, so that it covers all events."""
        sign = read_carried(RunDir(self.run.path).lease)
        if sign.get("attempt") != len(self.lives) + 1:  # still the sign of the previous attempt
            return False
        mine = [event for event in timed.events(self.file) if event["pid"] == pid]
        known = sum(sign.get("time", {}).get("seconds", {}).values())
        return bool(known > mine[-1]["to"] - self._process_began(pid))

    @staticmethod
    def _process_began(pid: int) -> float:
        """Return the start of a process on the monotonic clock. The kernel counts in hundredths of a second."""
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK") + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def events(self, number: int) -> list[dict[str, Any]]:
        """Return the events of one attempt."""
        found = timed.events(self.file)
        pids = list(dict.fromkeys(event["pid"] for event in found))
        return [event for event in found if event["pid"] == pids[number]]

    def slept(self, number: int, what: str) -> list[float]:
        return [event["to"] - event["from"] for event in self.events(number) if event["what"] == what]


@pytest.fixture(scope="module")
def recount(tmp_path_factory: pytest.TempPathFactory) -> Recount:
    return Recount(tmp_path_factory.mktemp("recount"))


EACH = pytest.mark.parametrize("number", range(4))


@pytest.mark.slow
@EACH
def test_recounted_activities_cover_the_life_of_the_process(recount: Recount, number: int) -> None:
    """Check killed attempts up to their last recorded activity. No second counts twice."""
    attempt, events = recount.attempts[number], recount.events(number)
    assert attempt["cause"] == ["killed", "killed", "interrupted", "finished"][number]
    total = sum(attempt["seconds"].values())
    # This process measured the life from before the start to after the end.
    assert events[-1]["to"] - events[0]["from"] < total < recount.lives[number] + 0.01
    # Only slow parts, the machine's time for them, and the idling at the end take time between steps.
    slept = sum(sum(recount.slept(number, what)) for what in ("step", *SLOW))
    assert total > attempt["seconds"]["start"] - timed.SLEEP_S + slept


@pytest.mark.slow
@EACH
def test_recounted_every_slow_part_is_in_its_bucket(recount: Recount, number: int) -> None:
    """Check that each bucket has at least its measured time, so that none has the time of another."""
    attempt = recount.attempts[number]
    found = goodput.of_attempt(attempt)
    for bucket in SLOW:
        assert found[bucket] >= sum(recount.slept(number, bucket)) - 0.001
    assert len(recount.slept(number, "start")) == 2
    assert len(recount.slept(number, "end")) == (attempt["cause"] == "finished")
    steps = recount.slept(number, "step")
    assert len(steps) == attempt["end_step"] - attempt["start_step"] + (attempt["cause"] == "killed")  # the last idles
    kept = attempt["checkpoint_step"] - attempt["start_step"]
    assert found["useful"] >= sum(steps[:kept]) - 0.001
    assert found["repeated"] >= sum(steps[kept : attempt["end_step"] - attempt["start_step"]]) - 0.001
    if attempt["cause"] != "killed":  # everything was saved
        assert found["repeated"] == 0
    first = next(event for event in recount.events(number) if event["what"] == "step")
    began = first["from"] - recount.events(number)[-1]["to"] + sum(attempt["seconds"].values())
    assert found["start"] + found["restore"] <= began + 0.01
    assert (found["restore"] > 0) == (number > 0) or found["restore"] < 0.01


@pytest.mark.slow
def test_recounted_over_all_attempts_every_step_is_useful_once(recount: Recount) -> None:
    """Count the sleeps: two for each repeated step, one for the others."""
    made_steps = sum(len(recount.slept(number, "step")) for number in range(4))
    lost = sum(attempt["steps_lost"] for attempt in recount.attempts)
    assert lost > 0
    assert made_steps == STEPS + lost + 2  # the attempt idled in two of them when it was killed
    found = read_run(RunDir(recount.run.path), recount.run.path.parent, 100).seconds
    assert found["useful"] >= STEPS * timed.SLEEP_S
    assert found["repeated"] >= lost * timed.SLEEP_S
    assert sum(goodput.shares(found).values()) == pytest.approx(1.0)
    assert allocated(found) <= sum(recount.lives) + 0.04


@pytest.mark.slow
def test_the_table_of_the_report_shows_the_same(recount: Recount, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(recount.run.path), "--json"])
    found = json.loads(capsys.readouterr().out)
    whole = sum(sum(attempt["seconds"].values()) for attempt in recount.attempts)
    assert allocated(found["goodput"]) == pytest.approx(whole, rel=0.005)
    report.main([str(recount.run.path)])
    shown = capsys.readouterr().out
    percents = [float(line.split()[-2]) for line in shown.splitlines() if line.rstrip().endswith("%")]
    assert sum(percents) == pytest.approx(100.0, abs=0.5)

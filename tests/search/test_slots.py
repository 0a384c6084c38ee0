"""How slots handle their trials' crashes, kills, divergence and withdrawal, other slots and other searches."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import search_runs
from search_runs import STEPS, begin, ended, journal_of, record, trains, work

from runner.cli.base.trials import as_json, lines_of
from runner.cli.runs.pruning import prune
from runner.cli.start.search import launch_here
from runner.cli.start.slot import Task
from runner.errors import ExitStatus, FileError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.search.choice import best_run
from runner.search.decide import replay
from runner.search.directory import Record, SearchDir, turn


def found(search: SearchDir) -> dict[str, Any]:
    rules = Record.read(search).rules
    journal = journal_of(search)
    assert replay(rules, journal.entries) == []
    return as_json(search, rules, journal)


def test_search_trains_few_trials_to_the_end(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 27)
    assert work(search, trains) == ExitStatus.FINISHED
    shown = found(search)
    assert len(shown["trials"]) == 27
    reached = Counter(max(map(int, trial["results"])) for trial in shown["trials"])
    assert reached[90] >= 1
    assert reached[30] + reached[90] >= 9
    states = {max(map(int, trial["results"])): trial["state"] for trial in shown["trials"]}
    assert states == {10: "paused", 30: "paused", 90: "finished"}
    best = min((trial for trial in shown["trials"] if "90" in trial["results"]), key=lambda one: one["results"]["90"])
    assert shown["best"] == {"run": best["run"], "values": best["values"], "result": best["results"]["90"]}
    assert str(best_run(search.path).path) == best["run"]
    assert shown["steps_trained"] == sum(max(map(int, trial["results"])) for trial in shown["trials"])


def test_several_slots_train_every_trial_once(tmp_path: Path) -> None:
    search, running, lock = begin(tmp_path / "search", 12), set[str](), threading.Lock()
    trained = Counter[tuple[str, int | None]]()

    def train(task: Task, run: RunDir) -> int:
        with lock:
            assert run.path.name not in running
            running.add(run.path.name)
            trained[run.path.name, task.step] += 1
        status = trains(task, run)
        with lock:
            running.remove(run.path.name)
        return status

    threads = [threading.Thread(target=work, args=(search, train, number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(trained.values()) == {1}
    assert len(found(search)["trials"]) == 12
    assert {entry["slot"] for entry in journal_of(search).entries if entry["entry"] == "start"} <= {0, 1, 2}


def test_the_same_search_again_has_nothing_to_do(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 3)
    work(search, trains)
    before = search.journal.read_bytes()
    assert work(search, lambda task, run: pytest.fail("nothing is left")) == ExitStatus.FINISHED
    assert search.journal.read_bytes() == before


def test_more_trials_and_a_rung_above_the_last_continue_a_search(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 3, (10, 30))
    work(search, trains)
    begin(search.path, 9, (10, 30, 90))
    work(search, trains)
    shown = found(search)
    assert len(shown["trials"]) == 9
    assert any("90" in trial["results"] for trial in shown["trials"])


def fails_then_trains(times: int, cause: str, status: int) -> Any:
    count = Counter[int]()

    def train(task: Task, run: RunDir) -> int:
        count[task.trial] += 1
        if task.trial == 1 and count[1] <= times:
            if cause != "none":
                ended(run, cause, reason="boom")
            return status
        return trains(task, run)

    return train


@pytest.mark.parametrize(
    ("times", "cause", "status", "state"),
    [
        (2, "crash", 1, "paused"),
        (3, "crash", 1, "failed"),
        (2, "none", -11, "paused"),
        (9, "none", -9, "paused"),
        (25, "none", -9, "failed"),
        (1, "failed", 2, "failed"),
        (1, "interrupted", 75, "paused"),
    ],
)
def test_failed_attempts_decide_the_fate_of_a_trial(
    tmp_path: Path, times: int, cause: str, status: int, state: str
) -> None:
    search = begin(tmp_path / "search", 2)
    work(search, fails_then_trains(times, cause, status))
    shown = found(search)
    assert [trial["state"] for trial in shown["trials"]] == ["paused", state]
    if state == "failed" and cause != "none":
        assert "boom" in shown["trials"][1]["reason"]


def test_a_diverged_trial_is_a_result(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 6, (10, 30))

    def train(task: Task, run: RunDir) -> int:
        if task.trial % 2:
            ended(run, "diverged", end_step=4)
            return 1
        return trains(task, run)

    work(search, train)
    shown = found(search)
    assert [trial["state"] for trial in shown["trials"]].count("diverged") == 3
    assert shown["trials"][1]["results"] == {"4": None}
    assert json.dumps(shown, allow_nan=False)
    assert sum("30" in trial["results"] for trial in shown["trials"]) == 2  # a third of six results


def test_a_withdrawn_trial_stays_so_until_it_is_retried(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 2)

    def train(task: Task, run: RunDir) -> int:
        if task.trial == 0:
            run.status.write_text(json.dumps({"state": "interrupted", "attempt": 1}))
            run.withdrawn.write_text(json.dumps({"submission": None, "attempt": 1}))
            return 75
        return trains(task, run)

    work(search, train)
    assert [trial["state"] for trial in found(search)["trials"]] == ["withdrawn", "paused"]


def test_another_slot_continues_the_trial_of_a_killed_one(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 2)

    class KilledError(BaseException):
        """A stand-in for SIGKILL: nothing is recorded."""

    def killed(task: Task, run: RunDir) -> int:
        raise KilledError

    with pytest.raises(KilledError):
        work(search, killed, number=0)
    order = list[int]()

    def train(task: Task, run: RunDir) -> int:
        order.append(task.trial)
        return trains(task, run)

    work(search, train, number=1)
    assert order == [0, 1]
    taken = [entry for entry in journal_of(search).entries if entry["entry"] == "take"]
    assert [(entry["trial"], entry["slot"]) for entry in taken] == [(0, 1)]


def test_a_trial_that_a_living_slot_trains_is_left_to_it(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 2)
    order, done = list[int](), threading.Event()

    def slow(task: Task, run: RunDir) -> int:
        assert done.wait(60)
        return trains(task, run)

    first = threading.Thread(target=work, args=(search, slow, 0))
    first.start()
    while not journal_of(search).trials:
        pass

    def train(task: Task, run: RunDir) -> int:
        order.append(task.trial)
        done.set()
        return trains(task, run)

    work(search, train, number=1)
    first.join()
    assert order == [1]


def test_run_of_another_search_is_not_trained_again(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1)
    run = RunDir(tmp_path / "run0-0")
    run.path.mkdir()
    record(run, STEPS[0], eval_loss=1.5)
    search_runs.checkpoint(run, STEPS[1])
    work(search, lambda task, run: pytest.fail("it is at step 30 already"))
    assert found(search)["trials"][0]["results"] == {"10": 1.5}


def test_run_beyond_a_rung_without_evaluation_is_reported(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1)
    run = RunDir(tmp_path / "run0-0")
    run.path.mkdir()
    search_runs.checkpoint(run, STEPS[1])
    work(search, lambda task, run: pytest.fail("it is at step 30 already"))
    assert "is at step 30 already, and has no eval_loss of step 10" in found(search)["trials"][0]["reason"]


def test_an_unknown_metric_names_the_recorded_ones(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1)

    def train(task: Task, run: RunDir) -> int:
        record(run, task.step or 0, eval_accuracy=0.5)
        return 0

    work(search, train)
    assert "it has no eval_loss, but eval_accuracy: set search.metric" in found(search)["trials"][0]["reason"]


def test_run_that_ends_early_has_its_result_at_later_rungs(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 3, (10, 30))

    def train(task: Task, run: RunDir) -> int:
        if task.trial == 0:
            record(run, 6, eval_loss=0.0)
            run.finished.write_text(json.dumps({"steps": 6, "ended_early": {"reason": "patience"}}))
            return 0
        return trains(task, run)

    work(search, train)
    first = found(search)["trials"][0]
    assert (first["rung"], first["results"], first["state"]) == (1, {"6": 0.0}, "finished")


def test_repeats_are_runs_whose_mean_is_the_result(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 3, (10, 30), repeats=3)
    work(search, trains)
    shown = found(search)
    assert all(len(trial["runs"]) == 3 for trial in shown["trials"])
    runs = [run for trial in shown["trials"] for run in trial["runs"]]
    assert len({*runs}) == 9
    first = shown["trials"][0]
    own = [json.loads((Path(run) / "metrics.jsonl").read_text().splitlines()[0])["eval_loss"] for run in first["runs"]]
    assert math.isclose(first["results"]["10"], sum(own) / 3)


def test_a_slot_that_is_in_use_is_refused(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1)
    slot = search.slot(0)
    slot.path.mkdir(parents=True)
    with Lease.acquire(slot.lease, None, 1.0):
        from runner.cli.start.slot import slot as start_slot
        from runner.system.signals import STOP

        try:
            assert start_slot(slot.path) == ExitStatus.LOCKED
        finally:
            STOP.uninstall()


def test_truncated_journal_is_continued_without_training(tmp_path: Path) -> None:
    """Cut off a damaged journal as the remedy suggests: its runs have the results."""
    search = begin(tmp_path / "search", 3, (10, 30))
    work(search, trains)
    lines, before = search.journal.read_text().splitlines(keepends=True), found(search)
    for count in range(1, len(lines)):
        search.journal.write_text("".join(lines[:count]))
        work(search, lambda task, run: pytest.fail(f"{task.title} is trained again"))
        assert found(search) == before


def test_killed_slots_restart_while_results_come_in(tmp_path: Path) -> None:
    search, starts = begin(tmp_path / "search", 3, (10, 30)), list[int]()

    class Launching:
        def launch(self, *_: object) -> int:
            starts.append(len(found(search)["trials"]))

            def train(task: Task, run: RunDir) -> int:
                if trained and len(starts) < 9:
                    raise KeyboardInterrupt
                trained.append(task)
                return trains(task, run)

            trained = list[Task]()
            try:
                return int(work(search, train))
            except KeyboardInterrupt:
                return 137

    asked: Any = SimpleNamespace(search=search, record=Record.read(search))
    launcher: Any = Launching()
    assert launch_here(asked, launcher, [search.slot(0).path]) == ExitStatus.FINISHED
    assert len(starts) == 4  # results
    assert {trial["state"] for trial in found(search)["trials"]} == {"paused", "finished"}
    launcher.launch = lambda *_: 137
    (search.path / "journal.jsonl").unlink()
    assert launch_here(asked, launcher, []) == 137


def test_a_full_disk_ends_a_slot_and_fails_no_trial(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 3, (10, 30))

    def fills(task: Task, run: RunDir) -> int:
        if task.trial == 1:
            ended(run, "unsaved", reason="no space")
            return 1
        return trains(task, run)

    with pytest.raises(FileError, match="run1-0: no space"):
        work(search, fills)
    assert found(search)["trials"][1]["results"] == {}
    assert work(search, trains) == ExitStatus.FINISHED
    assert {trial["state"] for trial in found(search)["trials"]} == {"paused", "finished"}


def test_only_abandoned_trials_lose_their_checkpoints(tmp_path: Path) -> None:
    """Keep checkpoints of runs that were trained further since, or that another search keeps or has not ended."""
    search, other = begin(tmp_path / "search", 3, (10, 30)), begin(tmp_path / "other", 4, (10, 30))
    for each in (search, other):
        record = replace(Record.read(each), prune=False)
        with turn(each, record) as mine:
            record.write(each, mine.guard)
        if each is search:
            work(each, trains)
    left = [RunDir(Path(trial["run"])) for trial in found(search)["trials"] if trial["state"] == "paused"]
    with turn(other, Record.read(other)) as mine:
        mine.append("start", trial=0, values={}, slot=0, fence=1)
        mine.append("run", trial=0, repeat=0, run=left[0].path.name)
    for run in left:
        run.status.write_text(json.dumps({"state": "paused"}))
    pruning = replace(Record.read(search), prune=True)
    search_runs.checkpoint(left[1], 20)  # trained further
    prune(search, pruning, journal_of(search))
    assert [run.checkpoint_steps() for run in left] == [[10], [10, 20]]
    with turn(other, record) as mine:
        mine.append("withdrawn", trial=0)
        mine.append("settings", trials=1, rungs=[10, 30])
        replace(record, prune=True).write(other, mine.guard)
    text = other.journal.read_text()
    other.journal.write_text("{")
    prune(search, pruning, journal_of(search))
    assert left[0].checkpoint_steps() == [10]
    other.journal.write_text(text)
    gone = journal_of(search)
    gone.errors = 3  # a search that has given up goes on once the cause is fixed
    prune(search, pruning, gone)
    assert left[0].checkpoint_steps() == [10]
    prune(search, pruning, journal_of(search))
    assert [run.checkpoint_steps() for run in left] == [[], [10, 20]]


def test_a_rung_added_during_a_search_is_reached(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 9, (10, 30))

    def train(task: Task, run: RunDir) -> int:
        begin(search.path, 9, (10, 30, 90))
        return trains(replace(task, last=task.step == 90), run)

    work(search, train)
    assert Counter(len(trial["results"]) for trial in found(search)["trials"])[3] == 1


def test_a_run_that_is_over_before_its_rung_is_no_result(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1, (10,))

    def train(task: Task, run: RunDir) -> int:
        record(run, 6, eval_loss=1.0)
        run.finished.write_text(json.dumps({"steps": 6}))
        return 0

    work(search, train)
    assert found(search)["trials"][0]["state"] == "failed"


def test_withdrawn_repeats_are_all_retried(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1, (10,), repeats=2)
    with turn(search, Record.read(search)) as mine:
        mine.append("start", trial=0, values={"optimizer.lr": "0.0004846"}, slot=0, fence=1)
    for repeat in range(2):
        run = search.run(f"run0-{repeat}")
        run.path.mkdir()
        run.status.write_text(json.dumps({"state": "interrupted", "attempt": 1, "cause": "cancelled"}))
        ended(run, "cancelled")
    with turn(search, Record.read(search)) as mine:
        mine.append("withdrawn", trial=0)
        mine.append("retry", trial=0)
    work(search, trains)
    assert found(search)["trials"][0]["state"] == "finished"


def test_run_paused_at_the_last_rung_is_not_finished(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 1, (10,))

    def train(task: Task, run: RunDir) -> int:
        record(run, 10, eval_loss=1.0)
        run.status.write_text(json.dumps({"state": "paused"}))
        ended(run, "paused")
        return 0

    work(search, train)
    assert found(search)["trials"][0]["state"] == "paused"


def test_the_lines_of_a_search_report_its_events(tmp_path: Path) -> None:
    search = begin(tmp_path / "search", 3, (10, 30))
    work(search, trains)
    rules = Record.read(search).rules
    lines = list(lines_of(rules, journal_of(search), 0))
    assert lines[0].startswith("trial 0 begins: optimizer.lr=")
    assert sum(": eval_loss " in line for line in lines) == 4
    assert sum(" goes on to step 30" in line for line in lines) == 1

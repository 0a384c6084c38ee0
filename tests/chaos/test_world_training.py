"""The scenario of training: real attempts in a simulated world come to what they come to undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.chaos.world.disk import ROOT
from runner.chaos.world.scenario import Scenario, play
from runner.chaos.world.schedule import Schedule, schedule
from runner.chaos.world.training import KINDS, STEPS, Training, undisturbed
from runner.checkpoint import directory
from runner.system import clock, files


def story(seed: int) -> Schedule:
    return schedule(str(seed), tuple(Training.kinds), Training.horizon)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_each_kind_of_run_trains_to_its_end(kind: int) -> None:
    assert undisturbed(kind).metrics.count(b'"loss"') == STEPS


@pytest.mark.parametrize("seed", range(12))
def test_whatever_befalls_attempts_the_run_is_the_same(seed: int) -> None:
    assert play(Training, story(seed)).broken is None


def test_the_same_schedule_is_the_same_story() -> None:
    assert play(Training, story(3)).events == play(Training, story(3)).events


class _TwoMachines(Scenario):
    """One machine looks at the checkpoints before and after the other one commits."""

    name = "two machines"
    network = True
    checkpoints = Path(ROOT) / "checkpoints"

    def begin(self) -> None:
        self.seen: list[list[str]] = []
        self.disk.make_dir(self.checkpoints)
        self.spawn(self.hosts[0], "reader", self._read)
        self.spawn(self.hosts[1], "writer", self._write)

    def _read(self) -> None:
        self._look()
        clock.sleep(1.0)
        self._look()
        directory.look_anew(self.checkpoints)
        self._look()

    def _look(self) -> None:
        self.seen.append([entry.path.name for entry in directory.scan(self.checkpoints)])

    def _write(self) -> None:
        clock.sleep(0.5)
        files.make_dir(self.checkpoints / "step_00000001")

    def finish(self) -> None:
        self.must(self.seen == [[], [], ["step_00000001"]], f"seen: {self.seen}")


def test_a_resume_does_not_rely_on_what_its_machine_listed_before() -> None:
    assert play(_TwoMachines, Schedule("1", ())).broken is None

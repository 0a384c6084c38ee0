"""The scenario of training: real attempts in a simulated world come to what they come to undisturbed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from runner.checkpoint import directory
from runner.rundir.lease import Lease
from runner.system import clock, files
from simulation.disk import ROOT
from simulation.scenario import Scenario, play
from simulation.schedule import Schedule, schedule
from simulation.training import KINDS, STEPS, Training, undisturbed


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


class _LateRename(Scenario):
    """A holder is superseded from another machine between its last look at the lease and its rename."""

    name = "late rename"
    network = True
    run_dir = Path(ROOT) / "run"

    def begin(self) -> None:
        self.disk.make_dir(self.run_dir)
        self.spawn(self.hosts[0], "older", self._older)
        self.spawn(self.hosts[1], "newer", self._newer)

    def _acquire(self, restart_count: int) -> Lease:
        """By a job that was restarted, of which earlier starts are known to be gone, or will be."""
        return Lease.acquire(self.run_dir / "lease", {"job_id": "7", "restart_count": restart_count}, 1.0)

    def _older(self) -> None:
        lease = self._acquire(0)

        def check() -> None:
            lease.check_fence()
            clock.sleep(2.0)

        clock.sleep(0.5)
        with suppress(FileNotFoundError):
            files.write_atomic(self.run_dir / "value", "old", guard=files.Guard(lease.guard.tag, check))

    def _newer(self) -> None:
        clock.sleep(0.4)
        files.list_dir(self.run_dir)
        clock.sleep(0.5)
        files.write_atomic(self.run_dir / "value", "new", guard=self._acquire(1).guard)

    def finish(self) -> None:
        value = self.disk.tree()[f"{self.run_dir}/value"]
        self.must(value == b"new", f"the newer holder has written, but found is {value!r}")


def test_a_newer_holder_does_not_rely_on_what_its_machine_listed_before() -> None:
    assert play(_LateRename, Schedule("1", ())).broken is None

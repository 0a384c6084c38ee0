"""What a machine listed before, on a network file system, decides nothing about a whole run."""

from __future__ import annotations

import json
from pathlib import Path

from runner.cli import archive
from runner.cli.housekeeping import branches
from runner.rundir.custody import custody
from runner.rundir.paths import RunDir
from runner.system import clock, files
from simulation.disk import ROOT
from simulation.scenario import Scenario, play
from simulation.schedule import Schedule

RUN = RunDir(Path(ROOT) / "run")
BEGUN = ("logs/1/old.log", "checkpoints/step_00000001/weights.bin", "evaluations/0f0f/00000001.json")
BRANCH = RunDir(Path(ROOT) / "branch")
NEW = (
    *("finished.json", "logs/1/new.log", "checkpoints/step_00000002/weights.bin", "checkpoints/step_00000001.pinned"),
    "evaluations/a1a1/00000001.json",
)


class _TwoMachines(Scenario):
    """One machine looks at the run before the other one adds to it, and a moment later takes custody of it."""

    name = "two machines"
    network = True
    begun: tuple[str, ...] = BEGUN

    def begin(self) -> None:
        for name in ("config.yaml", "code.json", *self.begun):
            self._add(name)
        self.spawn(self.hosts[0], "custody", self._take)
        self.spawn(self.hosts[1], "writer", self._write)

    def _add(self, name: str) -> None:
        files.make_dirs((RUN.path / name).parent)
        files.write_atomic(RUN.path / name, '{"released": true}' if name.startswith("evaluations") else "{}")

    def _take(self) -> None:
        for _ in files.walk(RUN.path):
            pass
        clock.sleep(1.0)
        with custody(RUN.path) as held:
            self.leases = sorted(lease.directory.name for lease in held._leases)
            self.members = [str(member) for member in archive._members(held.run, None)]

    def _write(self) -> None:
        clock.sleep(0.5)
        for name in NEW:
            self._add(name)

    def finish(self) -> None:
        self.must(self.leases == ["0f0f", "a1a1", "evaluation", "lease", "submission"], f"leases: {self.leases}")
        packed = {*BEGUN[:2], *NEW[:-1]}
        self.must(packed <= set(self.members), f"not packed: {sorted(packed - set(self.members))}")


def test_what_another_machine_has_just_made_is_packed_and_taken_into_custody() -> None:
    """An archive without it may be all that is left of the run, and an evaluation would lose its run."""
    assert play(_TwoMachines, Schedule("1", ())).broken is None


class _Branching(_TwoMachines):
    """One machine lists the runs before the other one makes a branch, and a moment later takes custody of the trunk."""

    begun = ()

    def _take(self) -> None:
        files.list_dir(RUN.path.parent)
        clock.sleep(1.0)
        with custody(RUN.path) as held:
            self.waiting = branches(held.run)[1]

    def _write(self) -> None:
        clock.sleep(0.5)
        files.make_dir(BRANCH.path)
        files.write_atomic(BRANCH.config, json.dumps({"fork": {"run": str(RUN.path)}}))

    def finish(self) -> None:
        self.must(self.waiting == [BRANCH.path], f"branches that wait: {self.waiting}")


def test_a_branch_that_another_machine_has_just_submitted_is_waited_for() -> None:
    """A trunk that is moved or removed in spite of it leaves the branch without a beginning."""
    assert play(_Branching, Schedule("1", ())).broken is None

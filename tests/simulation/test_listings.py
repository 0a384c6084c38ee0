"""Check that old listings of a network file system decide nothing about a checkpoint or a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from runner.checkpoint.files import choice
from runner.checkpoint.files.directory import Directory
from runner.cli.runs import archive
from runner.rundir.custody import custody
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock, files
from simulation.disk import ROOT
from simulation.scenario import Scenario, play
from simulation.schedule import Schedule

RUN = RunDir(Path(ROOT) / "run")
BEGUN = ("logs/1/old.log", "checkpoints/step_00000001/weights.bin", "evaluations/step_00000001-0f0f.json")
NEW = (
    *("finished.json", "logs/1/new.log", "checkpoints/step_00000002/weights.bin", "checkpoints/step_00000001.pinned"),
    "evaluations/step_00000002-0f0f.json",
)


class _Adding(Scenario):
    """One machine lists the run before another one adds files, and takes custody of it a moment later."""

    name = "adding"
    network = True
    begun: tuple[str, ...] = BEGUN

    def begin(self) -> None:
        for name in ("config.yaml", "code.json", *self.begun):
            self._add(name)
        self.spawn(self.hosts[0], "custody", self._take)
        self.spawn(self.hosts[1], "writer", self._write)

    def _add(self, name: str) -> None:
        files.make_dirs((RUN.path / name).parent)
        files.write_atomic(RUN.path / name, "{}")

    def _take(self) -> None:
        for _ in files.walk(RUN.path):
            pass
        clock.sleep(1.0)
        with custody(RUN) as held:
            self.members = [str(member) for member in archive._members(held.run, None)]

    def _write(self) -> None:
        clock.sleep(0.5)
        for name in NEW:
            self._add(name)

    def finish(self) -> None:
        packed = {*BEGUN, *NEW}
        self.must(packed <= set(self.members), f"not packed: {sorted(packed - set(self.members))}")


def test_run_just_made_elsewhere_is_packed_and_removed() -> None:
    """Pack the new files, because the archive may be all that is left of the run."""
    assert play(_Adding, Schedule("1", ())).broken is None


class _Saving(Scenario):
    """One machine lists the checkpoints before and after another one commits."""

    name = "saving"
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
        Directory(self.checkpoints).look_anew()
        self._look()

    def _look(self) -> None:
        self.seen.append([entry.path.name for entry in choice.scan(Directory(self.checkpoints))])

    def _write(self) -> None:
        clock.sleep(0.5)
        files.make_dir(self.checkpoints / "step_00000001")

    def finish(self) -> None:
        self.must(self.seen == [[], [], ["step_00000001"]], f"seen: {self.seen}")


def test_resume_does_not_rely_on_an_old_listing() -> None:
    assert play(_Saving, Schedule("1", ())).broken is None


class _LateRename(Scenario):
    """A machine supersedes a holder on another one between its last check of the lease and its rename."""

    name = "late rename"
    network = True
    run_dir = Path(ROOT) / "run"

    def begin(self) -> None:
        self.disk.make_dir(self.run_dir)
        self.spawn(self.hosts[0], "older", self._older)
        self.spawn(self.hosts[1], "newer", self._newer)

    def _acquire(self, restart_count: int) -> Lease:
        """Acquire the lease for a restarted job, whose earlier starts are known to be gone, now or soon."""
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


def test_newer_holder_does_not_rely_on_an_old_listing() -> None:
    assert play(_LateRename, Schedule("1", ())).broken is None

"""Play the scenario of the lease: several processes want to write to one run directory, and only one may at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from runner.errors import LockedError, SupersededError, UserError
from runner.rundir.lease import Lease
from runner.system import clock, files
from simulation.disk import ROOT
from simulation.engine import Process
from simulation.scenario import COMMON, Scenario

RUN = Path(ROOT) / "run"
VALUE = RUN / "value.json"
TIMEOUT_S = 6.0
WRITES = 4


class Leases(Scenario):
    """Processes that acquire the lease, replace a file of the run a few times under its guard, and release it."""

    name = "lease"
    kinds = COMMON | {"another": "one more process wants the lease"}
    horizon = 400
    host_names = ("node1", "node2", "node3")

    def begin(self) -> None:
        """Start two or three processes."""
        self._count = 0
        self._acquired = 0  # the highest number whose holder has begun to work
        self._holders: dict[int, str] = {}  # by number
        self._landed = (0, 0)  # (number of the holder, count) in the file
        self._kept = (0, 0)  # the last write that succeeded
        self._disturbed: set[Process] = set()  # processes whose heartbeat may have stopped for a while
        self.disk.watchers.append(self._watch)
        self.world.checks.append(self._look)
        self.disk.make_dir(RUN)
        if len(self.hosts) > 1 and self.random.random() < 0.3:
            self.hosts[1].clone_of = self.hosts[0].name
        for _ in range(self.random.choice((2, 2, 3))):
            self._another()

    def _another(self) -> None:
        self._count += 1
        host = self.random.choice(self.hosts)
        self.spawn(host, f"worker {self._count}", partial(self._work, self.random.uniform(0.0, 3.0)))

    def strike(self, kind: str, choice: float) -> None:
        """Let a strike happen."""
        if kind == "another":
            self._another()
            return
        befallen = self.choose(choice)
        for process in self.world.processes:
            if kind == "full" or process is befallen or (befallen and process.host is befallen.host):
                self._disturbed.add(process)
        super().strike(kind, choice)

    def _work(self, delay_s: float) -> None:
        clock.sleep(delay_s)
        process = self.world.current.process  # type: ignore[union-attr]
        try:
            lease = Lease.acquire(RUN / "lease", None, TIMEOUT_S, report=partial(self.world.tell, who=process.name))
        except LockedError as error:
            self.world.tell(f"is refused: {error}", process.name)
            return
        except (SupersededError, UserError) as error:
            self.world.tell(f"gives up: {error}", process.name)
            return
        self._acquired = max(self._acquired, lease.fence)
        self.world.tell(f"holds the lease as number {lease.fence}", process.name)
        first = self._holders.setdefault(lease.fence, process.name)
        self.must(first is process.name, f"number {lease.fence} was given to {first} and to {process.name}")
        try:
            for count in range(1, WRITES + 1):
                clock.sleep(self.random.uniform(0.0, 2.0))
                self._write(lease, count)
        except SupersededError:
            self.world.tell("finds that it was superseded", process.name)
            self.must(process in self._disturbed, f"{process.name} was superseded although its heart was beating")
        finally:
            lease.release()

    def _write(self, lease: Lease, count: int) -> None:
        with suppress(OSError):
            files.write_json(VALUE, [lease.fence, count], guard=lease.guard)
            self._kept = max(self._kept, (lease.fence, count))

    def _watch(self, what: str, path: str, to: str) -> None:
        """Check that no older holder replaces the file after a newer one has begun to work."""
        if what != "rename" or to != str(VALUE):
            return
        fence, count = self._value() or (0, 0)
        self.must(
            fence >= self._acquired,
            f"number {fence} replaced {VALUE.name} although number {self._acquired} holds the lease",
        )
        self._landed = fence, count

    def _value(self) -> tuple[int, int] | None:
        with self.world.outside():
            found = files.read_json(VALUE)
        return tuple(found) if isinstance(found, list) else None

    def _look(self) -> None:
        found = self._value()
        self.must(found is not None or self._kept == (0, 0), f"{VALUE.name} is lost or torn")
        self.must((found or (0, 0)) >= self._kept, f"{VALUE.name} is {found}, but {self._kept} was written durably")

    def on_end(self, process: Process) -> None:
        """Check that a process ends without a traceback."""
        self.must(not process.errors, f"{process.name} ended with a traceback:\n{''.join(process.errors)}")

    def finish(self) -> None:
        """Check that the last process gets the lease, whatever was left behind."""
        self._look()
        self.disk.full = False
        got, highest = list[Lease](), self._acquired
        self.spawn(self.hosts[0], "latecomer", partial(self._late, got.append))
        self.world.run()
        self.must(got, "nobody can get the lease any more")
        self.must(got[0].fence > highest, f"number {got[0].fence} was given twice")
        self._look()
        left = [name for name in self.disk.tree() if ".tmp-" in name]
        self.must(not left, f"files are left behind: {left}")

    def _late(self, got: Callable[[Lease], None]) -> None:
        lease = Lease.acquire(RUN / "lease", None, TIMEOUT_S)
        got(lease)
        self._acquired = max(self._acquired, lease.fence)
        files.write_json(VALUE, [lease.fence, 1], guard=lease.guard)
        lease.release()

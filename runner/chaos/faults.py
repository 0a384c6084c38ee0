"""The kinds of fault. Each waits for its moment, strikes, and checks what the run answers.

A kind is a class with a name; `@kind` registers it, and `--faults`, `--help` and the report know it.
"""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, ClassVar, cast

from runner.checkpoint import manifest as manifests
from runner.checkpoint import store
from runner.errors import CheckpointError, ExitStatus

if TYPE_CHECKING:
    from pathlib import Path

    from runner.chaos.drill import Stage
    from runner.chaos.plan import Planned
    from runner.chaos.slurm import SlurmVictim

SMALLEST_LIMIT = 8192  # bytes of a file that may always be written: the status still fits


class TooLateError(Exception):
    """The run was finished before the fault could strike."""


class UnansweredError(Exception):
    """The run did not answer as it should; the message says what it did instead."""


class Fault:
    """One kind of fault."""

    name: ClassVar[str]
    about: ClassVar[str]
    expects: ClassVar[str]
    moments: ClassVar[tuple[str, ...]] = ("step",)
    moments_of_a_job: ClassVar[tuple[str, ...] | None] = None  # where they are others
    on_this_machine: ClassVar[bool] = True
    in_a_job: ClassVar[bool] = False

    def at(self, local: bool) -> tuple[str, ...]:
        """The moments at which it may strike a process of this machine, or a job."""
        return self.moments if local or self.moments_of_a_job is None else self.moments_of_a_job

    def strike(self, stage: Stage, planned: Planned) -> str:
        """Inject the fault and return what the run answered, in words.

        Raises:
            TooLateError: the run was finished first.
            UnansweredError: the run answered otherwise than it should.
        """
        raise NotImplementedError


KINDS: dict[str, Fault] = {}


def kind(cls: type[Fault]) -> type[Fault]:
    """Register a kind of fault by its name."""
    KINDS[cls.name] = cls()
    return cls


class Stop(Fault):
    """A signal that asks the run to leave."""

    signum: ClassVar[signal.Signals]
    expects = "saves, leaves with status 75, loses no step"
    moments: ClassVar[tuple[str, ...]] = ("start", "step", "step", "evaluation", "save")
    in_a_job = True

    def ask(self, stage: Stage) -> None:
        """Ask the run to leave."""
        stage.victim.send(self.signum)

    def strike(self, stage: Stage, planned: Planned) -> str:
        stage.hold(planned)
        self.ask(stage)
        stage.victim.resume()
        status = stage.wait_for_end()
        if status == ExitStatus.FINISHED:
            raise TooLateError
        if status != ExitStatus.INTERRUPTED:
            raise UnansweredError(f"ended with status {status} instead of 75: {stage.victim.tail()}")
        line = stage.closed()
        if line.get("steps_lost") != 0:
            raise UnansweredError(
                f"left at step {line.get('end_step')} with its state saved at step {line.get('checkpoint_step')}"
            )
        stage.goes_on_from(int(line["end_step"]))
        return f"left with status 75 and its state of step {line['end_step']}"


@kind
class Sigterm(Stop):
    name, about, signum = "sigterm", "SIGTERM: a preemption, a shutdown", signal.SIGTERM


@kind
class Sigint(Stop):
    name, about, signum = "sigint", "SIGINT: Ctrl-C", signal.SIGINT


@kind
class Sigusr1(Stop):
    name, about, signum = "sigusr1", "SIGUSR1: a scheduler's warning", signal.SIGUSR1


@kind
class Sigusr2(Stop):
    name, about, signum = "sigusr2", "SIGUSR2: the time limit is near", signal.SIGUSR2


@kind
class Requeue(Stop):
    """By an administrator, or by Slurm where a preemption has no grace time."""

    name, about = "requeue", "scontrol requeue: the job is put back at once"
    moments = ("step", "evaluation")
    on_this_machine = False

    def ask(self, stage: Stage) -> None:
        cast("SlurmVictim", stage.victim).requeue()


@kind
class Cancel(Stop):
    """By its user; the same command submits it again."""

    name, about = "cancel", "scancel: the job is taken out of the queue"
    moments = ("step", "evaluation")
    on_this_machine = False

    def ask(self, stage: Stage) -> None:
        cast("SlurmVictim", stage.victim).cancel()


@kind
class Sigkill(Fault):
    name = "sigkill"
    about = "SIGKILL while it starts, in a step, in an evaluation"
    expects = "goes on from the newest checkpoint, which is whole"
    moments: ClassVar[tuple[str, ...]] = ("start", "step", "step", "evaluation")
    moments_of_a_job = ("after a save",)  # three kills in a row without one stop a job: a crash loop
    in_a_job = True

    def strike(self, stage: Stage, planned: Planned) -> str:
        stage.hold(planned)
        kill(stage)
        found = newest(stage)
        stage.goes_on_from(found)
        return f"goes on from step {found}"


@kind
class SigkillSave(Sigkill):
    name = "sigkill-save"
    about = "SIGKILL while the files of a checkpoint are written"
    moments = ("save",)
    in_a_job = False

    def strike(self, stage: Stage, planned: Planned) -> str:
        answer = super().strike(stage, planned)
        left = len(stage.watch.saves())
        return f"{answer}, {left} half-written left behind" if left else f"{answer}, the save was just over"


@kind
class SigkillRename(SigkillSave):
    name = "sigkill-rename"
    about = "SIGKILL when a checkpoint lacks only its final name"
    moments = ("rename",)


@kind
class DiskFull(Fault):
    name = "disk-full"
    about = "writes are refused for a while (RLIMIT_FSIZE stands in for a full disk)"
    expects = "goes on training, harms no checkpoint, saves again when it can"
    moments = ("room left",)

    def strike(self, stage: Stage, planned: Planned) -> str:
        stage.hold(planned)
        before = stage.committed()
        said = len(stage.watch.faults())
        limit = self._limit(stage)
        stage.victim.limit_files(limit)
        stage.victim.resume()
        ended = stage.wait_for_or_end(lambda: len(stage.watch.faults()) > said)
        if ended is not None or not stage.victim.freeze():
            raise self.ended(stage)
        fault = stage.watch.faults()[-1]
        # Retention may have deleted an old one after a save that was under way before the limit came.
        harmed = [path.name for path in before if path.exists() and store.fault_of(_candidate(path)) is not None]
        if harmed or newest(stage) < max(map(_step, before)):
            raise UnansweredError(f"{', '.join(harmed) or 'the newest checkpoint'} can no longer be used")
        reached, last = stage.watch.step(), max(stage.run.checkpoint_steps())
        stage.victim.limit_files(None)
        stage.victim.resume()
        status = stage.wait_for_or_end(lambda: max(stage.run.checkpoint_steps(), default=0) > last)
        if status:
            raise self.ended(stage)
        saved = max(stage.run.checkpoint_steps())
        return f"no file beyond {limit} bytes: “{shortened(fault)}”; trained on from step {reached}, saved step {saved}"

    @staticmethod
    def ended(stage: Stage) -> Exception:
        """What it means that training ended: a run that cannot make its very last save is right to fail."""
        status = stage.victim.ended()
        if stage.watch.step() >= stage.steps:
            return TooLateError()
        return UnansweredError(f"training ended with status {status}: {stage.victim.tail()}")

    @staticmethod
    def _limit(stage: Stage) -> int:
        """Half of the largest file of a checkpoint, so that a save is cut in the middle of it."""
        newest_one = max(stage.committed(), key=_step)
        largest = max(path.stat().st_size for path in newest_one.iterdir())
        return max(largest // 2, SMALLEST_LIMIT) if largest > SMALLEST_LIMIT else 0


@kind
class Flip(Fault):
    name = "flip"
    about = "SIGKILL, then one byte of the newest checkpoint is changed"
    expects = "sets it aside as .corrupt and uses the one before"
    moments = ("two checkpoints",)
    in_a_job = True

    def strike(self, stage: Stage, planned: Planned) -> str:
        stage.hold(planned)
        kill(stage)
        doomed = stage.run.checkpoints / store.step_name(newest(stage))
        where = flip(doomed, random.Random(f"flip {planned.number} {planned.fraction}"))
        before = newest(stage)
        stage.goes_on_from(before)
        stage.ensure()
        if stage.wait_for_or_end(stage.made_steps):
            raise UnansweredError(f"the next attempt ended with status {stage.victim.ended()}: {stage.victim.tail()}")
        if not list(doomed.parent.glob(f"{doomed.name}.corrupt*")):
            raise UnansweredError(f"{doomed.name} was not set aside ({where})")
        return f"{where}: {doomed.name} set aside, went on from step {before}"


@kind
class Twice(Fault):
    name = "twice"
    about = "the same command again while it runs"
    expects = "turns the second away, the first is unharmed"
    moments = ("start",)
    in_a_job = True

    def strike(self, stage: Stage, planned: Planned) -> str:
        stage.ensure()
        stage.wait_for(stage.owned)
        at, number = stage.watch.step(), stage.watch.holder()[0]
        second = stage.also(stage.victim.another())
        second.begin()
        status = stage.wait_for_end(second)
        if status == ExitStatus.FINISHED and stage.run.finished.exists():
            raise TooLateError
        if status not in stage.victim.refusals or stage.watch.holder()[0] not in (0, number):
            raise UnansweredError(f"the second was not turned away but ended with status {status}: {second.tail()}")
        ended = stage.wait_for_or_end(lambda: stage.made_steps() and stage.watch.step() > at)
        if ended:
            raise UnansweredError(f"the first ended with status {ended}: {stage.victim.tail()}")
        return f"the second was turned away with status {status}, the first went on"


@kind
class Frozen(Fault):
    name = "frozen"
    about = "SIGSTOP, another takes over, SIGCONT: the older wakes up"
    expects = "the older leaves with status 74 and commits nothing"
    moments = ("step", "save", "rename")

    def strike(self, stage: Stage, planned: Planned) -> str:
        stage.hold(planned)
        older, fence = stage.victim, stage.watch.holder()[0]
        before = stage.committed(fence)
        stage.goes_on_from(newest(stage))
        stage.replace(older.another())
        stage.ensure()
        stage.wait_for_or_end(lambda: stage.owned() and stage.made_steps())
        older.resume()
        status = stage.wait_for_end(older)
        if status == ExitStatus.FINISHED and stage.struck[0] >= stage.steps:
            raise TooLateError  # it had made its last step and saved it: there was nothing left to take over
        if status != ExitStatus.SUPERSEDED:
            raise UnansweredError(f"the older ended with status {status} instead of 74: {older.tail()}")
        if written := stage.committed(fence) - before:
            raise UnansweredError(f"the older committed {', '.join(sorted(path.name for path in written))}")
        return "another took over; the older left with status 74 and committed nothing"


def kill(stage: Stage) -> None:
    """SIGKILL to the run, which must die of it."""
    stage.victim.send(signal.SIGKILL)
    status = stage.wait_for_end()
    if status == ExitStatus.FINISHED:
        raise TooLateError
    if status != -signal.SIGKILL:
        raise UnansweredError(f"ended with status {status}, not by SIGKILL: {stage.victim.tail()}")


def newest(stage: Stage) -> int:
    """Step of the newest checkpoint, every byte of which was read; 0 if there is none yet."""
    try:
        found = store.newest(stage.run.checkpoints)
    except CheckpointError as error:
        raise UnansweredError(str(error)) from None
    return found.step if found else 0


def flip(checkpoint: Path, draw: random.Random) -> str:
    """Change one byte of a file of `checkpoint`; say which."""
    path = draw.choice(sorted(path for path in checkpoint.iterdir() if path.stat().st_size))
    offset = draw.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ draw.randrange(1, 256)]))
    return f"byte {offset} of {path.name}"


def shortened(text: str, length: int = 90) -> str:
    """The beginning of `text`."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _candidate(path: Path) -> store.Candidate:
    try:
        return store.Candidate(path, _step(path), manifests.read(path))
    except manifests.DamagedError as damage:
        return store.Candidate(path, _step(path), None, str(damage))

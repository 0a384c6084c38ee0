"""Define the kinds of fault. Each waits for its trigger, injects the fault, and checks how the run reacts.

Each kind is a class with a name. `@kind` registers it, so that it appears in `--faults`, the help and the report.
"""

from __future__ import annotations

import random
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, cast

from runner.chaos.plan import PlannedFault
from runner.chaos.slurm_target import SlurmTarget
from runner.chaos.stage import Stage, TooLateError, UnansweredError
from runner.checkpoint.files import choice
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.directory import Folder, store_of
from runner.checkpoint.files.store import step_name
from runner.errors import CheckpointError, ExitStatus

SMALLEST_LIMIT = 8192  # writes up to this file size in bytes always succeed, which is enough for the status


class Fault(ABC):
    """A kind of fault.

    Attributes:
        name: the name used in `--faults` and the report.
        about: what the fault does to the run.
        requires: how the run must react.
        triggers: when the fault may be injected into a process on this machine.
        job_triggers: when the fault may be injected into a Slurm job, if different.
        any_ranks: whether the fault needs a run whose result does not depend on the number of ranks.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    requires: ClassVar[str]
    triggers: ClassVar[tuple[str, ...]] = ("step",)
    job_triggers: ClassVar[tuple[str, ...] | None] = None
    on_this_machine: ClassVar[bool] = True
    in_a_job: ClassVar[bool] = False
    any_ranks: ClassVar[bool] = False

    def triggers_for(self, local: bool) -> tuple[str, ...]:
        """Return the triggers for a process on this machine if `local`, else those for a job."""
        return self.triggers if local or self.job_triggers is None else self.job_triggers

    @abstractmethod
    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        """Inject the fault and describe how the run reacted.

        Raises:
            TooLateError: the run finished before the fault could be injected.
            UnansweredError: the run did not react as the fault requires.
        """


KINDS: dict[str, Fault] = {}


def kind(cls: type[Fault]) -> type[Fault]:
    """Register a kind of fault under its name."""
    KINDS[cls.name] = cls()
    return cls


class StopSignal(Fault):
    """A fault that asks the run to stop with a signal."""

    signum: ClassVar[signal.Signals]
    requires = "saves, exits with status 75, loses no step"
    triggers: ClassVar[tuple[str, ...]] = ("start", "step", "step", "evaluation", "save")
    in_a_job = True

    def ask(self, stage: Stage) -> None:
        stage.target.send(self.signum)

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        stage.freeze_at(planned)
        self.ask(stage)
        stage.target.unfreeze()
        status = stage.wait_for_end()
        if status == ExitStatus.FINISHED:
            raise TooLateError
        if status != ExitStatus.INTERRUPTED:
            raise UnansweredError(f"ended with status {status} instead of 75: {stage.target.tail()}")
        line = stage.last_ended()
        if line.get("steps_lost") != 0:
            raise UnansweredError(
                f"exited at step {line.get('end_step')} with its state saved at step {line.get('checkpoint_step')}"
            )
        stage.must_resume_at(int(line["end_step"]))
        return f"exited with status 75, its state saved at step {line['end_step']}"


@kind
class Sigterm(StopSignal):
    name, about, signum = "sigterm", "SIGTERM: a preemption, a shutdown", signal.SIGTERM


@kind
class Sigint(StopSignal):
    name, about, signum = "sigint", "SIGINT: Ctrl-C", signal.SIGINT


@kind
class Sigusr1(StopSignal):
    name, about, signum = "sigusr1", "SIGUSR1: a scheduler's warning", signal.SIGUSR1


@kind
class Sigusr2(StopSignal):
    name, about, signum = "sigusr2", "SIGUSR2: the time limit is near", signal.SIGUSR2


@kind
class Requeue(StopSignal):
    """Requeue the job, as an administrator does, or as Slurm does for a preemption without grace time."""

    name, about = "requeue", "scontrol requeue: the job is requeued at once"
    triggers = ("step", "evaluation")
    on_this_machine = False

    def ask(self, stage: Stage) -> None:
        cast(SlurmTarget, stage.target).requeue()


@kind
class Cancel(StopSignal):
    """Cancel the job, as its user does. Rerunning the command then submits the run again."""

    name, about = "cancel", "scancel: the job is cancelled"
    triggers = ("step", "evaluation")
    on_this_machine = False

    def ask(self, stage: Stage) -> None:
        cast(SlurmTarget, stage.target).cancel()


@kind
class Sigkill(Fault):
    name = "sigkill"
    about = "SIGKILL during startup, in a step, in an evaluation"
    requires = "resumes from the newest checkpoint, which is intact"
    triggers: ClassVar[tuple[str, ...]] = ("start", "step", "step", "evaluation")
    job_triggers = ("after a save",)  # three kills in a row without a save are a crash loop, which stops the job
    in_a_job = True

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        stage.freeze_at(planned)
        kill(stage)
        found = newest(stage)
        stage.must_resume_at(found)
        return f"resumes at step {found}"


@kind
class SigkillSave(Sigkill):
    name = "sigkill-save"
    about = "SIGKILL while the files of a checkpoint are written"
    triggers = ("save",)
    in_a_job = False

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        answer = super().inject(stage, planned)
        left = len(stage.watch.saves())
        return f"{answer}, {left} partial left behind" if left else f"{answer}, the save had just ended"


@kind
class SigkillRename(SigkillSave):
    name = "sigkill-rename"
    about = "SIGKILL when a checkpoint lacks only its final name"
    triggers = ("rename",)


@kind
class Shape(Fault):
    """Restart the run with fewer or more ranks, as after a node loses or gains GPUs."""

    name = "shape"
    about = "SIGTERM or SIGKILL, then the run comes back with another number of ranks"
    requires = "resumes there; its losses and weights stay the same bits"
    triggers: ClassVar[tuple[str, ...]] = ("start", "step", "step", "evaluation")
    any_ranks = True

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        draw = random.Random(f"shape {planned.number} {planned.fraction}")
        before = stage.target.ranks
        KINDS[draw.choice(("sigterm", "sigkill"))].inject(stage, planned)
        stage.target.ranks = now = draw.choice([count for count in stage.ranks if count != before])
        stage.ensure_running()
        if stage.wait_for_or_end(stage.made_steps):
            raise UnansweredError(f"the next attempt ended with status {stage.target.ended()}: {stage.target.tail()}")
        found = (stage.watch.attempt() or stage.last_ended()).get("ranks")
        if found != now:
            raise UnansweredError(f"the next attempt had {found} ranks instead of {now}: {stage.target.tail()}")
        return f"resumed at step {stage.resumes_at} on {now} rank{'' if now == 1 else 's'} ({before} before)"


@kind
class DiskFull(Fault):
    name = "disk-full"
    about = "writes are refused for a while (RLIMIT_FSIZE in place of a full disk)"
    requires = "keeps training, harms no checkpoint, saves again when it can"
    triggers = ("room left",)

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        stage.freeze_at(planned)
        before = stage.committed()
        reported = len(stage.watch.warnings())
        limit = self._limit(stage)
        stage.target.limit_files(limit)
        stage.target.unfreeze()
        ended = stage.wait_for_or_end(lambda: len(stage.watch.warnings()) > reported)
        if ended is not None or not stage.target.freeze():
            raise self.ended(stage)
        warning = stage.watch.warnings()[-1]
        # Retention may have deleted an old checkpoint after a save that was in progress when the limit was set.
        harmed = [path.name for path in before if path.exists() and _is_corrupt(path)]
        if harmed or newest(stage) < max(map(_step, before)):
            raise UnansweredError(f"{', '.join(harmed) or 'the newest checkpoint'} can no longer be used")
        reached, last = stage.watch.step(), stage.run.newest_step()
        stage.target.limit_files(None)
        stage.target.unfreeze()
        status = stage.wait_for_or_end(lambda: stage.run.newest_step() > last)
        if status:
            raise self.ended(stage)
        saved = stage.run.newest_step()
        return (
            f"no file above {limit} bytes: “{shortened(warning)}”; kept training at step {reached}, saved step {saved}"
        )

    @staticmethod
    def ended(stage: Stage) -> Exception:
        """Return the error to raise after training has ended. A run that cannot save its last step should fail."""
        status = stage.target.ended()
        if stage.watch.step() >= stage.steps:
            return TooLateError()
        return UnansweredError(f"training ended with status {status}: {stage.target.tail()}")

    @staticmethod
    def _limit(stage: Stage) -> int:
        """Return half the size of a checkpoint's largest file, so that a save fails partway."""
        newest_one = max(stage.committed(), key=_step)
        largest = max(path.stat().st_size for path in newest_one.iterdir())
        return max(largest // 2, SMALLEST_LIMIT) if largest > SMALLEST_LIMIT else 0


@kind
class Flip(Fault):
    name = "flip"
    about = "SIGKILL, then one byte of the newest checkpoint is changed"
    requires = "sets it aside as .corrupt and uses the one before"
    triggers = ("two checkpoints",)
    in_a_job = True

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        stage.freeze_at(planned)
        kill(stage)
        corrupt = stage.run.checkpoints / step_name(newest(stage))
        where = flip(corrupt, random.Random(f"flip {planned.number} {planned.fraction}"))
        before = newest(stage)
        stage.must_resume_at(before)
        stage.ensure_running()
        if stage.wait_for_or_end(stage.made_steps):
            raise UnansweredError(f"the next attempt ended with status {stage.target.ended()}: {stage.target.tail()}")
        if not list(corrupt.parent.glob(f"{corrupt.name}.corrupt*")):
            raise UnansweredError(f"{corrupt.name} was not set aside ({where})")
        return f"{where}: {corrupt.name} set aside, resumed at step {before}"


@kind
class Twice(Fault):
    name = "twice"
    about = "the command is entered again while it runs"
    requires = "refuses the second process, the first is unharmed"
    triggers = ("start",)
    in_a_job = True

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        stage.ensure_running()
        stage.wait_for(stage.owned)
        step, fence = stage.watch.step(), stage.watch.holder()[0]
        second = stage.add(stage.target.another())
        second.begin()
        status = stage.wait_for_end(second)
        if status == ExitStatus.FINISHED and stage.run.finished.exists():
            raise TooLateError
        if status not in stage.target.refusals or stage.watch.holder()[0] not in (0, fence):
            raise UnansweredError(f"the second was not refused but ended with status {status}: {second.tail()}")
        ended = stage.wait_for_or_end(lambda: stage.made_steps() and stage.watch.step() > step)
        if ended:
            raise UnansweredError(f"the first ended with status {ended}: {stage.target.tail()}")
        return f"the second was refused with status {status}, the first kept training"


@kind
class Frozen(Fault):
    name = "frozen"
    about = "SIGSTOP, another process takes over, SIGCONT: the older one wakes up"
    requires = "the older exits with status 74 and commits nothing"
    triggers = ("step", "save", "rename")

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        stage.freeze_at(planned)
        older, fence = stage.target, stage.watch.holder()[0]
        before = stage.committed(fence)
        stage.must_resume_at(newest(stage))
        stage.replace(older.another())
        stage.ensure_running()
        stage.wait_for_or_end(lambda: stage.owned() and stage.made_steps())
        older.unfreeze()
        status = stage.wait_for_end(older)
        if status == ExitStatus.FINISHED and stage.injected_at[0] >= stage.steps:
            raise TooLateError  # the run had already saved its last step, so there was nothing to take over
        if status != ExitStatus.SUPERSEDED:
            raise UnansweredError(f"the older ended with status {status} instead of 74: {older.tail()}")
        if written := stage.committed(fence) - before:
            raise UnansweredError(f"the older committed {', '.join(sorted(path.name for path in written))}")
        return "another took over; the older exited with status 74 and committed nothing"


def kill(stage: Stage) -> None:
    """Send SIGKILL to the run and check that the run dies."""
    stage.target.send(signal.SIGKILL)
    status = stage.wait_for_end()
    if status == ExitStatus.FINISHED:
        raise TooLateError
    if status != -signal.SIGKILL:
        raise UnansweredError(f"ended with status {status}, not by SIGKILL: {stage.target.tail()}")


def newest(stage: Stage) -> int:
    """Return the step of the newest checkpoint after reading every byte of it, or 0 if there is no checkpoint yet."""
    try:
        found = choice.newest(store_of(stage.run))
    except CheckpointError as error:
        raise UnansweredError(str(error)) from None
    return found.step if found else 0


def flip(checkpoint: Path, draw: random.Random) -> str:
    """Change one byte in a file of `checkpoint`, and describe the changed byte."""
    path = draw.choice(sorted(path for path in checkpoint.iterdir() if path.stat().st_size))
    offset = draw.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ draw.randrange(1, 256)]))
    return f"byte {offset} of {path.name}"


def shortened(text: str, length: int = 90) -> str:
    """Truncate `text` to one line of at most `length` characters."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_corrupt(path: Path) -> bool:
    try:
        manifests.verify(Folder(path), manifests.read(Folder(path)))
    except manifests.CorruptionError:
        return True
    return False

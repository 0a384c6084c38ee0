"""Change settings of an existing run: check which changes are allowed, describe their effects, and record them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.cli.base.console import PROGRAM, shown
from runner.config.composition import Composed
from runner.config.finished import has_finished
from runner.config.frozen import holds, load_plain, to_config, trained
from runner.config.identity import ABSENT, LENGTH_KEYS, ConfigChange, as_text, differences, identity, length_readers
from runner.config.schedule import learning_rate, to_scheduler
from runner.config.schema import Config
from runner.errors import refuse
from runner.rundir import provenance
from runner.rundir.paths import RunDir
from runner.system import clock

# Settings that control where a command puts a run and how it starts it. The run itself does not depend on them.
OF_COMMANDS = (
    "run.dir",
    "run.name",
    "run.root",
    "run.allow_data_change",
    "launcher.dry_run",
    "launcher.retry_failed",
    "launcher.wait",
)


@dataclass(frozen=True)
class Changes:
    """The changes that a command makes to the frozen config of a run.

    Attributes:
        job: the run with its new settings.
        frozen: the frozen config as plain values, before the change. It is empty for a new run.
        all: every difference between the two.
    """

    job: Composed
    frozen: dict[str, Any] = field(default_factory=dict)
    all: Sequence[ConfigChange] = ()

    @classmethod
    def of(cls, job: Composed) -> Changes:
        """Compare the config of a command with the frozen config of its run.

        Raises:
            RunDirError: the frozen config cannot be read.
        """
        if holds(job.run_dir, job.plain):
            return cls(job, job.plain)
        frozen = load_plain(job.run_dir)
        return cls(job, frozen, differences(frozen, job.plain))

    @property
    def of_results(self) -> list[ConfigChange]:
        """Return the allowed changes that alter the results from the current step on."""
        return [change for change in self.all if change.kind == "data" or self._is_edit(change)]

    def _is_edit(self, change: ConfigChange) -> bool:
        """Return whether a change marks the run as edited.

        A change of the length does so only if a schedule depends on the length.
        """
        if change.kind != "edit":
            return False
        if change.key not in LENGTH_KEYS:
            return True
        follows = length_readers(self.frozen) or length_readers(self.job.plain)
        return bool(follows) and _length(self.frozen) != _length(self.job.plain)

    def check(self) -> None:
        """Raise an error if a change is not allowed in an existing run.

        Raises:
            UserError: the message lists all such changes, one per line.
        """
        where, resumes = self.job.run_dir, f"{PROGRAM} resume {shown(self.job.run_dir)}"
        errors = []
        for change in self._by_source():
            if change.kind == "fixed":
                what = "cannot be changed"
                remedy = "keep the old value, or choose another run.dir"
                if change.key.startswith(("optimizer", "scheduler.", "train.")):  # a branch can change these
                    remedy += f"; or branch off: `{PROGRAM} fork {shown(where)} --step N {change.key}=...`"
            elif change.kind == "data" and not self.job.config.run.allow_data_change:
                what = "changes which data comes next"
                remedy = "keep the old value, add run.allow_data_change=true, or choose another run.dir"
            elif self._is_edit(change) and not self.job.resumed:
                what = "changes the result"
                remedy = f"`{resumes} {change.key}={as_text(change.new)}` does so on purpose, or choose another run.dir"
            else:
                continue
            errors.append(f"{change} {what} in the run {where}: {remedy}")
        refuse(sorted(errors, key=lambda line: " cannot be changed in " not in line))

    def _by_source(self) -> list[ConfigChange]:
        """Return all changes. The settings of a source that was added or removed are merged into one change."""
        old, new = (plain.get("data", {}).get("sources", {}) for plain in (self.frozen, self.job.plain))
        whole = {f"data.sources.{name}.": (name in old, name in new) for name in old.keys() ^ new.keys()}
        kept = [change for change in self.all if not change.key.startswith(tuple(whole))]
        texts = {(True, False): ("there", ABSENT), (False, True): (ABSENT, "there")}
        return kept + [ConfigChange(key.rstrip("."), *texts[where], "data") for key, where in sorted(whole.items())]

    def notes(self, step: int) -> list[str]:
        """Describe the effects of the changes on a run at `step`, one line each."""
        lines = [str(change) for change in self.all if change.kind not in ("free", "moved")]
        if any(change.key in LENGTH_KEYS for change in self.of_results):
            lines += _schedules(self.frozen, self.job.config, step)
        then, now = (plain.get("run", {}).get("directory") for plain in (self.frozen, self.job.plain))
        if then and now and then != now:
            lines.append(f"the run was started in {then}; its paths are relative to {now} now")
        return lines

    def not_taken_over(self, ending: str) -> list[str]:
        """Return a line for each setting that a live run does not adopt, with a remedy if a resume would adopt it.

        Args:
            ending: how to stop the run.
        """
        found = [change for change in self.all if change.kind != "moved" and change.key not in OF_COMMANDS]
        found = [change for change in found if change.key == "launcher._target_"] or found
        fixed = [change for change in found if change.kind == "fixed"]
        lines = [f"{change} is not taken over by a live run" for change in found if change not in fixed]
        if lines:
            lines.append(f"{ending} first, then rerun this command: the run resumes with what a run may change")
        return [*(f"{change} cannot be changed in a run: choose another run.dir" for change in fixed), *lines]

    def edit(self, step: int) -> dict[str, Any] | None:
        """Return the code.json record of a deliberate change at `step`, or None if the results stay the same."""
        if not self.of_results:
            return None
        changes = [str(change) for change in self.of_results]
        return {"step": step, "time": clock.wall(), "changes": changes, "before": identity(self.frozen)}

    def edited(self) -> tuple[str, bool] | None:
        """Describe the edits since a command like this one started the run. Return whether the run has enough steps.

        The length of the command's run decides how many steps are enough. Return None if the run has the settings of
        this command, or if it never had them.

        Raises:
            OSError: the records cannot be read.
        """
        if self.job.resumed or not self.of_results:
            return None
        edits = provenance.edits(self.job.run_dir)
        since = next((number for number, edit in enumerate(edits) if edit.get("before") == self.job.digest), None)
        if since is None:
            return None
        said = "; ".join(
            f"at step {edit.get('step')}: {', '.join(map(str, edit.get('changes') or []))}" for edit in edits[since:]
        )
        reached = self._reached()
        run = shown(self.job.run_dir)
        remedy = f"`{PROGRAM} resume {run}` continues the edited run, and another run.dir or run.name begins this anew"
        if reached:
            remedy = "the run has the steps that it asks for"
        return f"was edited {said}. This command trains nothing: {remedy}", reached

    def _reached(self) -> bool:
        run, config = RunDir(self.job.run_dir), self.job.config
        if has_finished(run, config):
            return True
        return config.known_steps is not None and run.newest_step() >= config.known_steps


def _length(plain: dict[str, Any]) -> tuple[Any, Any]:
    config = to_config(plain)
    return config.known_steps, config.train.epochs


def _schedules(frozen: dict[str, Any], new: Config, step: int) -> list[str]:
    """Describe how a different length changes the learning rate from `step` on."""
    old = trained(frozen)
    lines = []
    for key in length_readers(frozen):
        if old.known_steps is None or new.known_steps is None:
            lines.append(f"{key} follows the length: from step {step} on it is that of the longer run")
            continue
        own = None if key == "scheduler" else new.optimizers[key.split(".")[1]]["scheduler"]
        options = new.scheduler if own is None else to_scheduler(key, own)
        before, after = (learning_rate(options, steps)(step) for steps in (old.known_steps, new.known_steps))
        lines.append(
            f"{key} follows the length: from step {step} on the learning rate is that of a run of {new.known_steps} "
            f"steps ({before:.4g} -> {after:.4g} of its peak), so the result is that of neither length alone"
        )
    return lines

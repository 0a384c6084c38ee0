"""Show progress on the terminal: one line that is updated, and one permanent line per fault."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from runner.chaos.plan import Outcome, PlannedFault

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]"}


class Display:
    """Show the progress of a drill.

    Args:
        console: the console to print to.
        faults: the number of planned faults.
    """

    def __init__(self, console: Console, faults: int) -> None:
        self.console = console
        self.faults = faults
        self._status: Status | None = None
        self._current = ""

    def run(self, path: Path) -> None:
        """Start showing the progress of another run."""
        self.say(f"[bold]{escape(path.name)}[/] in {escape(str(path))}")
        self._current = path.name

    def waiting_for(self, fault: PlannedFault, run: str) -> None:
        """Show the fault whose trigger is awaited."""
        when = f"at step {fault.step} or later" if fault.trigger != "start" else "during startup"
        self._current = f"{run}: fault {fault.number} of {self.faults}, {fault.kind} {when}"

    def injected(self, outcome: Outcome) -> None:
        """Print a line for an injected fault."""
        self.say(
            f"  {MARKS[outcome.answered]} {outcome.kind} at step {outcome.step} ({outcome.trigger}): "
            f"{escape(outcome.answer)}"
        )

    def step(self, step: int, steps: int) -> None:
        """Show the run's current step, only on a terminal."""
        if not self.console.is_terminal:
            return
        text = f"{escape(self._current)} · step {step}/{steps}"
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def say(self, text: str) -> None:
        """Print one permanent line. `text` may contain rich markup."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Finish the line that is updated."""
        if self._status is not None:
            self._status.stop()
            self._status = None

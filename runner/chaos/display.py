"""Progress on the terminal: one line that moves, and one that stays for each fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.status import Status

if TYPE_CHECKING:
    from runner.chaos.drill import Outcome
    from runner.chaos.plan import Planned

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]"}


class Display:
    """What is seen while the drill works. `faults`: how many are planned."""

    def __init__(self, console: Console, faults: int) -> None:
        self.console = console
        self.faults = faults
        self._status: Status | None = None
        self._what = ""

    def run(self, path: Path) -> None:
        """Another run is under way."""
        self.say(f"[bold]{escape(path.name)}[/] in {escape(str(path))}")
        self._what = path.name

    def fault(self, fault: Planned, run: str) -> None:
        """A fault is waited for."""
        when = f"at step {fault.step} or later" if fault.moment != "start" else "while it starts"
        self._what = f"{run}: fault {fault.number} of {self.faults}, {fault.kind} {when}"

    def struck(self, outcome: Outcome) -> None:
        """A fault has struck."""
        self.say(
            f"  {MARKS[outcome.answered]} {outcome.kind} at step {outcome.step} ({outcome.moment}): "
            f"{escape(outcome.answer)}"
        )

    def step(self, step: int, steps: int) -> None:
        """Where the run is. Seen on a terminal only."""
        if not self.console.is_terminal:
            return
        text = f"{escape(self._what)} · step {step}/{steps}"
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def say(self, text: str) -> None:
        """One line that stays; rich markup."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the line that moves."""
        if self._status is not None:
            self._status.stop()
            self._status = None

"""What is seen of a run while it trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.1


class ProgressBar:
    """Step, loss, tokens/s and the time that is left.

    On a terminal a bar, redrawn ten times a second at most; elsewhere (a log file, a scheduler's output) a line for
    the first and the last step and every `LINE_EVERY_S` seconds between. Nothing is imported or drawn before the
    first `update`. A terminal that is gone, or a log on a full disk, is no reason to stop.

    Args:
        total: the step at which the run is finished.
        quiet: show messages only, no progress.
        stream: where to write; None: standard error.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        total: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.quiet = quiet
        self.stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._terminal = self.stream.isatty()
        self._shown_at = float("-inf")
        self._began: tuple[int, float] | None = None
        self._bar: Any = None
        self._task: Any = None

    def update(self, step: int, loss: float, tokens_per_s: float) -> None:
        """`step` steps are complete; `loss` is that of the last one."""
        if self.quiet:
            return
        now = self._clock()
        if self._began is None:
            self._began = (step, now)
        last = step >= self.total
        if not last and now - self._shown_at < (REFRESH_EVERY_S if self._terminal else LINE_EVERY_S):
            return
        self._shown_at = now
        left = duration(self._seconds_left(step, now))
        if self._terminal:
            with contextlib.suppress(OSError):
                self._draw(step, f"loss {loss:.4f}  {quantity(tokens_per_s)} tokens/s  {left} left")
        else:
            self._print(f"step {step}/{self.total}  loss {loss:.4f}  {quantity(tokens_per_s)} tokens/s  {left} left")

    def say(self, message: str) -> None:
        """Show one line that stays."""
        bar = self._bar  # another thread may close it
        if bar is None:
            self._print(message)
            return
        with contextlib.suppress(OSError):
            bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the bar and leave it as it is; closing twice is no error."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.stop()

    def _seconds_left(self, step: int, now: float) -> float | None:
        first, began = self._began or (step, now)
        return (now - began) / (step - first) * (self.total - step) if step > first else None

    def _draw(self, step: int, text: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
            console = Console(file=self.stream)
            self._bar = Progress(*columns, console=console, auto_refresh=False)  # no thread beside the training
            self._task = self._bar.add_task("", total=self.total, text="")
            self._bar.start()
            console.show_cursor(True)  # a killed run must not leave a terminal without one
        self._bar.update(self._task, completed=step, text=text, refresh=True)

    def _print(self, message: str) -> None:
        with contextlib.suppress(OSError):
            print(message, file=self.stream, flush=True)


def quantity(number: float) -> str:
    """A number in at most four characters and a letter: 873, 12.3k, 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as 0:42, 12:05 or 3:07:09; `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

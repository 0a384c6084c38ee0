"""Progress of a run: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TextIO

from runner.system import clock as system_clock

LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.1


class ProgressBar:
    """A display of step, loss, tokens/s (samples/s where there are no tokens) and remaining time.

    On a terminal this is a bar, redrawn at most ten times a second. Elsewhere (a log file, a scheduler's output) it
    prints a line for the first and the last step and every `LINE_EVERY_S` seconds between. Nothing is imported or drawn
    before the first `update`. Training continues if the terminal is closed or the log is on a full disk.

    Args:
        total: the step at which the run is finished.
        stream: where to write; None: standard error.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = system_clock.monotonic,
    ) -> None:
        self.total = total
        self.stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._terminal = self.stream.isatty()
        self._shown_at = float("-inf")
        self._began: tuple[int, float] | None = None
        self._bar: Any = None
        self._task: Any = None

    def update(
        self,
        step: int,
        loss: float,
        samples_per_s: float,
        tokens_per_s: float | None = None,
        data_wait: float | None = None,
    ) -> None:
        """Show that `step` steps are complete.

        Args:
            step: number of completed steps.
            loss: loss of the last step.
            samples_per_s: the current speed.
            tokens_per_s: the current speed in tokens, if there are any.
            data_wait: share of the time spent waiting for data, shown with the last step.
        """
        now = self._clock()
        if self._began is None:
            self._began = (step, now)
        last = step >= self.total
        if not last and now - self._shown_at < (REFRESH_EVERY_S if self._terminal else LINE_EVERY_S):
            return
        self._shown_at = now
        speed = f"{quantity(samples_per_s)} samples/s" if tokens_per_s is None else f"{quantity(tokens_per_s)} tokens/s"
        text = f"loss {loss:.4f}  {speed}  {duration(self._seconds_left(step, now))} left"
        if last and data_wait is not None:
            text += f"  data wait {100 * data_wait:.0f} %"
        if self._terminal:
            with contextlib.suppress(OSError):
                self._draw(step, text)
        else:
            self._print(f"step {step}/{self.total}  {text}")

    def say(self, message: str) -> None:
        """Print a line that stays above the bar."""
        bar = self._bar  # another thread may close it
        if bar is None:
            self._print(message)
            return
        with contextlib.suppress(OSError):
            bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and leave it visible. Closing twice is allowed."""
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
            self._bar = Progress(*columns, console=console, auto_refresh=False)  # no further thread
            self._task = self._bar.add_task("", total=self.total, text="")
            self._bar.start()
            console.show_cursor(True)  # a killed run must not leave the terminal without a cursor
        self._bar.update(self._task, completed=step, text=text, refresh=True)

    def _print(self, message: str) -> None:
        with contextlib.suppress(OSError):
            print(message, file=self.stream, flush=True)


def quantity(number: float) -> str:
    """Format a number as 873, 12.3k or 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def size(count: float | None) -> str:
    """Format bytes as `312 B` or `1.2 MB` (powers of 1000), and None as an empty string."""
    if count is None:
        return ""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def duration(seconds: float | None) -> str:
    """Format seconds as 0:42, 12:05 or 3:07:09, and None as `?`."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

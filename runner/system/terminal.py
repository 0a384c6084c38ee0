"""Write text to a terminal that may be closed while the command runs."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from runner.system import files

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

MAX_LINE = 2000  # characters


def printable(text: str) -> str:
    """Return `text` on one line, with unprintable characters escaped: no file may control the terminal.

    Text longer than MAX_LINE is truncated. Pass every message that may quote a file, a name or a setting through this.
    """
    shown = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def printable_lines(text: str) -> str:
    """Return `text` with each of its lines made printable."""
    return "\n".join(map(printable, text.split("\n")))


class Fitting:
    """A renderable for rich's Live that shows as many items as fit into the window. Long lines are folded.

    Args:
        count: number of items.
        made: takes a number of items, and returns a renderable of that many of the most important items.
    """

    def __init__(self, count: int, made: Callable[[int], Any]) -> None:
        self._count, self._made = count, made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Render as many items as fit; rich calls this."""
        from rich.segment import Segment

        options, height = options.update(no_wrap=False, overflow="fold"), options.size.height
        shown, least = min(self._count, height), max(1, height // 6)
        while True:
            lines = console.render_lines(self._made(shown), options, pad=False)
            if len(lines) <= height or shown <= least:  # Live truncates the rest
                break
            shown = max(shown - max(1, (len(lines) - height) // 4), least)
        for line in lines:
            yield from (*line, Segment.line())


class _Terminal(io.FileIO):
    """A terminal that drops all output once it is closed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Make prints do nothing, instead of failing, after their terminal (window, ssh session) has closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue  # replaced by a different object, or closed from the start
        # Do not use isatty(), which returns False if the terminal is already gone.
        if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            raw = _Terminal(stream.fileno(), "w", closefd=False)
            raw.name = stream.name
            buffer = io.BufferedWriter(raw)
            made = io.TextIOWrapper(
                buffer, stream.encoding, stream.errors, line_buffering=True, write_through=stream.write_through
            )
            setattr(sys, name, made)


def discard(stream: Any) -> None:
    """Drop everything printed to `stream` from now on, because the reader of the pipe has gone."""
    os.dup2(files.open_fd(os.devnull, os.O_WRONLY), stream.fileno())


def flush_output() -> None:
    """Flush the output. If its reader has gone, drop it, so that the exit status does not change."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)

"""Print errors, messages and tables for all commands, and format sizes and paths.

Run directories may contain any text, so unprintable characters are replaced here. Only commands that print a table
import rich.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from runner.errors import UserError
from runner.system import clock, processes
from runner.system.terminal import discard, printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table

    from runner.checkpoint.files.choice import Candidate

T = TypeVar("T")
PROGRAM = "python -m runner"
MAX_INTERVAL_S = 86_400.0
# Intervals of progress reports for slow operations: the first after a second, then often on a terminal, and rarely
# elsewhere.
FIRST_PROGRESS_S, LIVE_PROGRESS_S, PROGRESS_S = 1.0, 0.2, 10.0
PIPED_WIDTH = 1000  # if the output is not a terminal, so that names and paths are never truncated


class Parser(argparse.ArgumentParser):
    """A command's argument parser. It reports wrong arguments as one error line, without a usage text."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        """Raise an error for wrong arguments. argparse calls this.

        Raises:
            UserError: this method always raises.
        """
        raise UserError(f"{message}; see {self.prog} --help")


def _path(text: str) -> Path:
    """Convert a command-line argument to a path.

    Reject an empty string, e.g. from "$UNSET", which would mean the current directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def tell(message: str) -> None:
    """Print a line to standard error, such as a warning or the reason for a wait."""
    print(printable(message), file=sys.stderr, flush=True)


def skip_corrupt(bad: Candidate, why: str) -> None:
    """Report that a corrupt checkpoint is skipped, and an older one is used."""
    tell(f"warning: {bad.path} is corrupt ({why}): skipped")


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return `record` for JSON. NaN and infinity, which JSON does not have, become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def check_interval(seconds: float | None) -> None:
    """Check that the interval in `--watch SECONDS` is valid.

    Raises:
        UserError: the interval is not valid.
    """
    if seconds is not None and not 0 < seconds <= MAX_INTERVAL_S:
        raise UserError(f"--watch {seconds:g}: must be more than 0 seconds, and at most a day ({MAX_INTERVAL_S:g})")


def print_errors(error: UserError) -> int:
    """Print each line of `error` to standard error, on rank 0 only, and return its exit status."""
    if int(processes.environment.get("RANK", "0")) == 0:
        print("\n".join(f"error: {printable(line)}" for line in str(error).splitlines()), file=sys.stderr)
    return int(error.status)


def discard_output() -> None:
    """Discard all further standard output, because the reader of the pipe has exited."""
    discard(sys.stdout)


def say(message: str) -> None:
    """Print a line. If the pipe is closed, the command continues to start runs."""
    try:
        print(printable(message), flush=True)
    except BrokenPipeError:
        discard_output()


def counted(items: Collection[T], doing: str) -> Iterator[T]:
    """Yield `items`. If this takes long, report the progress on standard error.

    Args:
        items: the items to process.
        doing: the description of the work in the report, such as `composing jobs`.
    """
    live, told, since = sys.stderr.isatty(), False, clock.monotonic()
    wait_s = FIRST_PROGRESS_S if live else PROGRESS_S
    try:
        for done, item in enumerate(items):
            if clock.monotonic() - since > wait_s and int(processes.environment.get("RANK", "0")) == 0:
                line = f"{doing}: {done:,} of {len(items):,}"
                print(f"\r{line}\x1b[K" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)
                since, wait_s, told = clock.monotonic(), LIVE_PROGRESS_S if live else PROGRESS_S, True
            yield item
    finally:
        if live and told:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def console(stderr: bool = False) -> Console:
    """Return a console for tables. It is as wide as the terminal, or if piped, wide enough for complete lines.

    Text is printed without rich's markup, and unprintable characters are replaced. A closed pipe raises
    BrokenPipeError, as `print` does, whereas rich would exit with status 1.
    """
    from rich.console import Console

    class Printable(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable_lines(segment.text))

        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 the BrokenPipeError that rich is handling

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else PIPED_WIDTH
    return Printable(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False, width=width)


def table(*columns: str) -> Table:
    """Return an empty table without lines between its cells."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False)


class Lines:
    """A rich table with one line per row. On a wide console it is laid out here, in a tenth of rich's time.

    Args:
        columns: the names of the columns.
        rows: the text of each cell, by row.
        styled: the index of the column that has styles.
        styles: the style of each cell in that column.
    """

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], styled: int, styles: Sequence[str]
    ) -> None:
        self._columns, self._styled, self._styles = columns, styled, styles
        self._rows = [[printable(cell) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Segment]:
        """Render the table. rich calls this."""
        from rich.cells import cell_len
        from rich.segment import Segment

        widths = [max(map(cell_len, column)) for column in zip(self._columns, *self._rows, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) > options.max_width:
            yield self._table()
            return
        for number, row in enumerate([self._columns, *self._rows], start=-1):
            cells = [text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)]
            head, middle, tail = cells[: self._styled], cells[self._styled], cells[self._styled + 1 :]
            usual = "table.header" if number < 0 else "none"
            yield Segment("".join(f"{cell}  " for cell in head), console.get_style(usual))
            yield Segment(middle, console.get_style(usual if number < 0 else self._styles[number] or usual))
            yield Segment("".join(f"  {cell}" for cell in tail), console.get_style(usual))
            yield Segment.line()

    def _table(self) -> Table:
        from rich.text import Text

        made = table(*self._columns)
        made.columns[0].overflow = "fold"  # the end of a name contains the seed and the hash, which distinguish runs
        for row, style in zip(self._rows, self._styles, strict=True):
            made.add_row(*(Text(text, style if column == self._styled else "") for column, text in enumerate(row)))
        return made


def shown(path: Path) -> str:
    """Return `path` as you would type it in the current directory."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

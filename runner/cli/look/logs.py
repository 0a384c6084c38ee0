"""Print and follow the log of a run: `runner logs RUN`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.cli.base.console import PROGRAM, Parser, shown, tell
from runner.errors import ExitStatus, RunDirError, UserError
from runner.rundir.attempt_log import TITLE
from runner.rundir.find import run_dir
from runner.rundir.paths import RunDir
from runner.rundir.state import IN_QUEUE, State, asked
from runner.rundir.trust import reading
from runner.system import clock, files
from runner.system.terminal import printable

LINES = 200
POLL_S, LOOK_S = 0.5, 10.0
PART = 1 << 20  # bytes per read
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} logs",
        description="Prints what the last attempt at a run has printed, as a job or in a sweep. What a run prints to a "
        "terminal is kept nowhere.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("-f", "--follow", action="store_true", help="print more until the run is over, or Ctrl-C")
    made.add_argument("--rank", type=int, default=0, metavar="N", help="which rank's (default: 0)")
    made.add_argument(
        "--lines",
        type=int,
        metavar="N",
        help=f"the last N lines, also of earlier attempts (default: those of the last attempt, {LINES} at most)",
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the run does not exist, or has no log.
    """
    options = parser().parse_args(arguments)
    for name, value, least in (("--rank", options.rank, 0), ("--lines", options.lines, 1)):
        if value is not None and value < least:
            raise UserError(f"{name} {value}: must be {least} or more")
    run = run_dir(options.run)
    with reading(run), suppress(KeyboardInterrupt):
        path = _log(run, options.rank)
        if path is None and not (options.follow and _waits(asked(run))):
            raise RunDirError(_why_none(run, options.rank))
        at = _print_end(path, options.lines, options.follow) if path else 0
        if options.follow:
            _follow(run, options.rank, path, at)
    return int(ExitStatus.FINISHED)


def _log(run: RunDir, rank: int) -> Path | None:
    """Return the log file that a rank wrote to most recently, or None if it has none."""
    own = run.local_log if rank == 0 else run.rank_log(rank)
    of_job = re.compile(rf"\d+(_\d+)?_{rank}_log\.out")
    names = files.list_dir(run.logs) if files.is_dir(run.logs) else []
    timed = []
    for name in names:
        if name == own.name or of_job.fullmatch(name):
            with suppress(OSError):  # the target of a symlink does not exist until the task starts
                timed.append((files.stat(run.logs / name).st_mtime, run.logs / name))
    return max(timed)[1] if timed else None


def _waits(state: State) -> bool:
    return state.word in IN_QUEUE or (state.word == "running" and state.job is not None)


def _why_none(run: RunDir, rank: int) -> str:
    """Explain why the run has no log."""
    state = asked(run)
    if _waits(state):
        reason = f": {state.reason}" if state.reason else ""
        return f"{shown(run.path)} has printed nothing yet, as it is {state.word}{reason}; logs -f waits for it"
    ranks = state.status.get("ranks")
    if isinstance(ranks, int) and rank >= ranks:
        return f"--rank {rank}: the last attempt at {shown(run.path)} had ranks 0 to {ranks - 1}"
    return (
        f"{shown(run.path)} has no log of rank {rank}: it is {state.word}, and what a run prints to a terminal is kept "
        f"nowhere; its losses are in {run.metrics.name}, and what its attempts came to in {run.attempts.name}"
    )


def _print_end(path: Path, count: int | None, follows: bool) -> int:
    """Print the last `count` lines of a log, or if None, those of the last attempt. Return the offset of their end.

    If `follows`, an incomplete last line is not printed. `_follow` prints it later.
    """
    found: list[bytes] = []
    end, is_whole = 0, False
    with files.open_regular(path, follow=True) as file:
        for start, line in files.lines_backwards(file.fileno()):
            end = end or start + len(line)
            found.append(line)
            is_whole = start == 0 or (count is None and TITLE.match(line) is not None)
            if is_whole or len(found) == (count or LINES):
                break
        if not follows:
            found.insert(0, files.read_at(file.fileno(), files.size_of(file.fileno()) - end, end))
    if not is_whole and count is None:
        tell(f"the last {LINES} lines of {shown(path)}; --lines N prints more")
    for line in reversed(found):
        _print(line)
    return end


def _print(line: bytes) -> None:
    """Print a line without colors. For a progress bar, print only its final state."""
    text = _COLOUR.sub("", line.decode(errors="replace")).rstrip("\r\n")
    if line:
        print(printable(text.rpartition("\r")[2]), flush=True)


def _follow(run: RunDir, rank: int, path: Path | None, at: int) -> None:
    """Print new lines of a run's log, including the logs of later attempts, until the run is over."""
    looked, told = float("-inf"), ""
    while True:
        is_over = False
        if clock.monotonic() - looked >= LOOK_S:
            state, looked = asked(run), clock.monotonic()
            is_over = not _waits(state) and state.holder is None
            line = f"{shown(run.path)}: {state.word}{f' ({state.reason})' if state.reason else ''}"
            if line != told and (is_over or path is None):
                tell(line)
                told = line
        newest = _log(run, rank)
        if newest != path:
            path, at = newest, 0
        while path is not None and (more := _print_from(path, at)) != at:
            at = more
        if is_over:
            return
        clock.sleep(POLL_S)


def _print_from(path: Path, at: int) -> int:
    """Print the complete lines of a log from an offset on. If there are many, print only some of them.

    Return the offset after the printed lines.
    """
    with files.open_regular(path, follow=True) as file:
        size = files.size_of(file.fileno())
        at = 0 if size < at else at  # a smaller file means that it was replaced
        data = files.read_at(file.fileno(), min(size - at, PART), at)
    lines = data.split(b"\n")[:-1] if len(data) < PART or b"\n" in data else [data]
    for line in lines:
        _print(line + b"\n")
    return at + (len(data) if lines == [data] else sum(len(line) + 1 for line in lines))

"""Compare runs in tables, one HTML page, CSV or JSON: `runner report [DIR...]`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.cli.base.console import PROGRAM, Parser, check_interval, console, say, shown, table, tell
from runner.cli.base.trials import summary
from runner.cli.look.status import collect, having
from runner.cli.look.status_table import STYLES, Row
from runner.config.identity import kind_of
from runner.errors import FileError, RunDirError, UserError, nearest
from runner.report import goodput, spreadsheet
from runner.report.compare import Group, as_json, differing, grouped, main_metric, ranked
from runner.report.page import page
from runner.report.runs import NO_MODES, RunResults, ends, may_rank, read_run
from runner.report.search import search_data
from runner.report.tables import fork_lines, goodput_table, group_table, run_table, week_table
from runner.rundir.find import base_of, find_searches
from runner.rundir.paths import RunDir
from runner.search.directory import Record, SearchDir, read_journal
from runner.system import clock, files, processes

POINTS = 3_000_000  # for all curves in total, to limit memory
MAX_POINTS, MIN_POINTS = 1000, 60  # per curve
WATCH_S = 30.0
STDOUT = Path("-")
MAX_ROWS = 200  # of a table on the terminal
LOOKS = 3  # reports until --notify assumes that runs which have not started never will
UNDER_WAY = ("running", "pending", "requeued", "ending", "suspended")


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} report",
        description="Compares runs: prints tables, and writes one HTML page that needs no network.",
    )
    made.add_argument(
        "roots", nargs="*", type=Path, metavar="DIR", help="runs, or directories that contain them (default: outputs)"
    )
    made.add_argument(
        "--by", action="append", default=[], metavar="KEY", help="group by this setting (default: all but the seed)"
    )
    made.add_argument("--tag", action="append", default=[], help="only runs that have this one of run.tags")
    made.add_argument("--metric", metavar="NAME", help="rank by this metric (default: that of the best checkpoints)")
    made.add_argument(
        "--mode", choices=("min", "max"), help="whether less or more of --metric is better, where its name does not say"
    )
    made.add_argument(
        "--html", type=Path, metavar="FILE", help="the page (default: report.html in DIR, or beside several DIRs)"
    )
    made.add_argument("--json", action="store_true", help="print JSON; the page is written only with --html")
    made.add_argument(
        "--csv",
        nargs="?",
        type=Path,
        const=STDOUT,
        metavar="FILE",
        help="write the table of runs; print it without FILE",
    )
    made.add_argument("--steps-csv", type=Path, metavar="FILE", help="write the records of all steps of all runs")
    made.add_argument(
        "--watch", nargs="?", type=float, const=WATCH_S, metavar="SECONDS", help="refresh until Ctrl-C (default: 30 s)"
    )
    made.add_argument("--notify", metavar="CMD", help="refresh until no run is under way, then run this shell command")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: an argument is wrong, there are no runs, or a file cannot be written.
    """
    options = parser().parse_args(arguments)
    if options.csv is not None and options.csv != STDOUT and files.is_dir(options.csv):  # for `--csv outputs`
        options.roots.append(options.csv)
        options.csv = STDOUT
    if options.json and options.csv == STDOUT:
        raise UserError("--json and --csv without a file: only one of them can be printed")
    roots = options.roots or [Path("outputs")]
    for root in roots:
        if not files.is_dir(root):
            raise UserError(f"{root} is not a directory: name the one that contains the runs (run.root)")
    check_interval(options.watch)
    if options.mode and not options.metric:
        raise UserError(f"--mode {options.mode} needs --metric NAME: it says whether less or more of that is better")
    if options.notify is not None and not options.notify.strip():
        raise UserError("--notify: the command is empty: name a shell command, such as 'echo \"$RUNNER_SUMMARY\"'")
    if options.watch is None and not options.notify:
        _show_report(roots, options)
        return 0
    try:
        return _watch(roots, options, options.watch or WATCH_S)
    except KeyboardInterrupt:
        if options.notify:  # the command for --notify has not run
            raise
        return 0


def _watch(roots: Sequence[Path], options: Any, every_s: float) -> int:
    """Report repeatedly. With --notify, stop when no run is in progress, and return the notify command's status.

    In a sweep on this machine, there are moments when one run has ended and the next has not started yet.
    """
    still = 0
    while True:
        runs = _show_report(roots, options, every_s)
        still = 0 if any(run.state in UNDER_WAY for run in runs) else still + 1
        if options.notify and still and (not _to_come(runs) or still == LOOKS):
            return _notify(options.notify, runs)
        clock.sleep(every_s)


def _to_come(runs: Sequence[RunResults]) -> bool:
    return any(run.state in (*UNDER_WAY, "not started") for run in runs)


def _show_report(roots: Sequence[Path], options: Any, every_s: float | None = None) -> list[RunResults]:
    runs = results(roots, options.tag, {options.metric: options.mode} if options.mode else {})
    if not runs:
        where = ", ".join(map(str, roots)) + (f" with the tags {', '.join(options.tag)}" if options.tag else "")
        raise UserError(f"there are no runs in {where}: name the directory that contains them")
    metric = _metric(runs, options.metric)
    by = options.by or default_by(runs)
    groups = grouped(runs, by)
    order = ranked(runs, metric)
    printed = options.json or options.csv == STDOUT
    # Files are written first, because the reader of the tables may close the pipe.
    written = _files(runs, order, options)
    searches = read_searches(roots) if options.html or not printed else []
    if options.html or not printed:
        refresh_s = every_s if _to_come(runs) else None
        html = page(runs, _title(roots), metric, options.by, by, refresh_s=refresh_s, searches=searches)
        written[options.html or _folder(roots) / "report.html"] = html
    for path, content in written.items():
        _write(path, content)
    if options.json:
        print(json.dumps(as_json(order, groups), indent=2, allow_nan=False))
    elif options.csv == STDOUT:
        print(spreadsheet.of_runs(order), end="")
    else:
        _print(order, groups, metric)
        for search in searches:
            say(f"search {search['name']}: {search['summary']}")
        if metric and not any(may_rank(metric, run.modes) for run in runs):
            say(f"not ranked: whether less or more of {metric} is better is not known; add --mode min or --mode max")
        for path in written:
            say(f"wrote {shown(path.absolute())}")
    return runs


def _files(runs: Sequence[RunResults], order: Sequence[RunResults], options: Any) -> dict[Path, str]:
    """Return the contents of all requested files except the HTML page, by path."""
    written: dict[Path, str] = {}
    if options.csv and options.csv != STDOUT:
        written[options.csv] = spreadsheet.of_runs(order)
    if options.steps_csv:
        written[options.steps_csv] = spreadsheet.of_steps(runs)
    return written


def results(roots: Sequence[Path], tags: Sequence[str] = (), modes: Mapping[str, str] = NO_MODES) -> list[RunResults]:
    """Read the results and states of all runs in `roots` that have all of these tags. Skip duplicates."""
    base = Path(os.path.commonpath([os.path.abspath(base_of(root)) for root in roots]))
    rows = {files.resolve(row.path): row for root in roots for row in having(collect(root)[0], tags)}
    points = max(MIN_POINTS, min(MAX_POINTS, POINTS // (10 * max(len(rows), 1))))

    def read_one(row: Row, keep: Collection[int] = ()) -> RunResults:
        made = read_run(RunDir(Path(row.path)), base, points, keep, modes)
        if made.state != "unreadable":
            made.state, made.reason = row.state, row.reason
            made.settings |= {"tags": ", ".join(row.tags) or None, "notes": "; ".join(row.notes) or None}
        return made

    read = [read_one(row) for row in rows.values()]
    if len(keep := ends(read)) > 1 and any(run.steps > points for run in read):  # otherwise all steps are shown already
        read = [read_one(row, keep) for row in rows.values()]
    return [run for run in read if files.is_dir(run.path)]  # other runs were removed or moved while they were read


def read_searches(roots: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the data of each search in `roots`, for the HTML page.

    Searches that cannot be read are skipped with a warning.
    """
    found = []
    for path in {files.resolve(path): path for root in roots for path in find_searches(root)}.values():
        try:
            rules = Record.read(SearchDir(path)).rules
            journal = read_journal(SearchDir(path), rules.repeats)
        except (RunDirError, OSError) as error:
            tell(f"warning: {shown(path)} is left out: {error}")
            continue
        found.append({"name": path.name, "summary": summary(rules, journal), **search_data(rules, journal)})
    return found


def _folder(roots: Sequence[Path]) -> Path:
    """Return the directory for the page: the one that was named, or the parent that several have in common."""
    parents = {root.parent for root in roots}
    return roots[0].parent if len(roots) > 1 and len(parents) == 1 else roots[0]


def _title(roots: Sequence[Path]) -> str:
    return ", ".join(files.resolve(root).name for root in roots)


def _metric(runs: Sequence[RunResults], given: str | None) -> str | None:
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    if given is not None and given not in names:
        known = ", ".join(names) or "none"
        raise UserError(f"--metric {given}: no run has it{nearest(given, names)}; there are {known}")
    return given or main_metric(runs)


def default_by(runs: Sequence[RunResults]) -> list[str]:
    """Return all settings that differ between runs and can change a result, except the seed."""
    return [key for key in differing(runs) if key != "seed" and kind_of(key) != "free"]


def _print(order: Sequence[RunResults], groups: Sequence[Group], metric: str | None) -> None:
    from rich.text import Text

    out = console()
    metrics = [metric] if metric else []
    tables = [run_table(order, metrics)]
    if len(groups) > 1 or any(len(group.runs) > 1 for group in groups):
        tables.append(group_table(groups, metrics))
    seconds = goodput.total(run.seconds for run in order)
    if any(seconds.values()):
        tables.append(goodput_table(seconds))
    weeks = goodput.by_week(attempt for run in order for attempt in run.accounts)
    if len(weeks) > 1:
        tables.append(week_table(weeks))
    for columns, rows in tables:
        listing = table(*columns)
        for row in rows[:MAX_ROWS]:
            listing.add_row(
                *(Text(cell, style=STYLES.get(cell, "") if number == 1 else "") for number, cell in enumerate(row))
            )
        out.print(listing)
        if len(rows) > MAX_ROWS:
            out.print(f"and {len(rows) - MAX_ROWS} more: the page and --csv have them all")
        out.print()
    unknown = sum(not goodput.has_account(attempt) for run in order for attempt in run.accounts)
    if unknown:
        out.print(Text(f"{unknown} attempts left no account of their time, and are not in the table", style="yellow"))
    for line in fork_lines(order):
        out.print(Text(line))
    for run in order:
        if run.state in ("failed", "crash loop", "stuck", "unreadable") and run.reason:
            out.print(Text(f"{run.name}: {run.reason}", style="yellow"))


def _write(path: Path, content: str | bytes) -> None:
    try:
        files.write_atomic(path, content)
    except OSError as error:
        raise FileError(f"{path} cannot be written ({error.strerror or error}): choose another file") from error


def _notify(command: str, runs: Sequence[RunResults]) -> int:
    """Run the user's notify command, with the outcome of the runs in its environment variables.

    Raises:
        FileError: the command failed.
    """
    finished = sum(run.state == "finished" for run in runs)
    summary = f"{finished} of {len(runs)} runs finished"
    environment = {
        **processes.environment,
        "RUNNER_SUMMARY": summary,
        "RUNNER_FINISHED": str(finished),
        "RUNNER_RUNS": str(len(runs)),
    }
    say(f"{summary}: {command}")
    status = processes.run(["/bin/sh", "-c", command], env=environment, check=False).returncode
    if status:
        raise FileError(f"--notify: the command ended with exit status {status}: {command}")
    return 0

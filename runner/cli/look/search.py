"""Show the trials of a search, best first: `python -m runner search DIR`.

python -m runner search outputs/text-asha-lr-seed0-1f2e3d4c
python -m runner search outputs/text-asha-lr-seed0-1f2e3d4c --replay
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from runner.cli.base.console import PROGRAM, Parser, say, shown, tell
from runner.cli.base.trials import as_json, print_table
from runner.errors import ExitStatus, RunDirError
from runner.rundir.find import find_searches
from runner.search.decide import replay
from runner.search.directory import Record, SearchDir, is_search, read_journal

ABOUT = """\
Shows the trials of a search: what each varies, how far it is, its result, its run. The best one has a star. Reads the
journal and the run directories; starts nothing. The command that began the search continues it."""


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(prog=f"{PROGRAM} search", description=ABOUT)
    made.add_argument("directory", type=Path, metavar="DIR", help="of the search, such as outputs/NAME")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--optuna", type=Path, metavar="FILE.db", help="write a study for optuna-dashboard")
    made.add_argument("--replay", action="store_true", help="make every decision again, and compare it")
    return made


def _only_search(root: Path, given: Path) -> Path:
    """Return the only search in a directory and its subdirectories.

    Raises:
        RunDirError: there is no search, or more than one.
    """
    found = list(find_searches(root))
    if len(found) == 1:
        return found[0]
    known = ", ".join(map(shown, found)) or "those that a command with search=... printed"
    raise RunDirError(f"{given} is not the directory of a search, which has a search.json: pass one of {known}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        RunDirError: DIR is not a search, or its journal is malformed.
    """
    options = parser().parse_args(list(arguments))
    path = options.directory.absolute()
    if not is_search(path):
        path = _only_search(path, options.directory)
    search = SearchDir(path)
    record = Record.read(search)
    rules = record.rules
    journal = read_journal(search, rules.repeats)
    if options.optuna is not None:
        from runner.search.optuna import write_study

        write_study(rules, journal, path.name, options.optuna)
        url = shlex.quote(f"sqlite:///{options.optuna}")
        say(f"{options.optuna}: {len(journal.trials)} trials; look at them with `optuna-dashboard {url}`")
        return int(ExitStatus.FINISHED)
    if options.replay:
        wrong = replay(rules, journal.entries)
        for line in wrong:
            tell(line)
        say(f"{len(journal.entries)} entries, {len(wrong)} decisions come out differently")
        return int(ExitStatus.FAILED if wrong else ExitStatus.FINISHED)
    if options.json:
        print(json.dumps(as_json(search, rules, journal), indent=2))
    else:
        print_table(search, record, journal)
    return int(ExitStatus.FINISHED)

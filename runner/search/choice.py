"""Find the best run of a search, for commands that continue training from it."""

from __future__ import annotations

from pathlib import Path

from runner.errors import UserError
from runner.rundir.paths import RunDir
from runner.search.decide import best
from runner.search.directory import Record, SearchDir, read_journal


def best_run(path: Path) -> RunDir:
    """Return the run with the first seed of the best trial so far.

    Raises:
        UserError: no trial has a result yet, or the search directory is malformed.
    """
    search = SearchDir(path)
    rules = Record.read(search).rules
    found = best(rules, read_journal(search, rules.repeats))
    if found is None:
        raise UserError(f"{path}: no trial of the search has a result yet: rerun its command")
    return search.run(found.trial.runs[0])

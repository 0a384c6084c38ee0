"""Read and write the directory of a search: its rules, its journal, its slots. Its runs are in the same folder.

outputs/NAME/search.json      the rules, and the config that every trial begins with
outputs/NAME/journal.jsonl    see `runner.search.journal`; the holder of the lease replaces the whole file
outputs/NAME/code.json        the code at the last command, as in a run
outputs/NAME/lease/           held for the moment of a decision
outputs/NAME/slots/slot-0/    a directory with a lease, a job and logs, as a run has them, for each slot
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunDirError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.search.journal import Entry, Journal
from runner.search.rules import Rules
from runner.system import clock, files
from runner.system.signals import STOP

FORMAT = 1
WAIT_S = 180.0
"""How long to wait for the lease while others decide: longer than the lease timeout of a killed process."""


@dataclass(frozen=True)
class SearchDir:
    """The paths of a search."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "search.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def lease(self) -> Path:
        return RunDir(self.path).lease

    def slot(self, number: int) -> RunDir:
        """Return the directory of a slot. It has a lease, a job and logs, as a run has."""
        return RunDir(self.path / "slots" / f"slot-{number}")

    @staticmethod
    def number_of(slot: RunDir) -> int:
        return int(slot.path.name.removeprefix("slot-"))

    def slots(self) -> list[RunDir]:
        """Return the existing slots, ordered by number.

        Raises:
            OSError: the directory cannot be read.
        """
        try:
            names = files.list_dir(self.path / "slots")
        except FileNotFoundError:
            return []
        found = [RunDir(self.path / "slots" / name) for name in names if name.startswith("slot-")]
        return sorted(found, key=self.number_of)

    def run(self, name: str) -> RunDir:
        """Return the run that an entry of the journal names."""
        return RunDir(Path(os.path.normpath(self.path.parent / name)))

    def name_of(self, run: Path) -> str:
        """Return the journal's name of a run: its path relative to the directory that holds the search."""
        return os.path.relpath(run, self.path.parent)


def is_search(path: Path) -> bool:
    """Return whether a directory is the directory of a search."""
    return files.is_file(SearchDir(path).record)


@dataclass(frozen=True)
class Record:
    """The content of search.json.

    Attributes:
        rules: the rules of its decisions; they never change.
        config: the starting point of the trials, for `runner.config.template`.
        digest: the identity of a trial without its point; if it changes, the trials become other runs.
        directory: the directory of the command.
        keep: how many checkpoints a paused trial keeps.
        prune: whether paused trials lose them when the search ends.
        lease_timeout_s: see run.lease_timeout_s.
    """

    rules: Rules
    config: dict[str, Any]
    digest: str
    directory: str
    keep: int = 1
    prune: bool = True
    lease_timeout_s: float = 30.0

    def write(self, search: SearchDir, guard: files.Guard) -> None:
        """Replace search.json.

        Raises:
            SupersededError: another process has taken over the lease.
            OSError: the file system refused.
        """
        rest = {key: getattr(self, key) for key in ("digest", "directory", "keep", "prune", "lease_timeout_s")}
        made = {"format": FORMAT, "rules": self.rules.to_json(), **rest, "config": self.config}
        files.write_json(search.record, made, guard=guard)

    @staticmethod
    def read(search: SearchDir) -> Record:
        """Read search.json.

        Raises:
            RunDirError: it is missing or malformed.
            OSError: it cannot be read.
        """
        found = files.read_object(search.record)
        if not found and not files.exists(search.record):
            raise RunDirError(f"{search.path} is not a search, which has a search.json: pass one, such as outputs/NAME")
        try:
            made = {key: value for key, value in found.items() if key not in ("format", "rules")}
            return Record(rules=Rules.from_json(found["rules"]), **made)
        except (LookupError, TypeError, AttributeError):
            raise RunDirError(
                f"{search.record} is malformed: rerun the command of the search, which writes it"
            ) from None


def read_journal(search: SearchDir, repeats: int) -> Journal:
    """Read the journal of a search.

    Raises:
        RunDirError: it is malformed.
        OSError: it cannot be read.
    """
    try:
        text = files.read_regular(search.journal).decode()
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError:
        raise RunDirError(f"{search.journal} is no text: restore it from a copy") from None
    return Journal.parse(text, repeats, search.journal)


@dataclass
class Turn:
    """The right to decide, while this process holds the lease of the search."""

    search: SearchDir
    journal: Journal
    guard: files.Guard
    _added: int = field(default=0)

    def append(self, entry: str, **values: Any) -> Entry:
        """Add an entry, to be written by `commit`."""
        made: Entry = {"entry": entry, **values, "time": round(clock.wall(), 3)}
        self.journal.add(made)
        self._added += 1
        return made

    def commit(self) -> None:
        """Write the entries that were added.

        Raises:
            SupersededError: another process has taken over the lease: nothing was written.
            OSError: the file system refused.
        """
        if self._added:
            files.write_atomic(self.search.journal, self.journal.text(), guard=self.guard)
            self._added = 0


@contextmanager
def turn(search: SearchDir, record: Record, holder: Mapping[str, Any] | None = None) -> Iterator[Turn]:
    """Acquire the lease of a search and read its journal. Write the entries added in the block when it ends.

    Args:
        search: the search.
        record: its search.json.
        holder: the job of this process.

    Raises:
        LockedError: other processes kept the lease for too long.
        StoppedError: a signal ended the wait.
        SupersededError: this process was stopped for so long that another one has taken over.
        RunDirError: the search was moved or removed, or its journal is malformed.
        OSError: the file system refused.
    """
    with Lease.acquire(
        search.lease, holder, record.lease_timeout_s, wait_s=WAIT_S, asked_to_stop=lambda: STOP, within=search.path
    ) as lease:
        made = Turn(search, read_journal(search, record.rules.repeats), lease.guard)
        yield made
        made.commit()

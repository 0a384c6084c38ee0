"""Read and write the directory of a search: its rules, journal and slots. Its runs are in the same parent folder.

outputs/NAME/search.json      the rules, and the base config of all trials
outputs/NAME/journal.jsonl    see `runner.search.journal`; only the holder of the lease replaces this file
outputs/NAME/code.json        the identity of the code at the last command, as in a run
outputs/NAME/lease/           the lease, held only while a process decides
outputs/NAME/slots/slot-0/    one directory per slot, with a lease, a job and logs like those of a run
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
"""Seconds to wait for the lease while other processes decide. Longer than the lease timeout of a killed process."""


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
        """Return the directory of a slot. Like a run, it has a lease, a job and logs."""
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
        """Return the run that a journal entry names."""
        return RunDir(Path(os.path.normpath(self.path.parent / name)))

    def name_of(self, run: Path) -> str:
        """Return the name of a run in the journal, which is its path relative to the search's parent directory."""
        return os.path.relpath(run, self.path.parent)


def is_search(path: Path) -> bool:
    """Return whether `path` is the directory of a search."""
    return files.is_file(SearchDir(path).record)


@dataclass(frozen=True)
class Record:
    """The content of search.json.

    Attributes:
        rules: the rules of the search; they never change.
        config: the base config of the trials, as JSON values for `runner.config.template`.
        digest: the identity of a trial without its point. If it changes, the trials become different runs.
        directory: the working directory of the command.
        keep: the number of checkpoints that a paused trial keeps.
        prune: whether these checkpoints are deleted when the search ends.
        lease_timeout_s: the value of run.lease_timeout_s.
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
            OSError: search.json cannot be written.
        """
        rest = {key: getattr(self, key) for key in ("digest", "directory", "keep", "prune", "lease_timeout_s")}
        made = {"format": FORMAT, "rules": self.rules.to_json(), **rest, "config": self.config}
        files.write_json(search.record, made, guard=guard)

    @staticmethod
    def read(search: SearchDir) -> Record:
        """Read search.json.

        Raises:
            RunDirError: the file is missing or malformed.
            OSError: the file cannot be read.
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
        RunDirError: the journal is malformed.
        OSError: the journal cannot be read.
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
    """The exclusive right to decide, valid while this process holds the lease of the search."""

    search: SearchDir
    journal: Journal
    guard: files.Guard
    _added: int = field(default=0)

    def append(self, entry: str, **values: Any) -> Entry:
        """Add an entry. `commit` writes it."""
        made: Entry = {"entry": entry, **values, "time": round(clock.wall(), 3)}
        self.journal.add(made)
        self._added += 1
        return made

    def commit(self) -> None:
        """Write the added entries to the journal.

        Raises:
            SupersededError: another process has taken over the lease, so nothing was written.
            OSError: the journal cannot be written.
        """
        if self._added:
            files.write_atomic(self.search.journal, self.journal.text(), guard=self.guard)
            self._added = 0


@contextmanager
def turn(search: SearchDir, record: Record, holder: Mapping[str, Any] | None = None) -> Iterator[Turn]:
    """Acquire the lease of a search and read its journal. When the block ends, write the entries that were added in it.

    Args:
        search: the search to decide for.
        record: the content of its search.json.
        holder: the identity of this process's job, for the lease.

    Raises:
        LockedError: other processes held the lease for too long.
        StoppedError: a signal arrived during the wait.
        SupersededError: this process was paused for so long that another process took over.
        RunDirError: the search was moved or removed, or its journal is malformed.
        OSError: a file cannot be read or written.
    """
    with Lease.acquire(
        search.lease, holder, record.lease_timeout_s, wait_s=WAIT_S, asked_to_stop=lambda: STOP, within=search.path
    ) as lease:
        made = Turn(search, read_journal(search, record.rules.repeats), lease.guard)
        yield made
        made.commit()

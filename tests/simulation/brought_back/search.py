"""Faults of a search's slots and journal."""

from __future__ import annotations

from typing import Any

import pytest

from runner.cli.start.slot import Slot
from runner.search.directory import Turn
from runner.search.journal import FAILED, RESULT
from runner.system import files
from simulation.brought_back.fault import Fault


def _without_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turn, "commit", lambda self: files.write_atomic(self.search.journal, self.journal.text()))


def _not_durable(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Turn) -> None:
        files.write_atomic(self.search.journal, self.journal.text(), durable=False, guard=self.guard)

    patch.setattr(Turn, "commit", commit)


def _never_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "_is_free", lambda self, claim: claim is None)


def _always_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "_is_free", lambda self, claim: True)


def _recorded_twice(patch: pytest.MonkeyPatch) -> None:
    real = Slot._append

    def append(self: Slot, entry: str, task: Any, **values: Any) -> None:
        if entry in (RESULT, FAILED):

            def twice(mine: Turn) -> None:
                mine.append(entry, trial=task.trial, repeat=task.repeat, **values)

            self._turn(twice)
        else:
            real(self, entry, task, **values)

    patch.setattr(Slot, "_append", append)


FAULTS = [
    Fault("journal-unguarded", "search", "the journal is written without the fence", "`Turn.commit`", _without_guard),
    Fault("journal-not-durable", "search", "an entry may be lost by a power loss", "`Turn.commit`", _not_durable),
    Fault("claim-for-ever", "search", "the trial of a slot that was killed stays its own", "`Slot`", _never_free),
    Fault("claims-ignored", "search", "a trial is taken from the slot that trains it", "`Slot`", _always_free),
    Fault("recorded-twice", "search", "two slots record one result", "`Slot._append`", _recorded_twice),
]

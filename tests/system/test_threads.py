"""Which process and which thread this is: asked in one place, so that a simulated one can say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.system import files, processes, threads


def test_a_simulated_process_is_another_one_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them in one real process must not write the same temporary file."""
    renamed = []
    monkeypatch.setattr(threads, "own_pid", lambda: 7)
    monkeypatch.setattr(threads, "ident", lambda: 9)
    monkeypatch.setattr(files, "rename", lambda source, target: renamed.append(source.name))
    files.write_atomic(tmp_path / "record", b"")
    assert renamed == ["record.tmp-7-9"]
    assert processes.own_pid() == processes.this_process()["pid"] == 7

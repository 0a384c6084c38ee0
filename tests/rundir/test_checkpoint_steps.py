"""Which checkpoints a run directory counts: those whose manifest agrees with their name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from runner.rundir.paths import RunDir
from runner.system import files


def put(run: RunDir, name: str, manifest: str | None) -> None:
    (run.checkpoints / name).mkdir(parents=True)
    if manifest is not None:
        (run.checkpoints / name / "manifest.json").write_text(manifest)


def test_only_a_manifest_of_the_step_in_the_name_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.checkpoint_steps() == []
    assert run.newest_step() == 0
    put(run, "step_00000002", '{"step": 2, "sha256": ""}')
    put(run, "step_123456789", '{"step": 123456789, "sha256": ""}')
    for name, manifest in {
        "step_6": '{"step": 6, "sha256": ""}',
        "step_00000006": '{"step": 2, "sha256": ""}',
        "step_00000007": None,
        "step_00000008": '{"step": 8}',
        "step_00000014": "[1]",
        "step_00000009": "no JSON",
        "step_00000002.corrupt": '{"step": 2, "sha256": ""}',
        "step_00000010.tmp-1-2": '{"step": 10, "sha256": ""}',
    }.items():
        put(run, name, manifest)
    (run.checkpoints / "step_00000011").write_text("a file")
    (run.checkpoints / "step_00000012").symlink_to("nowhere")
    put(run, "step_00000013", None)
    os.mkfifo(run.checkpoints / "step_00000013" / "manifest.json")
    assert run.checkpoint_steps() == [2, 123456789]
    assert run.newest_step() == 123456789
    assert run.newest_checkpoint() is not None


def test_the_newest_is_found_without_reading_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status is written every few seconds, and a run may keep hundreds of checkpoints."""
    run = RunDir(tmp_path)
    for step in range(1, 6):
        put(run, f"step_{step:08d}", json.dumps({"step": step if step < 5 else 2, "sha256": ""}))
    read: list[str] = []
    real = files.open_regular

    def note(path: Any, **options: Any) -> Any:
        read.append(Path(path).parent.name)
        return real(path, **options)

    monkeypatch.setattr(files, "open_regular", note)
    found = run.newest_checkpoint()
    assert found is not None
    assert found[0] == run.newest_step() == 4
    assert read == ["step_00000005", "step_00000004"] * 2


def test_an_error_of_the_disk_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    put(run, "step_00000002", json.dumps({"step": 2, "sha256": ""}))

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "open_regular", refuse)
    assert run.checkpoint_steps() == [2]

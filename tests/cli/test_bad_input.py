"""Bad configs, data and disks end a run with one error line with cause and remedy; no file is harmed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from runs import TINY, Run

pytestmark = pytest.mark.slow

SHARDS = [*TINY, "data=shards", "eval.every_steps=0", "train.steps=4"]


def shard(path: Path, tokens: int = 4000, top: int = 255) -> Path:
    np.save(path, np.random.default_rng(0).integers(0, top + 1, tokens).astype(np.uint16))
    return path


def over(path: Path) -> list[str]:
    return [*SHARDS, f"data.sources.tokens.paths={path}"]


def refused(run: Run, *words: str, status: int | None = None) -> str:
    """Return the one error line that the command ends with."""
    run.start()
    found, output = run.wait()
    assert found != 0, output
    assert status is None or found == status, output
    assert "Traceback" not in output, output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


def contents(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a run that a refused command must not change."""
    kept = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".pt", ".safetensors", ".npy")]
    kept += [path for path in (folder / "metrics.jsonl", folder / "config.yaml") if path.exists()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def test_a_missing_shard(tmp_path: Path) -> None:
    refused(Run(tmp_path / "run", over(tmp_path / "nowhere.npy")), "nowhere.npy", status=2)


def test_a_truncated_shard(tmp_path: Path) -> None:
    path = shard(tmp_path / "cut.npy")
    os.truncate(path, path.stat().st_size // 2)
    refused(Run(tmp_path / "run", over(path)), "cut.npy", status=2)


def test_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = shard(tmp_path / "wild.npy", top=300)
    refused(Run(tmp_path / "run", over(path)), "wild.npy", "vocab", "255")


def test_text_in_a_model_of_a_smaller_vocabulary(tmp_path: Path) -> None:
    refused(Run(tmp_path / "run", [*TINY, "data.vocab_size=64"]), "vocab_size=64", "data.vocab_size=256", status=2)


def test_a_source_shorter_than_one_sequence(tmp_path: Path) -> None:
    refused(Run(tmp_path / "run", over(shard(tmp_path / "short.npy", tokens=9))), "short.npy", "9", "16", status=2)


def test_fewer_samples_than_one_batch(tmp_path: Path) -> None:
    path = shard(tmp_path / "few.npy", tokens=40)
    refused(Run(tmp_path / "run", [*over(path), "train.batch_size=8"]), "batch_size")


def test_a_run_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(Run(tmp_path / "file" / "run", TINY), "file")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with these options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_output_directory(small_disk: Callable[[str], Path]) -> None:
    refused(Run(small_disk("ro") / "run", TINY), "Read-only", "run.dir")


def test_a_full_output_directory(small_disk: Callable[[str], Path]) -> None:
    """Full before the start: refused. Full later: training continues, and its end reports that it was not saved."""
    disk = small_disk("size=64k")
    without_git = {"PATH": str(disk)}  # code.json holds the uncommitted changes, which may need more than the disk has
    (disk / "ballast").write_bytes(b"\0" * 60_000)
    refused(Run(disk / "run", TINY, without_git), "space")
    (disk / "ballast").unlink()
    line = refused(Run(disk / "run", TINY, without_git), "space", "save", status=1)
    assert "rerun" in line


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("finished")
    run = Run(folder / "run", over(shard(folder / "tokens.npy")))
    run.finish()
    return run


def test_another_model_in_the_same_directory(finished: Run) -> None:
    before = contents(finished.path)
    other = Run(finished.path, [*finished.overrides, "model.width=32", "train.steps=8"])
    refused(other, "model.width", "16", "32", "run.", status=2)
    assert contents(finished.path) == before


def test_the_checkpoint_of_another_model(finished: Run, tmp_path: Path) -> None:
    """Copy it by hand from a run with other sizes: the error names a parameter and both shapes."""
    Run(tmp_path / "run", [*finished.overrides, "model.width=32"]).finish()
    other = Run(tmp_path / "run", [*finished.overrides, "model.width=32", "train.steps=8"])
    shutil.rmtree(other.path / "checkpoints")
    shutil.copytree(finished.path / "checkpoints", other.path / "checkpoints")
    before = contents(other.path / "checkpoints")
    refused(other, "weight", "16", "32")
    assert contents(other.path).items() >= before.items()


def test_data_that_changed_since_the_run_started(finished: Run) -> None:
    path = finished.path.parent / "tokens.npy"
    before, kept = contents(finished.path), path.read_bytes()
    shard(path, tokens=5000)
    longer = Run(finished.path, [*finished.overrides, "train.steps=8"])
    try:
        refused(longer, "tokens", "249", "312")
    finally:
        path.write_bytes(kept)
    after = contents(finished.path)
    assert {name: sum_ for name, sum_ in after.items() if "checkpoints" in name} == {
        name: sum_ for name, sum_ in before.items() if "checkpoints" in name
    }
    longer.finish()


def test_run_with_only_corrupt_checkpoints_avoids_step_0(finished: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*finished.overrides, "train.steps=20"])
    shutil.copytree(finished.path, run.path)
    for checkpoint in run.checkpoints():
        (checkpoint / "train_state.pt").write_bytes(b"not a state")
    refused(run, "checkpoint", "step 0", status=1)

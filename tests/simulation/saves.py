"""Commit a checkpoint of one small file as the saver does, for scenarios without a model."""

from __future__ import annotations

from runner.checkpoint.files.commit import NewFiles, Transaction
from runner.checkpoint.files.manifest import Manifest
from runner.checkpoint.files.store import Fence
from runner.rundir.paths import RunDir
from runner.system import files

WEIGHTS = b"weights of step %d\n"


def save(run: RunDir, step: int, fence: Fence) -> None:
    """Commit a checkpoint of one file."""
    transaction = Transaction(run.checkpoint(step), fence)
    if not files.is_dir(run.checkpoints):
        files.make_dir(run.checkpoints)
        files.fsync_dir(run.path)
    transaction.begin()
    try:
        with NewFiles(transaction.path) as new:
            record = new.write("weights.bin", lambda file: file.write(WEIGHTS % step))
            transaction.commit(Manifest(step, {"weights.bin": record}, fence=fence.number).encode(), new)
    except BaseException:
        transaction.abort()
        raise

"""Copy a committed checkpoint into a different run's directory, so that this run does not depend on the first one.

This module does not import torch.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from runner.checkpoint.files import choice
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.choice import Candidate, Intact
from runner.checkpoint.files.commit import Transaction, write_file
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.files.manifest import CorruptionError
from runner.checkpoint.files.store import BLOCK_BYTES, Fence
from runner.errors import CheckpointError
from runner.system import files

# Errors that a file system returns if it cannot create hard links, or not for this file.
UNLINKABLE = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def adopt(source: Path, directory: Path, fence: Fence) -> None:
    """Commit the checkpoint at `source` to `directory` under the same name. Do nothing if it is already there.

    Committed files never change, so they are hard-linked, or copied if the file system cannot link them. Every byte is
    verified before the commit. If the source is deleted at the same time, the complete checkpoint is committed, or
    nothing is.

    Args:
        source: a committed checkpoint.
        directory: checkpoint directory of the run that receives the checkpoint.
        fence: fence of the receiving run.

    Raises:
        CheckpointError: there is no valid checkpoint at `source`.
        SupersededError: a newer attempt holds the lease of the receiving run.
        OSError: the file system returned an error.
    """
    final = directory / source.name
    if isinstance(choice.judge(Folder(final)), Candidate):
        return
    found = choice.judge(Folder(source))
    if not isinstance(found, Intact):
        reason = "it is gone" if found is None else getattr(found, "corruption", None) or "it is no checkpoint"
        raise CheckpointError(f"{source} cannot be taken over: {reason}")
    fence.check()  # do not recreate a branch's directory that was moved or removed
    with suppress(FileExistsError):
        files.make_dir(directory, files.OWNED)
    files.fsync_dir(directory.parent)
    transaction = Transaction(final, fence)
    transaction.begin()
    try:
        for name in found.manifest.files:
            _link_or_copy(source / name, transaction.path / name)
        manifests.verify(Folder(transaction.path), found.manifest)
        transaction.commit(found.manifest.encode())
    except FileNotFoundError:
        transaction.abort()
        raise CheckpointError(f"{source} cannot be taken over: it was deleted meanwhile") from None
    except CorruptionError as corruption:
        transaction.abort()
        raise CheckpointError(f"{source} cannot be taken over: it is corrupt ({corruption})") from None
    except BaseException:
        transaction.abort()
        raise


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        files.link(source, target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        with files.open_regular(source) as reader:
            blocks = iter(lambda: reader.read(BLOCK_BYTES), b"")
            write_file(target, lambda file: [file.write(block) for block in blocks])

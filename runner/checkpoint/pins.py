"""Checkpoints that are not deleted, whatever retention says: pinned ones, and those that an evaluation waits for.

    step_00000100.pinned       an empty file: this one is kept for good
    evaluation-NAME.awaits     of an evaluation of all checkpoints: which it has evaluated, and how many others to keep

Anybody who may write to the directory may set one, also while the run trains: it changes nothing of the run. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from runner.system import clock, files

_PINNED = re.compile(r"step_(\d+)\.pinned")
_AWAITS = re.compile(r"evaluation-.+\.awaits")
_COMMITTED = re.compile(r"step_(\d{8,})")
# A checkpoint that is being deleted is back by then, if its pin was seen in time.
LOOKS, PAUSE_S = 20, 0.05


def pinned(directory: Path) -> set[int]:
    """The steps of the pins in a directory of checkpoints.

    Raises:
        OSError: the directory cannot be read.
    """
    return _numbers(_PINNED, _names(directory))


def kept(directory: Path) -> set[int]:
    """The steps in a directory of checkpoints that must not be deleted: pinned, or awaited by an evaluation.

    Raises:
        OSError: the directory cannot be read.
    """
    names = _names(directory)
    return _numbers(_PINNED, names) | _awaited(directory, names, _numbers(_COMMITTED, names))


def is_kept(checkpoint: Path) -> bool:
    """Whether the checkpoint at this path, which need not be there any more, must not be deleted.

    Raises:
        OSError: the directory cannot be read.
    """
    if is_pinned(checkpoint):
        return True
    if not (own := _COMMITTED.fullmatch(checkpoint.name)):  # one that was set aside
        return False
    names, step = _names(checkpoint.parent), int(own[1])
    return step in _awaited(checkpoint.parent, names, _numbers(_COMMITTED, names) | {step})


def await_evaluation(directory: Path, name: str, evaluated: Collection[int], most: int) -> None:
    """Keep the newest `most` checkpoints that are not among `evaluated`, until `evaluation_done`.

    Called again after each evaluation. Only those that are there still are recorded, so the file stays small.

    Raises:
        OSError: the file system refused.
    """
    present = _numbers(_COMMITTED, _names(directory))
    record = {"evaluated": sorted(present.intersection(evaluated)), "keep": most}
    files.write_json(_awaits(directory, name), record)


def evaluation_done(directory: Path, name: str) -> None:
    """Keep nothing for this evaluation any more; it may be done already."""
    files.remove(_awaits(directory, name))


def awaits_evaluation(directory: Path, name: str) -> bool:
    """Whether checkpoints are kept for this evaluation."""
    return files.exists(_awaits(directory, name))


def _awaits(directory: Path, name: str) -> Path:
    return directory / f"evaluation-{name}.awaits"


def _awaited(directory: Path, names: Collection[str], present: Collection[int]) -> set[int]:
    found: set[int] = set()
    for name in names:
        if not _AWAITS.fullmatch(name):
            continue
        record = files.read_object(directory / name)
        evaluated, most = record.get("evaluated"), record.get("keep")
        if isinstance(evaluated, list) and isinstance(most, int) and most > 0:  # else nobody of ours has written it
            found.update(sorted(set(present).difference(evaluated))[-most:])
    return found


def _names(directory: Path) -> list[str]:
    try:
        return files.list_dir(directory)
    except FileNotFoundError:
        return []


def _numbers(pattern: re.Pattern[str], names: Collection[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := pattern.fullmatch(name))}


def is_pinned(checkpoint: Path) -> bool:
    """Whether the checkpoint at this path, which need not be there any more, has a pin."""
    return files.exists(_pin_of(checkpoint))


def pin(checkpoint: Path) -> bool:
    """Pin a checkpoint; False, and no pin, if it was deleted meanwhile.

    Whoever deletes one moves it aside first, looks for a pin, and puts it back if there is one.

    Raises:
        OSError: the file system refused.
    """
    try:
        files.create(_pin_of(checkpoint), b"")
    except FileExistsError:
        files.fsync_dir(checkpoint.parent)  # `create` does so: who saved it may have been killed before
    for _ in range(LOOKS):
        if files.is_dir(checkpoint):
            return True
        clock.sleep(PAUSE_S)
    unpin(checkpoint)
    return False


def reserve(checkpoint: Path) -> bool:
    """Pin a checkpoint that may not be there yet; False if it has a pin already.

    Raises:
        FileNotFoundError: the run is gone: nothing is made in the place of one that was moved or removed.
        OSError: the file system refused.
    """
    with files.owned():
        files.make_dirs_in(checkpoint.parent.parent, checkpoint.parent)
    try:
        files.create(_pin_of(checkpoint), b"")
    except FileExistsError:
        return False
    return True


def unpin(checkpoint: Path) -> None:
    """Remove a pin; it may be gone already."""
    files.remove(_pin_of(checkpoint))


def _pin_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.pinned")

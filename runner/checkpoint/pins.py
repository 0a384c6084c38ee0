"""Checkpoints that are not deleted, whatever retention says: pinned ones, and those that an evaluation waits for.

    step_00000100.pinned       an empty file: this one is kept for good
    step_00000100.pinned-…     likewise, by somebody who may take it back yet
    evaluation-NAME.awaits     of an evaluation of all checkpoints: which it has evaluated, and how many others to keep

Anybody who may write to the directory may set one, also while the run trains: it changes nothing of the run. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from runner.system import clock, files, processes

_PINNED = re.compile(r"step_(\d+)\.pinned(?:-\d+-\d+)?")
_AWAITS = re.compile(r"evaluation-.+\.awaits")
_COMMITTED = re.compile(r"step_(\d{8,})")
# A checkpoint that is being deleted is back by then, if its pin was seen in time.
LOOKS, PAUSE_S = 20, 0.05


def pinned(directory: Path) -> set[int]:
    """The steps of the pins in a directory of checkpoints.

    Raises:
        OSError: the directory cannot be read.
    """
    return _steps_in(_PINNED, _names(directory))


def kept(directory: Path) -> set[int]:
    """The steps in a directory of checkpoints that must not be deleted: pinned, or awaited by an evaluation.

    Raises:
        OSError: the directory cannot be read.
    """
    names = _names(directory)
    return _steps_in(_PINNED, names) | _awaited(directory, names, _steps_in(_COMMITTED, names))


def is_kept(checkpoint: Path) -> bool:
    """Whether the checkpoint at this path, which need not be there any more, must not be deleted.

    Raises:
        OSError: the directory cannot be read.
    """
    if not (own := _COMMITTED.fullmatch(checkpoint.name)):  # one that was set aside
        return False
    names, step = _names(checkpoint.parent), int(own[1])
    present = _steps_in(_COMMITTED, names) | {step}
    return step in _steps_in(_PINNED, names) | _awaited(checkpoint.parent, names, present)


def await_evaluation(directory: Path, name: str, evaluated: Collection[int], most: int) -> None:
    """Keep the newest `most` checkpoints that are not among `evaluated`, until `evaluation_done`.

    Called again after each evaluation. Only those that are there still are recorded, so the file stays small.

    Raises:
        OSError: the file system refused.
    """
    present = _steps_in(_COMMITTED, _names(directory))
    record = {"evaluated": sorted(present.intersection(evaluated)), "keep": most}
    files.write_json(_awaits(directory, name), record)


def evaluation_done(directory: Path, name: str) -> None:
    """Keep nothing for this evaluation any more; it may be done already."""
    own = _awaits(directory, name)
    files.remove(own)
    for other in _names(directory):
        if other.startswith(f"{own.name}.tmp-"):  # of a process that was killed while it wrote
            files.remove(directory / other)


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


def _steps_in(pattern: re.Pattern[str], names: Collection[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := pattern.fullmatch(name))}


def pin(checkpoint: Path) -> bool:
    """Pin a checkpoint; False, and no pin of this call, if it was deleted meanwhile.

    Whoever deletes one moves it aside first, looks for a pin, and puts it back if there is one.

    Raises:
        OSError: the file system refused.
    """
    own = _own_pin(checkpoint)
    for _ in range(LOOKS):
        if files.is_dir(checkpoint):
            confirm(own)
            return True
        clock.sleep(PAUSE_S)
    files.remove(own)
    return False


def reserve(checkpoint: Path) -> Path:
    """Pin a checkpoint that may not be there yet: `confirm` what is returned, or remove it.

    Raises:
        FileNotFoundError: the run is gone: nothing is made in the place of one that was moved or removed.
        OSError: the file system refused.
    """
    with files.owned():
        files.make_dirs_in(checkpoint.parent.parent, checkpoint.parent)
    return _own_pin(checkpoint)


def is_missed(checkpoint: Path) -> bool:
    """Whether a checkpoint that was reserved had been saved and deleted before.

    Raises:
        OSError: the directory cannot be read.
    """
    for _ in range(LOOKS):
        with suppress(PermissionError):
            files.look_anew(checkpoint.parent)
        saved = _steps_in(_COMMITTED, _names(checkpoint.parent))
        (step,) = _steps_in(_COMMITTED, [checkpoint.name])
        if step in saved or max(saved, default=0) < step:
            return False
        clock.sleep(PAUSE_S)  # whoever deletes it looks for a pin, and puts it back
    return True


def confirm(own: Path) -> None:
    """Nobody will take this pin back: give it the name that those of its checkpoint share."""
    with suppress(OSError):  # it is a pin under either name
        files.rename(own, own.with_name(f"{own.name.partition('.')[0]}.pinned"))


def unpin(checkpoint: Path) -> None:
    """Remove the pins of a checkpoint, whoever has set them; they may be gone already."""
    own = _steps_in(_COMMITTED, [checkpoint.name])
    for name in {f"{checkpoint.name}.pinned", *_names(checkpoint.parent)}:
        if _steps_in(_PINNED, [name]) == own:
            files.remove(checkpoint.with_name(name))


def _own_pin(checkpoint: Path) -> Path:
    """A new pin, durable, that nobody else has set: who takes it back takes nobody else's."""
    number = 1
    while True:
        own = checkpoint.with_name(f"{checkpoint.name}.pinned-{processes.own_pid()}-{number}")
        try:
            files.create(own, b"")
        except FileExistsError:
            number += 1
        else:
            return own

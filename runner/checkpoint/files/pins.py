"""Pins: marks on checkpoints that retention must not delete.

    step_00000100.pinned       an empty file

Anyone with write access to the directory may pin a checkpoint, even while the run trains. A pin does not affect the
run's results. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.system import clock, files

_PIN = re.compile(r"(step_(\d{8,}))\.pinned")
# Within this time, a deletion that found the pin has put the checkpoint back.
LOOKS, PAUSE_S = 20, 0.05


def pinned(directory: Path) -> set[int]:
    """List the steps of the pins in a directory of checkpoints.

    Raises:
        OSError: the directory cannot be read.
    """
    return {int(pin[2]) for pin in _pins(directory)}


def is_pinned(checkpoint: Path) -> bool:
    """Check whether the checkpoint at this path, which may no longer exist, has a pin.

    Raises:
        OSError: the directory cannot be read.
    """
    return any(pin[1] == checkpoint.name for pin in _pins(checkpoint.parent))


def _pins(directory: Path) -> list[re.Match[str]]:
    # The directory is listed because a machine may cache for seconds that a name on a network file system is missing.
    try:
        return [pin for name in files.list_dir(directory) if (pin := _PIN.fullmatch(name))]
    except FileNotFoundError:
        return []


def pin(checkpoint: Path) -> bool:
    """Pin a checkpoint. Return False, without a pin, if it was deleted at the same time.

    A deletion first moves the checkpoint aside, then looks for a pin, and puts the checkpoint back if there is one.

    Raises:
        OSError: the file system refused.
    """
    own = _pin(checkpoint)
    try:
        files.create(own, b"")
    except FileExistsError:
        files.fsync_dir(own.parent)  # the process that set it may have been killed before it was durable
    for _ in range(LOOKS):
        if files.is_dir(checkpoint):
            return True
        clock.sleep(PAUSE_S)
    files.remove(own)
    return False


def unpin(checkpoint: Path) -> None:
    """Remove the pin of a checkpoint, if there is one."""
    files.remove(_pin(checkpoint))


def _pin(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.pinned")

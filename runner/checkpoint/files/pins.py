"""Pins: checkpoints that are not deleted, whatever retention says.

    step_00000100.pinned       an empty file

Anybody who may write to the directory may set one, also while the run trains: it changes nothing of the run. Imports no
torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.system import clock, files

_PIN = re.compile(r"(step_(\d{8,}))\.pinned")
# A checkpoint that is being deleted is back by then, if its pin was seen in time.
LOOKS, PAUSE_S = 20, 0.05


def pinned(directory: Path) -> set[int]:
    """List the steps of the pins in a directory of checkpoints.

    Raises:
        OSError: the directory cannot be read.
    """
    return {int(pin[2]) for pin in _pins(directory)}


def is_pinned(checkpoint: Path) -> bool:
    """Tell whether the checkpoint at this path, which need not be there any more, has a pin.

    Raises:
        OSError: the directory cannot be read.
    """
    return any(pin[1] == checkpoint.name for pin in _pins(checkpoint.parent))


def _pins(directory: Path) -> list[re.Match[str]]:
    # Listed: a machine may remember for seconds that a name on a network file system was missing.
    try:
        return [pin for name in files.list_dir(directory) if (pin := _PIN.fullmatch(name))]
    except FileNotFoundError:
        return []


def pin(checkpoint: Path) -> bool:
    """Pin a checkpoint; False, and no pin, if it was deleted meanwhile.

    Whoever deletes one moves it aside first, looks for a pin, and puts it back if there is one.

    Raises:
        OSError: the file system refused.
    """
    own = _pin(checkpoint)
    try:
        files.create(own, b"")
    except FileExistsError:
        files.fsync_dir(own.parent)  # who set it may have been killed before it was durable
    for _ in range(LOOKS):
        if files.is_dir(checkpoint):
            return True
        clock.sleep(PAUSE_S)
    files.remove(own)
    return False


def unpin(checkpoint: Path) -> None:
    """Remove the pin of a checkpoint; it may be gone already."""
    files.remove(_pin(checkpoint))


def _pin(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.pinned")

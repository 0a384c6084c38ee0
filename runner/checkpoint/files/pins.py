"""Pin checkpoints, so that retention does not delete them.

    step_00000100.pinned       an empty file

Anyone with write access to the directory may pin a checkpoint, even while the run trains. A pin does not affect the
run's results. This module does not import torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.system import clock, files

_PIN = re.compile(r"(step_(\d{8,}))\.pinned")
# Number of checks, and seconds between them. In this time, a deletion that found the pin restores the checkpoint.
LOOKS, PAUSE_S = 20, 0.05


def pinned(directory: Path) -> set[int]:
    """Return the steps that are pinned in a checkpoint directory.

    Raises:
        OSError: the directory cannot be read.
    """
    return {int(pin[2]) for pin in _pins(directory)}


def is_pinned(checkpoint: Path) -> bool:
    """Check whether a checkpoint is pinned. The checkpoint itself may no longer exist.

    Raises:
        OSError: the directory cannot be read.
    """
    return any(pin[1] == checkpoint.name for pin in _pins(checkpoint.parent))


def _pins(directory: Path) -> list[re.Match[str]]:
    # List the directory instead of looking up the name: on a network file system, a machine may cache for seconds that
    # a name does not exist.
    try:
        return [pin for name in files.list_dir(directory) if (pin := _PIN.fullmatch(name))]
    except FileNotFoundError:
        return []


def pin(checkpoint: Path) -> bool:
    """Pin a checkpoint. If it is deleted at the same time, remove the pin and return False.

    A deletion first moves the checkpoint away and then checks for a pin. If it finds one, it moves the checkpoint back.

    Raises:
        OSError: the file system returned an error.
    """
    own = _pin(checkpoint)
    try:
        files.create(own, b"")
    except FileExistsError:
        files.fsync_dir(own.parent)  # the process that created the pin may have been killed before an fsync
    for _ in range(LOOKS):
        if files.is_dir(checkpoint):
            return True
        clock.sleep(PAUSE_S)
    files.remove(own)
    return False


def unpin(checkpoint: Path) -> None:
    """Remove the pin of a checkpoint, if it has one."""
    files.remove(_pin(checkpoint))


def _pin(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.pinned")

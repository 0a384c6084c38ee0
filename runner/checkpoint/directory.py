"""The directory of a run's checkpoints: names, listing, the newest valid one, setting aside, retention, sweeping.

    step_00000100                    committed
    step_00000100.tmp-<fence>-<pid>  being written or deleted, or left behind by a kill
    step_00000100.corrupt            set aside; `.corrupt-2` and so on if that name is taken

Everything else in the directory is ignored. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint import manifest as manifests
from runner.checkpoint.manifest import CorruptionError, Manifest
from runner.errors import CheckpointError
from runner.system import files

_log = logging.getLogger(__name__)

_COMMITTED = re.compile(r"step_(\d+)")
_TEMPORARY = re.compile(r"step_\d+\.tmp-.*")
_CORRUPT = re.compile(r"step_\d+\.corrupt(-\d+)?")


@dataclass(frozen=True)
class Info:
    """A committed checkpoint that was verified."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.manifest.step


@dataclass(frozen=True)
class Candidate:
    """A directory with a checkpoint's name.

    Attributes:
        path: the directory.
        step: the step in its name; the same as in its manifest, if there is one.
        manifest: None if it is corrupt.
        corruption: what is wrong with the manifest.
    """

    path: Path
    step: int
    manifest: Manifest | None
    corruption: str | None = None


def step_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


def candidates(directory: Path) -> list[Candidate]:
    """Every directory with a checkpoint's name, highest step first. Reads only the manifests.

    Raises:
        CheckpointError: the directory or a manifest is not readable, or a format version is unknown.
    """
    found = [
        read_candidate(directory / name)
        for name in _names(directory)
        if _COMMITTED.fullmatch(name) and _is_dir(directory / name)
    ]
    return sorted(found, key=lambda candidate: (candidate.step, candidate.path.name), reverse=True)


def read_candidate(path: Path) -> Candidate:
    """The checkpoint directory at `path`, whose name must be `step_N`. Reads only the manifest.

    A manifest of another step than the name is corruption: a copy of an old checkpoint must not pass as a newer one.

    Raises:
        CheckpointError: the manifest is not readable, or its format version is unknown.
    """
    step = int(path.name.removeprefix("step_"))
    try:
        manifest = manifests.read(path)
    except CorruptionError as error:
        return Candidate(path, step, None, str(error))
    if path.name != step_name(manifest.step):
        return Candidate(path, step, None, f"it contains step {manifest.step}, which {path.name} does not match")
    return Candidate(path, step, manifest)


def _names(directory: Path) -> list[str]:
    try:
        return files.list_dir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror}); restore the permission and rerun"
        ) from error


def _is_dir(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def corruption_of(candidate: Candidate) -> str | None:
    """What is wrong with a checkpoint, or None; reads every byte."""
    if candidate.manifest is None:
        return candidate.corruption
    try:
        manifests.verify(candidate.path, candidate.manifest)
    except CorruptionError as error:
        return str(error)
    return None


def size_error(candidate: Candidate) -> str | None:
    """What is wrong with a checkpoint judging by names and sizes, or None; reads no file."""
    if candidate.manifest is None:
        return candidate.corruption
    for name, expected in sorted(candidate.manifest.files.items()):
        try:
            found = (candidate.path / name).lstat().st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != expected.size:
            return f"{name} has {found} bytes, but {expected.size} were written"
    return None


def newest(directory: Path, on_corruption: Callable[[Candidate, str], None] | None = None) -> Info | None:
    """The highest step that verifies; changes nothing.

    Args:
        directory: the directory of checkpoints.
        on_corruption: called with each corrupt checkpoint of a higher step, and what is wrong with it.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints and none is valid.
    """
    corruptions = []
    for candidate in candidates(directory):
        corruption = corruption_of(candidate)
        if corruption is None and candidate.manifest is not None:
            return Info(candidate.path, candidate.manifest)
        corruptions.append(f"{candidate.path.name}: {corruption}")
        if on_corruption is not None:
            on_corruption(candidate, str(corruption))
    check_never_saved(directory, corruptions)
    return None


def check_never_saved(directory: Path, corruptions: list[str]) -> None:
    """Distinguish a run without checkpoints, which starts at step 0, from one that has lost all of them.

    Args:
        directory: the directory of checkpoints.
        corruptions: what is wrong with each checkpoint that was found.

    Raises:
        CheckpointError: there are checkpoints, or there were and all were set aside.
    """
    corruptions = corruptions or [f"{path.name}: set aside earlier" for path in set_aside_earlier(directory)]
    if corruptions:
        raise CheckpointError(
            f"no checkpoint in {directory} is valid ({'; '.join(corruptions)}); restore one from a backup, "
            "or remove the directory to start again from step 0"
        )


def set_aside(path: Path, corruption: str, check_fence: Callable[[], None]) -> None:
    """Rename a corrupt checkpoint to a free name that marks it as such, and log a warning, also if that fails.

    Args:
        path: the checkpoint.
        corruption: what is wrong with it.
        check_fence: called before the rename; raises SupersededError if a newer attempt holds the lease.
    """
    number, target = 1, path.with_name(f"{path.name}.corrupt")
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.corrupt-{number}")
    check_fence()
    try:
        files.rename(path, target)
        files.fsync_dir(path.parent)
        _log.warning(f"checkpoint {path.name} is corrupt ({corruption}) and was set aside as {target.name}")
    except OSError as error:
        _log.warning(f"checkpoint {path.name} is corrupt ({corruption}) and cannot be set aside ({error.strerror})")


def leftovers(directory: Path) -> list[Path]:
    """Temporary directories: of a save or a deletion that is in progress, or that was killed."""
    return sorted(directory / name for name in _names(directory) if _TEMPORARY.fullmatch(name))


def set_aside_earlier(directory: Path) -> list[Path]:
    """Corrupt checkpoints that were set aside."""
    return sorted(directory / name for name in _names(directory) if _CORRUPT.fullmatch(name))


def sweep(directory: Path) -> None:
    """Remove leftovers. Only for the holder of the run's lease, while it has no save in flight."""
    for path in leftovers(directory):
        try:
            remove_tree(path)
        except OSError as error:
            _log.warning(f"{path}, left behind by a killed save, cannot be removed ({error}); remove it by hand")


def remove_tree(path: Path) -> None:
    """Remove a directory, which may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        files.remove_tree(path)


def delete(path: Path, tag: str) -> None:
    """Delete a checkpoint so that part of it is never visible under its name: rename it, then remove it.

    Args:
        path: the checkpoint.
        tag: makes the temporary name unique among processes.

    Raises:
        OSError: the file system refused.
    """
    temporary = path.with_name(f"{path.name}.tmp-deleted-{tag}")
    files.rename(path, temporary)
    files.fsync_dir(path.parent)
    remove_tree(temporary)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep; the newest is always kept.

    Attributes:
        keep_last: this many newest ones.
        keep_every_steps: also every multiple of this step.
        keep_best: also this many with the lowest metric.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0

    def to_delete(self, found: Iterable[Candidate]) -> list[Candidate]:
        """The intact ones among `found` that need not be kept, oldest first."""
        intact = sorted((c for c in found if c.manifest is not None), key=lambda c: c.step)
        kept = {c.path for c in intact[-max(self.keep_last, 1) :]}
        if self.keep_every_steps:
            kept |= {c.path for c in intact if c.step % self.keep_every_steps == 0}
        kept |= {c.path for c in self._best(intact)}
        return [c for c in intact if c.path not in kept]

    def _best(self, intact: list[Candidate]) -> list[Candidate]:
        judged = [(c.manifest.metric, c.step, c) for c in intact if c.manifest and c.manifest.metric is not None]
        numbers = [entry for entry in judged if entry[0] == entry[0]]  # without NaN
        return [c for _, _, c in sorted(numbers, key=lambda entry: entry[:2])[: self.keep_best]]


def loose_modes(path: Path) -> str | None:
    """A warning if others than the owner may write to `path`, or None."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return None if error.errno == errno.ENOENT else f"{path}: {error.strerror}"
    others = [who for who, bit in (("its group", stat.S_IWGRP), ("everybody", stat.S_IWOTH)) if mode & bit]
    if not others:
        return None
    return f"{path} is writable by {' and '.join(others)}, who can change this run's weights: run chmod go-w on it"

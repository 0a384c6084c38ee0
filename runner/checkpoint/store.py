"""The directory of a run's checkpoints: names, listing, newest, setting aside, retention, sweeping.

    step_00000100                    committed
    step_00000100.tmp-<fence>-<pid>  being written, or being deleted; left over after a kill
    step_00000100.corrupt            set aside; `.corrupt-2` and so on if there was one already

Everything else is ignored. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint import manifest as manifests
from runner.checkpoint.manifest import DamagedError, Manifest
from runner.errors import CheckpointError
from runner.files import fsync_dir

Report = Callable[[str], None]

_COMMITTED = re.compile(r"step_(\d+)")
_TEMPORARY = re.compile(r"step_\d+\.tmp-.*")
_CORRUPT = re.compile(r"step_\d+\.corrupt(-\d+)?")


@dataclass(frozen=True)
class Info:
    """One committed checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True)
class Candidate:
    """A directory with a checkpoint's name: its manifest, or what is wrong with it."""

    path: Path
    number: int
    manifest: Manifest | None
    fault: str | None = None

    @property
    def step(self) -> int:
        """The step it says inside; by its name only if it says nothing."""
        return self.manifest.step if self.manifest else self.number


def step_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


def candidates(directory: Path) -> list[Candidate]:
    """All that is named like a checkpoint, newest step first. Only manifests are read.

    Raises:
        CheckpointError: the directory or a manifest may not be read, or is of an unknown version.
    """
    found = []
    for name in _names(directory):
        match = _COMMITTED.fullmatch(name)
        if match is None or not _is_dir(directory / name):
            continue
        try:
            found.append(Candidate(directory / name, int(match[1]), manifests.read(directory / name)))
        except DamagedError as damage:
            found.append(Candidate(directory / name, int(match[1]), None, str(damage)))
    return sorted(found, key=lambda candidate: (candidate.step, candidate.number), reverse=True)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror}); give the permission back and run again"
        ) from error


def _is_dir(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def fault_of(candidate: Candidate) -> str | None:
    """What is wrong with it after reading every byte, or None."""
    if candidate.manifest is None:
        return candidate.fault
    try:
        manifests.verify(candidate.path, candidate.manifest)
    except DamagedError as damage:
        return str(damage)
    return None


def size_fault(candidate: Candidate) -> str | None:
    """What is wrong with it as far as names and sizes show, without reading a file."""
    if candidate.manifest is None:
        return candidate.fault
    for name, expected in sorted(candidate.manifest.files.items()):
        try:
            found = os.lstat(candidate.path / name).st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != expected.size:
            return f"{name} has {found} bytes, {expected.size} were written"
    return None


def newest(directory: Path, on_damage: Callable[[Candidate, str], None] | None = None) -> Info | None:
    """The highest step that verifies; `on_damage` hears of each damaged one above it.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints and none can be used.
    """
    faults = []
    for candidate in candidates(directory):
        fault = fault_of(candidate)
        if fault is None and candidate.manifest is not None:
            return Info(candidate.path, candidate.manifest)
        faults.append(f"{candidate.path.name}: {fault}")
        if on_damage is not None:
            on_damage(candidate, str(fault))
    if not faults:
        faults = [f"{name}: set aside earlier" for name in _names(directory) if _CORRUPT.fullmatch(name)]
    if faults:
        raise CheckpointError(
            f"no checkpoint in {directory} can be used ({'; '.join(faults)}); restore one from a copy, "
            "or remove the directory to start again from step 0"
        )
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to a name that says so and is not taken; return the new path."""
    for number in range(1, 10_000):
        target = path.with_name(f"{path.name}.corrupt" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(target):
            os.rename(path, target)
            fsync_dir(path.parent)
            return target
    raise CheckpointError(f"{path.parent} holds 9999 damaged copies of {path.name}; remove them")


def leftovers(directory: Path) -> list[Path]:
    """Temporary directories: of a save or a deletion that was cut short, or that is under way."""
    return sorted(directory / name for name in _names(directory) if _TEMPORARY.fullmatch(name))


def set_aside_earlier(directory: Path) -> list[Path]:
    """Checkpoints that were found damaged."""
    return sorted(directory / name for name in _names(directory) if _CORRUPT.fullmatch(name))


def sweep(directory: Path, report: Report | None = None) -> list[Path]:
    """Remove temporary directories. Only for the holder of the run, when it has no save in flight."""
    swept = []
    for path in leftovers(directory):
        try:
            remove_tree(path)
            swept.append(path)
        except OSError as error:
            if report is not None:
                report(f"{path} is left over from a save that was cut short and cannot be removed ({error})")
    return swept


def remove_tree(path: Path) -> None:
    """Remove a directory; one that is gone already is no fault."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def delete(path: Path, tag: str) -> None:
    """Delete a checkpoint so that no moment shows half of one: rename it away, then remove it."""
    doomed = path.with_name(f"{path.name}.tmp-deleted-{tag}")
    os.rename(path, doomed)
    fsync_dir(path.parent)
    remove_tree(doomed)


@dataclass(frozen=True)
class Retention:
    """What to keep: the last `keep_last`, every step that `keep_every_steps` divides, the `keep_best` best."""

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0

    def doomed(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Which of the whole checkpoints to delete, oldest first; never the newest one."""
        whole = sorted((c for c in found if c.manifest is not None), key=lambda c: c.step)
        kept = {c.path for c in whole[-max(self.keep_last, 1) :]}
        if self.keep_every_steps:
            kept |= {c.path for c in whole if c.step % self.keep_every_steps == 0}
        kept |= {c.path for c in self._best(whole)}
        return [c for c in whole if c.path not in kept]

    def _best(self, whole: list[Candidate]) -> list[Candidate]:
        judged = [(c.manifest.metric, c.step, c) for c in whole if c.manifest and c.manifest.metric is not None]
        finite = [entry for entry in judged if entry[0] == entry[0]]
        return [c for _, _, c in sorted(finite, key=lambda entry: entry[:2])[: self.keep_best]]


def loose_modes(path: Path) -> str | None:
    """Who else may write to `path`: a sentence to warn with, or None."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return None if error.errno == errno.ENOENT else f"{path}: {error.strerror}"
    others = [who for who, bit in (("its group", stat.S_IWGRP), ("everybody", stat.S_IWOTH)) if mode & bit]
    if not others:
        return None
    return f"{path} may be written by {' and '.join(others)}: whoever can write there can change this run; chmod go-w"

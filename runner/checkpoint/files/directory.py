"""The directory of a run's checkpoints: names, listing, the newest valid one, setting aside, retention, sweeping.

    step_00000100                    committed; the step in its manifest must be the one in its name
    step_00000100.tmp-<fence>-<pid>  being written, deleted or set aside, or left behind by a kill
    step_00000100.corrupt            set aside: damaged; `.corrupt-2` and so on if that name is taken
    step_00000100.misnamed           set aside: it contains another step, and its name was needed

Everything else in the directory belongs to somebody else and is left alone. Imports no torch.

A process that was superseded changes nothing here, whenever it wakes: whatever is written, deleted or set aside passes
through a temporary directory whose name carries the fence. It is created, then the fence is checked, then something is
renamed out of it or into it. A newer holder takes its number first and then renames the temporary directories of
older fences away, so that the older process either fails the check or finds its directory gone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.manifest import BEST_METRIC, CorruptionError, Manifest
from runner.checkpoint.files.pins import is_pinned
from runner.checkpoint.files.reading import patiently
from runner.errors import CheckpointError
from runner.system import files, processes

_log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o755

_COMMITTED = re.compile(r"step_(\d+)")
_TEMPORARY = re.compile(
    r"step_\d+(?:\.(?:corrupt|misnamed)(?:-\d+)?)?\.tmp-(?P<fence>\d+)-\d+(?:-taken|-swept\d+|-again\d+)?"
)
_SET_ASIDE = re.compile(r"step_\d+\.(corrupt|misnamed)(-\d+)?")
_TAKEN = "taken"  # a whole checkpoint that may be deleted, in a temporary directory
_COUNT = itertools.count()


@dataclass(frozen=True)
class Fence:
    """The fencing number of an attempt.

    Attributes:
        number: 0 where nobody else can work on the checkpoints.
        check: raises SupersededError if a newer attempt holds the lease.
    """

    number: int = 0
    check: Callable[[], None] = lambda: None


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
    """A checkpoint that was committed under its name, judged by its manifest.

    Attributes:
        path: the directory.
        step: the step in its name; the same as in its manifest, if there is one.
        manifest: None if it is corrupt or cannot be judged.
        corruption: what is wrong with the manifest.
        error: why it cannot be judged: not readable, or of an unknown format version.
    """

    path: Path
    step: int
    manifest: Manifest | None
    corruption: str | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class Stranger:
    """What has a checkpoint's name and is none: never loaded, counted or deleted.

    Attributes:
        path: the entry.
        reason: what it is instead.
        step: if it is a checkpoint that was copied or renamed: the step that it contains. Else None: not ours.
    """

    path: Path
    reason: str
    step: int | None = None

    @property
    def is_empty_directory(self) -> bool:
        """Whether it holds nothing, so that a checkpoint can take its place."""
        with contextlib.suppress(OSError):
            return not files.is_link(self.path) and not files.list_dir(self.path)
        return False


def step_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


def scan(directory: Path) -> list[Candidate | Stranger]:
    """Whatever has a checkpoint's name, highest number first. Reads only the manifests.

    Raises:
        CheckpointError: the directory is not readable.
    """
    found = [judge(directory / name) for name in _names(directory) if _COMMITTED.fullmatch(name)]
    return sorted(
        (entry for entry in found if entry is not None),
        key=lambda entry: (int(entry.path.name.removeprefix("step_")), entry.path.name),
        reverse=True,
    )


def candidates(directory: Path) -> list[Candidate]:
    """The committed checkpoints, highest step first. Reads only the manifests.

    Raises:
        CheckpointError: the directory is not readable.
    """
    return [entry for entry in scan(directory) if isinstance(entry, Candidate)]


def strangers(directory: Path) -> list[Stranger]:
    """What has a checkpoint's name and is none.

    Raises:
        CheckpointError: the directory is not readable.
    """
    return [entry for entry in scan(directory) if isinstance(entry, Stranger)]


def judge(path: Path) -> Candidate | Stranger | None:
    """What is at `path`, whose name is `step_` and a number; None if nothing is. Reads only the manifest.

    The step in the manifest decides: a copy of an old checkpoint must not pass as a newer one.
    """
    step = int(path.name.removeprefix("step_"))
    canonical = path.name == step_name(step)
    try:
        mode = patiently(path, partial(files.lstat, path)).st_mode
        if not stat.S_ISDIR(mode):
            return Stranger(path, f"it is a {'link' if stat.S_ISLNK(mode) else 'file'}, not a directory")
        manifest = manifests.read(path)
    except CorruptionError as corruption:
        return _judge_damaged(path, step if canonical else None, str(corruption))
    except CheckpointError as error:
        return Candidate(path, step, None, error=error)
    except OSError:  # deleted meanwhile
        return None
    if path.name == step_name(manifest.step):
        return Candidate(path, step, manifest)
    wrong = f"it contains step {manifest.step}, so its name would have to be {step_name(manifest.step)}"
    return Stranger(path, wrong, manifest.step)


def _judge_damaged(path: Path, step: int | None, corruption: str) -> Candidate | Stranger | None:
    try:
        if step is not None and manifests.is_ours(path):
            return Candidate(path, step, None, corruption)
    except CheckpointError as error:
        return Candidate(path, step or 0, None, error=error)
    except OSError:  # deleted meanwhile
        return None
    return Stranger(path, "it has no manifest of this runner")


def _names(directory: Path) -> list[str]:
    try:
        return patiently(directory, lambda: files.list_dir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror}); restore it and rerun") from error


def look_anew(directory: Path) -> None:
    """Let the next look at the directory show what there is now.

    What another machine has committed since may be missing otherwise: see `files.look_anew`.
    """
    with contextlib.suppress(OSError):  # not there yet, or somebody else's
        files.look_anew(directory)


def corruption_of(candidate: Candidate) -> str | None:
    """What is wrong with a checkpoint, or None; reads every byte.

    Raises:
        CheckpointError: it cannot be judged.
    """
    if candidate.error is not None:
        raise candidate.error
    if candidate.manifest is None:
        return candidate.corruption
    try:
        manifests.verify(candidate.path, candidate.manifest)
    except CorruptionError as error:
        return str(error)
    return None


def size_error(candidate: Candidate) -> str | None:
    """What is wrong with a checkpoint judging by names and sizes, or None; reads no file.

    Raises:
        CheckpointError: it cannot be judged.
    """
    if candidate.error is not None:
        raise candidate.error
    if candidate.manifest is None:
        return candidate.corruption
    for name, expected in sorted(candidate.manifest.files.items()):
        path = candidate.path / name
        try:
            found = patiently(path, partial(files.lstat, path)).st_size
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
        CheckpointError: there are checkpoints and none is valid, or one of a higher step cannot be judged.
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
        CheckpointError: there are checkpoints, or there were and all were set aside or renamed.
    """
    renamed = [f"{each.path.name}: {each.reason}" for each in strangers(directory) if each.step is not None]
    unusable = [*corruptions, *renamed]
    unusable = unusable or [f"{path.name}: set aside earlier" for path in set_aside_earlier(directory)]
    if unusable:
        raise CheckpointError(
            f"no checkpoint in {directory} is valid ({'; '.join(unusable)}); restore one from a backup, "
            "or remove the directory to start again from step 0"
        )


def warn_of_strangers(directory: Path) -> None:
    """Log what has a checkpoint's name and is none, in one warning."""
    found = ", ".join(f"{each.path.name} ({each.reason})" for each in strangers(directory))
    if found:
        _log.warning(f"not used, since no checkpoint was committed under that name in {directory}: {found}")


def leftovers(directory: Path) -> list[Path]:
    """Temporary directories: of a save or a deletion that is in progress, or that was killed."""
    named = (directory / name for name in _names(directory) if _TEMPORARY.fullmatch(name))
    return sorted(path for path in named if files.is_dir(path) and not files.is_link(path))  # nothing else is made here


def set_aside_earlier(directory: Path) -> list[Path]:
    """Corrupt and misnamed checkpoints that were set aside."""
    return sorted(directory / name for name in _names(directory) if _SET_ASIDE.fullmatch(name))


def temporary_name(path: Path, fence: Fence, use: str = "") -> Path:
    """A name beside `path` for a temporary directory of the attempt `fence`: of a save, or of another `use`."""
    return path.with_name(f"{path.name}.tmp-{fence.number}-{processes.own_pid()}{use}")


def set_aside(path: Path, mark: str, why: str, fence: Fence) -> None:
    """Rename a checkpoint that is in the way to a free name, and log a warning, also if that fails.

    Args:
        path: the checkpoint.
        mark: `corrupt` or `misnamed`, which ends the new name.
        why: what is wrong with it.
        fence: this attempt's.

    Raises:
        SupersededError: a newer attempt holds the lease; nothing was changed.
    """
    number, target = 1, path.with_name(f"{path.name}.{mark}")
    try:
        while files.is_taken(target):
            number += 1
            target = path.with_name(f"{path.name}.{mark}-{number}")
        container = _take(path, target.name, fence)
        files.rename(container / target.name, target)
        files.fsync_dir(path.parent)
        remove_tree(container)
        _log.warning(f"checkpoint {path.name} is {mark} ({why}) and was set aside as {target.name}")
    except OSError as error:
        _log.warning(f"checkpoint {path.name} is {mark} ({why}) and cannot be set aside ({error.strerror})")


def delete(path: Path, fence: Fence) -> None:
    """Delete a checkpoint so that part of it is never visible under its name; not if it has a pin by now.

    Raises:
        SupersededError: a newer attempt holds the lease; nothing was changed.
        OSError: the file system refused.
    """
    container = _take(path, _TAKEN, fence)
    if is_pinned(path):  # looked at again: a pin that is set later finds the checkpoint gone
        files.rename(container / _TAKEN, path)
    else:
        files.rename(container / _TAKEN, container / "deleted")  # a name that `sweep` does not put back
    files.fsync_dir(path.parent)
    remove_tree(container)


def _take(path: Path, name: str, fence: Fence) -> Path:
    """Move a checkpoint, as `name`, into a temporary directory of this attempt, which is returned."""
    container = temporary_name(path, fence, "-taken")
    fence.check()
    files.make_dir(container, DIRECTORY_MODE)
    try:
        fence.check()
        files.rename(path, container / name)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_dir(container)  # an error may have been reported for a rename that took place
        raise
    return container


def sweep(directory: Path, fence: Fence) -> None:
    """Remove what killed saves and deletions left behind. Only while this attempt has no save in flight.

    Listed first and checked afterwards, so that nothing of a newer attempt is among them, however long this process is
    stopped. Each is renamed first: after that, an older process cannot rename anything out of it or into it. A
    checkpoint that was being set aside gets the name that it was to have, and one that was pinned before it was
    deleted gets its own back.

    Raises:
        SupersededError: a newer attempt holds the lease.
        CheckpointError: the directory is not readable, or one of an older attempt cannot be renamed.
    """
    found = leftovers(directory)
    fence.check()
    for path in found:
        step, whole = path.with_name(path.name.partition(".")[0]), path.name.partition(".tmp-")[0]
        mine = temporary_name(step, fence, f"-swept{next(_COUNT)}")
        left = path
        try:
            _take_over(path, mine, fence)
            left = mine
            for name in files.list_dir(mine):
                if _SET_ASIDE.fullmatch(name) and not files.is_taken(directory / name):
                    files.rename(mine / name, directory / name)
                # Killed before it saw the pin. (One that was set aside as corrupt is no checkpoint of that step.)
                if name == _TAKEN and whole == step.name and is_pinned(step) and not files.is_taken(step):
                    files.rename(mine / name, step)
            files.fsync_dir(directory)  # or a power loss might bring a name back after its content is gone
            remove_tree(mine)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            _log.warning(f"{left}, left behind by a killed save, cannot be removed ({error}); remove it by hand")


def _take_over(path: Path, mine: Path, fence: Fence) -> None:
    found = _TEMPORARY.fullmatch(path.name)
    if found is None or int(found["fence"]) >= fence.number:  # of this attempt's own save, which failed
        files.rename(path, mine)
        return
    try:
        patiently(path, lambda: files.rename(path, mine))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} was left behind by a save that was killed and cannot be renamed ({error.__cause__}): should the "
            "process that wrote it still exist, it could commit it yet; remove it by hand and rerun"
        ) from error


def remove_tree(path: Path) -> None:
    """Remove a directory, which may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        files.remove_tree(path)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep; the newest is always kept.

    Attributes:
        keep_last: this many newest ones.
        keep_every_steps: also every multiple of this step.
        keep_best: also this many with the best value of `best_metric`.
        best_metric: the metric that they are judged by; what was saved with another one is not.
        best_mode: `min` or `max`; NaN is never the best.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    best_metric: str = BEST_METRIC
    best_mode: str = "min"

    def to_delete(self, found: Iterable[Candidate], pinned: Collection[int] = ()) -> list[Candidate]:
        """The intact ones among `found` that need not be kept, oldest first; not those of `pinned` steps."""
        intact = sorted((c for c in found if c.manifest is not None), key=lambda c: c.step)
        kept = {c.path for c in intact[-max(self.keep_last, 1) :]}
        if self.keep_every_steps:
            kept |= {c.path for c in intact if c.step % self.keep_every_steps == 0}
        kept |= {c.path for c in self.best(intact)[: self.keep_best]}
        kept |= {c.path for c in intact if c.step in pinned}
        return [c for c in intact if c.path not in kept]

    def best(self, intact: Iterable[Candidate]) -> list[Candidate]:
        """Those that were judged by the metric, the best first; of equal ones the oldest first."""
        judged = [
            (-m.metric if self.best_mode == "max" else m.metric, c.step, c)
            for c in intact
            if (m := c.manifest) and m.metric is not None and m.metric == m.metric and m.metric_name == self.best_metric
        ]
        return [c for _, _, c in sorted(judged, key=lambda entry: entry[:2])]


def loose_modes(path: Path) -> str | None:
    """A warning if others than the owner may write to `path`, or None."""
    try:
        mode = files.stat(path).st_mode
    except OSError as error:
        return None if error.errno == errno.ENOENT else f"{path}: {error.strerror}"
    others = [who for who, bit in (("its group", stat.S_IWGRP), ("everybody", stat.S_IWOTH)) if mode & bit]
    if not others:
        return None
    return f"{path} is writable by {' and '.join(others)}, who can change this run's weights: run chmod go-w on it"

"""List the checkpoints of a store, verify them, choose one, and decide which ones to keep.

An entry is a checkpoint only if the step in its manifest matches the step in its name. All other entries are left
unchanged. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.manifest import BEST_METRIC, CorruptionError, Manifest
from runner.checkpoint.files.reading import patiently
from runner.checkpoint.files.store import COMMITTED, SET_ASIDE, Store, Stored, step_name
from runner.errors import CheckpointError, UserError

_log = logging.getLogger(__name__)

LAST, BEST = "last", "best"


@dataclass(frozen=True)
class _Entry:
    at: Stored

    @property
    def path(self) -> Path:
        return self.at.path


@dataclass(frozen=True)
class Candidate(_Entry):
    """A checkpoint that was committed under its current name, intact or corrupt.

    Attributes:
        at: the checkpoint.
        step: step in the name. If there is a manifest, its step is the same.
        manifest: the manifest, or None if it is corrupt, not readable, or of an unknown format version.
        corruption: description of the manifest's corruption, or None.
        error: the error if the manifest is not readable or has an unknown format version, otherwise None.
    """

    step: int
    manifest: Manifest | None
    corruption: str | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class Intact(Candidate):
    """A checkpoint whose manifest is intact."""

    manifest: Manifest


@dataclass(frozen=True)
class Stranger(_Entry):
    """An entry that is named like a checkpoint but is not one. It is never loaded, counted or deleted.

    Attributes:
        at: the entry.
        reason: why it is not a checkpoint.
        step: the step in its manifest if it is a checkpoint that was copied or renamed; None if this runner did not
            write it.
    """

    reason: str
    step: int | None = None

    @property
    def is_empty_directory(self) -> bool:
        """Return whether the entry is an empty directory, which a checkpoint can replace."""
        with contextlib.suppress(OSError):
            return not self.at.wrong_kind() and not self.at.names()
        return False


@dataclass(frozen=True)
class Retention:
    """Rules that decide which checkpoints to keep. The newest one is always kept.

    Attributes:
        keep_last: keep this many of the newest checkpoints.
        keep_every_steps: also keep checkpoints at multiples of this step.
        keep_best: also keep this many checkpoints with the best values of `best_metric`.
        best_metric: name of the metric. Checkpoints saved with a different metric are not considered.
        best_mode: `min` if the lowest value is best, `max` if the highest value is best. NaN is never best.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    best_metric: str = BEST_METRIC
    best_mode: str = "min"

    def to_delete(self, found: Iterable[Candidate], pinned: Collection[int] = ()) -> list[Candidate]:
        """Return the intact checkpoints in `found` that can be deleted, oldest first. Steps in `pinned` are kept."""
        intact = sorted((c for c in found if isinstance(c, Intact)), key=lambda c: c.step)
        kept = {c.path for c in intact[-max(self.keep_last, 1) :]}
        if self.keep_every_steps:
            kept |= {c.path for c in intact if c.step % self.keep_every_steps == 0}
        kept |= {c.path for c in self.best(intact)[: self.keep_best]}
        kept |= {c.path for c in intact if c.step in pinned}
        return [c for c in intact if c.path not in kept]

    def best(self, intact: Iterable[Candidate]) -> list[Candidate]:
        """Return the checkpoints that have a value of the metric, best first. Ties are ordered oldest first."""
        judged = [
            (-m.metric if self.best_mode == "max" else m.metric, c.step, c)
            for c in intact
            if (m := c.manifest) and m.metric is not None and m.metric == m.metric and m.metric_name == self.best_metric
        ]
        return [c for _, _, c in sorted(judged, key=lambda entry: entry[:2])]


def scan(store: Store) -> list[Candidate | Stranger]:
    """List all entries that are named like a checkpoint, highest step first. Only the manifests are read.

    Raises:
        CheckpointError: the directory is not readable.
    """
    found = [judge(store.at(name)) for name in store.names() if COMMITTED.fullmatch(name)]
    return sorted(
        (entry for entry in found if entry is not None),
        key=lambda entry: (int(entry.path.name.removeprefix("step_")), entry.path.name),
        reverse=True,
    )


def candidates(store: Store) -> list[Candidate]:
    """List the committed checkpoints, highest step first. Only the manifests are read.

    Raises:
        CheckpointError: the directory is not readable.
    """
    return [entry for entry in scan(store) if isinstance(entry, Candidate)]


def strangers(store: Store) -> list[Stranger]:
    """List the entries that are named like a checkpoint but are not one.

    Raises:
        CheckpointError: the directory is not readable.
    """
    return [entry for entry in scan(store) if isinstance(entry, Stranger)]


def judge(at: Stored) -> Candidate | Stranger | None:
    """Classify an entry named `step_<number>` by its manifest. Return None if the entry does not exist.

    The step in the manifest must match the name. Otherwise a renamed copy of an old checkpoint could pass as a newer
    one.
    """
    step = int(at.path.name.removeprefix("step_"))
    canonical = at.path.name == step_name(step)
    try:
        if wrong := patiently(at.path, at.wrong_kind):
            return Stranger(at, f"it is {wrong}, not a directory")
        manifest = manifests.read(at)
    except CorruptionError as corruption:
        return _judge_damaged(at, step if canonical else None, str(corruption))
    except CheckpointError as error:
        return Candidate(at, step, None, error=error)
    except OSError:  # deleted by another process
        return None
    if at.path.name == step_name(manifest.step):
        return Intact(at, step, manifest)
    wrong = f"it contains step {manifest.step}, so its name would have to be {step_name(manifest.step)}"
    return Stranger(at, wrong, manifest.step)


def _judge_damaged(at: Stored, step: int | None, corruption: str) -> Candidate | Stranger | None:
    try:
        if step is not None and manifests.is_ours(at):
            return Candidate(at, step, None, corruption)
    except CheckpointError as error:
        return Candidate(at, step or 0, None, error=error)
    except OSError:  # deleted by another process
        return None
    return Stranger(at, "it has no manifest of this runner")


def corruption_of(candidate: Candidate) -> str | None:
    """Read every byte of a checkpoint and return a description of its corruption, or None.

    Raises:
        CheckpointError: the checkpoint is not readable or has an unknown format version.
    """
    return _found_wrong(candidate, manifests.verify)


def size_error(candidate: Candidate) -> str | None:
    """Compare the file names and sizes with the manifest. Return a description of the first difference, or None.

    Raises:
        CheckpointError: the checkpoint is not readable or has an unknown format version.
    """
    return _found_wrong(candidate, _check_sizes)


def _found_wrong(candidate: Candidate, check: Callable[[Stored, Manifest], None]) -> str | None:
    if candidate.error is not None:
        raise candidate.error
    if not isinstance(candidate, Intact):
        return candidate.corruption
    try:
        check(candidate.at, candidate.manifest)
    except CorruptionError as error:
        return str(error)
    return None


def _check_sizes(at: Stored, manifest: Manifest) -> None:
    for name, expected in sorted(manifest.files.items()):
        try:
            found = patiently(at.path / name, partial(at.size, name))
        except OSError as error:
            raise CorruptionError(f"{name} cannot be read ({error.strerror})") from error
        if found != expected.size:
            raise CorruptionError(f"{name} has {found} bytes, but {expected.size} were written")


def newest(store: Store, on_corruption: Callable[[Candidate, str], None] | None = None) -> Intact | None:
    """Return the newest valid checkpoint without changing anything.

    Args:
        store: the checkpoints.
        on_corruption: called with each newer corrupt checkpoint and a description of its corruption.

    Returns:
        The checkpoint, or None if there are no checkpoints.

    Raises:
        CheckpointError: there are checkpoints, but none is valid. Or a checkpoint newer than the newest valid one is
            not readable or has an unknown format version.
    """
    corruptions = []
    for candidate in candidates(store):
        corruption = corruption_of(candidate)
        if corruption is None and isinstance(candidate, Intact):
            return candidate
        corruptions.append(f"{candidate.path.name}: {corruption}")
        if on_corruption is not None:
            on_corruption(candidate, str(corruption))
    check_never_saved(store, corruptions)
    return None


def check_never_saved(store: Store, corruptions: list[str]) -> None:
    """Check that a run without valid checkpoints has never saved one, so that it may start at step 0.

    Args:
        store: the checkpoints.
        corruptions: descriptions of the corrupt checkpoints that were found.

    Raises:
        CheckpointError: a checkpoint is corrupt or renamed, or was set aside earlier.
    """
    renamed = [f"{each.path.name}: {each.reason}" for each in strangers(store) if each.step is not None]
    unusable = [*corruptions, *renamed]
    unusable = unusable or [f"{name}: set aside earlier" for name in set_aside_earlier(store)]
    if unusable:
        raise CheckpointError(
            f"no checkpoint in {store.path} is valid ({'; '.join(unusable)}); restore one from a backup, "
            "or remove the directory to start again from step 0"
        )


def warn_of_strangers(store: Store) -> None:
    """Log one warning about all entries that are named like a checkpoint but are not one."""
    found = ", ".join(f"{each.path.name} ({each.reason})" for each in strangers(store))
    if found:
        _log.warning(f"not used, since no checkpoint was committed under that name in {store.path}: {found}")


def set_aside_earlier(store: Store) -> list[str]:
    """List the names of corrupt and misnamed checkpoints that were set aside."""
    return sorted(name for name in store.names() if SET_ASIDE.fullmatch(name))


def choose(
    store: Store, which: str | int = LAST, on_corruption: Callable[[Candidate, str], None] | None = None
) -> Intact:
    """Return the checkpoint that `which` selects, after verifying every byte.

    Args:
        store: the checkpoints of a run.
        which: a step, `last` or `best`.
        on_corruption: called with each corrupt checkpoint that is newer than the last valid one, and a description of
            its corruption.

    Raises:
        UserError: the requested checkpoint does not exist.
        CheckpointError: the checkpoint is corrupt.
    """
    if which == LAST:
        latest = newest(store, on_corruption)
        if latest is None:
            raise UserError(f"{store.path} has no checkpoint")
        return latest
    found = candidates(store)
    if which == BEST:
        by_result = best(judged(store, found))
        if by_result is None:
            raise UserError(
                f"no checkpoint in {store.path} was judged by a metric: evaluate them (runner evaluate RUN --step "
                f"all), or name a step ({_steps(found)})"
            )
        which = by_result.step
    chosen = next((one for one in found if str(one.step) == str(which)), None)
    if chosen is None:
        raise UserError(
            f"there is no checkpoint of step {which} in {store.path}; available: {_steps(found)}; or last, best"
        )
    corruption = corruption_of(chosen)
    if corruption is not None or not isinstance(chosen, Intact):
        raise CheckpointError(f"{chosen.path} is corrupt: {corruption}")
    return chosen


def judged(store: Store, found: Iterable[Candidate]) -> list[Candidate]:
    """Return `found`, with missing metrics filled in from evaluations that ran after the save.

    Raises:
        CheckpointError: the results are not readable.
    """
    results = store.results()

    def with_result(one: Candidate) -> Candidate:
        if one.manifest is None or one.manifest.metric is not None:
            return one
        number = results.get(one.step, {}).get(one.manifest.metric_name)
        return replace(one, manifest=replace(one.manifest, metric=number)) if isinstance(number, float) else one

    return [with_result(one) for one in found]


def best(judged: Sequence[Candidate]) -> Candidate | None:
    """Return the best checkpoint, or None if none has a metric. The newest one with a metric sets the mode."""
    manifests = [one.manifest for one in judged if one.manifest and one.manifest.metric is not None]
    if not manifests:
        return None
    by = Retention(best_metric=manifests[0].metric_name, best_mode=manifests[0].metric_mode)
    return next(iter(by.best(judged)), None)


def _steps(found: Sequence[Candidate]) -> str:
    return ", ".join(str(step) for step in sorted(one.step for one in found)) or "none"

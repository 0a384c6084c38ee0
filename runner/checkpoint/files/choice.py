"""The checkpoints of a store: which there are, which verify, which one somebody means, and which to keep.

The step in the manifest must be the one in the name. Everything else there belongs to somebody else and is left alone.
Imports no torch.
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
        """Where it is."""
        return self.at.path


@dataclass(frozen=True)
class Candidate(_Entry):
    """A checkpoint that was committed under its name, judged by its manifest.

    Attributes:
        at: the checkpoint.
        step: the step in its name; the same as in its manifest, if there is one.
        manifest: None if it is corrupt or cannot be judged.
        corruption: what is wrong with the manifest.
        error: why it cannot be judged: not readable, or of an unknown format version.
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
    """What has a checkpoint's name and is none: never loaded, counted or deleted.

    Attributes:
        at: the entry.
        reason: what it is instead.
        step: if it is a checkpoint that was copied or renamed: the step that it contains. Else None: not ours.
    """

    reason: str
    step: int | None = None

    @property
    def is_empty_directory(self) -> bool:
        """Whether it holds nothing, so that a checkpoint can take its place."""
        with contextlib.suppress(OSError):
            return not self.at.wrong_kind() and not self.at.names()
        return False


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
        intact = sorted((c for c in found if isinstance(c, Intact)), key=lambda c: c.step)
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


def scan(store: Store) -> list[Candidate | Stranger]:
    """Whatever has a checkpoint's name, highest number first. Reads only the manifests.

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
    """The committed checkpoints, highest step first. Reads only the manifests.

    Raises:
        CheckpointError: the directory is not readable.
    """
    return [entry for entry in scan(store) if isinstance(entry, Candidate)]


def strangers(store: Store) -> list[Stranger]:
    """What has a checkpoint's name and is none.

    Raises:
        CheckpointError: the directory is not readable.
    """
    return [entry for entry in scan(store) if isinstance(entry, Stranger)]


def judge(at: Stored) -> Candidate | Stranger | None:
    """What is there, where the name is `step_` and a number; None if nothing is. Reads only the manifest.

    The step in the manifest decides: a copy of an old checkpoint must not pass as a newer one.
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
    except OSError:  # deleted meanwhile
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
    except OSError:  # deleted meanwhile
        return None
    return Stranger(at, "it has no manifest of this runner")


def corruption_of(candidate: Candidate) -> str | None:
    """Read every byte of a checkpoint, and return what is wrong with it, or None.

    Raises:
        CheckpointError: it cannot be judged.
    """
    return _found_wrong(candidate, manifests.verify)


def size_error(candidate: Candidate) -> str | None:
    """Return what is wrong with a checkpoint judging by names and sizes, or None; reads no file.

    Raises:
        CheckpointError: it cannot be judged.
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
    """The highest step that verifies; changes nothing.

    Args:
        store: the checkpoints.
        on_corruption: called with each corrupt checkpoint of a higher step, and what is wrong with it.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints and none is valid, or one of a higher step cannot be judged.
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
    """Distinguish a run without checkpoints, which starts at step 0, from one that has lost all of them.

    Args:
        store: the checkpoints.
        corruptions: what is wrong with each checkpoint that was found.

    Raises:
        CheckpointError: there are checkpoints, or there were and all were set aside or renamed.
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
    """Log what has a checkpoint's name and is none, in one warning."""
    found = ", ".join(f"{each.path.name} ({each.reason})" for each in strangers(store))
    if found:
        _log.warning(f"not used, since no checkpoint was committed under that name in {store.path}: {found}")


def set_aside_earlier(store: Store) -> list[str]:
    """The names of corrupt and misnamed checkpoints that were set aside."""
    return sorted(name for name in store.names() if SET_ASIDE.fullmatch(name))


def choose(
    store: Store, which: str | int = LAST, on_corruption: Callable[[Candidate, str], None] | None = None
) -> Intact:
    """The checkpoint that `which` means, of which every byte was verified.

    Args:
        store: the checkpoints of a run.
        which: a step, `last` or `best`.
        on_corruption: called with each corrupt checkpoint that is newer than the last valid one.

    Raises:
        UserError: there is no such checkpoint.
        CheckpointError: it is corrupt.
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
    """Return `found`, whose manifests have the result of an evaluation that came after the save, if there is one.

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
    """Return the best by the metric and the mode of the newest one that has a metric; None if none has."""
    manifests = [one.manifest for one in judged if one.manifest and one.manifest.metric is not None]
    if not manifests:
        return None
    by = Retention(best_metric=manifests[0].metric_name, best_mode=manifests[0].metric_mode)
    return next(iter(by.best(judged)), None)


def _steps(found: Sequence[Candidate]) -> str:
    return ", ".join(str(step) for step in sorted(one.step for one in found)) or "none"

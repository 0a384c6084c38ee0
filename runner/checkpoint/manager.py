"""Save checkpoints atomically and in the background, and verify them when loading."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from exactdata.ranks import current_ranks
from runner import bounds
from runner.checkpoint.background import Background
from runner.checkpoint.files import choice
from runner.checkpoint.files.choice import Intact, Retention
from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.manifest import BEST_METRIC, BEST_MODES
from runner.checkpoint.files.reading import in_one_line
from runner.checkpoint.files.store import Fence, Store
from runner.checkpoint.saver import PendingSave, Saver
from runner.checkpoint.selection import agreed, open_checkpoint, select, tensor_files
from runner.checkpoint.tensors import writer
from runner.checkpoint.tensors.checks import check_fit, optimizer_difference
from runner.checkpoint.tensors.restore import load_tensors
from runner.checkpoint.tensors.staging import collect
from runner.checkpoint.tensors.state import Averaged, OptimizerLike, StateDict, TrainState
from runner.errors import SupersededError, UserError
from runner.system import clock
from runner.system.distributed import World

_log = logging.getLogger(__name__)

PEER_TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the other ranks, which may be writing a large checkpoint to a slow disk."""


class SaveCost(TypedDict):
    """The cost of a save: seconds that training stalled, seconds until the commit (0 before it), and bytes written."""

    step: int
    stall_s: float
    write_s: float
    bytes: int


class TrainStateManager:
    """Save and load the checkpoints of one run.

    All ranks must create the manager together, because with several ranks it creates a gloo process group. All ranks
    must call `save` and `load` at the same step. Rank 0 logs a warning for each checkpoint that it sets aside and each
    error that training survives.

    Args:
        directory: the checkpoint directory. The first save creates it.
        fingerprint: JSON values. A checkpoint is loaded only if the fingerprint saved with it has the same values. Keys
            that only one of the two fingerprints has are not compared.
        keep_last: keep this many of the newest checkpoints; see `Retention`.
        keep_every_steps: also keep checkpoints at multiples of this step.
        keep_best: also keep this many checkpoints with the best values of `best_metric`.
        best_metric: name of the metric. If a run changes it, checkpoints saved with the old metric are no longer kept
            as best.
        best_mode: `min` if the lowest value is best, `max` if the highest value is best. NaN is never best.
        mode: with `async`, `save` copies the tensors to memory and writes them in the background, one save at a time.
            With `sync`, `save` returns after the commit.
        check_fence: called on rank 0 before every change. It must raise SupersededError if a newer attempt holds the
            lease.
        fence: the fencing number of this attempt.
        store: function that creates the store from `directory` and the fence.

    Raises:
        UserError: a setting is out of range.

    Example:
        >>> import torch
        >>> from runner.checkpoint import TrainStateManager, build_train_state, restore_train_state
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> manager = TrainStateManager("checkpoints", fingerprint={"data": "v1"}, keep_last=2)
        >>> state = manager.load(model, optimizer)  # None if there is no checkpoint yet
        >>> start, tokens_seen, extra = restore_train_state(state or {})
        >>> for step in range(start + 1, start + 4):
        ...     loss = model(torch.randn(4, 8)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     saved = manager.save(step, model, optimizer, build_train_state(step, tokens_seen))
        >>> manager.wait()  # the last save is written in the background
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        keep_last: int = 3,
        keep_every_steps: int | None = None,
        keep_best: int = 0,
        best_metric: str = BEST_METRIC,
        best_mode: str = "min",
        mode: str = "async",
        check_fence: Callable[[], None] | None = None,
        fence: int = 0,
        store: Callable[[Path, Fence], Store] = Directory,
    ) -> None:
        _check_settings(keep_last, keep_every_steps, keep_best, best_mode, mode)
        self.directory = Path(directory)
        self.last_save: SaveCost | None = None
        self.last_error: str | None = None
        self._asynchronous = mode == "async"
        self._fingerprint = dict(fingerprint or {})
        self._world = World(*current_ranks()).with_own_group(PEER_TIMEOUT_S)
        retention = Retention(keep_last, keep_every_steps, keep_best, best_metric, best_mode)
        self._fence = Fence(fence, check_fence or (lambda: None))
        self._store = store(self.directory, self._fence)
        self._saver = Saver(self._store, self._world, self._fingerprint, retention, self._fence)
        self._background = Background()
        self._superseded: SupersededError | None = None
        self._committed: set[int] = set()
        self._copying: PendingSave | None = None  # its tensor copies may be incomplete
        self._copied = threading.Event()

    def warm_up(self) -> None:
        """Import the modules that the first save needs. Call this in a background thread after the first step."""
        self._background.start()
        writer.warm_up()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: OptimizerLike | None,
        train_state: Mapping[str, Any],
        *,
        averaged: Averaged | None = None,
        metric: float | None = None,
        wait: bool = False,
        copy_later: bool = False,
    ) -> bool:
        """Save the state after `step` completed steps.

        `save` first waits until the previous save is written. So at most one save is in flight, and the disk's speed
        does not affect which steps are saved. A step that is already committed is not written again. File system errors
        are logged, and training continues.

        Args:
            step: completed optimizer steps.
            model: the model.
            optimizer: its optimizer, if it has one.
            train_state: this rank's train state, from `build_train_state`.
            averaged: the averaged weights of the model, e.g. a torch.optim.swa_utils.AveragedModel, or None.
            metric: value of `best_metric` at this step.
            wait: return only after the commit. Use this before exiting.
            copy_later: copy the weights and the optimizer state during the next forward and backward passes. You must
                call `finish_copy` after these passes, before anything changes the weights or the optimizer state.

        Returns:
            False if the save has already failed (see `last_error`), otherwise True.

        Raises:
            SupersededError: a newer attempt holds the lease; nothing was committed.
            CheckpointError: the optimizer holds parameters that are not in the model, or the train state lacks an
                entry, has a different step, or contains values that could not be loaded safely.
        """
        begun = clock.perf_counter()
        self.wait()
        if step in self._committed:
            return True
        in_background = self._asynchronous and not wait
        pending = self._saver.stage(
            step,
            model,
            optimizer,
            train_state,
            metric,
            averaged=averaged,
            copy=in_background,
            copy_later=copy_later,
        )
        self.last_save = SaveCost(step=step, stall_s=clock.perf_counter() - begun, write_s=0.0, bytes=0)
        if in_background:
            self._copying = pending if copy_later else None
            self._copied.clear()
            self._background.submit(lambda: self._copy_and_write(pending, begun))
            self.last_save["stall_s"] = clock.perf_counter() - begun
            return True
        self._write(pending, begun)
        self.last_save["stall_s"] = clock.perf_counter() - begun
        self._raise_if_superseded()
        return step in self._committed

    @property
    def copying(self) -> bool:
        """Return True if `finish_copy` must be called before the next update."""
        return self._copying is not None

    def finish_copy(self) -> None:
        """Wait for the copies that `copy_later` deferred. Call this after the forward and backward passes."""
        pending, self._copying = self._copying, None
        if pending is None:
            return
        began = clock.perf_counter()
        self._copied.wait()
        self._saver.observe(pending)
        if self.last_save is not None:
            self.last_save["stall_s"] += clock.perf_counter() - began

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SupersededError: a newer attempt holds the lease.
        """
        self._copying = None
        self._background.join()
        self._raise_if_superseded()

    def settle(self) -> None:
        """Wait until no save is in flight, ignoring errors of the save. Call this before you release the lease."""
        self._background.join()

    def newest(self) -> Intact | None:
        """Return the newest valid checkpoint. This verifies every byte and changes nothing.

        Returns:
            The checkpoint, or None if there are no checkpoints. Raises:
            CheckpointError: there are checkpoints, but none is valid.
        """
        return choice.newest(self._store)

    def load(
        self,
        model: nn.Module,
        optimizer: OptimizerLike | None = None,
        averaged: Averaged | None = None,
        *,
        another_optimizer: Callable[[int], bool] = lambda step: False,
    ) -> StateDict | None:
        """Load the newest valid checkpoint into `model`, `optimizer` and `averaged`, in place.

        Newer checkpoints that are corrupt are renamed to `….corrupt`. Files are verified while they are read. So after
        a CheckpointError about corruption, the contents of the model and optimizer are undefined.

        Args:
            model: the model.
            optimizer: its optimizer. If None, the optimizer's state is not loaded.
            averaged: the averaged weights of the model, or None.
            another_optimizer: function of the loaded step. If it returns True and the optimizer does not match the
                saved one, the optimizer keeps its current state, and a warning is logged. If it returns False, a
                mismatch raises an error.

        Returns:
            The train state for `restore_train_state`, or None if there are no checkpoints.

        Raises:
            CheckpointError: there are checkpoints, but none is valid. Or the newest is not readable, does not match
                this run, has an unknown format version, or contains objects that might run code when loaded.
            SupersededError: a newer attempt holds the lease.
        """
        self.wait()
        with in_one_line(self.directory):
            found = self._restore(model, optimizer, averaged, another_optimizer)
        if found is None:
            return None
        chosen, state = found
        self._committed.add(chosen.step)
        return replace(state, optimizer=None, model_extra=None, version=None).to_dict()

    def _restore(
        self,
        model: nn.Module,
        optimizer: OptimizerLike | None,
        averaged: Averaged | None,
        another_optimizer: Callable[[int], bool],
    ) -> tuple[Intact, TrainState] | None:
        self._world.run_on_main(self._store.look_anew)
        self._world.run_on_main(self._saver.sweep)

        def load(chosen: Intact) -> tuple[Intact, TrainState]:
            return chosen, self._load(chosen, model, optimizer, averaged, another_optimizer(chosen.step))

        return select(self._store, self._world, load, self._saver.set_aside)

    def _load(
        self,
        chosen: Intact,
        model: nn.Module,
        optimizer: OptimizerLike | None,
        averaged: Averaged | None,
        another_optimizer: bool,
    ) -> TrainState:
        """Load a checkpoint and verify it in the same pass. Each rank verifies some of the files.

        Raises:
            CorruptionError: the checkpoint is corrupt. The contents of the model and optimizer are then undefined.
        """
        world = self._world
        state, reader = agreed(world, lambda: open_checkpoint(chosen, self._fingerprint))
        with reader:
            if another_optimizer and optimizer is not None:
                present = collect(model, optimizer).optimizer
                if present is not None and (difference := optimizer_difference(state.optimizer, present)):
                    if world.is_main:
                        _log.warning(f"the optimizer begins without a state: {difference}")
                    optimizer = None
            world.run_on_all(lambda: check_fit(reader, state, model, optimizer, averaged, f"checkpoint {chosen.path}"))
            verified = tensor_files(chosen.manifest, world)
            agreed(world, lambda: load_tensors(reader, state, model, optimizer, averaged, verified))
        return state

    def _copy_and_write(self, pending: PendingSave, begun: float) -> None:
        try:
            pending.complete()
        finally:
            self._copied.set()
        self._write(pending, begun)

    def _write(self, pending: PendingSave, begun: float) -> None:
        """Commit a save and delete old checkpoints. Errors are recorded and logged, never raised."""
        try:
            manifest = self._saver.commit(pending)
        except SupersededError as error:
            self._superseded, self.last_error = error, str(error)
            return
        except Exception as error:  # noqa: BLE001 - a failed save must not end training
            self._failed(
                f"step {pending.step} could not be saved ({_reason(error)})",
                "training continues, and the next save tries again",
            )
            return
        self._committed.add(pending.step)
        self.last_error = None
        if manifest is not None and self.last_save is not None:
            self.last_save |= {"bytes": manifest.size, "write_s": clock.perf_counter() - begun}
        if self._world.is_main:
            self._delete_old(pending.step)

    def _delete_old(self, step: int) -> None:
        try:
            self._saver.delete_old(step)
        except SupersededError as error:
            self._superseded = error
        except Exception as error:  # noqa: BLE001 - a failed save must not end training
            self._failed(f"old checkpoints could not be deleted ({_reason(error)})", "the next save tries again")

    def _failed(self, message: str, consequence: str) -> None:
        self.last_error = message
        if self._world.is_main:
            _log.warning(f"{message}; {consequence}")

    def _raise_if_superseded(self) -> None:
        if self._superseded is not None:
            raise self._superseded


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _check_settings(keep_last: int, keep_every_steps: int | None, keep_best: int, best_mode: str, mode: str) -> None:
    kept = {"keep_last": keep_last, "keep_every_steps": keep_every_steps, "keep_best": keep_best}
    bounds.check({f"checkpoint.{name}": count for name, count in kept.items()})
    if best_mode not in BEST_MODES:
        raise UserError(f"checkpoint.best.mode={best_mode!r}: set 'min' or 'max'")
    if mode not in ("async", "sync"):
        raise UserError(f"checkpoint.mode={mode!r}: set 'async' or 'sync'")

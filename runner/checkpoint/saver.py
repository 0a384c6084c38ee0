"""Run the stages of a save on all ranks together: stage, write, commit, and delete old checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoint.files import choice
from runner.checkpoint.files.choice import Candidate, Retention, Stranger
from runner.checkpoint.files.manifest import TRAIN_STATE, VERSION, Manifest
from runner.checkpoint.files.store import Fence, FileRecord, Save, Store, Stored, Writer, step_name
from runner.checkpoint.tensors import writer
from runner.checkpoint.tensors.copying import Copy, HostBuffers
from runner.checkpoint.tensors.layout import INDEX
from runner.checkpoint.tensors.staging import Tensors, changed_by_updates, collect, snapshot
from runner.checkpoint.tensors.state import Averaged, OptimizerLike, TrainState
from runner.errors import CheckpointError
from runner.system import clock
from runner.system.distributed import World

_log = logging.getLogger(__name__)


@dataclass
class PendingSave:
    """A save that is staged but not written yet.

    Attributes:
        step: completed optimizer steps.
        tensors: tensors that this rank writes a chunk of, by flat name.
        copy: copies of the tensors, or None if the tensors are written without a copy.
        state: this rank's train state.
        plan: which rank writes which chunk.
        metric: value of `best_metric` at this step, or None.
    """

    step: int
    tensors: Tensors
    state: TrainState
    plan: writer.WritePlan
    metric: float | None
    copy: Copy | None = None
    error: Exception | None = None

    def complete(self) -> None:
        """Make the deferred copies. If this fails, `Saver.commit` raises the error on every rank."""
        try:
            if self.copy is not None:
                self.copy.complete()
        except Exception as error:  # noqa: BLE001 `Saver.commit` raises it on every rank
            self.error = error


class Saver:
    """Stage and commit saves. Errors are raised, not logged.

    Args:
        store: the store of the checkpoints.
        world: the ranks, in a separate process group because `commit` may run in a background thread.
        fingerprint: JSON values that must match for a run to load the checkpoints.
        retention: rules that decide which checkpoints to keep.
        fence: fence of this attempt.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        fingerprint: Mapping[str, Any],
        retention: Retention,
        fence: Fence,
    ) -> None:
        self._store = store
        self._world = world
        self._fingerprint = dict(fingerprint)
        self._retention = retention
        self._fence = fence
        self._buffers = HostBuffers()
        self._plan: writer.WritePlan | None = None
        self._warned = False
        self._found_corrupt = set[int]()  # steps of corrupt checkpoints, even if setting them aside failed

    def set_aside(self, step: int, corruption: str) -> None:
        """Rename a corrupt checkpoint, on rank 0. If renaming fails, `delete_old` checks the checkpoint again.

        Raises:
            SupersededError: a newer attempt holds the lease; nothing was changed.
        """
        self._found_corrupt.add(step)
        self._store.set_aside(step_name(step), "corrupt", corruption)

    def sweep(self) -> None:
        """Remove leftovers of killed or failed saves. Runs on rank 0 before a save or load.

        Raises:
            SupersededError: a newer attempt holds the lease.
            CheckpointError: the directory is not readable.
        """
        self._store.sweep()
        if not self._warned and (warning := self._store.warning()):
            _log.warning(warning)
        self._warned = True

    def stage(
        self,
        step: int,
        model: nn.Module,
        optimizer: OptimizerLike | None,
        train_state: Mapping[str, Any],
        metric: float | None,
        *,
        averaged: Averaged | None = None,
        copy: bool,
        copy_later: bool = False,
    ) -> PendingSave:
        """Plan a save and snapshot the train state.

        Args:
            step: completed optimizer steps.
            model: the model.
            optimizer: its optimizer, if it has one.
            train_state: from `build_train_state`.
            metric: value of `best_metric` at this step, or None.
            averaged: the averaged weights of the model, or None.
            copy: also copy the tensors, so that training can continue before `commit`.
            copy_later: defer some of the copies to `PendingSave.complete`; see the module `tensors.copying`.

        Raises:
            CheckpointError: the optimizer holds parameters that are not in the model, or the train state lacks an
                entry, has a different step, or contains values that could not be loaded safely.
        """
        state = TrainState.from_dict(train_state, "the train state passed to save")
        if state.step != step:
            raise CheckpointError(
                f"the train state passed to save is of step {state.step}, not {step}: pass build_train_state({step}, …)"
            )
        collected = collect(model, optimizer, averaged)
        signature = writer.signature_of(collected.tensors)
        if self._plan is None or self._plan.signature != signature:
            self._plan = writer.make_plan(collected, signature, self._world)
        own = {name: tensor for name, tensor in collected.tensors.items() if name in self._plan.names}
        state = replace(state, optimizer=collected.optimizer, model_extra=collected.model_extra, version=VERSION)
        plain = TrainState.from_dict(snapshot(state.to_dict()), "the train state")
        if not copy:
            return PendingSave(step, own, plain, self._plan, metric)
        copies = self._buffers.copy(own, own.keys() & changed_by_updates(collected) if copy_later else ())
        return PendingSave(step, copies.tensors, plain, self._plan, metric, copies)

    def observe(self, pending: PendingSave) -> None:
        """Find the tensors that the forward and backward passes after a save changed; see `HostBuffers.observe`."""
        if pending.copy is not None:
            self._buffers.observe(pending.copy)

    def commit(self, pending: PendingSave) -> Manifest | None:
        """Write the files on all ranks, then commit on rank 0.

        Returns:
            The manifest, or None if the step is already committed.

        Raises:
            SupersededError: a newer attempt holds the lease; nothing was committed.
            Exception: the error of the lowest-numbered rank that failed; nothing was committed.
        """
        world = self._world
        name = step_name(pending.step)
        save = self._store.save(name)
        path = world.run_on_main(lambda: self._begin(save, self._store.at(name)))
        if path is None:
            return None
        try:
            with self._store.writer(path) as new:
                written = world.gather_on_main(world.run_on_all(lambda: self._write(new, pending)))
                state = self._of_all_ranks(pending.state)
                return world.run_on_main(lambda: self._finish(save, new, pending, state, written))
        except BaseException as error:
            if world.is_main:
                save.abort()
            if isinstance(error, OSError):  # on every rank: a newer attempt may have removed the directory
                world.run_on_main(self._fence.check)
            raise

    def _write(self, new: Writer, pending: PendingSave) -> dict[str, FileRecord]:
        """Write the tensors of this rank. Rank 0 syncs its file later, together with the other files that it writes."""
        if pending.error is not None:
            if pending.copy is not None:
                self._buffers.never_copy_later(pending.copy.unstable)
            raise pending.error
        records = writer.write_tensors(new, self._world.rank, pending.plan, pending.tensors)
        if not self._world.is_main:
            new.sync()
        return records

    def _begin(self, save: Save, at: Stored) -> Path | None:
        """Begin a save and return its path, or None if a valid checkpoint of this step exists."""
        self.sweep()
        if self._make_room(at):
            return None
        save.begin()
        return save.path

    def _make_room(self, at: Stored) -> bool:
        """Set aside an entry that has the new checkpoint's name. If it is a valid checkpoint, keep it and return True.

        Raises:
            CheckpointError: the entry was not written by this runner and is left unchanged, or it cannot be read.
        """
        found = choice.judge(at)
        if isinstance(found, Candidate):
            corruption = choice.corruption_of(found)
            if corruption is None:
                return True
            self.set_aside(found.step, corruption)
        elif isinstance(found, Stranger) and found.step is not None:
            self._store.set_aside(at.path.name, "misnamed", found.reason)
        elif isinstance(found, Stranger) and not found.is_empty_directory:
            raise CheckpointError(
                f"{at.path} is in the way: {found.reason}, so it is not touched; move it to another name"
            )
        return False

    def _of_all_ranks(self, state: TrainState) -> TrainState:
        """Return rank 0's train state, with the random generators and dataloader states of all ranks added."""
        parts: list[Any] = self._world.gather_on_main((state.rng, state.dataloader))
        several = state.dataloader is not None and len(parts) > 1
        return replace(
            state,
            rng_by_rank=[rng for rng, _ in parts],
            dataloader_by_rank=[dataloader for _, dataloader in parts] if several else None,
        )

    def _finish(
        self,
        save: Save,
        new: Writer,
        pending: PendingSave,
        state: TrainState,
        written: list[dict[str, FileRecord]],
    ) -> Manifest:
        records = {name: record for own in written for name, record in own.items()}
        records[INDEX] = new.write(INDEX, lambda file: file.write(pending.plan.index))
        records[TRAIN_STATE] = new.write(
            TRAIN_STATE,
            lambda file: torch.save(state.to_dict(), file),
        )
        manifest = Manifest(
            step=pending.step,
            files=records,
            fence=self._fence.number,
            fingerprint=self._fingerprint,
            metric=None if pending.metric is None else float(pending.metric),
            metric_name=self._retention.best_metric,
            metric_mode=self._retention.best_mode,
            world_size=self._world.size,
            created=clock.wall(),
        )
        save.commit(manifest.encode(), new)
        self._found_corrupt.discard(pending.step)
        return manifest

    def delete_old(self, step: int) -> None:
        """Delete the checkpoints that retention does not keep. Runs on rank 0 after the commit of `step`.

        Only checkpoints up to `step` are counted and deleted. This attempt resumed from a lower step because
        checkpoints at higher steps are corrupt and could not be set aside. They must not be kept in place of valid
        ones. Once training reaches their step, they are checked again, and are set aside or counted.

        Raises:
            SupersededError: a newer attempt holds the lease.
            OSError, CheckpointError: the file system returned an error.
        """
        try:
            found = [each for each in choice.candidates(self._store) if each.step <= step]
            whole = [each for each in found if each.step not in self._found_corrupt or self._is_whole(each)]
            for candidate in self._retention.to_delete(whole, self._store.pinned()):
                self._store.delete(candidate.path.name)
        finally:
            self._store.sweep()

    def _is_whole(self, candidate: Candidate) -> bool:
        """Check whether a checkpoint that was found corrupt is valid now. If it is not, try to set it aside.

        It can be valid now if it was saved again but the save reported an error after the commit, or if the first read
        returned wrong bytes.
        """
        try:
            corruption = choice.corruption_of(candidate)
        except CheckpointError:  # not readable now; the next save checks it again
            return False
        if corruption is None:
            self._found_corrupt.discard(candidate.step)
            return True
        self.set_aside(candidate.step, corruption)
        return False

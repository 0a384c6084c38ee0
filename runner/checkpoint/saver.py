"""The steps of a save, taken by all ranks together: stage, write, commit, and delete what need not be kept."""

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
        tensors: those of which this rank writes a chunk, by flat name.
        copy: what they are copies in, if they are.
        state: this rank's train state.
        plan: which rank writes which chunk.
        metric: what "best" is judged by.
    """

    step: int
    tensors: Tensors
    state: TrainState
    plan: writer.WritePlan
    metric: float | None
    copy: Copy | None = None
    error: Exception | None = None

    def complete(self) -> None:
        """Make the rest of the copies; what goes wrong is raised by `Saver.commit`, on every rank."""
        try:
            if self.copy is not None:
                self.copy.complete()
        except Exception as error:  # noqa: BLE001 whatever it is, the other ranks must learn of it
            self.error = error


class Saver:
    """Stages and commits saves; raises whatever goes wrong.

    Args:
        store: where the checkpoints are.
        world: ranks with a group of their own, since `commit` may run in a background thread.
        fingerprint: what a run must agree in to load the checkpoints.
        retention: which checkpoints to keep.
        fence: this attempt's.
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
        self._found_corrupt = set[int]()  # steps of checkpoints that this attempt set aside, or could not

    def set_aside(self, step: int, corruption: str) -> None:
        """On rank 0: set a corrupt checkpoint aside; where the disk refuses that, `delete_old` looks at it again.

        Raises:
            SupersededError: a newer attempt holds the lease; nothing was changed.
        """
        self._found_corrupt.add(step)
        self._store.set_aside(step_name(step), "corrupt", corruption)

    def sweep(self) -> None:
        """On rank 0, before a save or load: remove what killed or failed saves left behind.

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
        """Plan the save and snapshot the train state.

        Args:
            step: completed optimizer steps.
            model: the model.
            optimizer: its optimizer, if it has one.
            train_state: from `build_train_state`.
            metric: what "best" is judged by.
            averaged: the average of its weights, if it has one.
            copy: copy the tensors too, so that training may continue before `commit`.
            copy_later: some of that may be left to `PendingSave.complete`; see `copying`.

        Raises:
            CheckpointError: the optimizer holds parameters that are not in the model, or the train state lacks an
                entry, is of another step, or contains what could not be loaded safely.
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
        """After the forward and backward passes that follow a save whose copies might wait."""
        if pending.copy is not None:
            self._buffers.observe(pending.copy)

    def commit(self, pending: PendingSave) -> Manifest | None:
        """Write on all ranks, commit on rank 0.

        Returns:
            None if the step was committed before.

        Raises:
            SupersededError: a newer attempt holds the lease; nothing was committed.
            Exception: the error of the lowest failing rank; nothing was committed.
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
            if isinstance(error, OSError):  # on every rank; a newer attempt has removed the directory, perhaps
                world.run_on_main(self._fence.check)
            raise

    def _write(self, new: Writer, pending: PendingSave) -> dict[str, FileRecord]:
        """Write the tensors of this rank. Those of rank 0 become durable with the files that it adds."""
        if pending.error is not None:
            if pending.copy is not None:
                self._buffers.never_copy_later(pending.copy.unstable)
            raise pending.error
        records = writer.write_tensors(new, self._world.rank, pending.plan, pending.tensors)
        if not self._world.is_main:
            new.sync()
        return records

    def _begin(self, save: Save, at: Stored) -> Path | None:
        """Begin a save, and return its place; None if a valid checkpoint of this step exists."""
        self.sweep()
        if self._make_room(at):
            return None
        save.begin()
        return save.path

    def _make_room(self, at: Stored) -> bool:
        """Set aside what is in the way; True if it is a valid checkpoint of this step, which is kept.

        Raises:
            CheckpointError: it is not of this runner and so is not touched, or it cannot be judged.
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
        """Rank 0's train state, with what differs between ranks from all of them."""
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
        """On rank 0, after the commit of `step`: delete what retention does not keep.

        Only up to that step, and counted from there: this attempt resumed below whatever is above it, which is corrupt
        and could not be set aside. It must not be kept instead of what is whole, so once it is below, that is tried
        again, and it is not counted either way.

        Raises:
            SupersededError: a newer attempt holds the lease.
            OSError, CheckpointError: the file system refused.
        """
        try:
            found = [each for each in choice.candidates(self._store) if each.step <= step]
            whole = [each for each in found if each.step not in self._found_corrupt or self._is_whole(each)]
            for candidate in self._retention.to_delete(whole, self._store.pinned()):
                self._store.delete(candidate.path.name)
        finally:
            self._store.sweep()

    def _is_whole(self, candidate: Candidate) -> bool:
        """Whether a checkpoint that was found corrupt is whole after all; otherwise it is set aside, if possible.

        It may have been saved again, and only the answer of the disk was an error; or it was misread.
        """
        try:
            corruption = choice.corruption_of(candidate)
        except CheckpointError:  # it cannot be read now: the next save looks again
            return False
        if corruption is None:
            self._found_corrupt.discard(candidate.step)
            return True
        self.set_aside(candidate.step, corruption)
        return False

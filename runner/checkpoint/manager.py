"""Saves and loads checkpoints: asynchronously, atomically, and never anything that does not verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from runner.checkpoint import manifest as manifests
from runner.checkpoint import store, writer
from runner.checkpoint.archive import TRAIN_STATE, Archive, load_train_state
from runner.checkpoint.background import Background
from runner.checkpoint.commit import Transaction, write_file
from runner.checkpoint.compatible import check_fingerprint, check_model, check_optimizer
from runner.checkpoint.exchange import Exchange
from runner.checkpoint.loading import load_model, load_optimizer
from runner.checkpoint.manifest import VERSION, DamagedError, Manifest
from runner.checkpoint.migrations import migrate
from runner.checkpoint.staging import HostBuffers, Tensors, collect, model_state, snapshot
from runner.checkpoint.state import TrainState, rng_for_rank
from runner.checkpoint.store import Candidate, Info, Retention
from runner.errors import CheckpointError, SupersededError, UserError


class SaveCost(TypedDict):
    """What a save cost: seconds that training stood still, seconds until it was committed, bytes."""

    step: int
    stall_s: float
    write_s: float
    bytes: int


@dataclass
class _Job:
    """One save on its way to the disk."""

    step: int
    tensors: Tensors
    state: TrainState
    plan: writer.Plan
    metric: float | None
    begun: float


class TrainStateManager:
    """The checkpoints of one run.

    Made on every rank at the same time (with several ranks it makes a gloo group), and `save` and `load`
    are called on every rank at the same step.

    Args:
        directory: where the checkpoints are; made at the first save.
        fingerprint: what a run must agree in to load them (JSON values); parts that a loading run does not
            name are not compared.
        keep_last, keep_every_steps, keep_best: see `Retention`; the newest is always kept.
        mode: `async` copies in memory and writes in the background, one save at a time; `sync` returns
            when it is committed.
        check_fence: called (on rank 0) before anything is made final; raises SupersededError.
        fence: the number of this incarnation, for the names of temporary directories and the manifest.
        report: told, in one line each, about faults that training survives and checkpoints set aside.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        keep_last: int = 3,
        keep_every_steps: int | None = None,
        keep_best: int = 0,
        mode: str = "async",
        check_fence: Callable[[], None] | None = None,
        fence: int = 0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        _check_settings(keep_last, keep_every_steps, keep_best, mode)
        self.directory = Path(directory)
        self.fingerprint = dict(fingerprint or {})
        self.retention = Retention(keep_last, keep_every_steps, keep_best)
        self.mode = mode
        self.last_save: SaveCost | None = None
        self.last_error: str | None = None
        self._check_fence = check_fence
        self._fence = fence
        self._report = report or (lambda message: None)
        self._exchange = Exchange()
        self._buffers = HostBuffers()
        self._plan: writer.Plan | None = None
        self._background = Background()
        self._superseded: SupersededError | None = None
        self._committed: set[int] = set()
        self._swept = False

    def warm_up(self) -> None:
        """Import what the first save needs; call it in a background thread after the first step."""
        self._background.start()
        writer.warm_up()

    @property
    def in_flight(self) -> bool:
        """Whether a save is being written in the background."""
        return self._background.busy

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        train_state: Mapping[str, Any],
        *,
        metric: float | None = None,
        wait: bool = False,
    ) -> bool:
        """Save the state after `step` complete steps.

        A save that is still being written is awaited first: there is never more than one, and which steps
        are saved does not depend on the speed of the disk. A step that is committed already is left as it
        is. A file system that refuses is reported, and training goes on.

        Args:
            train_state: from `build_train_state`; each rank passes its own.
            metric: what "best" is judged by; lower is better.
            wait: return only when it is committed (before leaving, say).

        Returns:
            False if it is known not to be committed: see `last_error`.

        Raises:
            SupersededError: a newer incarnation holds the run; nothing was made final.
            CheckpointError: the optimizer holds parameters that are not the model's, or the train state
                holds what could not be loaded safely.
        """
        begun = time.perf_counter()
        self.wait()
        if step in self._committed:
            return True
        job = self._stage(step, model, optimizer, train_state, metric, begun, copy=self.mode == "async" and not wait)
        self.last_save = SaveCost(step=step, stall_s=time.perf_counter() - begun, write_s=0.0, bytes=0)
        if self.mode == "async" and not wait:
            self._background.submit(lambda: self._write(job))
            self.last_save["stall_s"] = time.perf_counter() - begun
            return True
        self._write(job)
        self.last_save["stall_s"] = time.perf_counter() - begun
        self._raise_if_superseded()
        return step in self._committed

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            SupersededError: a newer incarnation holds the run.
        """
        self._background.join()
        self._raise_if_superseded()

    def settle(self) -> None:
        """Return when no save is in flight, whatever became of it: before the lease or the process group is left."""
        self._background.join()

    def newest(self) -> Info | None:
        """The newest checkpoint that verifies (every byte is read); changes nothing.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            CheckpointError: there are some and none can be used.
        """
        return store.newest(self.directory)

    def load(self, model: nn.Module, optimizer: Optimizer | None = None) -> TrainState | None:
        """Load the newest checkpoint that verifies into `model` and `optimizer`, in place.

        Damaged ones above it are set aside as `….corrupt` and reported.

        Returns:
            Its train state with this rank's `rng`, for `restore_train_state`; None if there is no
            checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints and none verifies; or the newest does not fit this run,
                is of an unknown format, or holds what might run code. Nothing was changed then.
        """
        self.wait()
        self._sweep()
        info = self._choose()
        if info is None:
            return None
        where = f"checkpoint {info.path}"
        state, archive = self._exchange.together(lambda: self._open(info))
        with archive:
            self._exchange.together(lambda: self._check_fit(archive, state, model, optimizer, where))

            def apply() -> None:
                load_model(archive, model, model_state(model)[0], state.get("model_extra", {}))
                if optimizer is not None:
                    load_optimizer(archive, model, optimizer, state["optimizer"])

            self._exchange.together(apply)
        self._committed.add(info.step)
        for key in ("version", "optimizer", "model_extra"):
            state.pop(key, None)
        if "rng_by_rank" in state:
            state["rng"] = rng_for_rank(state["rng_by_rank"], self._exchange.rank)
        return state

    # Loading

    def _choose(self) -> Info | None:
        """The newest that verifies, the files shared out over the ranks; damaged ones are set aside."""
        exchange = self._exchange
        found = exchange.together(lambda: store.candidates(self.directory), only_main=True)
        faults = []
        for candidate in found:
            fault = self._fault(candidate)
            if fault is None and candidate.manifest is not None:
                return Info(candidate.path, candidate.manifest)
            faults.append(f"{candidate.path.name}: {fault}")
            if exchange.is_main:
                self._set_aside(candidate.path, str(fault))
        if found:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used ({'; '.join(faults)}); restore one from a copy, "
                "or remove the directory to start again from step 0"
            )
        exchange.together(lambda: store.newest(self.directory), only_main=True)
        return None

    def _fault(self, candidate: Candidate) -> str | None:
        """What is wrong with a candidate, agreed by all ranks, each of which reads some of the files."""
        exchange, manifest = self._exchange, candidate.manifest
        if manifest is None:
            return candidate.fault

        def check() -> str | None:
            try:
                manifests.verify(candidate.path, manifest, exchange.rank, exchange.world)
            except DamagedError as damage:
                return str(damage)
            return None

        faults = exchange.gather(exchange.together(check))
        return exchange.broadcast(next((fault for fault in faults if fault is not None), None))

    def _set_aside(self, path: Path, fault: str) -> None:
        try:
            target = store.set_aside(path)
            self._report(
                f"checkpoint {path.name} is damaged ({fault}); set aside as {target.name}, using the one before"
            )
        except OSError as error:
            self._report(f"checkpoint {path.name} is damaged ({fault}) and cannot be set aside ({error.strerror})")

    def _open(self, info: Info) -> tuple[TrainState, Archive]:
        where = f"checkpoint {info.path}"
        try:
            state = migrate(load_train_state(info.path))
        except KeyError as error:
            raise CheckpointError(f"{where}: its train state lacks {error}") from error
        check_fingerprint(info.manifest.fingerprint, self.fingerprint, where)
        if state.get("step") != info.step:
            raise CheckpointError(f"{where}: the manifest says step {info.step}, the train state {state.get('step')}")
        return state, Archive(info.path, info.manifest)

    def _check_fit(
        self, archive: Archive, state: TrainState, model: nn.Module, optimizer: Optimizer | None, where: str
    ) -> None:
        check_model(archive, model_state(model)[0], where)
        if optimizer is not None:
            check_optimizer(state.get("optimizer"), optimizer, collect(model, optimizer).plain["optimizer"], where)

    # Saving

    def _stage(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        train_state: Mapping[str, Any],
        metric: float | None,
        begun: float,
        copy: bool,
    ) -> _Job:
        """Plan, and copy if training is to go on meanwhile."""
        collected = collect(model, optimizer)
        signature = writer.signature_of(collected.tensors)
        if self._plan is None or self._plan.signature != signature:
            self._plan = writer.make_plan(collected, signature, self._exchange)
        names = self._plan.names
        own = {name: tensor for name, tensor in collected.tensors.items() if name in names}
        state = snapshot({**train_state, **collected.plain, "version": VERSION})
        if copy:
            own = self._buffers.copy(own)
        return _Job(step, own, state, self._plan, metric, begun)

    def _write(self, job: _Job) -> None:
        """Commit a save and tidy up; faults are reported, never raised."""
        try:
            manifest = self._commit(job)
            self._committed.add(job.step)
            if manifest is not None and self.last_save is not None:
                self.last_save |= {"bytes": manifest.size, "write_s": time.perf_counter() - job.begun}
            self.last_error = None
        except SupersededError as error:
            self._superseded = error
            self.last_error = str(error)
        except Exception as error:  # noqa: BLE001 - no fault of a save may end the training
            self._fail(
                f"step {job.step} could not be saved ({_told(error)})",
                "; training goes on and the next save tries again",
            )
            return
        if self._exchange.is_main and self._superseded is None:
            self._retain()

    def _commit(self, job: _Job) -> Manifest | None:
        """All ranks write; rank 0 commits. None if the step was there already."""
        exchange = self._exchange
        transaction = Transaction(self.directory / store.step_name(job.step), self._fence, self._check_fence)
        directory = exchange.together(lambda: self._begin(transaction), only_main=True)
        if directory is None:
            return None
        try:
            files, places = exchange.together(
                lambda: writer.write_pieces(directory, exchange.rank, job.plan, job.tensors)
            )
            written = exchange.gather((files, places))
            state = self._gathered(job.state)

            def finish() -> Manifest:
                return self._finish(transaction, job, state, written)

            return exchange.together(finish, only_main=True)
        except BaseException:
            if exchange.is_main:
                transaction.abort()
            raise

    def _begin(self, transaction: Transaction) -> Path | None:
        """Make rank 0's temporary directory; None if a whole checkpoint of this step is there already."""
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._sweep_now()
        present = [c for c in store.candidates(self.directory) if c.path == transaction.final]
        for candidate in present:
            fault = store.fault_of(candidate)
            if fault is None:
                return None
            self._set_aside(candidate.path, fault)
        transaction.begin()
        return transaction.path

    def _gathered(self, state: TrainState) -> TrainState:
        """Rank 0's train state with what differs between ranks from all of them."""
        parts = self._exchange.gather((state.get("rng"), state.get("dataloader")))
        gathered = dict(state)
        if "rng" in state:
            gathered["rng_by_rank"] = [rng for rng, _ in parts]
        if "dataloader" in state and len(parts) > 1:
            gathered["dataloader_by_rank"] = [loader for _, loader in parts]
        return gathered

    def _finish(
        self,
        transaction: Transaction,
        job: _Job,
        state: TrainState,
        written: list[tuple[dict[str, Any], list[Any]]],
    ) -> Manifest:
        files = {name: record for records, _ in written for name, record in records.items()}
        places = [place for _, own in written for place in own]
        files[".metadata"] = writer.write_metadata(transaction.path, job.plan, places)
        files[TRAIN_STATE] = write_file(
            transaction.path / TRAIN_STATE,
            lambda file: torch.save(state, file),  # type: ignore[arg-type]
        )
        manifest = Manifest(
            step=job.step,
            files=files,
            fence=self._fence,
            fingerprint=self.fingerprint,
            metric=None if job.metric is None else float(job.metric),
            world_size=self._exchange.world,
            created=time.time(),
        )
        transaction.commit(manifest)
        return manifest

    def _retain(self) -> None:
        """Delete what retention does not keep: only after the new one is committed."""
        try:
            for candidate in self.retention.doomed(store.candidates(self.directory)):
                if self._check_fence is not None:
                    self._check_fence()
                store.delete(candidate.path, f"{self._fence}")
        except SupersededError as error:
            self._superseded = error
        except (OSError, CheckpointError) as error:
            self._fail(f"old checkpoints could not be removed ({_told(error)}); they stay until the next save")

    # Both

    def _sweep(self) -> None:
        self._exchange.together(self._sweep_now, only_main=True)

    def _sweep_now(self) -> None:
        """Once, and before the first save of this process: whatever is there is somebody else's."""
        if not self._swept:
            store.sweep(self.directory, self._report)
            warning = store.loose_modes(self.directory)
            if warning is not None:
                self._report(warning)
            self._swept = True

    def _fail(self, message: str, outlook: str = "") -> None:
        self.last_error = message
        if self._exchange.is_main:
            self._report(message + outlook)

    def _raise_if_superseded(self) -> None:
        if self._superseded is not None:
            raise self._superseded


def _told(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _check_settings(keep_last: int, keep_every_steps: int | None, keep_best: int, mode: str) -> None:
    if keep_last < 1:
        raise UserError(f"checkpoint.keep_last={keep_last}: give 1 or more; the newest one is always kept")
    if keep_every_steps is not None and keep_every_steps < 1:
        raise UserError(f"checkpoint.keep_every_steps={keep_every_steps}: give 1 or more, or null for none")
    if keep_best < 0:
        raise UserError(f"checkpoint.keep_best={keep_best}: give 0 or more")
    if mode not in ("async", "sync"):
        raise UserError(f"checkpoint.mode={mode!r}: give 'async' or 'sync'")

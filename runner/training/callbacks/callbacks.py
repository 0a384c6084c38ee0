"""Call callbacks between steps. They are user code that observes training, logs values and may have a state.

Callbacks run on rank 0. With strategy=fsdp they run on every rank, because a forward pass needs all ranks. They cannot
affect the random generators used in training: during a call, the generators are seeded from seed, step, callback and
method, and they are restored afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from exactdata import generators
from runner.config.schema import CallbackFailure, Config, Strategy
from runner.config.targets import CHANGES_TRAINING
from runner.errors import CallbackError, PeerError, SupersededError, UserError
from runner.metrics.media import Media, file_name, png
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.distributed import World
from runner.training.callbacks.hook import MAY_STOP, METHODS, Failure, Hook, failure_of, make_hook, restore_hook
from runner.training.ranks.peers import peer_errors
from runner.training.records.recorder import Recorder
from runner.training.records.run_state import RunState
from runner.training.step.tasks import RESERVED as STEP_KEYS

# Keys that the runner uses in its records, including timings.jsonl and keys that only some records have.
RESERVED = frozenset(
    (
        *STEP_KEYS,
        *"loss loss_by_source eval_loss time callback samples_per_s tokens_per_s save".split(),
        *"step_s data_wait_s compute_s communication_s callbacks_s memory_bytes gpu_memory_bytes".split(),
    )
)

_log = logging.getLogger(__name__)


class Context:
    """The argument passed to a callback's method. It is valid until the method returns.

    Attributes:
        model: the config's model, without the wrapper for several ranks.
        step: number of completed steps.
        run_dir: the run directory.
        device: device of the model.
    """

    def __init__(
        self, owner: Callbacks, step: int, record: dict[str, Any], values: dict[str, Any], name: str | None = None
    ) -> None:
        self.model: nn.Module = owner.model
        self.step = step
        self.run_dir: Path = owner.run.path
        self.device: torch.device = owner.device
        self._owner = owner
        self._record = record
        self._values = values
        self._name = name  # name of the callback if the method may end the run, otherwise None
        self._valid = True

    @property
    def config(self) -> dict[str, Any]:
        """Return a copy of the run's config as plain values."""
        return deepcopy(self._owner.config)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Return the read-only record of this step or evaluation so far. In other methods, return the last record."""
        return MappingProxyType(deepcopy(self._record))

    def log(self, name: str, value: float) -> None:
        """Log a number as `name` in the record of this step or evaluation.

        Raises:
            UserError: the record already has this name, or the value is not a number or is infinite.
        """
        self._check_valid("log")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UserError(f"log({name!r}, …): the name must be a printable text")
        if name in self._record or name in self._values or name in RESERVED:
            raise UserError(f"log({name!r}, …): the record has {name!r} already: choose another name")
        self._values[name] = _number(name, value)

    def stop(self, reason: str) -> None:
        """End the run after this step as if it were the last step: save, evaluate and mark the run as finished.

        The run stays finished until you change the callback's options or remove it. Only `on_step_end` and
        `on_evaluation` may call this, because kills affect when the other methods run.

        Args:
            reason: reason that `runner status`, the report and the loggers show.

        Raises:
            UserError: it is called from a different method or before the first step, or `reason` is not a string.
        """
        self._check_valid("stop")
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f"stop({reason!r}): pass the reason as a text")
        if self._name is None or self.step == 0:
            raise UserError("stop is for on_step_end and on_evaluation, after the first step or later")
        self._owner.stop_asked = self._owner.stop_asked or (self._name, " ".join(reason.split()))

    def log_image(self, name: str, image: Any) -> None:
        """Write an image to a file in the run directory's artifacts/, and pass it to loggers that support images.

        Args:
            name: name of the image. The file is NAME-STEP.png.
            image: see `runner.metrics.media.IMAGES`.

        Raises:
            UserError: the name or the image is invalid.
        """
        self._check_valid("log_image")
        path = self._owner.run.artifacts / file_name(name, self.step, "png")
        self._owner.recorder.media(Media(self.step, name, path, png(image)))

    def log_text(self, name: str, text: str) -> None:
        """Write a text to a file in the run directory's artifacts/, and pass it to loggers that support text.

        Args:
            name: name of the text. The file is NAME-STEP.txt.
            text: the text.

        Raises:
            UserError: the name is invalid, or the text is not a str.
        """
        self._check_valid("log_text")
        if not isinstance(text, str):
            raise UserError(f"log_text({name!r}, …) is passed a {type(text).__name__}: pass a str")
        path = self._owner.run.artifacts / file_name(name, self.step, "txt")
        self._owner.recorder.media(Media(self.step, name, path, text))

    def _check_valid(self, method: str) -> None:
        if not self._valid:
            raise UserError(f"{method} was called after the method of the callback had returned: call it before")


def _number(name: str, value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"log({name!r}, …) is passed a {type(value).__name__}: pass a number")
    with suppress(OverflowError):  # the integer is too large for a float
        if not math.isinf(value):
            return int(value) if isinstance(value, int) else float(value)
    raise UserError(f"log({name!r}, …) is passed {float('inf')}: pass a number that is finite or nan")


@dataclass
class Callbacks:
    """The callbacks of an attempt. Without callbacks, each method returns immediately."""

    run: RunDir
    model: nn.Module
    device: torch.device
    config: dict[str, Any]
    world: World = field(default_factory=World)
    everywhere: bool = False
    """True if every rank calls the callbacks. A failure on one rank is then a failure on all ranks."""
    stop: bool = False
    """True if a callback that raises ends the run. Otherwise, the callback is skipped from then on."""
    recorder: Recorder = field(default_factory=Recorder)
    seconds: Callable[[float], None] = lambda seconds: None
    hooks: list[Hook] = field(default_factory=list)
    stop_asked: tuple[str, str] | None = None
    """The callback that requests the end of the run, and its reason."""
    _last: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def none() -> Callbacks:
        """Create an instance without callbacks."""
        return Callbacks(RunDir(Path()), nn.Module(), torch.device("cpu"), {})

    @staticmethod
    def open(
        config: Config, world: World, run: RunDir, model: nn.Module, device: torch.device, saved: RunState | None
    ) -> Callbacks:
        """Create the config's callbacks and restore their states from `saved`.

        Raises:
            UserError: a callback cannot be created, has no valid method or a misspelt one, or has a state that cannot
                be saved.
        """
        everywhere = config.strategy is Strategy.fsdp and world.size > 1
        stop = config.train.on_callback_error is CallbackFailure.stop
        opened = Callbacks(run, model, device, _plain_config(config), world, everywhere, stop)
        if everywhere or world.is_main:
            nodes = {name: node for name, node in config.callbacks.items() if node is not None}
            if nodes:
                opened._create(nodes, saved)
        return opened

    def __post_init__(self) -> None:
        self._of: dict[str, list[Hook]] = {method: [] for method in (*METHODS, "state_dict")}
        self._modules: list[nn.Module] = []

    def _create(self, nodes: dict[str, Any], saved: RunState | None) -> None:
        self._modules = list(self.model.modules())
        with generators.lent():
            for name, node in nodes.items():
                generators.seed(generators.seed_of(self.config["seed"], name), gpus=True)
                hook = make_hook(name, node)
                if saved is not None:
                    restore_hook(hook, saved)
                self.hooks.append(hook)
                if hook.dropped and self.world.is_main:
                    _log.warning(
                        f"callbacks.{name} is left out: it raised in this run, and neither its code nor its options "
                        f"have changed since; traceback in {self.run.callback_errors}"
                    )
                for method in hook.methods & self._of.keys() if not hook.dropped else ():
                    self._of[method].append(hook)

    def has(self, method: str) -> bool:
        """Check whether any callback has this method."""
        return bool(self._of[method])

    def start(self, step: int) -> None:
        """Call `on_start` when training begins or resumes at `step`."""
        self._call_and_record("on_start", step)

    def step_end(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        """Call `on_step_end` after a step, in training mode. Return `record` with the logged values added."""
        self._last = record
        if self._of["on_step_end"]:
            began = clock.perf_counter()
            self._call("on_step_end", step, record, record)
            self.seconds(clock.perf_counter() - began)
        return record

    def evaluated(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        """Call `on_evaluation` after an evaluation. Return `record` with the logged values added."""
        self._call("on_evaluation", step, record, record)
        self._last = {**self._last, **record}
        return record

    def saved(self, step: int) -> None:
        """Call `on_save` when a save was passed to the writer thread. An attempt's last save is already committed."""
        self._call_and_record("on_save", step)

    def end(self, step: int) -> None:
        """Call `on_end` when the run has completed its last step."""
        self._call_and_record("on_end", step)

    def keep(self, state: RunState) -> RunState:
        """Return `state` with the callbacks' states added."""
        if not self.hooks:
            return replace(state, callbacks={}, dropped_callbacks={})
        with generators.lent():
            for hook in list(self._of["state_dict"]):
                self._attempt(hook, "state_dict", hook.refresh)
        return replace(
            state,
            callbacks={hook.name: hook.state for hook in self.hooks if hook.keeps_state and hook.state is not None},
            dropped_callbacks={hook.name: hook.code for hook in self.hooks if hook.dropped},
        )

    def _call_and_record(self, method: str, step: int) -> None:
        """Call `method` on every callback. Log its values to timings.jsonl.

        The number of calls depends on kills, so metrics.jsonl must not contain the values.
        """
        values: dict[str, Any] = {}
        self._call(method, step, self._last, values)
        if values:
            self.recorder.callback(step, method, values)

    def _call(self, method: str, step: int, record: dict[str, Any], values: dict[str, Any]) -> None:
        hooks = self._of[method]
        if not hooks:
            return
        with generators.lent():
            for hook in list(hooks):
                generators.seed(generators.seed_of(self.config["seed"], hook.name, method, step), gpus=True)
                context = Context(self, step, record, values, hook.name if method in MAY_STOP else None)
                with self._observing(evaluating=method != "on_step_end"), self._unchanged(hook, method, step):
                    self._attempt(hook, method, lambda: getattr(hook.callback, method)(context))  # noqa: B023
                context._valid = False

    @contextmanager
    def _unchanged(self, hook: Hook, method: str, step: int) -> Iterator[None]:
        """Warn once about a callback that changes weights without declaring it. Changes via `.data` go unnoticed."""
        versions = [] if hook.changes_training else [parameter._version for parameter in self.model.parameters()]
        yield
        if versions and versions != [parameter._version for parameter in self.model.parameters()]:
            hook.changes_training = True
            if self.world.is_main:
                _log.warning(
                    f"callbacks.{hook.name}.{method} changed weights at step {step}: set {CHANGES_TRAINING} = True in "
                    "its class, so that it belongs to what identifies the run"
                )

    @contextmanager
    def _observing(self, evaluating: bool) -> Iterator[None]:
        """Disable gradients in the `with` block, and restore the mode of each module afterwards."""
        modes = [module.training for module in self._modules]
        if evaluating:
            self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in zip(self._modules, modes, strict=True):
                if module.training is not mode:
                    module.training = mode

    def _attempt(self, hook: Hook, method: str, action: Callable[[], None]) -> None:
        """Run `action`. If it raises on any participating rank, report the error, then drop the callback or stop.

        Raises:
            CallbackError: `action` raised, and train.on_callback_error=stop is set.
        """
        failure = None
        try:
            with peer_errors(self.world) if self.everywhere else nullcontext():
                action()
        except (SupersededError, PeerError):
            raise  # these errors concern the attempt, not the callback
        except (Exception, SystemExit) as error:  # noqa: BLE001 a user's code may raise anything
            failure = failure_of(hook, method, error)
        failures = self.world.gather(failure) if self.everywhere else [failure]
        found = next((each for each in failures if each is not None), None)
        if found is not None:
            self._drop(hook, found)

    def _drop(self, hook: Hook, failure: Failure) -> None:
        if self.world.is_main:
            with suppress(OSError):  # the report is not essential
                self.run.check_guard()
                with files.open_append(self.run.callback_errors) as file:
                    file.write(f"{failure.summary}\n{failure.details}\n".encode())
        where = f"traceback in {self.run.callback_errors}"
        if self.stop:
            error = CallbackError(f"{failure.summary}; train.on_callback_error=stop ends the run; {where}")
            error.everywhere = self.everywhere
            raise error
        hook.dropped = True
        for hooks in self._of.values():
            if hook in hooks:
                hooks.remove(hook)
        if self.world.is_main:
            _log.warning(f"{failure.summary}; it is left out from here on; {where}")


def _plain_config(config: Config) -> dict[str, Any]:
    """Return the config as plain values. Enums are replaced by their names."""

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value.name if isinstance(value, Enum) else value for key, value in pairs}

    return asdict(config, dict_factory=plain)

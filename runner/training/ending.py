"""End a run before its last step, at the request of early stopping or a callback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from runner.config.early_stopping import EarlyStoppingConfig, stopped
from runner.config.finished import options_of
from runner.system.distributed import World
from runner.training.callbacks.callbacks import Callbacks
from runner.training.evaluation.evaluation import check_name


@dataclass(frozen=True)
class EarlyEnd:
    """The reason why a run ends before its last step.

    Attributes:
        reason: sentence that is shown to the user.
        callback: name of the callback that requested the end, or None for early stopping.
        options: digest of the callback's options in the config.
    """

    reason: str
    callback: str | None = None
    options: str | None = None

    def to_json(self) -> dict[str, str]:
        """Return the entry for the completion mark or a checkpoint. Fields that are None are omitted."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass
class Ending:
    """Decide whether the run ends. Rank 0 decides for all ranks.

    Args:
        options: settings of early stopping.
        nodes: config of each callback, by name.
        callbacks: the callbacks of this attempt.
        evaluations: on rank 0, the evaluation records so far.
        saved: the end that a callback had requested when the resumed checkpoint was saved. Empty if there was no
            request.
    """

    options: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    nodes: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callbacks = field(default_factory=Callbacks.none)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    saved: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_new, self._is_complete = True, False
        # The callback is not called again at this step. Drop its request if the callback was removed or has new
        # options.
        self._asked = EarlyEnd(**self.saved) if self.saved else None
        if self._asked and self._asked.options != options_of(self.nodes.get(str(self._asked.callback))):
            self._asked = None

    @property
    def asked(self) -> EarlyEnd | None:
        """Return the end that a callback on this rank requests, now or when the checkpoint was saved."""
        if self.callbacks.stop_asked is None:
            return self._asked
        name, reason = self.callbacks.stop_asked
        return EarlyEnd(f"callbacks.{name}: {reason}", name, options_of(self.nodes[name]))

    def evaluated(self, record: dict[str, Any], complete: bool) -> None:
        """Add the record of an evaluation. Every rank must call this.

        Args:
            record: results of the evaluation. On rank 0, they include the values that callbacks logged.
            complete: True if every set was evaluated.
        """
        if self.options.is_set:
            self.evaluations.append(record)
        self._is_new, self._is_complete = True, complete

    def decide(self, step: int, world: World) -> EarlyEnd | None:
        """Return the reason why the run ends at `step`, or None if it continues. All ranks get the same result.

        Raises:
            UserError: an evaluation lacks the metric that early stopping monitors.
        """
        found: EarlyEnd | None = None
        if self.options.is_set and self._is_new:
            found = world.run_on_main(self._by_evaluations)
        self._is_new = self._is_complete = False
        if found is None and self.nodes:
            asked = self.asked
            if int(world.sum(torch.tensor([int(asked is not None)]))[0]):
                found = next(each for each in world.gather(asked) if each is not None)
        return found if step else None

    def _by_evaluations(self) -> EarlyEnd | None:
        metric, last = self.options.metric, self.evaluations[-1] if self._is_complete else {}
        if last:
            check_name("early_stopping.metric", str(metric), last)
        reason = stopped(self.options, self.evaluations)
        return None if reason is None else EarlyEnd(reason)

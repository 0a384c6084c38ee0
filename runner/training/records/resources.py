"""Where the time of a step goes, and how much memory the process takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from runner.system import clock, distributed, processes

T = TypeVar("T")


class StepMeter:
    """Adds up the seconds of steps; the figures are means over the steps since the last ones.

    `data_wait_s`: waiting for batches. `communication_s`: the runner's own collectives, which includes waiting for a
    slower rank. `callbacks_s`: in `on_step_end`, if there are callbacks. `compute_s`: the rest of `step_s`, with what
    DDP and FSDP exchange while they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._step_s = self._data_s = self._communication_s = self._callbacks_s = 0.0
        self._all_s = self._all_data_s = 0.0
        self._communicated = 0.0
        self._pending = [0.0, 0.0]  # of the step that is being made: waiting for data, in callbacks

    def begin(self, draw: Callable[[], T]) -> Callable[[], T]:
        """A step begins; `draw`, timed."""
        self._communicated = distributed.waited.seconds
        self._pending = pending = [0.0, 0.0]

        def timed() -> T:
            began = clock.perf_counter()
            try:
                return draw()
            finally:
                pending[0] += clock.perf_counter() - began

        return timed

    def callbacks(self, seconds: float) -> None:
        """So long took the callbacks of this step."""
        self._pending[1] += seconds

    def end(self, seconds: float) -> None:
        """The step took so long altogether."""
        data_s, callbacks_s = self._pending
        self._steps += 1
        self._step_s += seconds
        self._data_s += data_s
        self._callbacks_s += callbacks_s
        self._communication_s += distributed.waited.seconds - self._communicated
        self._all_s += seconds
        self._all_data_s += data_s

    @property
    def data_wait(self) -> float:
        """The share of all steps so far that was spent waiting for data."""
        return self._all_data_s / self._all_s if self._all_s else 0.0

    def take(self) -> dict[str, Any]:
        """The figures of the steps since the last call; seconds are means per step, bytes the peak so far."""
        count, self._steps = max(self._steps, 1), 0
        parts = {"data_wait_s": self._data_s, "communication_s": self._communication_s}
        if self._callbacks_s:
            parts["callbacks_s"] = self._callbacks_s
        compute_s = max(self._step_s - sum(parts.values()), 0.0)
        means = {"step_s": self._step_s, "compute_s": compute_s, **parts}
        self._step_s = self._data_s = self._communication_s = self._callbacks_s = 0.0
        figures: dict[str, Any] = {name: seconds / count for name, seconds in means.items()}
        figures["memory_bytes"] = processes.peak_memory()
        if self._device.type == "cuda":
            figures["gpu_memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return figures

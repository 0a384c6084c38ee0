"""Measure the time that each part of a step takes, and the memory of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from runner.system import clock, distributed, processes

T = TypeVar("T")


class StepMeter:
    """Measure the seconds per step, and report means over the steps since the last report.

    `data_wait_s` is the time spent waiting for batches. `communication_s` is the time of the runner's collectives,
    including the wait for slower ranks. `callbacks_s` is the time in `on_step_end` of callbacks, if there are any.
    `compute_s` is the rest of `step_s`, including communication that DDP and FSDP overlap with computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._step_s = self._data_s = self._communication_s = self._callbacks_s = 0.0
        self._all_s = self._all_data_s = 0.0
        self._communicated = 0.0
        self._pending = [0.0, 0.0]  # seconds of this step so far: waiting for data, in callbacks

    def begin(self, draw: Callable[[], T]) -> Callable[[], T]:
        """Begin a step. Return `draw`, wrapped to measure its time."""
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
        """Add the seconds that callbacks took in this step."""
        self._pending[1] += seconds

    def end(self, seconds: float) -> None:
        """End the step, which took `seconds` in total."""
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
        """Return the share of all steps so far that was spent waiting for data."""
        return self._all_data_s / self._all_s if self._all_s else 0.0

    def take(self) -> dict[str, Any]:
        """Return mean seconds per step since the last call, and peak memory in bytes so far."""
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

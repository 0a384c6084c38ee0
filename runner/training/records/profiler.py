"""Profile the steps `train.profile=first:last` with torch.profiler, and write the trace."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from typing import Any

import torch

from runner.config.schema import Config, profiled_steps
from runner.errors import SupersededError
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.system import files
from runner.system.distributed import World

_log = logging.getLogger(__name__)


class Profiler:
    """Profile the steps from `first` to `last` that this attempt trains, and write a single trace.

    Args:
        steps: (first, last), counted from 1. If None, nothing is profiled, at no cost.
        run: the run directory. The lease is checked before the trace is written.
        name: file name of the trace in `run.profile`. chrome://tracing and Perfetto can open it.
        device: device of the model.
    """

    def __init__(self, steps: tuple[int, int] | None, run: RunDir, name: str, device: torch.device) -> None:
        self._first, self._last = steps or (0, -1)
        self._run = run
        self._path = run.profile / name
        self._device = device
        self._profile: Any = None
        self._step: ExitStack | None = None

    @staticmethod
    def open(
        config: Config, run: RunDir, world: World, log: AttemptLog | None, step: int, device: torch.device
    ) -> Profiler:
        """Profile the remaining steps of `train.profile`. The trace is named after the attempt."""
        steps = profiled_steps(config.train.profile or "")
        if steps is None or steps[1] <= step:
            return Profiler(None, run, "", device)
        attempt = world.broadcast(log.record["attempt"] if log else 0)
        return Profiler(steps, run, f"attempt{attempt}-rank{world.rank}.json", device)

    def begin(self, step: int) -> None:
        """Start profiling step number `step`, if it is among the profiled steps."""
        if not self._first <= step <= self._last:
            return
        if self._profile is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        self._step = ExitStack()
        self._step.enter_context(torch.profiler.record_function(f"step {step}"))

    def end(self, step: int) -> None:
        """Record the end of step number `step`. After the last profiled step, write the trace."""
        self._end_step()
        if step == self._last:
            self.close()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None

    def close(self) -> None:
        """Write the recorded trace. If this fails, report the error and continue training."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._end_step()
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        try:
            profile.stop()
            self._run.make_dirs(self._run.profile)
            with files.owned():
                profile.export_chrome_trace(str(temporary))
            files.rename(temporary, self._path)
        except SupersededError:  # the training thread detects this too
            return
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                files.remove(temporary)
            _log.warning(f"the profile could not be written to {self._path} ({error}); training continues")

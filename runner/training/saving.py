"""Create the objects that an attempt uses for saving: the checkpoint manager, the cadence, and the lease check."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from runner.checkpoint import TrainStateManager
from runner.checkpoint.cadence import AdaptiveInterval, Cadence
from runner.config.schema import Config
from runner.errors import UserError
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.time_account import lived_s
from runner.system import clock
from runner.training.data.epoch_steps import EpochSteps

LEASE_CHECK_S = 1.0

_log = logging.getLogger(__name__)


def make_manager(config: Config, run: RunDir, lease: Lease | None, fingerprint: dict[str, Any]) -> TrainStateManager:
    """Create the manager that saves and loads a run's checkpoints. It checks the lease before each change."""
    options = config.checkpoint
    return TrainStateManager(
        run.checkpoints,
        fingerprint=fingerprint,
        keep_last=options.keep_last,
        keep_every_steps=options.keep_every_steps,
        keep_best=options.keep_best,
        best_metric=options.best.metric,
        best_mode=options.best.mode.value,
        mode=options.mode.value,
        check_fence=lease.check_fence if lease else None,
        fence=lease.fence if lease else 0,
    )


def make_cadence(config: Config, log: AttemptLog | None, step: int, epochs: EpochSteps) -> Cadence:
    """Create the cadence of saves from `step` on. An adaptive cadence uses statistics of earlier attempts."""
    options = config.checkpoint
    adaptive = None
    if options.adaptive:
        adaptive = AdaptiveInterval(options.min_interval_s, options.max_interval_s)
        if log:
            ended = [(lived_s(line), line["cause"]) for line in log.earlier]
            adaptive.observe_attempts((seconds, cause) for seconds, cause in ended if seconds is not None)
    now = clock.monotonic()
    return Cadence(
        options.every_steps,
        options.every_minutes,
        every_epochs=options.every_epochs,
        completes=epochs.completes,
        adaptive=adaptive,
        start_step=step,
        now=now,
    )


def fence_check(lease: Lease | None) -> Callable[[], None]:
    """Return a function that checks, at most about once a second, whether a newer attempt holds the lease.

    A call costs almost nothing. Every commit checks the lease too.
    """
    last = clock.monotonic()

    def check() -> None:
        nonlocal last
        now = clock.monotonic()
        if lease is not None and now - last >= LEASE_CHECK_S:
            last = now
            with suppress(OSError):  # checked again a second later, and at every write
                lease.check_fence()

    return check


def check_beginning(config: Config, run: RunDir, log: AttemptLog | None) -> None:
    """Warn if a run restarts at step 0 because all its checkpoints were removed.

    Raises:
        UserError: the run is a branch. Only the command that begins the branch can copy the trunk's checkpoint again.
    """
    if config.fork.run is not None:
        raise UserError(
            f"{run.path} has lost its checkpoints: rerun the command that began this branch of {config.fork.run}, "
            f"which takes that of step {config.fork.step} over again"
        )
    earlier = log.earlier if log else []
    saved = max((attempt.get("checkpoint_step") or 0 for attempt in earlier), default=0)
    if saved:
        _log.warning(f"the checkpoint of step {saved} is gone from {run.checkpoints}: starting again at step 0")

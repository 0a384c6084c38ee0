"""Open a run's records at the step where an attempt begins, and report that step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from runner.config.plain_yaml import read_plain
from runner.config.schedule import unreached_phases
from runner.config.schema import Config
from runner.config.targets import instantiate
from runner.metrics import resume_records
from runner.metrics.lineage import Fork, Lineage
from runner.metrics.progress import ProgressBar
from runner.rundir.attempt_log import AttemptLog, insist
from runner.rundir.paths import RunDir
from runner.training.records.recorder import RunRecorder
from runner.training.records.resources import StepMeter

_log = logging.getLogger(__name__)


def open_recorder(
    run: RunDir,
    config: Config,
    log: AttemptLog,
    meter: StepMeter,
    step: int,
    evaluated: bool,
    trunk: RunDir | None,
    last_save: Callable[[], Mapping[str, Any] | None],
    add_evaluation: Callable[[dict[str, Any]], object],
) -> RunRecorder:
    """Truncate the metrics to `step`, then open them and the config's loggers.

    Args:
        run: the run directory.
        config: config of the run.
        log: the attempt log.
        meter: measures the time of steps.
        step: number of completed steps.
        evaluated: True if the metrics include the evaluation at `step`.
        trunk: run directory of the trunk, or None if the run is not a branch.
        last_save: function that returns the cost of the last save, or None.
        add_evaluation: function that adds a result to the results of `runner evaluate`.

    Raises:
        FileError: the disk fails repeatedly.
        SupersededError: a newer attempt holds the lease.
    """
    log.total = config.steps
    log.resumed(step)
    metrics, timings = insist(lambda: resume_records(run, step, evaluated), run.metrics)
    if metrics.reached < step:
        _log.warning(
            f"{run.metrics} ends at step {metrics.reached}, but the checkpoint is of step {step}: "
            "the records between are lost; the run continues"
        )
    recorder = RunRecorder(
        metrics=metrics,
        timings=timings,
        writers=[
            instantiate(f"logger.{name}", node, run, step, _log.warning)
            for name, node in config.logger.items()
            if isinstance(node, dict) and node.get("_target_")
        ],
        bar=ProgressBar(config.steps),
        log=log,
        meter=meter,
        last_save=last_save,
        add_evaluation=add_evaluation,
    )
    if recorder.writers:
        recorder.about(lineage(run, config, trunk, log.record["attempt"]))
    return recorder


def lineage(run: RunDir, config: Config, trunk: RunDir | None, attempt: int) -> Lineage:
    """Return the facts about a run that loggers show together with its metrics."""
    fork, best = config.fork, config.checkpoint.best
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        settings = read_plain(run.config)
    origin = Fork(trunk, fork.step, fork.digest or "") if trunk is not None and fork.step is not None else None
    return Lineage(settings, attempt, origin, {best.metric: best.mode.value} if best.metric else {})


def show_start(recorder: RunRecorder, config: Config, step: int, ranks: int) -> None:
    """Report the step at which the attempt begins, the number of ranks, and the steps that the attempt repeats."""
    log = recorder.log
    if config.train.epochs is not None:  # otherwise the command has already warned about them
        for message in unreached_phases(config.phases, config.steps):
            recorder.bar.say(f"warning: {message}")
    lost = log.earlier[-1].get("steps_lost") if log.earlier else 0
    repeated = f" (repeating {lost} steps that were not saved)" if lost else ""
    doing = "resuming" if step else "starting"
    if config.fork.begins_at(step):
        doing = f"branching off {config.fork.run}"
    before, shape = log.ranks_before, ""
    if ranks > 1 or before not in (None, 1):
        shape = f" on {ranks} rank{'s' if ranks > 1 else ''}"
        shape += f" ({before} before)" if before not in (None, ranks) else ""
    recorder.bar.say(f"{doing} at step {step} of {config.steps}{shape} in {log.run.path}{repeated}")

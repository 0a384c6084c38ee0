"""Read one run for a report: settings, metrics and attempts, without Hydra, torch or omegaconf."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from runner.config.identity import flatten
from runner.config.plain_yaml import read_plain
from runner.errors import RunDirError
from runner.report import goodput
from runner.report.series import Columns, Series, merged, read_series
from runner.rundir import trunk
from runner.rundir.artifacts import Artifact, artifacts
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.evaluations import results
from runner.rundir.lease import read_carried
from runner.rundir.paths import RunDir
from runner.rundir.provenance import code_facts, edits, environment_facts, object_in
from runner.rundir.time_account import latest
from runner.rundir.trust import reading
from runner.system import files

FINISHED = "finished"
NO_MODES: Mapping[str, str] = {}
MAX_ENDS = 100
RUNNING = ("running", "suspended", "ending")  # states in which a run's last steps may still be saved
# Numbers of a record that describe the training; they are no results by which runs are compared.
COUNTS = ("lr", "samples_seen", "tokens_seen", "grad_norm")
NESTED_COUNTS = ("sources/", "lr_by_optimizer/", "grad_norm_by_optimizer/")
MAX_NUMBER = 1e11  # in the attempt log; as seconds since 1970, in the year 5138
# Words in names of metrics of which higher, or lower, is better. For other metrics that is unknown.
HIGHER_IS_BETTER = (
    *("accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "reward", "return", "score", "bleu", "rouge"),
    *("r2", "psnr", "ssim", "iou", "dice", "map", "ndcg", "correct", "correlation", "auprc", "kappa"),
)
LOWER_IS_BETTER = (
    *("loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "wer", "cer", "bpb", "fid"),
    *("distance", "regret", "ece", "brier"),
)


@dataclass(frozen=True)
class Result:
    """The results of a metric. `best` and `best_step` are None if it was never finite, or cannot be ranked."""

    last: float
    best: float | None
    best_step: int | None


@dataclass
class RunResults:
    """The results of one run.

    Attributes:
        name: path below the report's directory.
        path: run directory.
        state: see `runner status`; `unreadable` with a reason if its records are malformed.
        settings: dotted key -> value of the frozen config.
        metrics: name -> result.
        series: every number by step, thinned.
        timings: the numbers of timings.jsonl by step, thinned.
        steps: number of steps so far.
        fork: for a branch, the name of its trunk's directory, and the step of the fork.
        trunk: for a branch, the present directory of its trunk.
        attempts: ended attempts, as in attempts.jsonl.
        under_way: an attempt without a recorded end, in the same form.
        status: contents of status.json.
        artifacts: images and texts that callbacks logged.
        code: facts that identify the code.
        environment: facts about software and hardware.
        diffs: digest -> uncommitted changes of the code.
        modes: `min` or `max` by metric, from the config or from the caller.
    """

    name: str
    path: Path
    state: str = ""
    reason: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Result] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    timings: dict[str, Series] = field(default_factory=dict)
    fork: tuple[str, int] | None = None
    trunk: Path | None = None
    attempts: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    under_way: dict[str, Any] | None = None
    steps: int = 0
    artifacts: list[Artifact] = field(default_factory=list)
    code: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    diffs: dict[str, str] = field(default_factory=dict)
    modes: dict[Any, Any] = field(default_factory=dict)

    @property
    def accounts(self) -> list[Mapping[str, Any]]:
        """Return all attempts, for `runner.report.goodput`."""
        last = [] if self.under_way is None else [self.under_way]
        if self.state in RUNNING:
            last = [goodput.all_kept(attempt) for attempt in last]
        return goodput.resumed([*self.attempts, *last])

    @property
    def ranks(self) -> list[int]:
        """Return the numbers of ranks of the attempts, in order; consecutive equal numbers are merged."""
        attempts = [*self.attempts, *([] if self.under_way is None else [self.under_way])]
        counts = [attempt["ranks"] for attempt in attempts if isinstance(attempt.get("ranks"), int)]
        return [count for count, _ in groupby(counts)]

    @property
    def seconds(self) -> dict[str, float]:
        """Return node seconds by bucket of `runner.report.goodput`."""
        return goodput.of_run(self.accounts)


def ends(runs: Iterable[RunResults]) -> list[int]:
    """Return the steps of the last values of finished runs' metrics: there, runs of other lengths are compared."""
    found = {int(run.series[name].steps[-1]) for run in runs if run.state == FINISHED for name in run.metrics}
    return sorted(found)[:MAX_ENDS]


def read_run(
    run: RunDir, root: Path, points: int, keep: Collection[int] = (), modes: Mapping[str, str] = NO_MODES
) -> RunResults:
    """Read the results of a run; `unreadable` if its directory has unexpected contents.

    Args:
        run: run directory.
        root: directory to which the run's name is relative.
        points: approximate number of points to keep of each series.
        keep: steps whose points are always kept.
        modes: `min` or `max` by metric, where neither the config nor the name shows which is better.
    """
    name = os.path.relpath(run.path, root)
    results = RunResults(name if name != "." else Path(os.path.abspath(run.path)).name, run.path)
    try:
        with reading(run):
            _fill(results, run, points, keep, modes)
    except RunDirError as error:
        results.state, results.reason = "unreadable", str(error)
    return results


def _fill(results: RunResults, run: RunDir, points: int, keep: Collection[int], modes: Mapping[str, str]) -> None:
    _fill_settings(results, run)
    results.modes = {**judges(results.settings), **modes}
    judged = results.modes
    series = _with_evaluations(read_series(run.metrics, is_shown), run)
    for name, one in series.items():
        results.steps = max(results.steps, int(one.steps[-1]))
        if is_metric(name):
            best = one.best(lower_is_better(name, judged)) if may_rank(name, judged) else None
            results.metrics[name] = Result(one.last, *(best or (None, None)))
    results.series = {name: one.thinned(points, keep) for name, one in series.items()}
    results.timings = {name: one.thinned(points) for name, one in read_series(run.timings).items()}
    results.attempts = [_possible(attempt) for attempt in ended_attempts(run)]
    results.status = _possible(files.read_object(run.status))
    current = files.read_object(run.attempt)
    if current and current.get("attempt") not in [attempt["attempt"] for attempt in results.attempts]:
        time = latest(current.get("attempt"), results.status, read_carried(run.lease))
        results.under_way = goodput.under_way(current, time, run.newest_step())
    results.artifacts = artifacts(run)
    _fill_code(results, run)


def _fill_code(results: RunResults, run: RunDir) -> None:
    code = files.read_object(run.code)
    last = results.attempts[-1] if results.attempts else results.under_way
    results.code, results.environment = code_facts(code), environment_facts(code, last or {})
    for described in object_in(code, "repositories").values():
        if isinstance(described, dict) and described.get("diff"):
            results.diffs[str(described.get("diff_digest"))] = str(described["diff"])


def _possible(record: Any) -> Any:
    """Return a record with null for each number that cannot be a time, a count or a duration."""
    if isinstance(record, dict):
        return {key: _possible(value) for key, value in record.items()}
    if isinstance(record, int | float) and not 0 <= record <= MAX_NUMBER:
        return None
    return record


def _fill_settings(results: RunResults, run: RunDir) -> None:
    """Read the settings, with one setting for all entries of `fork`, and find the trunk."""
    settings = flatten(read_plain(run.config))
    path, step = settings.get("fork.run"), settings.get("fork.step")
    elsewhere = ("fork.", "run.tags", "run.notes")
    plain = {key: value for key, value in settings.items() if not key.startswith(elsewhere)}
    changed = [f"{', '.join(map(str, one.get('changes') or []))} at step {one.get('step')}" for one in edits(run.path)]
    plain["edited"] = "; ".join(changed) or None
    results.settings = {**plain, "fork": None}
    if path is not None and step is not None:
        name = Path(str(path)).name
        results.settings["fork"], results.fork = f"{name}@{step}", (name, int(step))
        results.trunk = files.resolve(trunk.find(str(path), run.path).path)


def _with_evaluations(series: dict[str, Series], run: RunDir) -> dict[str, Series]:
    """Add the results of `runner evaluate`; those with other settings are named `NAME@SETTINGS`."""
    by_settings: dict[str, list[dict[str, Any]]] = {}
    for record in results(run):
        by_settings.setdefault(str(record.get("settings") or ""), []).append(record)
    found = dict(series)
    for settings, records in by_settings.items():
        columns = Columns()
        columns.add(records)
        for name, one in columns.series().items():
            base, slash, rest = name.partition("/")
            own = f"{base}@{settings}{slash}{rest}" if settings else name
            found[own] = merged(found[own], one) if own in found else one
    return found


def is_metric(name: str) -> bool:
    """Return whether a number of a record is a result by which runs are compared."""
    return name not in COUNTS and not name.startswith(NESTED_COUNTS)


def is_shown(name: str) -> bool:
    """Return whether a report shows a number of a record: results, single numbers and samples per source."""
    return not name.startswith(NESTED_COUNTS) or (name.startswith("sources/") and name.endswith("/samples"))


def judges(settings: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the metrics that decide early stopping or the best checkpoint: name -> `min` or `max`."""
    judged = {
        settings.get(f"{part}.metric"): settings.get(f"{part}.mode") for part in ("early_stopping", "checkpoint.best")
    }
    return {name: mode for name, mode in judged.items() if name is not None}


def may_rank(name: str, judged: Collection[Any]) -> bool:
    """Return whether a number can be ranked, that is, whether higher or lower is known to be better.

    This holds for the metrics in `judged`, and for names with a known word such as loss or accuracy. A wrong guess
    would put the worst run first.
    """
    return name in judged or any(_is_high(word) or word in LOWER_IS_BETTER for word in _words(name))


def _is_high(word: str) -> bool:
    return word in HIGHER_IS_BETTER or re.fullmatch(r"top[0-9]+", word) is not None


def lower_is_better(name: str, modes: Mapping[Any, Any]) -> bool:
    """Return whether lower is better: by `modes` (`min` or `max` by name), or by the metric's name."""
    if modes.get(name):
        return bool(modes[name] != "max")
    words = _words(name)
    return any(word in LOWER_IS_BETTER for word in words) or not any(map(_is_high, words))


def _words(name: str) -> list[str]:
    return name.lower().replace("/", "_").replace("@", "_").split("_")

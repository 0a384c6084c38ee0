"""`runner doctor --kills-per-hour RATE`: how much of the time would be useful, and with which cadence most of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.checkpoint.cadence import AdaptiveInterval
from runner.checkpoint.prediction import KilledRun
from runner.contracts import Finding
from runner.errors import UserError
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.paths import RunDir
from runner.rundir.time_account import is_duration
from runner.system import files

if TYPE_CHECKING:
    from runner.config.schema import Config

OPTIONS = {"step_s": "a step", "start_s": "a start", "save_s": "a save"}


@dataclass
class Times:
    """What a prediction is made from, in seconds; None: not known. `source` says where most of it is from."""

    step_s: float | None = None  # with the data and the evaluations between steps
    start_s: float | None = None
    stall_s: float | None = None
    commit_s: float = 0.0
    steps_share: float = 1.0
    source: str = "stated"


def check_options(options: Any) -> None:
    """Raises UserError if a number of the command line is out of range."""
    rate = options.kills_per_hour
    for name in OPTIONS:
        value = getattr(options, name)
        if value is not None and rate is None:
            raise UserError(f"{flag(name)} {value:g}: only together with --kills-per-hour")
        least = "more than 0" if name == "step_s" else "0 or more"
        if value is not None and not (0 <= value < math.inf and (value > 0 or name != "step_s")):
            raise UserError(f"{flag(name)} {value:g}: must be seconds, {least}")
    if rate is not None and not 0 < rate < math.inf:
        raise UserError(f"--kills-per-hour {rate:g}: must be more than 0, such as 0.5 for one in two hours")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def recorded(run: RunDir) -> Times:
    """The times of the attempts that this run has made so far."""
    attempts = [attempt for attempt in ended_attempts(run) if _steps(attempt) > 0]
    seconds = [attempt["seconds"] for attempt in attempts]
    if not seconds:
        return Times()
    steps, progress = (sum(_of(each, *names) for each in seconds) for names in (("steps",), PROGRESS))
    saves = sum(attempt["saves"] for attempt in attempts if is_duration(attempt.get("saves")))
    writes = [line["save"] for line in files.read_lines(run.timings) if _is_save(line)]
    commits_s = [max(save["write_s"] - save["stall_s"], 0.0) for save in writes]
    return Times(
        step_s=progress / sum(_steps(attempt) for attempt in attempts) or None,
        start_s=statistics.fmean(_of(each, "start", "restore") for each in seconds),
        stall_s=sum(_of(each, "save") for each in seconds) / saves if saves else None,
        commit_s=statistics.median(commits_s) if commits_s else 0.0,
        steps_share=steps / progress if progress else 1.0,
        source="of the attempts of this run",
    )


PROGRESS = ("steps", "data_wait", "evaluation")


def _steps(attempt: dict[str, Any]) -> int:
    first, last = attempt.get("start_step"), attempt.get("end_step")
    known = isinstance(first, int) and isinstance(last, int) and isinstance(attempt.get("seconds"), dict)
    return last - first if known else 0  # type: ignore[operator]


def _of(seconds: dict[str, Any], *activities: str) -> float:
    return sum(float(value) for name, value in seconds.items() if name in activities and is_duration(value))


def _is_save(line: Any) -> bool:
    save = line.get("save") if isinstance(line, dict) else None
    return isinstance(save, dict) and all(is_duration(save.get(name)) for name in ("stall_s", "write_s"))


def predict(config: Config, per_hour: float, times: Times) -> Iterator[Finding]:
    """What to expect at so many kills per hour.

    Raises:
        UserError: the time of a step, a start or a save is not known.
    """
    if times.start_s is None or times.stall_s is None:
        missing = [name for name, value in (("start_s", times.start_s), ("save_s", times.stall_s)) if value is None]
        raise UserError(
            f"--kills-per-hour: nobody knows how long {OPTIONS[missing[0]]} takes: set {flag(missing[0])}, or drop "
            "--no-measure"
        )
    run = KilledRun(per_hour / 3600, times.start_s, times.stall_s, times.commit_s, times.steps_share)
    work_s, cadence = _interval(config, run, times.step_s)
    step = "" if times.step_s is None else f" a step takes {_seconds(times.step_s)},"
    yield Finding(
        "ok",
        f"with {per_hour:g} kills per hour {100 * run.useful_share(work_s):.1f} % of the time would be steps that "
        f"count ({100 * run.without_kills(work_s):.1f} % without kills): a start takes {_seconds(run.start_s)},{step} "
        f"a save stalls training for {_seconds(run.stall_s)} and is committed {_seconds(run.commit_s)} later "
        f"({times.source}); {cadence}",
    )
    best_s = run.best_work_s()
    gain = run.useful_share(best_s) - run.useful_share(work_s)
    every = f"every {_seconds(best_s)}"
    if times.step_s is not None:
        every += f" (checkpoint.every_steps={max(round(best_s / times.step_s), 1)})"
    text = f"best would be a save {every}: {100 * run.useful_share(best_s):.1f} %"
    yield Finding("ok" if gain < WORTHWHILE else "warning", text, _remedy(gain, run))


WORTHWHILE = 0.01  # a gain that is worth another cadence


def _remedy(gain: float, run: KilledRun) -> str | None:
    if gain >= WORTHWHILE:
        return "set that, or checkpoint.adaptive=true, which finds it by itself"
    if run.rate * run.start_s > 1:
        return "a start takes longer than the time between two kills: no cadence helps, only a faster start"
    return None


def _interval(config: Config, run: KilledRun, step_s: float | None) -> tuple[float, str]:
    """The seconds of progress between two saves in this config, and how that comes."""
    options = config.checkpoint
    if options.adaptive:
        adaptive = AdaptiveInterval(options.min_interval_s, options.max_interval_s, prior_s=1 / run.rate)
        adaptive.observe_save(run.stall_s, run.stall_s + run.commit_s)
        return adaptive.interval_s(), f"saving adaptively, every {_seconds(adaptive.interval_s())}"
    found = []
    if options.every_minutes is not None:
        found.append((60 * options.every_minutes, f"saving every {options.every_minutes:g} minutes"))
    steps = options.every_steps if options.every_steps is not None else None if found else config.known_steps
    if steps is not None:
        if step_s is None:
            raise UserError(
                f"--kills-per-hour: a save comes after {steps} steps, and nobody knows how long a step takes: set "
                "--step-s, or rerun this once the run has made some"
            )
        what = f"saving every {steps} steps" if options.every_steps is not None else "saving only at the end"
        found.append((steps * step_s, f"{what}, that is every {_seconds(steps * step_s)}"))
    return min(found, default=(math.inf, "saving only at the end, which is not known"))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value / 60:.0f} min"

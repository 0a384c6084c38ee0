"""`runner doctor` where the number of ranks may vary: what each size of a run costs, in time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.cli.console import size, table
from runner.contracts import Finding, RankCounts
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.paths import RunDir
from runner.rundir.time_account import is_duration

if TYPE_CHECKING:
    from rich.table import Table

    from runner.config.schema import Config

MOST_ROWS = 16  # more sizes are thinned out: each is twice the one before
PROGRESS = ("steps", "data_wait", "evaluation")


@dataclass
class Size:
    """A run on so many ranks. None: not known.

    Attributes:
        ranks: how many.
        nodes: that they are on, where the launcher has nodes.
        micro_batches: of a step, on the rank that has most.
        time: of a step, in parts of that of one rank: what the micro-batches allow, without communication.
        step_s: seconds of a step, evaluations and waits for data included.
        measured: whether `step_s` is that of attempts of this size; else it follows from attempts of another one.
        hours: of training for the steps of the run.
        memory: bytes on each rank, estimated, without activations.
    """

    ranks: int
    nodes: int | None
    micro_batches: int
    time: float
    step_s: float | None = None
    measured: bool = False
    hours: float | None = None
    memory: int | None = None


def sizes(config: Config, counts: RankCounts, run: RunDir) -> tuple[list[Size], list[Finding]]:
    """Every size that a run may have, and what keeps a column from being known.

    Args:
        config: of the run, with a global batch.
        counts: the numbers of ranks.
        run: whose attempts tell how long a step takes, if it has made any.
    """
    assert config.train.global_batch_size is not None
    whole = config.train.global_batch_size // config.train.batch_size
    measured, findings = step_times(run), []
    memory, why = _memory(config)
    if memory is None:
        findings.append(Finding("warning", f"the memory of a rank is not known: {why}"))
    found = []
    for ranks in _thinned(counts.counts):
        most = -(-whole // ranks)
        row = Size(ranks, ranks // counts.per_node if counts.per_node else None, most, most / whole)
        row.measured = ranks in measured
        row.step_s = _step_s(measured, ranks, whole)
        if row.step_s is not None and config.known_steps is not None:
            row.hours = row.step_s * config.known_steps / 3600
        row.memory = None if memory is None else memory(ranks, most)
        found.append(row)
    if not measured:
        text = "seconds and hours are not known: the run has made no steps yet"
        findings.append(Finding("ok", text, "rerun this once it has"))
    return found, findings


def _thinned(counts: range) -> Iterator[int]:
    """All of few numbers; of many the first, each that is about twice the one before, and the last."""
    if len(counts) <= MOST_ROWS:
        yield from counts
        return
    number = 1
    while number < len(counts):
        yield counts[number - 1]
        number *= 2
    yield counts[-1]


def step_times(run: RunDir) -> dict[int, float]:
    """Seconds of a step by the number of ranks, over all attempts of a run that made steps."""
    steps: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for attempt in ended_attempts(run):
        ranks, first, last, account = (attempt.get(name) for name in ("ranks", "start_step", "end_step", "seconds"))
        if not (isinstance(ranks, int) and isinstance(first, int) and isinstance(last, int) and last > first):
            continue
        taken = [account.get(name) for name in PROGRESS] if isinstance(account, dict) else []
        steps[ranks] = steps.get(ranks, 0) + last - first
        seconds[ranks] = seconds.get(ranks, 0.0) + sum(value for value in taken if is_duration(value))
    return {ranks: seconds[ranks] / steps[ranks] for ranks in steps if seconds[ranks] > 0}


def _step_s(measured: dict[int, float], ranks: int, whole: int) -> float | None:
    """As measured with this number of ranks, or scaled from the nearest one by the micro-batches of a rank."""
    if not measured:
        return None
    nearest = min(measured, key=lambda other: abs(other - ranks))
    return measured[nearest] * -(-whole // ranks) / -(-whole // nearest)


def _memory(config: Config) -> tuple[Callable[[int, int], int] | None, str]:
    """(ranks, micro-batches) -> bytes on each rank; or why that is not known."""
    from runner.training.footprint import footprint

    try:
        held = footprint(config)
    except Exception as error:  # noqa: BLE001 the model is the user's own code
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return None, f"the model cannot be created without its memory ({reason})"
    return lambda ranks, most: held.per_rank(config, ranks, most), ""


def listing(rows: list[Size]) -> Table:
    """The sizes as a table; columns about which nothing is known are left out."""
    columns: dict[str, Callable[[Size], Any]] = {
        "nodes": lambda row: row.nodes,
        "ranks": lambda row: row.ranks,
        "micro-batches per rank": lambda row: row.micro_batches,
        "time relative to 1 rank": lambda row: f"{row.time:.3f}",
        "seconds": lambda row: row.step_s and f"{row.step_s:.3g} ({'measured' if row.measured else 'estimated'})",
        "hours": lambda row: row.hours and f"{row.hours:.3g}",
        "node-hours": lambda row: row.hours and row.nodes and f"{row.hours * row.nodes:.3g}",
        "memory per rank, without activations": lambda row: row.memory and f"about {size(row.memory)}",
    }
    columns = {name: of for name, of in columns.items() if any(of(row) is not None for row in rows)}
    made = table(*columns)
    for row in rows:
        made.add_row(*(str(of(row) if of(row) is not None else "") for of in columns.values()))
    return made

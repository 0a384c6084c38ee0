"""Tabulate the possible sizes of a run, for `runner doctor` if the number of ranks may vary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.cli.base.console import table
from runner.contracts import RankCounts
from runner.metrics.progress import size

if TYPE_CHECKING:
    from rich.table import Table

    from runner.config.schema import Config
    from runner.training.model.footprint import Footprint

MOST_ROWS = 16  # with more sizes, only those at positions 1, 2, 4, 8, ... and the last one are shown


@dataclass
class Size:
    """The properties of a run on a certain number of ranks. Values that are not known are None.

    Attributes:
        ranks: the number of ranks.
        nodes: the number of nodes, if the launcher uses nodes.
        micro_batches: micro-batches per step on the rank that has the most.
        time: the step time relative to one rank. It follows from the micro-batches and ignores communication.
        memory: the estimated bytes on each rank, without activations.
    """

    ranks: int
    nodes: int | None
    micro_batches: int
    time: float
    memory: int | None


def sizes(config: Config, counts: RankCounts, held: Footprint | None) -> list[Size]:
    """List every possible size of a run.

    Args:
        config: the config of the run, which has a global batch size.
        counts: the possible numbers of ranks.
        held: the memory that the model needs, or None if not known.
    """
    assert config.train.global_batch_size is not None
    whole = config.train.global_batch_size // config.train.batch_size
    found = []
    for ranks in _thinned(counts.counts):
        most = -(-whole // ranks)
        memory = None if held is None else held.per_rank(config, ranks, most)
        found.append(Size(ranks, ranks // counts.per_node if counts.per_node else None, most, most / whole, memory))
    return found


def _thinned(counts: range) -> Iterator[int]:
    """Yield all numbers if there are few. If not, yield the last, and those at positions 1, 2, 4, 8, ..."""
    if len(counts) <= MOST_ROWS:
        yield from counts
        return
    number = 1
    while number < len(counts):
        yield counts[number - 1]
        number *= 2
    yield counts[-1]


def listing(rows: list[Size]) -> Table:
    """Return the sizes as a table. Columns without known values are omitted."""
    columns: dict[str, list[str | int | None]] = {
        "nodes": [row.nodes and str(row.nodes) for row in rows],
        "ranks": [str(row.ranks) for row in rows],
        "micro-batches per rank": [str(row.micro_batches) for row in rows],
        "time relative to 1 rank": [f"{row.time:.3f}" for row in rows],
        "memory per rank, without activations": [row.memory and f"about {size(row.memory)}" for row in rows],
    }
    columns = {name: values for name, values in columns.items() if any(values)}
    made = table(*columns)
    for values in zip(*columns.values(), strict=True):
        made.add_row(*(str(value or "") for value in values))
    return made

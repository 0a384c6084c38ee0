"""Tabulate the sizes that a run may have, for `runner doctor` if the number of ranks may vary."""

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

MOST_ROWS = 16  # of more sizes only some are shown, each twice the one before


@dataclass
class Size:
    """A run on a number of ranks. None: not known.

    Attributes:
        ranks: how many.
        nodes: how many, if the launcher has nodes.
        micro_batches: of a step, on the rank with most of them.
        time: of a step, relative to one rank: what the micro-batches allow, without communication.
        memory: bytes on each rank, estimated, without activations.
    """

    ranks: int
    nodes: int | None
    micro_batches: int
    time: float
    memory: int | None


def sizes(config: Config, counts: RankCounts, held: Footprint | None) -> list[Size]:
    """List every size that a run may have.

    Args:
        config: of the run, with a global batch.
        counts: the numbers of ranks.
        held: the memory that its model takes; None: not known.
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
    """Yield all of a few numbers, or else the first, the last, and some between that double in number."""
    if len(counts) <= MOST_ROWS:
        yield from counts
        return
    number = 1
    while number < len(counts):
        yield counts[number - 1]
        number *= 2
    yield counts[-1]


def listing(rows: list[Size]) -> Table:
    """Return the sizes as a table, without columns that are not known."""
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

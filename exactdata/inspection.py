"""Answer questions about the data order in a checkpoint that contains the state of one of this package's loaders.

The checkpoint may be from any trainer, written with `torch.save` or `json`. It is loaded as plain data, so that no code
in it is executed. The datasets are not read.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exactdata.elastic import opened_state
from exactdata.errors import UserError, nearest
from exactdata.order.sequence import ElasticSequence

MOST = 1 << 20
"""The maximum number of positions that a single question may request."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m exactdata` and return its exit status, which is 2 for a user error."""
    options = _parser().parse_args(arguments)
    try:
        answers = [_answer(options, state) for state in _states_of(options.checkpoint)]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    if options.json:
        print(json.dumps([answer for answer, _ in answers]))
    else:
        print("\n\n".join(text for _, text in answers))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m exactdata", description="Questions about a data order.")
    inspect = parser.add_subparsers(required=True).add_parser(
        "inspect", help="what a checkpoint's loader has read, and what it reads next"
    )
    inspect.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a file that holds a loader's state")
    what = inspect.add_mutually_exclusive_group()
    what.add_argument("--next", type=int, metavar="N", help="the next N samples of all ranks, in their order")
    what.add_argument("--positions", metavar="FIRST-LAST", help="the samples at these positions, past or future")
    what.add_argument("--sample", metavar="SOURCE:INDEX", help="at which positions a sample was and will be read")
    inspect.add_argument("--json", action="store_true", help="print JSON, a list with an answer for each loader")
    return parser


def find_states(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every elastic sampler state in a checkpoint, parsed by `exactdata.elastic.opened_state`.

    Args:
        value: content of the checkpoint. Mappings, lists and JSON strings in it are searched.

    Raises:
        SamplerStateError: a state was truncated or edited.
    """
    if isinstance(value, str) and value[:1] in "{[" and '"elastic"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, Mapping):
        if value.get("kind") == "elastic" and "position" in value:
            yield opened_state(value)
            return
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for part in value:
        yield from find_states(part)


def _states_of(path: Path) -> list[dict[str, Any]]:
    """Read all sampler states in a file.

    Raises:
        UserError: the file cannot be read, or contains no state.
    """
    found = list({state["seal"]: state for state in find_states(_read(path))}.values())  # Lightning may save it twice
    if not found:
        raise UserError(
            f"{path}: no state of an elastic order in it: pass a file in which TrainerLoader.state_dict() was saved"
        )
    return found


def _read(path: Path) -> Any:
    if path.is_dir():
        raise UserError(f"{path} is a folder: pass the file in it that holds the loader's state")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    try:
        return json.loads(content)
    except ValueError:
        pass
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError):
        raise UserError(
            f"{path}: neither JSON nor a file of plain values and tensors, as torch.load(weights_only=True) reads it: "
            "save the loader's state in a file of its own, with json.dump(loader.state_dict(), file)"
        ) from None


def sequence_of(state: Mapping[str, Any]) -> ElasticSequence:
    """Construct the order from a state that `opened_state` returned."""
    return ElasticSequence(
        state["sizes"],
        state["seed"],
        state["segments"],
        state["exclusions"],
        absent=tuple(state["retired"]),
        shuffle=state["shuffle"],
    )


def _answer(options: argparse.Namespace, state: dict[str, Any]) -> tuple[Any, str]:
    order, position = sequence_of(state), int(state["position"])
    if options.sample is not None:
        rows = _times(order, options.sample, position)
        return rows, table(rows, f"{options.sample}, up to the end of the epoch that follows position {position:,}")
    if options.next is not None or options.positions is not None:
        first, last = _range(options, position)
        rows = _samples(order, first, last)
        return rows, table(rows, f"positions {first:,} to {last:,}")
    rows = _sources(order, position)
    return {"position": position, "seed": state["seed"], "sources": rows}, table(
        rows, f"position {position:,}: samples read by all ranks; seed {state['seed']}"
    )


def _range(options: argparse.Namespace, position: int) -> tuple[int, int]:
    """Return the first and last position that the command line requests."""
    if options.next is not None:
        first, last, given = position, position + options.next - 1, f"--next {options.next}"
    else:
        given = f"--positions {options.positions}"
        first, last = (int(part) if part.isdecimal() else -1 for part in options.positions.partition("-")[::2])
    if not 0 <= first <= last < min(first + MOST, 2**62):
        raise UserError(f"{given}: expected 1 to {MOST:,} positions, for example --next 16 or --positions 80-95")
    return first, last


def _samples(order: ElasticSequence, first: int, last: int) -> list[dict[str, Any]]:
    end = last + 1 if order.total is None else min(order.total, last + 1)
    positions = np.arange(first, end, dtype=np.int64)
    ids, index, epochs = order.locate(positions)
    columns = positions.tolist(), (order.names[i] for i in ids.tolist()), index.tolist(), epochs.tolist()
    return [
        {"position": at, "source": name, "index": number, "epoch": epoch}
        for at, name, number, epoch in zip(*columns, strict=True)
    ]


def _times(order: ElasticSequence, sample: str, position: int) -> list[dict[str, Any]]:
    source, _, text = sample.rpartition(":")
    if source not in order.sizes:
        raise UserError(
            f"--sample {sample}: unknown source{nearest(source, order.sizes)}; the sources are {', '.join(order.sizes)}"
        )
    if not text.isdecimal() or int(text) >= order.sizes[source]:
        raise UserError(f"--sample {sample}: expected an index from 0 to {order.sizes[source] - 1}, as in {source}:0")
    epochs = np.arange(int(order.epochs_at(position)[source]) + 2)
    at = order.find(np.full(len(epochs), order.id_of(source)), np.full(len(epochs), int(text)), epochs)
    return [
        {"epoch": epoch, "position": place, "read": place < position}
        for epoch, place in zip(epochs.tolist(), at.tolist(), strict=True)
        if place >= 0
    ]


def _sources(order: ElasticSequence, position: int) -> list[dict[str, Any]]:
    read, epochs, shares = order.consumed_at(position), order.epochs_at(position), order.shares_at(position)
    return [
        {
            "source": name,
            "samples": order.sizes[name],
            "read": int(read[name]),
            "epochs": round(float(epochs[name]), 4),
            "share from here": round(shares.get(name, 0.0), 4),
        }
        for name in order.names
    ]


def table(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Format rows, which all have the same keys, as a titled table of right-aligned columns."""
    if not rows:
        return title
    columns = [[key, *(str(row[key]) for row in rows)] for key in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*columns, strict=True)
    ]
    return "\n".join([title, *lines])

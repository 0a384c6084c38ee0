"""Read and write the file with a run's data order (`RunDir.order`). `runner inspect` uses it instead of the data."""

from __future__ import annotations

from pathlib import Path

from exactdata.queries.order_record import OrderRecord, RecordError
from runner.system import files


def read(path: Path) -> OrderRecord:
    """Read the data order that a run wrote.

    Raises:
        RecordError: the file does not exist or is invalid.
    """
    value = files.read_json(path)
    if value is None:
        raise RecordError(f"{path}: no record of a data order: is this the directory of a run that has started?")
    try:
        return OrderRecord.from_json(value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordError(
            f"{path}: not a record of a data order that this program can read ({error!r}): "
            "use the program version of the run"
        ) from error


def write(record: OrderRecord, path: Path, guard: files.Guard | None = None) -> None:
    """Write the data order, atomically replacing an older one. `guard` is the right to write to the run directory."""
    files.write_json(path, record.to_json(), guard=guard)

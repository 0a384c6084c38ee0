"""Find the documents that a step consumes, and the steps that consume a document, for sources of packed documents.

Only the pack plan and the document index, which the run has prepared, are read. The text is not. The code for reading
them is imported only for sources of packed documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exactdata.queries.order_queries import times_of_sample
from exactdata.queries.order_record import OrderRecord
from runner.errors import UserError

if TYPE_CHECKING:
    from exactdata.documents.packed import PackedRows

Row = dict[str, Any]

_SHOWN = 3  # the maximum number of documents shown per sample


def times_of_document(record: OrderRecord, asked: str) -> dict[str, Any]:
    """Find out when a document is consumed, up to the end of the run.

    Args:
        record: the order record of the run.
        asked: the document, as SOURCE:NUMBER or SOURCE:FILE:LINE.

    Returns:
        `source`, `document` (its number), `file`, `line`, and `times`. `times` has one row for each time that a sample
        with a piece of the document is consumed. A row has the index of the sample, and the first token and the length
        of the piece.

    Raises:
        UserError: the document does not exist, or the files that the run prepared are missing.
    """
    source, place = _parsed(record, asked)
    packed = _opened(record, source)
    file, _, line = place.rpartition(":")
    document = packed.find(file, int(line)) if file else int(line)
    found = packed.rows_of(document)
    which, documents, first, length = packed.pieces(found)
    mine = documents == document
    times = [
        {"sample": index, "first": begin, "length": count, **time}
        for index, begin, count in zip(*(part[mine].tolist() for part in (found[which], first, length)), strict=True)
        for time in times_of_sample(record, source, index)
    ]
    times.sort(key=lambda row: (row["step"], row["position"] or 0, row["rank"], row["sample"]))
    [(file, number)] = packed.where(np.array([document], np.int64))
    return {"source": source, "document": document, "file": file, "line": number, "times": times}


def _parsed(record: OrderRecord, asked: str) -> tuple[str, str]:
    """Split `asked` into the source and the rest, which is a number or FILE:LINE."""
    if not record.packed:
        raise UserError(
            f"--document {asked}: no source of this run has packed documents: ask for --sample SOURCE:INDEX"
        )
    for source in sorted(record.packed, key=len, reverse=True):  # the name of a source may contain a colon
        place = asked.removeprefix(f"{source}:")
        if place != asked and place.rpartition(":")[2].isdecimal() and not place.startswith(":"):
            return source, place
    raise UserError(
        f"--document {asked}: expected SOURCE:NUMBER or SOURCE:FILE:LINE, for example {next(iter(record.packed))}:12; "
        f"sources with documents: {', '.join(record.packed)}"
    )


def _opened(record: OrderRecord, source: str) -> PackedRows:
    """Open the pack plan of a source.

    Raises:
        UserError: the plan is missing, or belongs to different documents.
    """
    from exactdata.documents.packed import PackedRows

    directory = Path(record.packed[source])
    try:
        packed = PackedRows.open(directory)
    except UserError as error:
        raise UserError(
            f"source {source!r}: its prepared documents cannot be read ({error}): put back {directory}, or resume the "
            "run, which prepares them anew"
        ) from error
    if len(packed) != record.sizes[source]:
        raise UserError(
            f"source {source!r}: {directory} has {len(packed)} samples, and the run has {record.sizes[source]}: put "
            "back what the run prepared"
        )
    return packed


def with_documents(record: OrderRecord, rows: list[Row]) -> list[Row]:
    """Add `documents` to each sample of a step: number, file, line, and the first token and length of each piece.

    Raises:
        UserError: the files that the run prepared are missing.
    """
    found: list[Row] = [{**row, "documents": []} for row in rows]
    for source in record.packed:
        mine = [row for row in found if row["source"] == source]
        if not mine:
            continue
        packed = _opened(record, source)
        which, documents, first, length = packed.pieces(np.array([row["index"] for row in mine], np.int64))
        columns = documents.tolist(), packed.where(documents), first.tolist(), length.tolist()
        for at, document, (file, line), begin, count in zip(which.tolist(), *columns, strict=True):
            piece = {"document": document, "file": file, "line": line, "first": begin, "length": count}
            mine[at]["documents"].append(piece)
    return found


def as_text(rows: list[Row]) -> list[Row]:
    """Describe the documents of each sample in short form, for a table.

    Paths are shortened to a suffix that `--document` accepts.
    """
    texts = []
    for row in rows:
        pieces = [
            f"{'/'.join(Path(each['file']).parts[-2:])}:{each['line']} ({_tokens(each)})" for each in row["documents"]
        ]
        more = [f"and {len(pieces) - _SHOWN} more"] if len(pieces) > _SHOWN else []
        texts.append(", ".join([*pieces[:_SHOWN], *more]))
    width = max(map(len, [*texts, "documents"]))  # pads the texts, so that the column is left-aligned
    plain = [{key: value for key, value in row.items() if key != "documents"} for row in rows]
    return [{**row, "documents".ljust(width): text.ljust(width)} for row, text in zip(plain, texts, strict=True)]


def document_title(found: dict[str, Any], steps: int) -> str:
    """Describe the document, and how many times it is consumed."""
    often = "once" if len(found["times"]) == 1 else f"{len(found['times'])} times"
    return f"{found['source']}:{found['document']} ({found['file']}:{found['line']}): {often} in {steps} steps"


def times_as_text(times: list[Row]) -> list[Row]:
    """Format the tokens of each piece as a range, for a table."""
    return [
        {"sample": row["sample"], "tokens": _tokens(row).removeprefix("tokens ")}
        | {key: value for key, value in row.items() if key not in ("sample", "first", "length")}
        for row in times
    ]


def _tokens(piece: Row) -> str:
    return f"tokens {piece['first']}-{piece['first'] + piece['length'] - 1}"

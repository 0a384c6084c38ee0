"""Show the samples of a step, when a sample is consumed, or the effects of a resume: `runner inspect RUN`.

This command reads one small file of the run (`RunDir.order`), and neither data nor model. For documents it also reads
the files that the run prepared. It imports torch only if a seeded sampler has to draw its epochs. For a custom sampler,
it runs the class named in the frozen config, but only if the run directory is trusted enough to resume.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from exactdata.inspection import table
from exactdata.queries import order_queries
from exactdata.queries.order_record import OrderRecord
from runner.cli.base.console import PROGRAM, Parser, tell
from runner.cli.look.documents import as_text, document_title, times_as_text, times_of_document, with_documents
from runner.cli.look.resume_plan import parse_overrides, resume_plan
from runner.data import order_file
from runner.errors import UserError
from runner.rundir.paths import RunDir
from runner.rundir.state import look
from runner.rundir.trust import check_trusted, reading
from runner.system.terminal import printable_lines


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: an argument is wrong, or the run cannot be read.
    """
    options = _parser().parse_args(arguments)
    with reading(RunDir(options.run)):
        answer, text = _answer(options)
    print(json.dumps(answer) if options.json else printable_lines(text), flush=True)
    return 0


def _parser() -> Parser:
    parser = Parser(prog=f"{PROGRAM} inspect", description="Answer questions about the data order of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="the samples of step N on each rank, past or future")
    what.add_argument("--sample", metavar="SOURCE:INDEX", help="when a sample was and will be consumed")
    what.add_argument(
        "--document",
        metavar="SOURCE:NUMBER|SOURCE:FILE:LINE",
        help="when a document was and will be consumed, by its number or its line, of a source of packed documents",
    )
    what.add_argument("--plan", action="store_true", help="samples, epochs and tokens of each source, to the end")
    what.add_argument("--diff", type=Path, metavar="RUN2", help="where the data orders of two runs first differ")
    what.add_argument(
        "--resume-plan",
        nargs="*",
        metavar="KEY=VALUE",
        help="what a resume with launcher.ranks=3, train.batch_size=4, train.grad_accum_steps=2, "
        "sampler.weights.code=2, ... would repeat or skip",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _answer(options: argparse.Namespace) -> tuple[Any, str]:
    run = RunDir(options.run)
    record = order_file.read(run.order)
    if record.sampler.is_own:
        record = _with_sampler(run, record, options)
    done = look(run).step
    if options.step is not None:
        rows = order_queries.samples_of_step(record, options.step)
        return _step(record, rows, f"step {options.step} ({'consumed' if options.step <= done else 'to come'})")
    if options.sample is not None:
        source, _, index = options.sample.rpartition(":")
        if not index.isdecimal():
            raise UserError(f"--sample {options.sample!r}: expected SOURCE:INDEX, for example code:1234")
        rows = order_queries.times_of_sample(record, source, int(index))
        rows = [{**row, "consumed": row["step"] <= done} for row in rows]
        times = "once" if len(rows) == 1 else f"{len(rows)} times"
        return rows, table(rows, f"{options.sample}: {times} in {record.steps} steps")
    if options.document is not None:
        found = times_of_document(record, options.document)
        found["times"] = [{**row, "consumed": row["step"] <= done} for row in found["times"]]
        return found, table(times_as_text(found["times"]), document_title(found, record.steps))
    if options.plan:
        rows = order_queries.source_totals(record)
        return rows, _totals_text(record, rows)
    if options.diff is not None:
        with reading(RunDir(options.diff)):
            other = order_file.read(RunDir(options.diff).order)
            answer = order_queries.first_difference(record, other)
        return answer, _difference_text(answer)
    # A resume starts at the newest checkpoint, regardless of later steps.
    answer = resume_plan(record, run.newest_step(), parse_overrides(record, options.resume_plan))
    return answer, _resume_text(answer)


def _step(record: OrderRecord, rows: list[dict[str, Any]], title: str) -> tuple[Any, str]:
    """Return the samples of a step. If a source has documents and they can be read, include the documents."""
    if not any(row["source"] in record.packed for row in rows):
        return rows, table(rows, title)
    try:
        found = with_documents(record, rows)
    except UserError as error:
        tell(f"warning: without documents: {error}")
        return rows, table(rows, title)
    return found, table(as_text(found), title)


def _with_sampler(run: RunDir, record: OrderRecord, options: argparse.Namespace) -> OrderRecord:
    """Return the record with the custom sampler, which runs as in a resume.

    Raises:
        UserError: other users can write to the run directory, or the class does not support the request.
    """
    if options.step is None and options.sample is None and options.document is None:
        raise UserError(
            f"{run.path}: with sampler=own only --step, --sample and --document work: the shares are its class's own"
        )
    check_trusted(run)
    from runner.config.frozen import load
    from runner.training.data.order import make_own_sampler

    config = load(run.path)

    def make(num_replicas: int, rank: int) -> Any:
        try:
            return make_own_sampler(config, range(sum(record.sizes.values())), record.sizes, num_replicas, rank)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"sampler._target_={config.sampler.target} cannot be inspected without the data "
                f"({type(error).__name__}: {error}): one that only asks for len(dataset) can be"
            ) from error

    return replace(record, make=cache(make))


def _totals_text(record: OrderRecord, rows: list[dict[str, Any]]) -> str:
    parts = []
    for i, row in enumerate(rows):
        steps = f"steps {row['first_step']} to {row['last_step']}"
        if i + 1 == len(rows):
            estimate = "" if record.sampler.elastic else " (an incomplete epoch counts in proportion)"
            title = f"\nthe whole run, {steps}{estimate}"
        else:
            title = f"{steps}, positions {row['first_position']} to {row['stop_position'] - 1}"
        rows_of = [
            {
                "source": name,
                "share": f"{entry['share']:.4f}",
                "samples": f"{entry['samples']:,.0f}",
                "tokens": "" if entry["tokens"] is None else f"{entry['tokens']:,.0f}",
                "epochs at the end": f"{entry['epochs_at_end']:.3f}",
            }
            for name, entry in row["sources"].items()
        ]
        parts.append(table(rows_of, title))
    return "\n".join(parts)


def _difference_text(answer: dict[str, Any]) -> str:
    reason = f" ({answer['reason']})" if answer["reason"] else ""
    if answer["position"] is None:
        compared = f"the first {answer['compared']:,} of " if answer["compared"] < answer["common"] else "all "
        return f"the same samples at {compared}{answer['common']:,} positions that both runs have{reason}"
    samples = answer.get("samples")
    shown = f": {samples[0]} and {samples[1]}" if samples else ""
    steps = answer["steps"]
    return (
        f"the orders first differ at position {answer['position']:,}, in step {steps[0]} and step {steps[1]}"
        f"{shown}{reason}"
    )


def _resume_text(answer: dict[str, Any]) -> str:
    head = [
        f"after step {answer['step']}, position {answer['position']:,}",
        f"  before  {answer['before']}",
        f"  after   {answer['after']}",
        f"  {answer['repeated']:,} samples repeated, {answer['skipped']:,} skipped"
        + ("" if answer["accepted"] else "; the runner refuses to resume"),
    ]
    return "\n".join(
        [*head, *(f"  - {note}" for note in answer["notes"]), *(f"  > {note}" for note in answer["advice"])]
    )

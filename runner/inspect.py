"""Questions about the data order of a run: `python -m runner.inspect RUN --step 1200`.

Reads one small file of the run (`RunDir.order`), no data and no model; for the elastic sampler no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from runner.attempts import status_of
from runner.data import outlook
from runner.data.order_record import OrderRecord
from runner.data.resume_plan import parse_overrides, resume_plan
from runner.errors import ExitStatus, UserError
from runner.run_dir import RunDir


def main(arguments: list[str] | None = None) -> int:
    """Answer one question; 0, or 2 where the question or the run cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        answer, text = _answer(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.status)
    except OSError as error:
        print(f"error: {error.filename or options.run} cannot be read ({error.strerror or error})", file=sys.stderr)
        return int(ExitStatus.USAGE)
    try:
        print(json.dumps(answer) if options.json else text, flush=True)
    except BrokenPipeError:  # whoever reads has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runner.inspect", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="the samples that each rank saw, or will see, in step N")
    what.add_argument("--sample", metavar="SOURCE:INDEX", help="when a sample was seen and will be seen")
    what.add_argument("--plan", action="store_true", help="samples, epochs and tokens per source until the end")
    what.add_argument("--diff", type=Path, metavar="RUN2", help="where the data orders of two runs part")
    what.add_argument(
        "--resume-plan",
        nargs="*",
        metavar="KEY=VALUE",
        help="what would be repeated or skipped if the run went on with world_size=3, train.batch_size=4, "
        "train.grad_accum_steps=2, sampler.weights.code=2, ...",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON value")
    return parser


def _answer(options: argparse.Namespace) -> tuple[Any, str]:
    run = RunDir(options.run)
    record = OrderRecord.read(run.order)
    done = int(status_of(run).get("step") or 0)
    if options.step is not None:
        rows = outlook.samples_of_step(record, options.step)
        return rows, _table(rows, f"step {options.step} ({'seen' if options.step <= done else 'to come'})")
    if options.sample is not None:
        source, _, index = options.sample.rpartition(":")
        if not index.isdecimal():
            raise UserError(f"--sample {options.sample!r}: expected SOURCE:INDEX, for example code:1234")
        rows = outlook.times_of_sample(record, source, int(index))
        rows = [{**row, "seen": row["step"] <= done} for row in rows]
        return rows, _table(rows, f"{options.sample}, {len(rows)} times in {record.steps} steps")
    if options.plan:
        rows = outlook.plan(record)
        return rows, _plan_text(record, rows)
    if options.diff is not None:
        answer = outlook.difference(record, OrderRecord.read(RunDir(options.diff).order))
        return answer, _difference_text(answer)
    answer = resume_plan(record, done, parse_overrides(record, options.resume_plan))
    return answer, _resume_text(answer)


def _table(rows: list[dict[str, Any]], title: str) -> str:
    if not rows:
        return title
    columns = [[key, *(str(row[key]) for row in rows)] for key in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]
    return "\n".join([title, *lines])


def _plan_text(record: OrderRecord, rows: list[dict[str, Any]]) -> str:
    lines = []
    for i, row in enumerate(rows):
        whole = i + 1 == len(rows)
        span = f"steps {row['first_step']} to {row['last_step']}"
        about = ", part of an epoch in proportion" if record.kind != "elastic" else ""
        title = (
            f"\nthe whole run, {span}{about}"
            if whole
            else f"{span}, positions {row['first_position']} to {row['stop_position'] - 1}"
        )
        table = [
            {
                "source": name,
                "share": f"{entry['share']:.4f}",
                "samples": f"{entry['samples']:,.0f}",
                "tokens": f"{entry['tokens']:,.0f}",
                "epochs at the end": f"{entry['epochs_at_end']:.3f}",
            }
            for name, entry in row["sources"].items()
        ]
        lines.append(_table(table, title))
    return "\n".join(lines)


def _difference_text(answer: dict[str, Any]) -> str:
    because = f" ({answer['reason']})" if answer["reason"] else ""
    if answer["position"] is None:
        return f"the same samples at all {answer['compared']:,} positions that both runs have{because}"
    samples = answer.get("samples")
    shown = f": {samples[0]} and {samples[1]}" if samples else ""
    steps = answer["steps"]
    return f"they part at position {answer['position']:,}, in step {steps[0]} and step {steps[1]}{shown}{because}"


def _resume_text(answer: dict[str, Any]) -> str:
    head = [
        f"after step {answer['step']}, position {answer['position']:,}",
        f"  was  {answer['before']}",
        f"  now  {answer['after']}",
        f"  {answer['repeated']:,} samples repeated, {answer['skipped']:,} skipped"
        + ("" if answer["accepted"] else "; the runner refuses this"),
    ]
    return "\n".join(
        [*head, *(f"  - {note}" for note in answer["notes"]), *(f"  > {note}" for note in answer["advice"])]
    )


if __name__ == "__main__":
    sys.exit(main())

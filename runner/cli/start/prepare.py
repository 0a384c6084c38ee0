"""Tokenize and pack the documents of a config in advance, on one or more machines: `runner prepare`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from runner.cli.base.arguments import add_config_dir
from runner.cli.base.console import PROGRAM, Parser
from runner.errors import ExitStatus, UserError


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} prepare",
        description="Prepares the documents that a run with these settings trains and is evaluated on. Killed and "
        "rerun, it continues. Processes started side by side, such as the tasks of a Slurm array, share the work.",
    )
    made.add_argument("overrides", nargs="*", metavar="key=value", help=f"of one run, as for {PROGRAM}")
    made.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    made.add_argument("--json", action="store_true", help="print JSON: the report of each source")
    add_config_dir(made)
    made.add_argument("--config-name", default="config", metavar="NAME", help="another primary config")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the config cannot be composed or has no documents, or a source cannot be prepared.
    """
    options = parser().parse_intermixed_args(list(arguments) or ["--help"])
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers {options.workers}: expected a whole number of at least 1")
    from runner.config.composition import compose

    plain = compose(options.overrides, options.config_dir, options.config_name).plain
    reports = {}
    for key, prepare in _sources(plain):
        try:
            reports[key] = prepare(options.workers)
        except UserError as error:
            raise type(error)(f"{key}: {error}") from error
        if not options.json:
            from exactdata.documents.dataset import summary

            print("\n  ".join([f"{key}: {reports[key]['directory']}", *summary(reports[key])]), flush=True)
    if not reports:
        raise UserError("no source of this config has documents to prepare: choose data=documents and set its paths")
    if options.json:
        print(json.dumps(reports))
    return int(ExitStatus.FINISHED)


def _sources(plain: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the key of each source that can be prepared, with a function from the number of workers to a report."""
    from runner.config.targets import bind

    for group in ("sources", "eval_sources"):
        for name, node in plain["data"][group].items():
            made = bind(f"data.{group}.{name}", node)
            prepare = getattr(made.func, "prepare", None)
            if prepare is not None:
                yield f"data.{group}.{name}", lambda workers, p=prepare, m=made: p(workers, *m.args, **m.keywords)

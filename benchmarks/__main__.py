"""Run `python -m benchmarks [NAME ...]`: all benchmarks, or the named ones, one after the other.

Writes the figures to results.json, compares them with the last run there, and updates docs/project/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time

from benchmarks import results

NAMES = (
    "start",
    "sweep",
    "search",
    "loop",
    "ranks",
    "records",
    "extensions",
    "sampler",
    "loader",
    "documents",
    "trainers",
    "scale",
    "checkpoint",
    "large",
    "report",
    "slurm",
)


def run(names: list[str], accept: bool) -> int:
    """Run benchmarks by name; return 1 if a ratio got worse."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # commands are started compiled, as users start them
    worse: list[str] = []
    for name in names:
        began = time.perf_counter()
        print(f"\n== {name}", flush=True)
        sys.argv = [f"benchmarks.{name}"]
        results.RECORDED.clear()
        importlib.import_module(f"benchmarks.{name}").main()
        worse += results.keep(results.RECORDED.values(), accept)
        results.PAGE.write_text(results.with_figures(results.PAGE.read_text(), results.kept()))
        print(f"   ({time.perf_counter() - began:.0f} s)", flush=True)
    for sentence in worse:
        print(f"{'accepted' if accept else 'regression'}: {sentence}")
    if worse and not accept:
        print("tables with a regression were not kept; --accept keeps them")
    return int(bool(worse) and not accept)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    if arguments[:1] == ["gpu"]:
        from benchmarks.gpu import command

        return command.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="python -m benchmarks gpu --help: what only a GPU can show",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without one")
    parser.add_argument("--accept", action="store_true", help="keep figures that got worse, too")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return run(options.names or list(NAMES), options.accept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

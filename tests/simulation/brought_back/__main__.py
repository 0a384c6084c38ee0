"""Check with `python -m simulation.brought_back [NAME...]` that the search finds each fault. Print a Markdown table.

From the clone, with PYTHONPATH=.:tests. A NAME is the name of a fault or of a scenario. The default is all faults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from runner.system import processes
from simulation.brought_back import FAULTS
from simulation.brought_back.fault import Fault
from simulation.brought_back.measuring import SCHEDULES, Measured, known, measure_all, record
from simulation.command import SAME_EVERYWHERE
from simulation.scenarios import SCENARIOS

HEAD = "| fault | scenario | the right behavior is told in | schedules | seconds | lines of the story |"


def row(fault: Fault, measured: Measured) -> str:
    """Return a row of the table."""
    schedules = f"{measured.schedules:,}" if measured.seed is not None else f"not found in {measured.schedules:,}"
    result = f"{schedules} | {measured.seconds:.0f} | {measured.lines or ''}"
    return f"| {fault.what} | {fault.scenario} | {fault.told_in} | {result} |"


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m simulation.brought_back", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault, or a scenario")
    parser.add_argument("--anew", action="store_true", help="search from the seed on, not near what found it last time")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, metavar="N", help="how many to play at most")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="where to begin")
    parser.add_argument("--workers", type=int, default=processes.cores(), metavar="N", help="faults at the same time")
    parser.add_argument("--stories", action="store_true", help="look for the shortest story of each, and print it")
    parser.add_argument("--record", action="store_true", help="keep the schedules that found a fault, in found.json")
    options = parser.parse_args(arguments)
    if processes.environment.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "simulation.brought_back", *arguments]
        processes.become(sys.executable, command, {**processes.environment, **SAME_EVERYWHERE})
    chosen = FAULTS
    if options.names:
        unknown = set(options.names) - chosen.keys() - SCENARIOS.keys()
        if unknown:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}; choose from {', '.join(chosen)}")
        chosen = {name: each for name, each in chosen.items() if {name, each.scenario} & set(options.names)}
    print(f"{HEAD}\n|---|---|---|---|---|---|", flush=True)
    results = {}
    for name, measured in measure_all(
        chosen,
        near={} if options.anew else known(),
        seed=options.seed,
        schedules=options.schedules,
        workers=options.workers,
        shortest=options.stories,
    ):
        print(row(chosen[name], measured), flush=True)
        results[name] = measured
        if options.record and measured.seed is not None:
            record({name: measured.seed})
    for name, measured in results.items():
        if measured.text:
            print(f"\n{name}: {measured.text}")
    return int(any(measured.seed is None for measured in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

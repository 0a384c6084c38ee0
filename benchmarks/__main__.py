"""`python -m benchmarks [NAME ...]`: run all benchmarks, or those named, one after the other."""

from __future__ import annotations

import importlib
import sys
import time

NAMES = (
    "start",
    "loop",
    "ranks",
    "extensions",
    "sampler",
    "loader",
    "checkpoint",
    "large",
    "report",
    "goodput",
    "slurm",
)


def main(names: list[str]) -> int:
    """Run them; 2 for a name that is none."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"error: no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names or NAMES:
        began = time.perf_counter()
        print(f"\n== {name}", flush=True)
        sys.argv = [f"benchmarks.{name}"]
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"   ({time.perf_counter() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

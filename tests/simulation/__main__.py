"""Run `python -m simulation`, with tests/ in PYTHONPATH: see `simulation.command`."""

from __future__ import annotations

import sys

from simulation.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run one part and write its report: `python -m benchmarks.gpu.process PART FILE`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.gpu.report import Report
from runner.system import processes

if __name__ == "__main__":
    processes.end_with_parent()
    name, file = sys.argv[1], Path(sys.argv[2])
    importlib.import_module(f"benchmarks.gpu.{name}").main(Report(file), file.parent)

"""Run `python -m benchmarks gpu`: choose parts, run each within the time left, collect their figures."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import benchmarks.gpu
from benchmarks import results
from benchmarks.gpu.report import Report
from runner.system import processes

PARTS = {"exactness": 100, "speed": 40, "saving": 30, "ranks": 15, "start": 45}
"""The parts in the order of their worth, and the seconds that each needs: with less time left it is not started."""
NEEDED = "torch hydra omegaconf submitit numpy yaml rich orjson safetensors xxhash psutil".split()
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "PyYAML"}
ROOT = Path(__file__).resolve().parents[2]


def missing() -> list[str]:
    """Return the distributions that are needed and not installed."""
    return [DISTRIBUTIONS.get(name, name) for name in NEEDED if find_spec(name) is None]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without one")
    made.add_argument("--out", type=Path, default=Path("build/gpu.json"), help="the JSON file (%(default)s)")
    made.add_argument("--minutes", type=float, default=6.0, help="what has not begun by then is left out (%(default)s)")
    made.add_argument("--folder", type=Path, help="where runs and checkpoints are written; by default a temporary one")
    made.add_argument("--keep", type=Path, metavar="FILE", help="run nothing: put the figures of FILE into the docs")
    return made


def main(arguments: list[str]) -> int:
    """Run the command; return 1 if a part failed."""
    made = parser()
    options = made.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in PARTS]:
        made.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.minutes > 0:
        made.error(f"--minutes {options.minutes:g} must be more than 0")
    if options.keep:
        return keep(made, options.keep)
    if absent := missing():
        made.error(
            f"not installed: {', '.join(absent)}: pip install {' '.join(absent)}; without a network, make gpu-wheels "
            "where there is one, and pip install --no-index --find-links build/wheels ... here"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(options.parts or list(PARTS), options.out, 60 * options.minutes, options.folder)
    except KeyboardInterrupt:  # before the first part, or after the last one
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def keep(made: argparse.ArgumentParser, file: Path) -> int:
    """Copy the figures of a JSON file into results.json and the docs; exit if no GPU gave them."""
    try:
        found = json.loads(file.read_text())
        tables = found["tables"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        made.error(f"--keep {file}: not a file that this command has written ({type(error).__name__}: {error})")
    if not found.get("gpu"):
        made.error(f"--keep {file}: its figures were taken without a GPU, and say nothing")
    results.write({**results.kept(), **tables})
    results.PAGE.write_text(results.with_figures(results.PAGE.read_text(), results.kept()))
    print(f"kept: {', '.join(tables)}")
    return 0


def run(parts: list[str], out: Path, seconds: float, folder: Path | None) -> int:
    """Run parts one after the other; return 1 if one failed."""
    from benchmarks.gpu import sizes  # imports torch

    began, interrupted = time.monotonic(), ""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # commands are started as users have them: compiled
    whole = Report(out, sizes.machine())
    results.RECORDED.clear()
    print(whole.device or "no GPU: small sizes on the CPU, whose times say nothing", flush=True)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as made:
        sizes.write_tokens(Path(made))
        for part in parts:
            left = began + seconds - time.monotonic()
            print(f"\n== {part}, {max(left, 0):.0f} s left", flush=True)
            if interrupted or left < PARTS[part]:
                reason = f"it needs {PARTS[part]} s, and {max(left, 0):.0f} s were left of --minutes"
                whole.step(part, lambda: None, unless=interrupted or reason)
            else:
                file = Path(made, f"{part}.json")
                try:
                    failure = ended(part, file, left)
                except KeyboardInterrupt:
                    failure = interrupted = "interrupted"
                whole.add(part, file, failure)
            whole.write(machine=results.machine(), seconds=round(time.monotonic() - began, 1))
    print()
    for line in whole.summary():
        print(line)
    print(f"{time.monotonic() - began:.0f} s; written to {out}", flush=True)
    return int(bool(whole.failed))


def ended(part: str, file: Path, seconds: float) -> str:
    """Run a part in a separate process and kill its leftover processes; return how it failed, or nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu.process", part, str(file)]
    # DDP advises against a search that the runner has a reason for.
    environment = processes.bound({**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"})
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
        return f"its process ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s, which were left of --minutes"
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the rest of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()

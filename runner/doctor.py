"""Checks before anything is submitted: `python -m runner.doctor launcher=slurm [overrides] [--no-measure]`.

Prints what was found, each thing that needs attention with its remedy. Exit status 0 if nothing stands in
the way of the run, 2 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import ExitStatus, UserError
from runner.files import fsync_dir

if TYPE_CHECKING:
    from runner.config import Composed
    from runner.schema import Config

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}
SLOW_FSYNC_S = 0.5  # an fsync that takes longer slows every commit down


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: str  # ok | warning | fault
    text: str
    remedy: str | None = None


def examine(composed: Composed, measure: bool = True) -> Iterator[Finding]:
    """Everything worth knowing before this config is run or submitted.

    Args:
        composed: the run.
        measure: build the model and save it once, to know how large and how slow a checkpoint is.

    Raises:
        UserError: the launcher or the model cannot be made.
    """
    launcher = make_launcher(composed.config.launcher)
    faults = launcher.check([composed.run_dir])
    yield from (Finding("fault", fault) for fault in faults)
    folder = existing_parent(composed.run_dir)
    disk = examine_disk(folder)
    yield disk
    save_s = None
    if measure and disk.level != "fault":
        size, save_s = measure_save(composed.config, folder)
        yield Finding("ok", f"a checkpoint has {megabytes(size)} and takes {save_s:.2f} s to save on this machine")
        yield examine_space(composed.config, folder, size)
    if not faults:
        yield from (Finding(each.level, each.text, each.remedy) for each in launcher.examine(save_s))


def make_launcher(options: dict[str, Any]) -> Any:
    """The launcher that the config group `launcher` describes.

    Raises:
        UserError: there is no such class, or it refuses the options.
    """
    target = str(options.get("_target_"))
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(
            **{key: value for key, value in options.items() if key != "_target_"}
        )
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"launcher._target_={target!r} cannot be made: {error}") from error


def existing_parent(path: Path) -> Path:
    """The nearest directory at or above `path` that exists."""
    return next(each for each in (path, *path.parents) if each.is_dir())


@contextmanager
def probe(folder: Path) -> Iterator[Path]:
    """A directory of our own on the file system of `folder`, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as name:
        yield Path(name)


def examine_disk(folder: Path) -> Finding:
    """Whether files, renames of directories and fsync work here, and how long an fsync takes."""
    try:
        with probe(folder) as here:
            (here / "a").mkdir()
            started = time.perf_counter()
            with open(here / "a" / "file", "wb") as file:
                file.write(b"x" * 65_536)
                file.flush()
                os.fsync(file.fileno())
            fsync_dir(here / "a")
            os.rename(here / "a", here / "b")
            fsync_dir(here)
            seconds = time.perf_counter() - started
            if not (here / "b" / "file").is_file():
                raise OSError("a renamed directory cannot be seen")
    except OSError as error:
        remedy = "choose a directory on another file system: run.root=..."
        return Finding("fault", f"{folder}: {error.strerror or error}", remedy)
    text = f"{folder}: rename and fsync work, {seconds * 1000:.0f} ms"
    if seconds > SLOW_FSYNC_S:
        return Finding("warning", text, "save less often (checkpoint.every_minutes), or choose another run.root")
    return Finding("ok", text)


def checkpoints_kept(config: Config) -> int:
    """How many checkpoints lie on the disk at the most, the one being written included."""
    options = config.checkpoint
    milestones = config.train.steps // options.keep_every_steps if options.keep_every_steps else 0
    return options.keep_last + options.keep_best + milestones + 1


def examine_space(config: Config, folder: Path, size: int) -> Finding:
    """Whether the checkpoints that are to be kept fit on the disk."""
    kept, free = checkpoints_kept(config), shutil.disk_usage(folder).free
    text = f"{kept} checkpoints need {megabytes(kept * size)}, {megabytes(free)} are free on {folder}"
    if kept * size <= free:
        return Finding("ok", text)
    return Finding("fault", text, "keep fewer (checkpoint.keep_last, keep_every_steps) or choose another run.root")


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def measure_save(config: Config, folder: Path) -> tuple[int, float]:
    """Bytes of one checkpoint of this config, and the seconds that it takes to save it in `folder`.

    Builds the model on the CPU and gives the optimizer its state; no data is touched.
    """
    import torch

    from runner import build
    from runner.checkpoint import TrainStateManager, build_train_state

    model = build.model(config)
    optimizer = build.optimizer(config, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with probe(folder) as here:
        manager = TrainStateManager(here, fingerprint={}, keep_last=1, keep_every_steps=None, keep_best=0, mode="sync")
        started = time.perf_counter()
        manager.save(1, model, optimizer, build_train_state(1, 0, None, None, {}), wait=True)
        seconds = time.perf_counter() - started
        return sum(file.stat().st_size for file in here.rglob("*") if file.is_file()), seconds


def main(arguments: list[str]) -> int:
    """The command; its exit status."""
    from rich.console import Console
    from rich.text import Text

    options = _parser().parse_intermixed_args(arguments or ["--help"])
    console, worst = Console(soft_wrap=True, highlight=False), 0
    try:
        from runner.config import compose

        composed = compose(options.overrides, options.config_dir, options.config_name)
        for finding in examine(composed, measure=not options.no_measure):
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            console.print(Text(f"{finding.level:8}", style=STYLES[finding.level]) + Text(finding.text + remedy))
            worst = max(worst, int(ExitStatus.USAGE) if finding.level == "fault" else 0)
    except UserError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return int(error.status)
    return worst


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m runner.doctor", description=str(__doc__).partition("\n\n")[2])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of one run, as for python -m runner")
    parser.add_argument("--no-measure", action="store_true", help="do not build the model and save it once")
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="further config groups")
    parser.add_argument("--config-name", default="config", metavar="NAME", help="another primary config")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

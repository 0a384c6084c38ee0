"""Check a cluster and a config before you submit: `python -m runner doctor launcher=slurm [overrides]`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.base import model
from runner.cli.base.arguments import add_config_dir
from runner.cli.base.console import PROGRAM, Parser, console
from runner.cli.doctor import sizes
from runner.contracts import Finding, Launcher, RankCounts
from runner.errors import ExitStatus, UserError
from runner.metrics.progress import size
from runner.system import clock, files, processes

if TYPE_CHECKING:
    from runner.config.composition import Composed
    from runner.config.schema import Config
    from runner.training.model.footprint import Footprint

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
SLOW_FSYNC_S = 0.5  # above this, fsync slows down every save


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} doctor",
        description="Checks the disk, the checkpoint size and the cluster before a run is started or submitted, and "
        "prints each finding with its remedy. Exit status 0 if nothing keeps the run from running, 2 otherwise.",
    )
    made.add_argument("overrides", nargs="*", metavar="key=value", help=f"of one run, as for {PROGRAM}")
    made.add_argument("--no-measure", action="store_true", help="do not build the model and save it")
    made.add_argument("--json", action="store_true", help="print JSON: the findings, and what each size costs")
    add_config_dir(made)
    made.add_argument("--config-name", default="config", metavar="NAME", help="another primary config")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the config cannot be composed, or the launcher or the model cannot be created.
    """
    options = parser().parse_intermixed_args(list(arguments) or ["--help"])
    from runner.config.composition import compose

    composed = compose(options.overrides, options.config_dir, options.config_name)
    found = []
    for finding in examine(composed, measure=not options.no_measure):
        found.append(finding)
        if not options.json:
            _print(finding)
    failed = any(finding.level == "error" for finding in found)
    about = _About() if failed else _About.of(composed)
    if options.json:
        print(json.dumps({"findings": [asdict(each) for each in (*found, *about.findings)], **about.to_json()}))
    else:
        about.print()
    return int(ExitStatus.USAGE if failed else ExitStatus.FINISHED)


def _print(finding: Finding) -> None:
    from rich.text import Text

    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    console().print(Text(f"{finding.level:8}", style=STYLES[finding.level]) + Text(finding.text + remedy))


@dataclass
class _About:
    """The part of the report that describes the model and the possible sizes of the run."""

    held: Footprint | None = None
    listing: list[Any] = field(default_factory=list)
    rows: list[sizes.Size] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @staticmethod
    def of(composed: Composed) -> _About:
        """Measure the model without allocating its memory."""
        from runner.cli.base.launcher import make_launcher

        counts = make_launcher(composed.plain["launcher"]).rank_counts()
        held, reason = model.held_by(composed.config)
        reason = f"the model cannot be created without its memory ({reason})"
        if held and held.optimizers is None:
            reason = "the state of an optimizer is known after its first step only"
        unknown = held is None or held.optimizers is None
        return _About(
            held,
            list(model.listing(held, composed.config, counts.counts[0])) if held else [],
            sizes.sizes(composed.config, counts, held) if counts.vary else [],
            [Finding("warning", f"the memory of a rank is not known: {reason}")] if unknown else [],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the model, which is null if not known, and the sizes."""
        return {"model": self.held and asdict(self.held), "sizes": [asdict(row) for row in self.rows]}

    def print(self) -> None:
        """Print this part of the report, after the findings."""
        for finding in self.findings:
            _print(finding)
        for each in self.listing:
            console().print(each)
        if self.rows:
            console().print(sizes.listing(self.rows))


def examine(composed: Composed, measure: bool = True) -> Iterator[Finding]:
    """Yield all findings for a config.

    Args:
        composed: the run to check.
        measure: whether to build the model and save it, which measures the size of a checkpoint and the time to save
            it.

    Raises:
        UserError: the launcher or the model cannot be created.
    """
    from runner.cli.base.launcher import make_launcher

    launcher = make_launcher(composed.plain["launcher"])
    errors = launcher.check([composed.run_dir])
    yield from (Finding("error", error) for error in errors)
    yield from _rank_findings(launcher, composed.config)
    folder = existing_parent(composed.run_dir)
    if not launcher.in_process:
        yield from _cache_findings(composed.config, folder)
    disk = examine_disk(folder)
    yield disk
    saved = None
    if measure and disk.level != "error":
        saved = measure_save(composed.config, folder)
        text = f"a checkpoint has {size(saved.bytes)} and takes {saved.seconds:.2f} s to save on this machine"
        yield Finding("ok", text)
        yield examine_space(composed.config, folder, saved.bytes)
    if not errors:
        yield from launcher.examine(saved.seconds if saved else None)


def _rank_findings(launcher: Launcher, config: Config) -> Iterator[Finding]:
    """Yield an error for each number of ranks that the launcher may use but the run does not support."""
    from runner.cli.base.launcher import idle_ranks, rank_count_errors

    try:
        counts: RankCounts = launcher.rank_counts()
    except UserError:  # the launcher reports this error with its other option errors
        return
    yield from (Finding("error", error) for error in rank_count_errors(counts, config))
    yield from idle_ranks(counts, config)


def _cache_findings(config: Config, folder: Path) -> Iterator[Finding]:
    """Warn if the text cache is in a home directory that some nodes may not have. All nodes have `folder`."""
    from exactdata.paths import cache_directory

    cache = cache_directory(config.data.cache_dir)
    used = any("cache_dir" in source for source in config.data.sources.values() if isinstance(source, Mapping))
    if used and files.stat(existing_parent(cache)).st_dev != files.stat(folder).st_dev:
        text = f"the nodes may not have {cache}, where texts are cached: it is not on the file system of {folder}"
        yield Finding("warning", text, "if so, set data.cache_dir to a directory that they have")


def existing_parent(path: Path) -> Path:
    """Return the nearest existing directory: `path` itself, or one of its parents."""
    return next(each for each in (path, *path.parents) if files.is_dir(each))


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Create a temporary directory in `folder`, and delete it afterwards."""
    path = folder / f".doctor-{processes.own_pid()}"
    files.make_dirs(path)
    try:
        yield path
    finally:
        files.remove_tree(path)


def examine_disk(folder: Path) -> Finding:
    """Check that writing files, renaming directories and fsync work in `folder`, and measure their time."""
    try:
        with _temporary(folder) as here:
            started = clock.perf_counter()
            files.make_dirs(here / "a")
            files.write_atomic(here / "a" / "file", b"x" * 65_536)
            files.rename(here / "a", here / "b")
            files.fsync_dir(here)
            seconds = clock.perf_counter() - started
            if not files.is_file(here / "b" / "file"):
                raise OSError("a renamed directory is not visible")
    except OSError as error:
        remedy = "choose a directory on another file system: run.root=..."
        return Finding("error", f"{folder}: {error.strerror or error}", remedy)
    text = f"{folder}: rename and fsync work, {seconds * 1000:.0f} ms"
    if seconds > SLOW_FSYNC_S:
        return Finding("warning", text, "save less often (checkpoint.every_minutes), or choose another run.root")
    return Finding("ok", text)


def checkpoints_kept(config: Config) -> int:
    """Return the maximum number of checkpoints on disk at the same time, including the one being written.

    If the length of the run is not known, checkpoints of `keep_every_steps` are not included.
    """
    options = config.checkpoint
    milestones = (config.known_steps or 0) // options.keep_every_steps if options.keep_every_steps else 0
    return options.keep_last + options.keep_best + milestones + 1


def examine_space(config: Config, folder: Path, count: int) -> Finding:
    """Check that the disk has space for all checkpoints that will be kept, at `count` bytes each."""
    kept, free = checkpoints_kept(config), files.disk_usage(folder).free
    unknown = config.checkpoint.keep_every_steps is not None and config.known_steps is None
    count_text = f"{'at least ' if unknown else ''}{kept} checkpoints"
    text = f"{count_text} need {size(kept * count)}, {size(free)} are free on {folder}"
    if kept * count <= free:
        return Finding("ok", text)
    return Finding("error", text, "keep fewer (checkpoint.keep_last, keep_every_steps) or choose another run.root")


@dataclass
class Saved:
    """The size of a checkpoint in bytes, and the seconds from the start of the save to its commit."""

    bytes: int
    seconds: float


def measure_save(config: Config, folder: Path) -> Saved:
    """Save a checkpoint for this config in `folder`.

    The model is built on the CPU, and one optimizer step is made with zero gradients. No data is read.
    """
    import torch

    from runner.checkpoint import TrainStateManager, build_train_state
    from runner.system.distributed import World
    from runner.training.model import build

    model = build.model(config)
    average = build.average(config, model, World(), torch.device("cpu"))
    averaged = average.averaged if average else None
    optimizers = build.optimizers(config, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for name in optimizers.names:
        optimizers[name].step()
    with _temporary(folder) as here:
        mode = config.checkpoint.mode.value
        manager = TrainStateManager(here, fingerprint={}, keep_last=1, keep_every_steps=None, keep_best=0, mode=mode)
        for step in (1, 2):  # the first save is slower, because it imports modules
            started = clock.perf_counter()
            state = build_train_state(step, 0, None, None, {})
            manager.save(step, model, optimizers, state, averaged=averaged)
            manager.wait()
            seconds = clock.perf_counter() - started
        saved = [Path(directory) / name for directory, _, names in files.walk(here) for name in names]
        count = sum(files.stat(path).st_size for path in saved)
        return Saved(count, seconds)

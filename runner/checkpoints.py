"""What a run has saved: `python -m runner.checkpoints RUN [--verify | --prune | --export FILE | --diff A B]`.

RUN is a run directory or a directory of checkpoints; --diff with two paths needs none. Without an option, lists
them: only manifests and sizes are read. Nothing in a checkpoint is executed, and no model is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.checkpoint import store
from runner.checkpoint.store import Candidate, Retention
from runner.errors import CheckpointError, ExitStatus, UserError
from runner.lease import Lease
from runner.run_dir import RunDir

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DIFFERENT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status: 0, 1 if damaged or different, 2 for a mistake."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.status)
    except OSError as error:
        print(f"error: {error.filename or options.run}: {error.strerror}", file=sys.stderr)
        return int(ExitStatus.FAILED)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m runner.checkpoints",
        description="List, verify, prune, export and compare the checkpoints of a run.",
    )
    made.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run directory, or a directory of checkpoints")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read every byte; exit status 1 if any is damaged")
    what.add_argument(
        "--prune", action="store_true", help="delete leftovers, damaged ones and all but the newest (see --keep-last)"
    )
    what.add_argument("--export", type=Path, metavar="FILE", help="write the model's weights as a .safetensors file")
    what.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="compare two, each a step of RUN or the path of a checkpoint; exit status 1 if they differ",
    )
    made.add_argument("--step", type=int, help="with --export: this step instead of the newest that verifies")
    made.add_argument("--keep-last", type=int, metavar="N", help="with --prune: how many to keep (default 1)")
    made.add_argument("--dry-run", action="store_true", help="with --prune: only say what would be deleted")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def run(options: argparse.Namespace) -> int:
    """Do what the options ask for.

    Raises:
        UserError: an option is given beside what it belongs to.
    """
    for flag, given, owner, wanted in (
        ("--step", options.step is not None, "--export", options.export is not None),
        ("--keep-last", options.keep_last is not None, "--prune", options.prune),
        ("--dry-run", options.dry_run, "--prune", options.prune),
    ):
        if given and not wanted:
            raise UserError(f"{flag} goes with {owner} only: add {owner}, or leave {flag} out")
    if options.diff is not None:
        return diff(checkpoints_of(options.run) if options.run else None, *options.diff, as_json=options.json)
    if options.run is None:
        raise UserError("RUN is missing: give a run directory, such as outputs/NAME")
    directory = checkpoints_of(options.run)
    if options.prune:
        return prune(directory, 1 if options.keep_last is None else options.keep_last, options.dry_run, options.json)
    if options.export is not None:
        return export(directory, options.export, options.step, options.json)
    return show(directory, options.verify, options.json)


def checkpoints_of(path: Path) -> Path:
    """The directory of checkpoints that `path` means.

    Raises:
        UserError: there is none.
    """
    inside = RunDir(path).checkpoints
    if inside.is_dir():
        return inside
    if path.is_dir() and (store.candidates(path) or path.name == inside.name):
        return path
    raise UserError(f"{path} holds no checkpoints; give a run directory, such as outputs/NAME")


# List and verify


def show(directory: Path, verify: bool, as_json: bool) -> int:
    """List all that is there; with `verify`, after reading every byte."""
    rows = [_row(candidate, verify) for candidate in reversed(store.candidates(directory))]
    damaged = [row for row in rows if row["fault"]]
    others = {
        "set_aside": [path.name for path in store.set_aside_earlier(directory)],
        "temporary": [path.name for path in store.leftovers(directory)],
    }
    warning = store.loose_modes(directory)
    if as_json:
        print(json.dumps({"directory": str(directory), "checkpoints": rows, **others, "warning": warning}, indent=2))
    else:
        _print_list(directory, rows, others, warning, verify)
    return int(ExitStatus.FAILED) if damaged else 0


def _row(candidate: Candidate, verify: bool) -> dict[str, Any]:
    fault = store.fault_of(candidate) if verify else store.size_fault(candidate)
    manifest = candidate.manifest
    row = {"name": candidate.path.name, "step": candidate.step, "fault": fault, "verified": verify and fault is None}
    if manifest is None:
        return row
    return {
        **row,
        "bytes": manifest.size,
        "metric": manifest.metric,
        "ranks": manifest.world_size,
        "attempt": manifest.fence,
        "version": manifest.version,
        "created": manifest.created,
    }


def _print_list(
    directory: Path, rows: list[dict[str, Any]], others: dict[str, list[str]], warning: str | None, verify: bool
) -> None:
    from rich.table import Table

    console = _console()
    console.print(str(directory), style="bold", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right", style="cyan")
    for name in ("size", "saved", "ranks", "metric"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"])) if row.get("created") else ""
        metric = "" if row.get("metric") is None else f"{row['metric']:.4f}"
        state = (
            f"[red]damaged: {_escaped(row['fault'])}" if row["fault"] else "[green]verified" if verify else "committed"
        )
        table.add_row(str(row["step"]), size(row.get("bytes")), saved, str(row.get("ranks", "")), metric, state)
    console.print(table if rows else "no checkpoint")
    for title, names in others.items():
        if names:
            console.print(f"{title.replace('_', ' ')}: {', '.join(names)}", style="yellow", highlight=False)
    if warning:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _console() -> Console:
    """As wide as the terminal; whole lines when piped."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200)


def size(count: int | None) -> str:
    """Bytes for people: `1.2 MB`."""
    if count is None:
        return ""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


# Prune


def prune(directory: Path, keep_last: int, dry_run: bool, as_json: bool) -> int:
    """Delete leftovers, damaged ones, and all but the newest `keep_last`, of which one must verify.

    Raises:
        LockedError: the run is being trained.
        CheckpointError: nothing verifies, so nothing is deleted.
    """
    if keep_last < 1:
        raise UserError(f"--keep-last {keep_last}: give 1 or more; the newest valid one is never deleted")
    with Lease.acquire(RunDir(directory.parent).lease, {"job_id": None}, report=_warn):
        kept = store.newest(directory)
        found = [(c, store.fault_of(c)) for c in store.candidates(directory)]
        doomed = [c.path for c in Retention(keep_last).doomed(c for c, fault in found if fault is None)]
        doomed += [c.path for c, fault in found if fault is not None]
        doomed += store.set_aside_earlier(directory) + store.leftovers(directory)
        if not dry_run:
            for path in doomed:
                store.delete(path, "pruned")
    if as_json:
        print(json.dumps({"deleted" if not dry_run else "would_delete": [path.name for path in doomed]}, indent=2))
    else:
        for path in doomed:
            print(f"{'would delete' if dry_run else 'deleted'} {path}")
        print(f"kept {kept.path.name if kept else 'nothing: there is no checkpoint'}")
    return 0


# Export


def export(directory: Path, target: Path, step: int | None, as_json: bool) -> int:
    """Write the model's tensors, under their names, as a safetensors file.

    Raises:
        UserError: the name is wrong, or there is no such step.
    """
    from safetensors.torch import save

    from runner.checkpoint import archive
    from runner.checkpoint.staging import MODEL
    from runner.files import write_atomic

    if target.suffix != ".safetensors":
        raise UserError(f"--export {target}: give a file name that ends in .safetensors")
    chosen = newest(directory) if step is None else choose(directory, str(step))
    if chosen.manifest is None:
        raise CheckpointError(f"{chosen.path} is damaged: {chosen.fault}")
    weights = dict(archive.tensors(chosen.path, chosen.manifest, MODEL))
    try:
        write_atomic(target, save(weights, {"step": str(chosen.step), "format": "pt"}))
    except OSError as error:
        raise UserError(
            f"--export {target} cannot be written ({error.strerror or error}): give another file"
        ) from error
    values = sum(tensor.numel() for tensor in weights.values())
    if as_json:
        print(json.dumps({"file": str(target), "step": chosen.step, "tensors": len(weights), "values": values}))
    else:
        print(f"wrote {len(weights)} tensors with {values:,} values of step {chosen.step} to {target}")
    return 0


def newest(directory: Path) -> Candidate:
    """The newest checkpoint that verifies.

    Raises:
        UserError: there is none.
    """
    found = store.newest(directory, lambda bad, fault: _warn(f"{bad.path} is damaged ({fault}): passed over"))
    if found is None:
        raise UserError(f"{directory} holds no checkpoint")
    return Candidate(found.path, found.step, found.manifest)


def choose(directory: Path | None, which: str) -> Candidate:
    """The checkpoint of a step in `directory`, or at a path; verified.

    Raises:
        UserError: there is none such.
        CheckpointError: it is damaged.
    """
    found = {} if directory is None else {candidate.step: candidate for candidate in store.candidates(directory)}
    if which.isdigit() and int(which) in found:
        chosen = found[int(which)]
    elif Path(which).is_dir():
        path = Path(which).resolve()
        within = {candidate.path.resolve(): candidate for candidate in store.candidates(path.parent)}
        if path not in within:
            raise UserError(f"{which} is no checkpoint; give a step, or the path of a directory named step_…")
        chosen = within[path]
    elif directory is None:
        raise UserError(f"{which} is no directory: give the paths of two checkpoints, or RUN and two of its steps")
    else:
        steps = ", ".join(str(step) for step in sorted(found))
        raise UserError(f"there is no checkpoint of step {which} in {directory}; there are {steps or 'none'}")
    fault = store.fault_of(chosen)
    if fault is not None:
        raise CheckpointError(f"{chosen.path} is damaged: {fault}")
    return chosen


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


# Diff


def diff(directory: Path | None, first: str, second: str, *, as_json: bool) -> int:
    """Compare tensors bit for bit and the train states value by value."""
    one, two = choose(directory, first), choose(directory, second)
    rows = [*_tensor_differences(one, two), *_state_differences(one, two)]
    if as_json:
        print(json.dumps({"a": str(one.path), "b": str(two.path), "differences": rows}, indent=2))
    elif not rows:
        print(f"{one.path} and {two.path} hold the same, bit for bit")
    else:
        _print_differences(one, two, rows)
    return DIFFERENT if rows else 0


def _tensor_differences(one: Candidate, two: Candidate) -> list[dict[str, Any]]:
    from runner.checkpoint.archive import Archive

    if one.manifest is None or two.manifest is None:
        raise CheckpointError("a checkpoint without a manifest cannot be compared")
    rows = []
    with Archive(one.path, one.manifest) as left, Archive(two.path, two.manifest) as right:
        for name in sorted({*left.entries, *right.entries}):
            if name not in left.entries or name not in right.entries:
                rows.append({"name": name, "difference": f"only in {'B' if name in right.entries else 'A'}"})
            else:
                difference = compare(left.read(name), right.read(name))
                if difference:
                    rows.append({"name": name, "difference": difference})
    return rows


def compare(one: torch.Tensor, two: torch.Tensor) -> str | None:
    """How two tensors differ, in words; None if they are the same bit for bit (NaN and -0 too)."""
    import torch

    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{tuple(one.shape)} {one.dtype} and {tuple(two.shape)} {two.dtype}"
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    if torch.equal(*bits):
        return None
    gap = (one.double() - two.double()).abs().reshape(-1)
    return f"{int((gap != 0).sum())} of {one.numel()} values, by up to {float(gap.nan_to_num(torch.inf).max()):.3g}"


def _state_differences(one: Candidate, two: Candidate) -> list[dict[str, Any]]:
    from runner.checkpoint.archive import load_train_state

    left, right = (_flat(load_train_state(candidate.path), "train_state") for candidate in (one, two))
    rows = []
    for name in sorted({*left, *right}):
        if name not in left or name not in right:
            rows.append({"name": name, "difference": f"only in {'B' if name in right else 'A'}"})
        elif left[name] != right[name]:
            rows.append({"name": name, "difference": f"{_short(left[name])} and {_short(right[name])}"})
    return rows


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Nested values by dotted path; tensors and long tuples as their digest."""
    import hashlib

    import torch

    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for n, item in enumerate(value) for k, v in _flat(item, f"{path}.{n}").items()}
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(raw).hexdigest()[:12]}"}
    if isinstance(value, tuple) and len(str(value)) > 60:
        return {path: f"tuple {hashlib.sha256(repr(value).encode()).hexdigest()[:12]}"}
    return {path: value}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _print_differences(one: Candidate, two: Candidate, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    console = _console()
    console.print(f"A = {one.path}, B = {two.path}: {len(rows)} differences", style="bold", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("name", style="cyan")
    table.add_column("A and B differ in")
    for row in rows:
        table.add_row(_escaped(row["name"]), _escaped(row["difference"]))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

"""Manage the checkpoints of a run: `runner checkpoints RUN [--verify | --prune | --export FILE | --diff A B]`.

RUN is a run directory or a directory of checkpoints. `--diff` with two paths does not need it. Without an option, the
command lists the checkpoints and reads only manifests and sizes. Nothing in a checkpoint is executed, and the model is
not needed.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.checkpoint.files import choice
from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files.choice import Candidate, Intact, Retention, Stranger
from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence
from runner.cli.base.console import PROGRAM, Parser, console, skip_corrupt, table, tell
from runner.errors import CheckpointError, ExitStatus, FileError, UserError
from runner.metrics.progress import size
from runner.rundir.find import what_to_pass
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.trust import check_kinds
from runner.system import files, processes

DIFFERENT = 1

WEIGHT_FILES = (".bin", ".ckpt", ".h5", ".npz", ".onnx", ".pt", ".pth")  # file types that the export does not write


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 if a checkpoint is corrupt or two checkpoints differ, else 0.

    Raises:
        UserError: an argument is wrong, or a file cannot be read or written.
    """
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except OSError as error:
        raise FileError(f"{error.filename or options.run}: {error.strerror or error}") from error


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} checkpoints",
        description="List, verify, prune, export and compare the checkpoints of a run.",
    )
    made.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run directory, or a directory of checkpoints")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read every byte; exit status 1 if any is corrupt")
    what.add_argument(
        "--prune", action="store_true", help="delete leftovers, corrupt ones and all but the newest (see --keep-last)"
    )
    what.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the model's weights (their average with train.ema_decay) as a .safetensors file; a Hugging Face "
        "model as a folder",
    )
    what.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="compare two, each a step of RUN or the path of a checkpoint; exit status 1 if they differ",
    )
    made.add_argument("--step", help="with --export: this step, or best, instead of the newest valid one")
    made.add_argument("--raw", action="store_true", help="with --export: the weights themselves, not their average")
    made.add_argument("--keep-last", type=int, metavar="N", help="with --prune: how many to keep (default: 1)")
    made.add_argument("--dry-run", action="store_true", help="with --prune: only print what would be deleted")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(options: argparse.Namespace) -> int:
    """Perform the action that the options choose.

    Raises:
        UserError: an option is used without the option that it needs.
    """
    for flag, given, owner, wanted in (
        ("--step", options.step is not None, "--export", options.export is not None),
        ("--raw", options.raw, "--export", options.export is not None),
        ("--keep-last", options.keep_last is not None, "--prune", options.prune),
        ("--dry-run", options.dry_run, "--prune", options.prune),
    ):
        if given and not wanted:
            raise UserError(f"{flag} works with {owner} only: add {owner}, or remove {flag}")
    if options.diff is not None:
        return diff(checkpoints_of(options.run) if options.run else None, *options.diff, as_json=options.json)
    if options.run is None:
        raise UserError("RUN is missing: pass a run directory, such as outputs/NAME")
    directory = checkpoints_of(options.run)
    if options.prune:
        return prune(directory, 1 if options.keep_last is None else options.keep_last, options.dry_run, options.json)
    if options.export is not None:
        return export(directory, options.export, options.step, options.raw, options.json)
    return show(directory, options.verify, options.json)


def checkpoints_of(path: Path) -> Path:
    """Return the directory of checkpoints at `path`, or in the run at `path`.

    Raises:
        UserError: there is no such directory, or the run directory contains links or other special files.
    """
    inside = RunDir(path).checkpoints
    if files.is_taken(inside):  # otherwise it is not a run, and its files are not checked
        check_kinds(RunDir(path))
    if files.is_dir(inside):
        return inside
    if files.is_dir(path) and (choice.candidates(Directory(path)) or path.name == inside.name):
        return path
    raise UserError(f"{path} has no checkpoints: {what_to_pass(path)}")


# List and verify


def show(directory: Path, verify: bool, as_json: bool) -> int:
    """List all checkpoints. If `verify`, read every byte first."""
    store = Directory(directory)
    found = list(reversed(choice.scan(store)))
    candidates = choice.judged(store, (entry for entry in found if isinstance(entry, Candidate)))
    best = choice.best(candidates)
    rows = [{**_row(entry, verify), "best": entry is best} for entry in candidates]
    others = {
        "not_used": [f"{entry.path.name} ({entry.reason})" for entry in found if isinstance(entry, Stranger)],
        "set_aside": choice.set_aside_earlier(store),
        "temporary": [path.name for path in checkpoint_dir.leftovers(directory)],
    }
    warning = checkpoint_dir.loose_modes(directory)
    if as_json:
        print(json.dumps({"directory": str(directory), "checkpoints": rows, **others, "warning": warning}, indent=2))
    else:
        _print_list(directory, rows, others, warning, verify)
    return int(ExitStatus.FAILED) if any(row["corruption"] or row["error"] for row in rows) else 0


def _row(candidate: Candidate, verify: bool) -> dict[str, Any]:
    corruption = error = None
    try:
        corruption = choice.corruption_of(candidate) if verify else choice.size_error(candidate)
    except CheckpointError as unreadable:
        error = str(unreadable)
    manifest = candidate.manifest
    row = {
        "name": candidate.path.name,
        "step": candidate.step,
        "corruption": corruption,
        "error": error,
        "verified": verify and corruption is None and error is None,
    }
    if manifest is None:
        return row
    return {
        **row,
        "bytes": manifest.size,
        "metric": manifest.metric,
        "metric_name": manifest.metric_name,
        "metric_mode": manifest.metric_mode,
        "ranks": manifest.world_size,
        "fence": manifest.fence,
        "version": manifest.version,
        "created": manifest.created,
    }


def _print_list(
    directory: Path, rows: list[dict[str, Any]], others: dict[str, list[str]], warning: str | None, verify: bool
) -> None:
    from rich.text import Text

    out = console()
    out.print(str(directory), style="bold")
    listing = table("step", "size", "saved", "ranks", "metric", "state")
    for column in listing.columns[:-1]:
        column.justify = "right"
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"])) if row.get("created") else ""
        metric = "" if row.get("metric") is None else f"{row['metric_name']} {row['metric']:.4f}"
        metric += f" (best: {row['metric_mode']})" if row["best"] else ""
        if row["corruption"]:
            state = Text(f"corrupt: {row['corruption']}", style="red")
        elif row["error"]:
            state = Text(f"cannot be judged: {row['error']}", style="red")
        else:
            state = Text("verified", style="green") if verify else Text("committed")
        step = Text(str(row["step"]), style="cyan")
        listing.add_row(step, size(row.get("bytes")), saved, str(row.get("ranks", "")), metric, state)
    out.print(listing if rows else "no checkpoint")
    for title, names in others.items():
        if names:
            out.print(Text(f"{title.replace('_', ' ')}: {', '.join(names)}", style="yellow"))
    if warning:
        out.print(Text(f"warning: {warning}", style="yellow"))


# Prune


def prune(directory: Path, keep_last: int, dry_run: bool, as_json: bool) -> int:
    """Delete leftovers, corrupt checkpoints, and all but the newest `keep_last`, at least one of which must be valid.

    Raises:
        LockedError: the run is being trained.
        CheckpointError: no checkpoint is valid, so nothing was deleted.
    """
    if keep_last < 1:
        raise UserError(f"--keep-last {keep_last}: must be 1 or more; the newest valid one is never deleted")
    run = RunDir(directory.parent)
    with Lease.acquire(run.lease, {"job_id": None}, report=tell, within=run.path) as lease:
        store = Directory(directory, Fence(lease.fence, lease.check_fence))
        store.look_anew()
        kept = choice.newest(store)
        found = [(c, choice.corruption_of(c)) for c in choice.candidates(store)]
        left = checkpoint_dir.leftovers(directory)
        intact = [c for c, corruption in found if not corruption]
        to_delete = [c.path for c in Retention(keep_last).to_delete(intact, store.pinned())]
        to_delete += [c.path for c, corruption in found if corruption]
        to_delete += [directory / name for name in choice.set_aside_earlier(store) if ".corrupt" in name]
        if not dry_run:
            for path in to_delete:
                store.delete(path.name)
            store.sweep()
        to_delete += left
    if as_json:
        print(json.dumps({"would_delete" if dry_run else "deleted": [path.name for path in to_delete]}, indent=2))
    else:
        for path in to_delete:
            print(f"{'would delete' if dry_run else 'deleted'} {path}")
        print(f"kept {kept.path.name if kept else 'nothing: there is no checkpoint'}")
    return 0


# Export


def export(directory: Path, target: Path, step: str | None, raw: bool, as_json: bool) -> int:
    """Write the model's tensors to a safetensors file, by name.

    If the checkpoint has averaged weights, they are written, unless `raw` is set.

    Raises:
        UserError: the file name is wrong, or there is no checkpoint at that step.
    """
    from safetensors.torch import save

    from runner.checkpoint.tensors import reader
    from runner.checkpoint.tensors.staging import AVERAGE, MODEL

    if target.suffix != ".safetensors":
        return export_folder(directory, target, step, raw, as_json)
    chosen = choice.choose(Directory(directory), choice.LAST if step is None else step, skip_corrupt)
    averaged = {} if raw else dict(reader.tensors(chosen.at, chosen.manifest, AVERAGE))
    weights = averaged or dict(reader.tensors(chosen.at, chosen.manifest, MODEL))
    try:
        files.write_atomic(target, save(weights, {"step": str(chosen.step), "format": "pt"}))
    except OSError as error:
        raise UserError(
            f"--export {target} cannot be written ({error.strerror or error}): choose another file"
        ) from error
    values = sum(tensor.numel() for tensor in weights.values())
    if as_json:
        counts = {"tensors": len(weights), "values": values, "averaged": bool(averaged)}
        print(json.dumps({"file": str(target), "step": chosen.step, **counts}))
    else:
        kind = "averaged tensors" if averaged else "tensors"
        print(f"wrote {len(weights)} {kind} with {values:,} values of step {chosen.step} to {target}")
    return 0


def export_folder(directory: Path, target: Path, step: str | None, raw: bool, as_json: bool) -> int:
    """Write a Hugging Face model as a folder for `from_pretrained`, with its weights and its config.

    Raises:
        UserError: the model has no `save_pretrained`, the folder exists, or there is no checkpoint at that step.
    """
    from runner.training.load import load

    if target.suffix in WEIGHT_FILES:
        raise UserError(f"--export {target}: the file name must end in .safetensors, or name a folder")
    if not files.is_file(RunDir(directory.parent).config):
        raise UserError(f"--export {target}: the file name must end in .safetensors; a folder needs the run directory")
    loaded = load(directory.parent, step, raw=raw)
    save: Any = getattr(loaded.model, "save_pretrained", None)
    if not callable(save):
        raise UserError(
            f"--export {target}: the file name must end in .safetensors; a folder is for models of Hugging Face's "
            f"libraries, and {type(loaded.model).__name__} has no save_pretrained"
        )
    if differing := unlike_its_class(loaded.model):
        raise UserError(
            f"--export {target}: from_pretrained could not read it, since this {type(loaded.model).__name__} is not "
            f"what its class creates: {differing}. Merge what was added (adapters, say) into the weights, or export "
            "to a file that ends in .safetensors"
        )
    if files.is_taken(target):
        raise UserError(f"--export {target} exists: choose another folder")
    temporary = target.with_name(f".{target.name}.tmp-{processes.tag()}")
    try:
        save(str(temporary))
        _sync(temporary)
        files.rename(temporary, target)
        files.fsync_dir(target.parent)
    except OSError as error:
        raise UserError(f"--export {target} cannot be written ({error.strerror or error})") from error
    finally:
        if files.exists(temporary):
            files.remove_tree(temporary)
    if as_json:
        print(json.dumps({"folder": str(target), "step": loaded.step, "averaged": loaded.averaged}))
    else:
        print(f"wrote {type(loaded.model).__name__} of step {loaded.step} to {target}")
    return 0


def unlike_its_class(model: Any) -> str:
    """Describe which tensors a model has in addition to, or lacks compared with, a new model of its class and config.

    Return an empty string if there are none, or if the class cannot be created from only a config.
    """
    import torch

    try:
        with torch.device("meta"):
            new = type(model)(copy.deepcopy(model.config)).state_dict().keys()
    except Exception:  # noqa: BLE001 a user's class may raise anything
        return ""
    parts = {"has no": sorted(new - model.state_dict().keys()), "also has": sorted(model.state_dict().keys() - new)}
    return "; ".join(f"it {verb} {names[0]} and {len(names) - 1} more" for verb, names in parts.items() if names)


def _sync(folder: Path) -> None:
    """Make all files in a folder durable, because other code wrote them without fsync."""
    for path, _, names in files.walk(folder):
        for name in names:
            with files.open_regular(Path(path) / name, follow=True) as file:
                files.fsync_fd(file.fileno())
        files.fsync_dir(Path(path))


def compared(directory: Path | None, which: str) -> Intact:
    """Return a step's checkpoint in `directory`, or the checkpoint at a path, after verifying every byte.

    Raises:
        UserError: the checkpoint does not exist.
        CheckpointError: the checkpoint is corrupt.
    """
    if directory is not None and not files.is_dir(which):
        return choice.choose(Directory(directory), which)
    if not files.is_dir(which):
        raise UserError(f"{which} is not a directory: pass the paths of two checkpoints, or RUN and two of its steps")
    path = files.resolve(which)
    if path.name not in {candidate.path.name for candidate in choice.candidates(Directory(path.parent))}:
        raise UserError(f"{which} is not a checkpoint; pass a step, or the path of a directory named step_…")
    return choice.choose(Directory(path.parent), int(path.name.removeprefix("step_")))


# Diff


def diff(directory: Path | None, first: str, second: str, *, as_json: bool) -> int:
    """Compare the tensors of two checkpoints bit for bit, and their train states value by value."""
    from runner.checkpoint.tensors.compare import compare_checkpoints

    one, two = compared(directory, first), compared(directory, second)
    found = compare_checkpoints(one.at, two.at, (one.manifest, two.manifest)).differences
    if as_json:
        rows = [asdict(difference) for difference in found]
        print(json.dumps({"a": str(one.path), "b": str(two.path), "differences": rows}, indent=2))
    elif not found:
        print(f"{one.path} and {two.path} are bit-identical")
    else:
        from rich.text import Text

        out, listing = console(), table("name", "in A", "in B")
        out.print(Text(f"A = {one.path}, B = {two.path}: {len(found)} differences", style="bold"))
        for difference in found:
            listing.add_row(Text(difference.name, style="cyan"), Text(difference.one), Text(difference.two))
        out.print(listing)
    return DIFFERENT if found else 0

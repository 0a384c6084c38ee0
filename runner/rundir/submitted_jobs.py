"""Ask schedulers about submitted runs, through the launchers that submitted them.

A run directory may be shared and written by anybody, so job.json only selects among the launchers that this
installation knows. Nothing is imported because a file names it. Nothing here imports torch, numpy or hydra.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from runner.contracts import JobInfo
from runner.errors import UserError
from runner.rundir.paths import RunDir
from runner.system import files

GROUP = "runner.launchers"
"""The entry-point group in which a package registers its launchers, classes that can be called without arguments."""
NONE = "no launcher"
"""Replaces the class where job.json names none."""
SHIPPED = ("launch.local:LocalLauncher", "launch.slurm:SlurmLauncher")


def jobs(runs: Iterable[RunDir]) -> tuple[dict[Path, JobInfo], dict[Path, str]]:
    """Return the jobs that schedulers report, and why a scheduler cannot be asked, both by run directory."""
    submitted: dict[str, list[Path]] = {}
    found: dict[Path, JobInfo] = {}
    unanswered: dict[Path, str] = {}
    for run in runs:
        try:
            files.read_object(run.status)  # launchers read it; one unreadable file must not fail the query
            if name := launcher_of(run):
                submitted.setdefault(name, []).append(run.path)
        except OSError as error:
            unanswered[run.path] = f"{error.filename} cannot be read ({error.strerror})"
    for name, paths in submitted.items():
        try:
            launcher = _known_launcher(name)
            found.update(launcher.load()().jobs(paths))
        except (LookupError, ImportError, AttributeError, TypeError, ValueError, OSError) as error:
            unanswered.update(dict.fromkeys(paths, f"{name!r:.99} cannot report which jobs are live: {error}"))
    return found, unanswered


def cancel(runs: Iterable[RunDir]) -> dict[Path, str]:
    """Cancel the live jobs of runs through the launchers that submitted them. Return what was cancelled, by path.

    Raises:
        UserError: a launcher cannot cancel, or its scheduler does not answer or refuses.
    """
    ended: dict[Path, str] = {}
    submitted: dict[str, list[Path]] = {}
    for run in runs:
        submitted.setdefault(launcher_of(run) or NONE, []).append(run.path)
    for name, paths in submitted.items():
        try:
            ended.update(_known_launcher(name).load()().cancel(paths))
        except (LookupError, ImportError, AttributeError, TypeError, ValueError, OSError) as error:
            first = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
            raise UserError(f"{first} cannot be cancelled by {name!r:.99}: {error}; rerun the command later") from error
    return ended


def launcher_of(run: RunDir) -> str | None:
    """Return the launcher class that submitted the run, or None if the run was never submitted.

    Without a job.json (the command was killed before it wrote it), return the launcher of the job that trained last.

    Raises:
        OSError: job.json or status.json cannot be read.
    """
    try:
        # Open the file without checking first that it exists. On a network file system, a machine may believe for
        # seconds that a new file is missing, but it asks the server when it opens the file.
        found = files.read_regular(run.job)
    except (FileNotFoundError, NotADirectoryError):
        launcher = files.read_object(run.status).get("launcher")
        return None if launcher is None else str(launcher)
    with suppress(ValueError, RecursionError, AttributeError):
        return str(json.loads(found).get("launcher") or NONE)
    return NONE


def _known_launcher(name: str) -> metadata.EntryPoint:
    """Return the registered launcher with this name (`module.Class`).

    Raises:
        LookupError: no such launcher is registered.
    """
    for value in SHIPPED:
        if name == value.replace(":", "."):
            return metadata.EntryPoint(name, value, GROUP)
    for registered in metadata.entry_points(group=GROUP):
        if name == registered.value.replace(":", "."):
            return registered
    raise LookupError(f"unknown launcher (install the package that registers it as an entry point of {GROUP})")

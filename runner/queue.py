"""What schedulers say of runs that were submitted, asked through the launcher that submitted them.

Nothing here imports torch, numpy or hydra.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from runner.files import read_object
from runner.run_dir import RunDir


def jobs(runs: Iterable[RunDir]) -> tuple[dict[Path, Any], list[str]]:
    """The scheduler's word on the runs that were submitted, by path; a remark for each scheduler that is silent."""
    submitted: dict[str, list[Path]] = {}
    for run in runs:
        if name := launcher_of(run):
            submitted.setdefault(name, []).append(run.path)
    found: dict[Path, Any] = {}
    remarks = []
    for target, paths in submitted.items():
        module, _, name = target.rpartition(".")
        try:
            found.update(getattr(importlib.import_module(module), name)().jobs(paths))
        except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
            remarks.append(f"{target} does not tell which jobs are alive: {error}")
    return found, remarks


def launcher_of(run: RunDir) -> str | None:
    """The class that submitted the run, None where nobody did. A run may have been started in other ways since."""
    if not run.job.exists():
        return None
    return str(read_object(run.job).get("launcher") or frozen(run, "launcher", "_target_") or "a launcher")


def frozen(run: RunDir, group: str, key: str) -> Any:
    """One value of the frozen config; None where it cannot be read."""
    try:
        return yaml.safe_load(run.config.read_text())[group][key]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None

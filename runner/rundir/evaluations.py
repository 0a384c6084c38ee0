"""Read and write the results of `runner evaluate` in a run directory, one file per checkpoint and settings.

    evaluations/step_00000040-SETTINGS.json   a result
    evaluations/evaluate-STEP-SETTINGS/       a submitted evaluation: request.json, job.json, logs

Nothing here needs the run's lease, because each result is a new file. If two commands compute the same result, either
may write it. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.system import files

EVALUATION = b'"eval_'
"""Occurs in every evaluation line of metrics.jsonl, so that evaluations are found without parsing the other lines."""
ALL = "all"
PREFIX = "evaluate-"  # prefix of the directory names of submitted evaluations
_RESULT = re.compile(r"step_(\d{8,})-(\w+)\.json")


@dataclass(frozen=True)
class Request:
    """A checkpoint of a run to evaluate, and the settings to evaluate it with.

    Attributes:
        settings: digest of all settings that change a result.
        step: a step, `best`, `last` or `all`.
        overrides: the settings that differ from the run's, as passed to the command.
        config: the run's frozen config with these overrides, as plain values.
    """

    settings: str
    step: str = "last"
    overrides: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    def directory(self, run: RunDir) -> Path:
        """Return the directory of a submitted evaluation's request, job and logs.

        The directory's name is the job's name.
        """
        return run.evaluations / f"{PREFIX}{self.step}-{self.settings}"

    def write(self, directory: Path, guard: files.Guard) -> None:
        """Write request.json.

        Raises:
            OSError: the file system refused.
        """
        files.write_json(_request_file(directory), asdict(self), guard=guard)

    @classmethod
    def read(cls, directory: Path) -> Request:
        """Read the request of a submitted evaluation.

        Raises:
            RunDirError: the file is malformed.
        """
        found = files.read_object(_request_file(directory))
        try:
            return cls(**{**found, "overrides": tuple(found["overrides"])})
        except (TypeError, KeyError):
            raise RunDirError(f"{_request_file(directory)} is malformed: rerun the command, which writes it") from None


def _request_file(directory: Path) -> Path:
    return directory / "request.json"


def submitted(run: RunDir) -> list[RunDir]:
    """List the directories of a run's submitted evaluations.

    Raises:
        OSError: the run directory cannot be read.
    """
    return [RunDir(run.evaluations / name) for name in _file_names(run) if name.startswith(PREFIX)]


def results(run: RunDir) -> list[dict[str, Any]]:
    """Read all results of a run, ordered by step. Skip files that are not results.

    Raises:
        OSError: they cannot be read.
    """
    found = [files.read_object(run.evaluations / name) for name in _file_names(run) if _RESULT.fullmatch(name)]
    return sorted((one for one in found if isinstance(one.get("step"), int)), key=lambda one: int(one["step"]))


def evaluated(run: RunDir, settings: str) -> dict[int, dict[str, Any]]:
    """Read the results whose settings have this digest, keyed by step.

    Raises:
        OSError: they cannot be read.
    """
    return {int(one["step"]): one for one in results(run) if one.get("digest") == settings}


def by_own_settings(run: RunDir) -> dict[int, dict[str, Any]]:
    """Read the results with the run's own settings, keyed by step.

    Raises:
        OSError: they cannot be read.
    """
    return {int(one["step"]): one for one in results(run) if not one.get("overrides")}


def recorded(run: RunDir) -> Iterator[dict[str, Any]]:
    """Yield the evaluations in metrics.jsonl, ordered by step.

    Raises:
        OSError: it cannot be read.
    """
    for record in files.read_lines(run.metrics, having=EVALUATION):
        if isinstance(record, dict) and "loss" not in record:
            yield record


def known_values(run: RunDir, step: int) -> dict[str, Any]:
    """Read all values recorded at a step with the run's own settings, from its step record and its evaluations.

    Raises:
        OSError: they cannot be read.
    """
    mark, found = f'"step": {step},'.encode(), dict[str, Any]()
    for record in files.read_lines(run.metrics, having=mark):
        if isinstance(record, dict) and record.get("step") == step:
            found |= record
    found |= by_own_settings(run).get(step, {})
    return {key: value for key, value in found.items() if isinstance(value, int | float) and key != "step"}


def add(run: RunDir, record: Mapping[str, Any]) -> None:
    """Write a result, which has `step` and `digest`, to a new file.

    Raises:
        RunDirError: the run was moved or removed.
        OSError: the file system refused.
    """
    path = run.evaluations / f"step_{record['step']:08d}-{record['digest']}.json"
    try:
        files.make_dirs_in(run.path, run.evaluations)
        files.write_json(path, dict(record))
    except FileNotFoundError:
        if not files.exists(path):  # no other process wrote this result and removed our temporary file
            raise RunDirError(f"{run.path} was moved or removed meanwhile: rerun the command") from None
    for name in _file_names(run):
        if name.startswith(f"{path.name}.tmp-"):  # left by a process that was killed while it wrote
            files.remove(run.evaluations / name)


def _file_names(run: RunDir) -> list[str]:
    try:
        return files.list_dir(run.evaluations)
    except FileNotFoundError:
        return []

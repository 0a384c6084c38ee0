"""Compare two runs: settings, code, environment, and where their metrics start to differ (`runner diff A B`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from runner.cli.base.console import PROGRAM, Parser, say, shown
from runner.config.identity import ABSENT, as_text, differences, kind_of
from runner.config.plain_yaml import read_plain
from runner.errors import RunDirError
from runner.metrics.external import scalars
from runner.metrics.records import read_records
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.paths import RunDir
from runner.rundir.provenance import code_facts, environment_facts, object_in
from runner.rundir.trust import reading
from runner.system import files

DATA = "digest"
"""The entry of a step's record that depends on all samples up to this step."""


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} diff",
        description="Compares two runs: their settings, code and environment, and their metrics at the steps that both "
        "have. Names the first step at which the data or the losses differ.",
    )
    made.add_argument("one", type=Path, metavar="A", help="a run directory")
    made.add_argument("other", type=Path, metavar="B", help="another one")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: one of the directories is not a run or cannot be read.
    """
    options = parser().parse_args(arguments)
    runs = [RunDir(path.absolute()) for path in (options.one, options.other)]
    for run, given in zip(runs, (options.one, options.other), strict=True):
        if not files.is_file(run.config):
            raise RunDirError(f"{given} is no run directory, which has a config.yaml: pass one, such as outputs/NAME")
    with reading(runs[0]), reading(runs[1]):
        found = compare(*runs)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        for line in found.lines(*(shown(run.path) for run in runs)):
            say(line)
    return 0


@dataclass
class Difference:
    """The differences between two runs.

    Attributes:
        settings: both values of each differing setting that can change a result, by dotted key.
        others: both values of all other differing settings, by dotted key.
        data: both sizes in samples of each differing source, by name.
        code: both values of each differing entry of code.json.
        environment: both values of each differing entry of the environment.
        common: the number of steps that both runs have recorded.
        first: the first common step with a difference, for the key `data` and for each metric of the steps.
        last: both values of each metric at the last common step or evaluation.
    """

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    others: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    data: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    code: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    environment: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    common: int = 0
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the differences for `--json`. Metrics that never differ have no first step."""
        return {
            "settings": self.settings,
            "other_settings": self.others,
            "data": self.data,
            "code": self.code,
            "environment": self.environment,
            "common_steps": self.common,
            "first_difference": {"data": None, "loss": None, **self.first},
            "metrics": {name: [_finite(each) for each in pair] for name, pair in self.last.items()},
        }

    def lines(self, one: str, other: str) -> Iterator[str]:
        """Yield the differences as lines of text."""
        yield f"A {one}"
        yield f"B {other}"
        sections = {
            "settings": self.settings,
            "settings that cannot change a result": self.others,
            "samples of the sources": self.data,
            "code": self.code,
            "environment": self.environment,
        }
        for title, found in sections.items():
            yield f"{title}:" if found else f"{title}: the same"
            width = max(map(len, found), default=0)
            for key, (a, b) in found.items():
                yield f"  {key:{width}}  {_short(a)}  →  {_short(b)}"
        if not self.common:
            yield "metrics: no step in common"
            return
        yield f"metrics: {self.common:,} steps in common"
        data, losses = self.first.get("data"), self.first.get("loss")
        yield f"  data: {'the same at all of them' if data is None else f'differ from step {data} on'}"
        yield f"  loss: {'the same at all of them' if losses is None else f'differs from step {losses} on'}"
        width = max(map(len, self.last), default=0)
        for name, (a, b) in self.last.items():
            yield f"  {name:{width}}  {a:.6g}  →  {b:.6g}"


def compare(one: RunDir, other: RunDir) -> Difference:
    """Compare the records of two runs.

    Raises:
        OSError: a record cannot be read.
        ValueError: a config is malformed.
    """
    found = Difference()
    for change in differences(read_plain(one.config), read_plain(other.config)):
        into = found.others if kind_of(change.key) == "free" else found.settings
        into[change.key] = change.old, change.new
    found.data = _unequal(*(object_in(files.read_object(run.order), "sizes") for run in (one, other)))
    code = [files.read_object(run.code) for run in (one, other)]
    found.code = _unequal(*map(code_facts, code))
    found.environment = _unequal(*map(_environment, (one, other), code))
    _compare_metrics(found, one, other)
    return found


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys(chain(one, other))
    pairs = {key: (one.get(key, ABSENT), other.get(key, ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _environment(run: RunDir, code: Mapping[str, Any]) -> dict[str, Any]:
    attempts = ended_attempts(run)
    return environment_facts(code, attempts[-1] if attempts else files.read_object(run.attempt))


def _compare_metrics(found: Difference, one: RunDir, other: RunDir) -> None:
    """Compare the metrics of steps and of evaluations. The files are streamed, so memory use stays small."""
    evaluations: list[dict[int, dict[str, float]]] = [{}, {}]
    steps = [_steps(run, mine) for run, mine in zip((one, other), evaluations, strict=True)]
    for a, b in _joined(*steps):
        found.common += 1
        if a.get(DATA) != b.get(DATA):
            found.first.setdefault("data", a["step"])
        mine, theirs = scalars(a), scalars(b)
        for name in mine.keys() & theirs.keys():
            if not _same(mine[name], theirs[name]):
                found.first.setdefault(name, a["step"])
        found.last = {name: (mine[name], theirs[name]) for name in mine if name in theirs and "/" not in name}
    if shared := sorted(evaluations[0].keys() & evaluations[1].keys()):
        mine, theirs = evaluations[0][shared[-1]], evaluations[1][shared[-1]]
        found.last |= {name: (mine[name], theirs[name]) for name in mine if name in theirs and "/" not in name}


def _steps(run: RunDir, evaluations: dict[int, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Yield the records of steps. Evaluation records are added to `evaluations`."""
    for record in read_records(run.metrics):
        if "loss" in record:
            yield record
        else:
            evaluations[record["step"]] = scalars(record)


def _joined(
    one: Iterator[dict[str, Any]], other: Iterator[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield pairs of records for the steps that both runs have, in order. Both files are read to the end."""
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None:
        if a["step"] == b["step"]:
            yield a, b
        behind = a["step"] <= b["step"], b["step"] <= a["step"]
        a = next(one, None) if behind[0] else a
        b = next(other, None) if behind[1] else b
    for rest in (one, other):  # reading to the end collects the remaining evaluations
        for _ in rest:
            pass


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(value: Any) -> str:
    text = as_text(value)
    return text if len(text) <= 60 else f"{text[:28]}…{text[-28:]}"

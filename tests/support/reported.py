"""Write run directories for reports by hand: a thousand steps take a millisecond."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "seed": 1,
    "run": {"dir": "x", "name": "x"},
    "optimizer": {"lr": 0.1},
    "sampler": {"temperature": 1.0},
    "checkpoint": {"best": {"metric": "eval_loss", "mode": "min"}},
    "fork": {"run": None, "step": None},
}


def with_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with other values by dotted key."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    for key, value in settings.items():
        node = config
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return config


def write_run(
    path: Path,
    records: Sequence[Mapping[str, Any]] = ({"step": 1, "loss": 2.0},),
    state: str = "finished",
    attempts: Sequence[Mapping[str, Any]] = (),
    seed: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run to `path`. `settings`: additional values of its config, by dotted key."""
    path.mkdir(parents=True)
    steps = max((record["step"] for record in records if isinstance(record.get("step"), int)), default=0)
    (path / "config.yaml").write_text(
        yaml.safe_dump(with_settings({"seed": seed, **(settings or {})}), sort_keys=False)
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "timings.jsonl").write_text(
        "".join(json.dumps({"step": step, "time": 1e9 + step, "step_s": 0.5}) + "\n" for step in range(1, steps + 1))
    )
    (path / "status.json").write_text(json.dumps({"state": state, "step": steps, "total": steps, "attempt": 1}))
    if state == "finished":
        (path / "finished.json").write_text(json.dumps({"steps": steps}))
    lines = attempts or [{"attempt": 1, "cause": "finished", "started": 1e9, "ended": 1e9 + 60, "end_step": steps}]
    (path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def losses(values: Sequence[float | None], **more: Any) -> list[dict[str, Any]]:
    """Return a record per value, with `eval_loss` as well."""
    return [{"step": step, "eval_loss": value, **more} for step, value in enumerate(values, start=1)]

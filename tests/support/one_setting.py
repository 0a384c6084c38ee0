"""Compare one base run with runs that differ in one setting from the schema: in run directory and first records.

Outside the suite, since 500 settings take a quarter of an hour:

    python tests/support/one_setting.py --count 500 --seed 0
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from random_configs import fork_run, preload

BASE = [
    *("experiment=smoke", "data=mixture", "sampler=elastic", "model.width=8", "model.layers=1", "logger=none"),
    *("data.sequence_length=8", "train.steps=4", "eval.every_steps=2", "eval.batches=1", "checkpoint.every_steps=2"),
]
LEFT_OUT = ("run.directory", "run.typed", "run.changed_by", "run.dir", "run.root", "fork", "init_from", "launcher")
CHOICES = {
    "data": ["text", "mixture"],
    "sampler": ["mixture", "elastic"],
    "scheduler": ["constant", "linear", "cosine", "wsd", "rex"],
    "optimizer": ["sgd"],
    "phases": ["curriculum", "anneal"],
    "checkpoint": ["adaptive"],
    "model": ["gpt"],
    "logger": ["default"],
}
FURTHER = [
    *("+callbacks.look={_target_: recorders.Look}", "+callbacks.clip={_target_: recorders.DeclaredClip}"),
    *("train.epochs=0.0001", "data.sources.prose=null", "data.eval_sources.prose=null", "train.profile='1:2'"),
    *("phases.late={start_step: 2, lr_scale: 0.5}", "phases.late={start_step: 9, lr_scale: 0.5}"),
    *("eval.sets.p={sources: [prose], every_steps: 1}", "sampler.max_epochs.prose=1", "sampler.exclude=[1-2]"),
    *(f"sampler.weights_by={by}" for by in ("equal", "sizes", "tokens")),
    *(f"data.sources.code.cache_dir={name}" for name in ("a", "b")),
]


def settings(rng: random.Random) -> Iterator[str]:
    """Yield overrides of one setting each, without end: a key of the schema with a value of its type, valid or not."""
    from runner.config.composition import compose
    from runner.config.identity import flatten

    flat = flatten(compose(BASE).plain)
    keys = [key for key in flat if not key.startswith(LEFT_OUT) and not key.endswith("_target_")]
    groups = [f"{group}={option}" for group, options in CHOICES.items() for option in options]
    yield from [*FURTHER, *groups]
    while True:
        for key in rng.sample(keys, len(keys)):
            yield f"{key}={rng.choice(values(flat[key], key, rng))}"


def values(value: Any, key: str, rng: random.Random) -> list[Any]:
    """Return other values of a setting."""
    if isinstance(value, bool):
        return [str(not value).lower()]
    if isinstance(value, int):
        return [value + 1, value * 2, max(value - 1, 0), rng.randint(1, 9)]
    if isinstance(value, float):
        return [value * 2, value / 2, value + 0.5, rng.random()]
    if value is None:
        return [rng.randint(1, 6), rng.choice([0.5, 0.9]), "true", "false"]
    if isinstance(value, str):
        return {"precision": ["float32", "bfloat16"], "mode": ["sync", "max"], "on_nonfinite": ["skip"]}.get(
            key.rpartition(".")[2], ["fsdp", "cpu", "prose", "code", "eval_loss"]
        )
    return [value]


def metrics(where: Path, *words: str) -> tuple[str, list[str]] | str:
    """Return the name of a run's directory and its records, or the reason why there are none."""
    where.mkdir()
    outcome = fork_run([*BASE, *words], where)
    if outcome.status:
        return "traceback" if "Traceback" in outcome.output else "refused"
    (path,) = (where / "outputs").iterdir()
    return path.name, (path / "metrics.jsonl").read_text().splitlines()


def without_evaluations(lines: list[str]) -> list[str]:
    """Return the records of steps. Evaluations depend on their own settings, too."""
    return [line for line in lines if '"eval_' not in line]


def compared(base: tuple[str, list[str]], other: tuple[str, list[str]], setting: str) -> str:
    """Describe how a run with one other setting compares with the base."""
    lines, others = base[1], other[1]
    if base[0].rpartition("-")[2] != other[0].rpartition("-")[2]:
        return "another run, other records" if lines != others else "another run, the same records"
    if setting.lstrip("+").startswith(("eval.", "data.eval_sources", "callbacks.")):
        lines, others = without_evaluations(lines), without_evaluations(others)
    shorter = min(len(lines), len(others))
    return "one run, one beginning" if lines[:shorter] == others[:shorter] else "ONE RUN, OTHER RECORDS"


def main() -> int:
    """Run the comparison and return 1 if it found a problem."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--count", type=int, default=500)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    preload()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        base = metrics(Path(folder) / "base")
        assert not isinstance(base, str), base
        drawn, seen = settings(random.Random(options.seed)), set[str]()
        while found.total() - found["refused"] < options.count:
            setting = next(each for each in drawn if each not in seen)
            seen.add(setting)
            other = metrics(Path(folder) / str(len(seen)), setting)
            what = other if isinstance(other, str) else compared(base, other, setting)
            found[what] += 1
            if what in ("ONE RUN, OTHER RECORDS", "traceback", "another run, the same records") or len(seen) % 50 == 0:
                print(f"{len(seen)}: {setting}: {what}", flush=True)
    print(dict(found))
    return int(found["ONE RUN, OTHER RECORDS"] + found["traceback"] > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What makes two configs the same run, and what tells them apart. Plain dictionaries only."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from runner.schema import kind_of

HASH_DIGITS = 8
MISSING = "(absent)"
# Values that say enough without the name of their key.
SPEAKING = ("sampler.kind", "scheduler.decay", "strategy")
MAX_NAME = 80


class Difference(NamedTuple):
    """One value of a frozen config that a new one would change."""

    key: str  # dotted
    old: Any
    new: Any
    kind: str  # free, shape, data or fixed

    def __str__(self) -> str:
        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


def show(value: Any) -> str:
    """`value` as it would be written in a config."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. Lists and empty dictionaries are values."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def identity(plain: dict[str, Any]) -> str:
    """Eight hexadecimal digits of everything in a resolved config that can change the result.

    Left out is what `runner.schema.FREE` lists, and, once `train.global_batch_size` is set, how the global
    batch is cut up.
    """
    flat = decisive(plain)
    # The seeded mixture draws its sources in the order in which they are given.
    flat["data.sources in order"] = list(plain["data"]["sources"])
    text = json.dumps(flat, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def decisive(plain: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of everything that can change the result."""
    flat = {key: value for key, value in flatten(plain).items() if kind_of(key) != "free"}
    if plain["train"]["global_batch_size"] is not None:
        del flat["train.batch_size"], flat["train.grad_accum_steps"]
    return flat


def differences(frozen: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """What `new` would change in `frozen`, by dotted key; a key that one of them lacks counts too."""
    old_flat, new_flat = flatten(frozen), flatten(new)
    found = []
    for key in sorted(old_flat.keys() | new_flat.keys()):
        old, value = old_flat.get(key, MISSING), new_flat.get(key, MISSING)
        if old != value and not _emptied(key, old, value, old_flat, new_flat):
            found.append(Difference(key, old, value, kind_of(key)))
    return found


def _emptied(key: str, old: Any, new: Any, old_flat: dict[str, Any], new_flat: dict[str, Any]) -> bool:
    """Whether `key` is an empty dictionary on one side whose entries are listed by themselves."""
    if old == {} and new is MISSING:
        return any(other.startswith(f"{key}.") for other in new_flat)
    if new == {} and old is MISSING:
        return any(other.startswith(f"{key}.") for other in old_flat)
    return False


def readable_name(title: str, base: dict[str, Any], plain: dict[str, Any]) -> str:
    """`title`, then what `plain` changes of `base`, then the seed: the same for the same config.

    Args:
        title: the experiment or the data, by name.
        base: resolved config of that experiment and data without any further change.
        plain: resolved config of the run.
    """
    parts = [title]
    for key, _, value, _ in differences(decisive(base), decisive(plain)):
        if key == "seed" or isinstance(value, dict | list) or value in (None, MISSING):
            continue
        text = show(value).rpartition(".")[2] if key.endswith("_target_") else show(value)
        name = "" if key in SPEAKING or key.endswith("_target_") else key.rpartition(".")[2]
        part = re.sub(r"[^\w.+-]+", "_", f"{name}{text}")
        if part not in parts and len("-".join([*parts, part])) <= MAX_NAME:
            parts.append(part)
    return "-".join([*parts, f"seed{plain['seed']}"])

"""Which values of a config identify a run, and how two configs differ. Plain dictionaries only."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

HASH_DIGITS = 8
ABSENT = "(absent)"
MAX_NAME = 80
# In the name of a run their values are clear without the key.
CLEAR_WITHOUT_KEY = ("sampler.kind", "scheduler.decay", "strategy")

# Dotted keys, or prefixes that end in a dot. What cannot change the result of a run is not part of its identity.
FREE_KEYS = (
    "run.",
    "launcher.",
    "logger.",
    "callbacks.",
    "checkpoint.",
    "eval.",
    "train.steps",
    "train.epochs",
    "train.device",
    "train.peer_timeout_s",
    "train.on_callback_error",
    "train.profile",
    "data.num_workers",
    "data.prefetch_factor",
    "data.pin_memory",
    "data.cache_dir",
    "data.eval_sources.",
)
# How a global batch is split: with the elastic sampler the data order continues across a change.
SHAPE_KEYS = ("train.batch_size", "train.grad_accum_steps", "train.global_batch_size")
# What determines the data order: a run accepts a change only with `run.allow_data_change=true`.
DATA_KEYS = ("sampler.", "phases.", "data.sources.")


class ConfigChange(NamedTuple):
    """A value that differs between a frozen config and a new one."""

    key: str  # dotted
    old: Any
    new: Any
    kind: str  # see `kind_of`

    def __str__(self) -> str:
        return f"{self.key}: {as_text(self.old)} -> {as_text(self.new)}"


def kind_of(key: str) -> str:
    """What changing this dotted key means for an existing run: `free`, `shape`, `data` or `fixed`."""
    if key.endswith(".cache_dir"):
        return "free"
    for kind, prefixes in (("free", FREE_KEYS), ("shape", SHAPE_KEYS), ("data", DATA_KEYS)):
        if any(key == p.rstrip(".") or (p.endswith(".") and key.startswith(p)) for p in prefixes):
            return kind
    return "fixed"


def as_text(value: Any) -> str:
    """`value` as a config would contain it."""
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

    `FREE_KEYS` are left out, and how the global batch is split once `train.global_batch_size` is set.
    """
    flat = identifying_values(plain)
    # The seeded mixture draws from its sources in the order in which they are listed.
    flat["data.sources in order"] = list(plain["data"]["sources"])
    text = json.dumps(flat, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def identifying_values(plain: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of everything that can change the result."""
    flat = {key: value for key, value in flatten(plain).items() if kind_of(key) != "free"}
    if plain["train"]["global_batch_size"] is not None:
        del flat["train.batch_size"], flat["train.grad_accum_steps"]
    return flat


def differences(frozen: dict[str, Any], new: dict[str, Any]) -> list[ConfigChange]:
    """What `new` would change in `frozen`, ordered by dotted key, including keys that one of them lacks."""
    old_flat, new_flat = flatten(frozen), flatten(new)
    found = []
    for key in sorted(old_flat.keys() | new_flat.keys()):
        old, value = old_flat.get(key, ABSENT), new_flat.get(key, ABSENT)
        if old != value and not _is_emptied_dict(key, old, value, old_flat, new_flat):
            found.append(ConfigChange(key, old, value, kind_of(key)))
    return found


def _is_emptied_dict(key: str, old: Any, new: Any, old_flat: dict[str, Any], new_flat: dict[str, Any]) -> bool:
    """Whether `key` is an empty dictionary on one side only, so that its entries are listed instead."""
    if old == {} and new is ABSENT:
        return any(other.startswith(f"{key}.") for other in new_flat)
    if new == {} and old is ABSENT:
        return any(other.startswith(f"{key}.") for other in old_flat)
    return False


def readable_name(title: str, base: dict[str, Any], plain: dict[str, Any]) -> str:
    """`title`, then the values in which `plain` differs from `base`, then the seed.

    Args:
        title: the name of the experiment or of the data option.
        base: resolved config of that experiment and data option alone.
        plain: resolved config of the run.
    """
    parts = [title]
    for key, _, value, _ in differences(identifying_values(base), identifying_values(plain)):
        if key == "seed" or isinstance(value, dict | list) or value in (None, ABSENT):
            continue
        text = as_text(value).rpartition(".")[2] if key.endswith("_target_") else as_text(value)
        name = "" if key in CLEAR_WITHOUT_KEY or key.endswith("_target_") else key.rpartition(".")[2]
        part = re.sub(r"[^\w.+-]+", "_", f"{name}{text}")
        if part not in parts and len("-".join([*parts, part])) <= MAX_NAME:
            parts.append(part)
    return "-".join([*parts, f"seed{plain['seed']}"])

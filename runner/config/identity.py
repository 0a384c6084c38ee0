"""Decide which config values identify a run, and how two configs differ. Works on plain dictionaries only."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import PurePath
from typing import Any, NamedTuple

HASH_DIGITS = 8
ABSENT = "(absent)"
FILLED_IN = ("run.directory", "run.typed", "run.changed_by")  # values that the runner fills in; they are not settings
MAX_NAME = 80
MAX_GIVEN = 160  # maximum length of the command's settings in a name; file systems allow 255 bytes in total
# Keys that are omitted from a run's name, because their values are clear without them.
CLEAR_WITHOUT_KEY = ("sampler.kind", "scheduler.decay", "strategy")
# Keys that contain paths. The name of a run shows only the last part of a path.
PATHS = (".path", "_dir")

# Keys that cannot change a run's result and are not part of its identity. An entry that ends in a dot is a prefix.
FREE_KEYS = (
    "run.name",
    "run.dir",
    "run.root",
    "run.directory",
    "run.typed.",
    "run.changed_by",
    "run.tags",
    "run.notes",
    "user.",
    "run.allow_data_change",
    "run.lease_timeout_s",
    "launcher.",
    "logger.",
    "callbacks.",
    "checkpoint.",
    "early_stopping.",
    "eval.",
    "train.device",
    "train.peer_timeout_s",
    "train.hang_timeout_s",
    "train.on_callback_error",
    "train.profile",
    "data.num_workers",
    "data.prefetch_factor",
    "data.pin_memory",
    "data.cache_dir",
    "data.eval_sources.",
    *("search.trials", "search.keep", "search.prune"),  # settings of a search; runs do not have them
    "fork.run",  # the trunk's location; `fork.digest` identifies the trunk
    "init_from.run",  # the location of the source run; `init_from.digest` identifies it
    "fork.was.",
    "fork.trunk.",
)
# How a global batch is split. With the elastic sampler, the data order continues after a change.
SHAPE_KEYS = ("train.batch_size", "train.grad_accum_steps", "train.global_batch_size")
# Settings that determine the data order. A run accepts a change only with `run.allow_data_change=true`.
DATA_KEYS = ("sampler.", "phases.", "data.sources.", "data.weights.")
# The length of a run. It is part of the identity only if another setting depends on it; see `length_readers`.
LENGTH_KEYS = ("train.steps", "train.epochs")
# Settings that change the result but that `runner resume` may change. The run directory is then marked as edited.
EDIT_KEYS = (*LENGTH_KEYS, "run.threads")
DEFAULT_STEPS = 300


class ConfigChange(NamedTuple):
    """A value that differs between a frozen config and a new one."""

    key: str  # the dotted key
    old: Any
    new: Any
    kind: str  # as returned by `kind_of`

    def __str__(self) -> str:
        return f"{self.key}: {as_text(self.old)} -> {as_text(self.new)}"


@lru_cache(maxsize=1 << 16)
def kind_of(key: str) -> str:
    """Return how a change of `key` affects an existing run: `free`, `shape`, `data`, `edit` or `fixed`."""
    if key.endswith(".cache_dir"):
        return "free"
    for kind, prefixes in (
        ("free", FREE_KEYS),
        ("shape", SHAPE_KEYS),
        ("data", DATA_KEYS),
        ("edit", EDIT_KEYS),
    ):
        if any(key == p.rstrip(".") or (p.endswith(".") and key.startswith(p)) for p in prefixes):
            return kind
    return "fixed"


def as_text(value: Any) -> str:
    """Format `value` as it is written in a config."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a flat dictionary with dotted keys. Lists and empty dictionaries are kept as values."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def identity(plain: dict[str, Any]) -> str:
    """Return eight hexadecimal digits: the hash of everything in a resolved config that can change the result.

    `FREE_KEYS` are excluded. If `train.global_batch_size` is set, the split of the global batch is excluded too. Paths
    are included as typed. The length of the run is included only if a setting depends on it. Therefore, if two runs
    with the same identity use the same ranks and devices, the longer one starts with the same records as the shorter
    one.
    """
    flat = identifying_values(plain)
    # The seeded mixture draws from its sources in the listed order, which sorting the keys would hide.
    flat["data.sources in order"] = list(plain["data"]["sources"])
    return digest_of(flat)


def identifying_values(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a flat mapping of dotted keys to values, limited to everything that can change the result."""
    changing = _changing(plain)
    typed = typed_values(plain).items()
    flat = {key: value for key, value in typed if kind_of(key) != "free" or key.startswith(changing)}
    if not length_readers(plain):
        flat = {key: value for key, value in flat.items() if key not in LENGTH_KEYS}
    elif plain["train"]["epochs"] is None:
        flat["train.steps"] = DEFAULT_STEPS if plain["train"]["steps"] is None else plain["train"]["steps"]
    marks = (("fork.", ("step",)), ("init_from.", ("path", "digest")))
    unused = [name for name, keys in marks if all(plain[name[:-1]][key] is None for key in keys)]
    flat = {key: value for key, value in flat.items() if not key.startswith(tuple(unused))}
    if plain["train"]["global_batch_size"] is not None:
        del flat["train.batch_size"], flat["train.grad_accum_steps"]
    return flat


def typed_values(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a flat mapping of dotted keys to values.

    Paths are kept as typed, so the result does not depend on the working directory.
    """
    typed = plain["run"].get("typed")
    if not typed:
        return flatten(plain)
    made = {**plain, "data": copy.deepcopy(plain["data"])}
    for key, text in typed.items():
        *names, last = key.split(".")
        node: Any = made
        with suppress(LookupError, TypeError, ValueError):  # the file was edited
            for name in names:
                node = node[int(name)] if isinstance(node, list) else node[name]
            if last in node:
                node[last] = text
    return flatten(made)


def length_readers(plain: dict[str, Any]) -> list[str]:
    """Return the config keys of schedules that decay but set no `total_steps`.

    These schedules depend on the run's length. A user's class or function depends on it only if the config interpolates
    the length into one of its options.
    """
    run, nodes = plain["scheduler"], plain["optimizers"].values()
    own = {
        f"optimizers.{name}.scheduler": node["scheduler"]
        for name, node in plain["optimizers"].items()
        if isinstance(node, dict) and isinstance(node.get("scheduler"), dict)
    }
    shared = {} if nodes and len(own) == len(nodes) else {"scheduler": run}
    return [key for key, options in {**shared, **own}.items() if _follows_length(options)]


def _follows_length(scheduler: dict[str, Any]) -> bool:
    fixed = scheduler.get("total_steps") is not None or scheduler.get("decay", "cosine") == "constant"
    return not fixed and not scheduler.get("_target_")


def evaluation_digest(plain: dict[str, Any]) -> str:
    """Return eight hexadecimal digits: the hash of everything in a resolved config that affects evaluation results."""
    return digest_of(evaluation_values(plain))


def evaluation_values(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a flat mapping of dotted keys to values, limited to everything that affects evaluation results."""
    prefixes = ("eval.", "data.eval_sources.", "data.collate.")
    flat = {key: value for key, value in typed_values(plain).items() if key.startswith(prefixes)}
    others = (".every_steps", ".every_epochs", ".at_start", ".at_end", ".cache_dir")
    flat = {key: value for key, value in flat.items() if not key.endswith(others)}
    flat["eval.batch_size"] = plain["eval"]["batch_size"] or plain["train"]["batch_size"]
    return flat


def result_values(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a flat mapping of the settings that affect a run's results but are not part of its identity.

    These are the settings of evaluations and of early stopping.
    """
    ends = {key: value for key, value in flatten(plain).items() if key.startswith("early_stopping.")}
    return {**ends, **evaluation_values(plain)}


def canonical(node: Any) -> str:
    """Convert nested values to text that does not depend on the order of keys. Keys may have any type."""
    if isinstance(node, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {canonical(value)}" for key, value in node.items())) + "}"
    if isinstance(node, list | tuple):
        return "[" + ", ".join(map(canonical, node)) + "]"
    return repr(node)


def digest_of(values: Any) -> str:
    """Return a short hexadecimal hash of nested values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def differences(frozen: dict[str, Any], new: dict[str, Any]) -> list[ConfigChange]:
    """Return the changes from `frozen` to `new`, ordered by dotted key. Keys that only one of them has are included.

    If the same path was typed in a different directory, the change has kind `moved`.
    """
    old_flat, new_flat = flatten(frozen), flatten(new)
    old_typed, new_typed = typed_paths(frozen), typed_paths(new)
    found = []
    for key in sorted(old_flat.keys() | new_flat.keys()):
        if key.startswith(FILLED_IN):
            continue
        old, value = old_flat.get(key, ABSENT), new_flat.get(key, ABSENT)
        if old == value or _is_emptied_dict(key, old, value, old_flat, new_flat):
            continue
        kind = "fixed" if key.startswith((*_changing(frozen), *_changing(new))) else kind_of(key)
        if key in old_typed and key in new_typed:
            if old_typed[key].absolute == new_typed[key].absolute:
                continue  # the path did not exist when one config was frozen, so it was not recognized as a path
            if old_typed[key].text == new_typed[key].text:
                kind = "moved"
        found.append(ConfigChange(key, old, value, kind))
    return found


def _changing(plain: dict[str, Any]) -> tuple[str, ...]:
    """Return the key prefixes of callbacks that change what is trained."""
    return tuple(f"callbacks.{name}." for name in plain.get("run", {}).get("changed_by") or ())


class TypedPath(NamedTuple):
    """A path as typed, and the path that it refers to in the command's working directory."""

    text: Any  # a string, or a list of strings
    absolute: Any


def typed_paths(plain: dict[str, Any]) -> dict[str, TypedPath]:
    """Return every path that was typed relative to the working directory, by dotted key."""
    run = plain.get("run", {})
    base = str(run.get("directory") or "")
    found = {}
    for key, text in (run.get("typed") or {}).items():
        texts = text if isinstance(text, list) else [text]
        absolute = [os.path.normpath(os.path.join(base, os.path.expanduser(str(each)))) for each in texts]
        found[key] = TypedPath(text, absolute)
    return found


def _is_emptied_dict(key: str, old: Any, new: Any, old_flat: dict[str, Any], new_flat: dict[str, Any]) -> bool:
    """Return whether `key` is an empty dictionary in only one config. Then its entries are listed instead."""
    if old == {} and new is ABSENT:
        return any(other.startswith(f"{key}.") for other in new_flat)
    if new == {} and old is ABSENT:
        return any(other.startswith(f"{key}.") for other in old_flat)
    return False


def readable_name(
    title: str, base: dict[str, Any], plain: dict[str, Any], given: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """Return a run's name: `title`, then values that differ from `base` or were set by the command, then the seed.

    Args:
        title: the name of the experiment or the data option.
        base: the resolved config of that experiment and data option without other overrides.
        plain: the resolved config of the run.
        given: the keys that the command sets, even to the default value, because another job may set a different value.
        options: the group options that the command chooses, even if they are the default.
    """
    flat = identifying_values(plain)
    changed = {change.key: change.new for change in differences(identifying_values(base), flat)}
    values = {**changed, **{key: flat[key] for key in given if key in flat}}
    own, usual = {key for key in given if key in flat}, flatten(base)
    parts: dict[str, str] = {}
    for key in sorted(values, key=lambda key: (key not in own, key)):  # values set by the command first
        is_usual = _is_left_out(key, values[key]) or values[key] == usual.get(key, ABSENT)
        if key == "seed" or values[key] == {} or (key not in own and is_usual):
            continue
        part = _part_of_name(key, values[key])
        if part not in (title, *parts.values()) and len("-".join([title, *parts.values(), part])) <= (
            MAX_GIVEN if key in own else MAX_NAME
        ):
            parts[key] = part
    shown = [title, *(parts[key] for key in sorted(parts))]
    for option in options:
        group, _, name = option.partition("=")
        if kind_of(f"{group}.") != "free" and not any(key.startswith(f"{group}.") for key in changed):
            shown.append(_slug(name))
    return "-".join([*shown, f"seed{plain['seed']}"])


def _is_left_out(key: str, value: Any) -> bool:
    if key == "init_from.strict" and value:  # without a warm start, the base config has no such value
        return True
    return value is None or value is ABSENT or isinstance(value, dict | list)


def _part_of_name(key: str, value: Any) -> str:
    """Return a key and its value as part of a file name, or only the value if it is clear without the key."""
    if key.endswith("_target_"):
        return _slug(as_text(value).rpartition(".")[2])
    if key in ("init_from.path", "init_from.digest"):
        return _slug(f"from{PurePath(as_text(value)).stem}")
    text = str(value).rstrip("/").rpartition("/")[2] if key.endswith(PATHS) else as_text(value)
    name = "" if key in CLEAR_WITHOUT_KEY else key.removesuffix(".path").rpartition(".")[2]
    return _slug(f"{name}{text}")


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")

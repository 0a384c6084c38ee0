"""Merge named data sources of a command over `data.source`, with which each begins.

The values are merged after every override has been applied and before anything is resolved, so that an override of
`data.source`, or of a value that it refers to, affects all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

GROUPS = ("sources", "eval_sources")


def open_sources(config: DictConfig) -> None:
    """Let overrides add sources without a `+`, in place, if `data.source` names the class of a new one."""
    if _target(config) is None:
        return
    for group in GROUPS:
        if isinstance(node := OmegaConf.select(config, f"data.{group}"), DictConfig):
            OmegaConf.set_struct(node, False)


def complete_sources(config: DictConfig) -> None:
    """Merge each source that has no `_target_` over `data.source`, in place, and remove `data.source`.

    Args:
        config: composed by Hydra, not resolved.
    """
    data = OmegaConf.select(config, "data")
    if not isinstance(data, DictConfig) or "source" not in data:
        return
    for group in GROUPS if data.source else ():
        node = data.get(group) or {}
        for name in [name for name in node if not (OmegaConf.is_interpolation(node, name) or node[name] is None)]:
            if isinstance(entry := node[name], DictConfig) and "_target_" not in entry:
                node[name] = OmegaConf.merge(data.source, entry)
    with open_dict(data):
        del data["source"]


def name_sources(config: DictConfig, plain: Mapping[str, Any]) -> None:
    """Add the sources of another config that begin with `data.source`, in place, with no other values.

    Args:
        config: composed by Hydra, not resolved.
        plain: the values of the other config.
    """
    if (target := _target(config)) is None:
        return
    for group in GROUPS:
        for name, entry in plain["data"][group].items():
            if name not in config.data[group] and isinstance(entry, dict) and entry.get("_target_", target) == target:
                config.data[group][name] = {}


def _target(config: DictConfig) -> Any:
    """Return the class of new sources; None if a new source must name its own."""
    return OmegaConf.select(config, "data.source._target_", throw_on_missing=False)

"""Merge a command's named data sources with `data.source`, which supplies their default values.

This happens after every override has been applied and before anything is resolved. Therefore an override of
`data.source`, or of a value that it refers to, affects all sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

GROUPS = ("sources", "eval_sources")


def open_sources(config: DictConfig) -> None:
    """Allow overrides to add sources without a `+`, in place, if `data.source` names the class of new sources."""
    if _target(config) is None:
        return
    for group in GROUPS:
        if isinstance(node := OmegaConf.select(config, f"data.{group}"), DictConfig):
            OmegaConf.set_struct(node, False)


def complete_sources(config: DictConfig) -> None:
    """Merge each source without a `_target_` over `data.source`, in place, and remove `data.source`.

    Args:
        config: the config that Hydra composed, not resolved.
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
    """Add the sources of another config that use `data.source`, in place, without any other values.

    Args:
        config: the config that Hydra composed, not resolved.
        plain: the values of the other config.
    """
    if (target := _target(config)) is None:
        return
    for group in GROUPS:
        for name, entry in plain["data"][group].items():
            if name not in config.data[group] and isinstance(entry, dict) and entry.get("_target_", target) == target:
                config.data[group][name] = {}


def _target(config: DictConfig) -> Any:
    """Return the class of new sources, or None if a new source must name its class."""
    return OmegaConf.select(config, "data.source._target_", throw_on_missing=False)

"""Provide the names of the package `exactdata`, and the text that the examples train on.

Configs and projects may use `runner.data.shards.TokenShards` or `exactdata.shards.TokenShards`. Both are the same class
and give the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import exactdata
from exactdata import __all__ as __all__

_OURS = f"{__name__}."


class _Renamed(MetaPathFinder, Loader):
    """Importer that resolves `runner.data.NAME` to the module `exactdata.NAME`, if there is one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(_OURS) or util.find_spec(self._theirs(name)) is None:
            return None
        return util.spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._theirs(spec.name))
        spec.loader_state = module.__spec__  # saved, because the import system replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def _theirs(self, name: str) -> str:
        return f"exactdata.{name.removeprefix(_OURS)}"


sys.meta_path.insert(0, _Renamed())  # first, or another finder would load a second copy of a module


def __getattr__(name: str) -> Any:
    """Import a name of `exactdata` on first use."""
    try:
        return getattr(exactdata, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(__all__)

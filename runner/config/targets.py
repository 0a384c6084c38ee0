"""Whether what a config names by `_target_` is there, found out before a run directory is made.

A class that can be seen in the source of its module is not imported for that: importing torch, or a module of
the user's, takes seconds. One that cannot (made on import, or not there at all) is.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import symtable
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from runner.errors import nearest


def target_faults(plain: dict[str, Any]) -> list[str]:
    """A line for each `_target_` in a resolved config that names nothing that could be called."""
    # A launcher with a Python of its own has other modules than this one.
    checked = {"launcher": plain["launcher"]} if plain["launcher"].get("python") else plain
    return [f"{key}._target_={target}: {fault}" for key, target in _targets(checked) if (fault := _fault(target))]


def _targets(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, target) of every node that will be made."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        yield key, node["_target_"]
    if node.get("_recursive_", True):
        for name, part in node.items():
            yield from _targets(part, f"{key}.{name}" if key else str(name))


def _fault(target: Any) -> str | None:
    """Why `target` cannot be had, or None."""
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return "give the dotted name of a class or function, such as my_package.my_module.MyClass"
    return _fault_of_name(target)


def _fault_of_name(target: str) -> str | None:
    if _is_seen(target):
        return None
    try:
        found = pkgutil.resolve_name(target)
    except ModuleNotFoundError as error:
        return f"{error}; modules are looked for in the current directory and wherever else Python looks"
    except AttributeError as error:
        return f"{error}{_hint(target)}; give the name of a class or function in it"
    except Exception as error:  # noqa: BLE001 a module may raise anything when it is imported
        return f"it cannot be imported ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None if callable(found) else f"it is a {type(found).__name__}: give the dotted name of a class or function"


def _hint(target: str) -> str:
    """The nearest name beside `target`, in a module that could be imported."""
    module, _, name = target.rpartition(".")
    return nearest(name, vars(sys.modules[module])) if module in sys.modules else ""


def _is_seen(target: str) -> bool:
    """Whether a statement of a module binds `target`, without running any of it."""
    names = target.split(".")
    try:
        spec, depth = importlib.util.find_spec(names[0]), 1
        while spec and depth < len(names) and (inner := _inner(spec, names[depth])):
            spec, depth = inner, depth + 1
        if spec is None or depth == len(names):
            return False
        table = symtable.symtable(spec.loader.get_source(spec.name), str(spec.origin), "exec")  # type: ignore[union-attr]
        symbol = table.lookup(names[depth])
    except (ImportError, AttributeError, LookupError, SyntaxError, TypeError, ValueError, OSError):
        return False
    return symbol.is_assigned() or symbol.is_imported()


def _inner(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """The module `name` in `package`, if it is one."""
    where = package.submodule_search_locations
    return PathFinder.find_spec(f"{package.name}.{name}", where) if where is not None else None

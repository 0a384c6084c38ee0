"""Find modules without importing them, because an import runs code and may take seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder


def find(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level module, or None if there is no such module."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a loaded module may have lost its spec
        return None


def find_in(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return the spec of the module `name` in a package, or None if there is no such module."""
    where = package.submodule_search_locations
    return PathFinder.find_spec(f"{package.name}.{name}", where) if where is not None else None


def along(dotted: str) -> Iterator[ModuleSpec]:
    """Yield the specs of the modules in a dotted name. For `a.b.C`, yield the specs of `a` and `a.b`."""
    first, *names = dotted.split(".")
    found = find(first)
    while found is not None:
        yield found
        found = find_in(found, names.pop(0)) if names else None


def imported_from(package: str, level: int, module: str | None) -> str:
    """Return the dotted name that `from ...module import x` imports from, in a package; `level` counts the dots."""
    parts = package.split(".")
    above = parts[: len(parts) - level + 1] if level else []
    return ".".join([*above, *([module] if module else [])])


def source_of(dotted: str) -> tuple[ModuleSpec, str] | None:
    """Return the module that a dotted name is in, and the module's source. Return None if either is missing."""
    found = [*along(dotted)]
    if not found or found[-1].name == dotted:
        return None
    try:
        source = found[-1].loader.get_source(found[-1].name)  # type: ignore[union-attr]
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError, OSError):
        return None
    return None if source is None else (found[-1], source)

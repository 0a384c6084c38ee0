"""Check that private names of other libraries are listed in docs/project/dependencies.md and still exist.

After an upgrade, some could disappear without an error. For example, an unrecognized compilation counts as a hang.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in ("exactdata", "runner", "launch") for path in (ROOT / package).rglob("*.py"))
OURS = (*sys.stdlib_module_names, "exactdata", "runner", "launch")
DOTTED = re.compile(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*")
PREFIX = re.compile(r"_[a-z_]+\.")
"""Prefix of parameter names that a wrapper adds."""
PYTHONS = {name for of in (type, int, BaseException, Enum, sys, os, type(len)) for name in dir(of)}
PYTHONS |= {"__float__", "__array_interface__", "_fields", "__version__", "__dataclass_fields__", "__wrapped__"}
"""Names that Python or numpy documents."""


def listed() -> list[str]:
    """Return the names that the page lists."""
    section = (ROOT / "docs/project/dependencies.md").read_text().partition("## Private names")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)


def private(name: str) -> bool:
    return any(part.startswith("_") and part not in PYTHONS for part in name.split("."))


def used() -> Iterator[tuple[str, Path]]:
    """Yield private names of other libraries, with their module where the code imports or spells it out."""
    nodes = {path: list(ast.walk(ast.parse(path.read_text()))) for path in SOURCES}
    ours = {name for each in nodes.values() for node in each for name in made_by(node)} | PYTHONS
    for path, each in nodes.items():
        modules = dict(full for node in each for full in imported(node))
        for node in each:
            for name in names_in(node, modules, ours):
                if private(name) and name.partition(".")[0] not in OURS:
                    yield name, path


def made_by(node: ast.AST) -> list[str]:
    """Return the name that a node defines in our code. An attribute set on a foreign value does not count."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else []
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def names_in(node: ast.AST, modules: dict[str, str], ours: set[str]) -> list[str]:
    """Return candidates for private names of other libraries."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [full for _, full in imported(node)]
    if isinstance(node, ast.Attribute):
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if isinstance(inner, ast.Name) and inner.id in modules:
            return [".".join([modules[inner.id], *parts])]
        return [] if node.attr in ours else [node.attr]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value.strip(".")] if DOTTED.fullmatch(node.value) or PREFIX.fullmatch(node.value) else []
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
        asked = getattr(node.args[1], "value", "")
        return [asked] if isinstance(asked, str) and asked not in ours else []
    return []


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (local name, full name) of each module and name that an import defines."""
    if isinstance(node, ast.Import):
        yield from ((each.asname or each.name.partition(".")[0], each.name) for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def is_there(name: str) -> bool:
    """Return whether a name is in the source of its module. Importing a compiler would take seconds."""
    module, spec, rest = name, None, list[str]()
    while spec is None:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            if "." not in module:
                return False
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    if module == "torch" and len(rest) == 1:
        return hasattr(importlib.import_module(module), rest[0])
    text = Path(str(spec.origin)).read_text()
    return all(re.search(rf"(def|class) {part}\b|[\"'.]{part}\b|\b{part}\b *[:=]", text) for part in rest)


@pytest.mark.slow
def test_private_names_of_other_libraries_are_listed() -> None:
    known = listed()
    unlisted = {
        f"{name} in {path.relative_to(ROOT)}"
        for name, path in used()
        if not any(f".{each}.".endswith(f".{name}.") or f"{name}.".startswith(f"{each}.") for each in known)
    }
    assert sorted(unlisted) == []


@pytest.mark.parametrize("name", listed())
def test_a_private_name_is_still_there_and_in_use(name: str) -> None:
    assert is_there(name), "it is gone: find out what takes its place before this version is supported"
    *_, last = name.split(".")
    assert any(last in path.read_text() for path in SOURCES), "nothing uses it any more: remove it from the page"


def test_missing_private_name_is_detected() -> None:
    for name in ("torch._foreach_nothing_", "torch._dynamo.nothing", "torch.nn.Module._nothing", "torch._gone.x"):
        assert not is_there(name)

"""Find the user's source files that a run depends on: modules named by `_target_`, and everything they import.

Imports are read from the source text: nothing is imported or executed. Imports neither torch nor hydra.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sysconfig
from collections.abc import Collection, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import Any

from runner.system import files, modules

INSTALLED = {"site-packages", "dist-packages"}
SHIPPED = ("runner", "launch", "exactdata")
UNREADABLE = "unreadable"
"""Replaces the digest of a file that cannot be read."""


def named_targets(node: Any) -> list[str]:
    """Return every distinct `_target_` in the plain values of a config, sorted."""
    return sorted(set(_targets(node)))


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for part in node:
            yield from _targets(part)
    elif isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            yield target
        for part in node.values():
            yield from _targets(part)


class Sources:
    """A reader of the user's source files. It reads each file only once for all configs of a command."""

    def __init__(self) -> None:
        importlib.invalidate_caches()
        self._foreign = set(SHIPPED)  # modules that the user did not write
        self._read: dict[str, tuple[str, list[str]]] = {}  # module -> its digest, and the dotted names that it imports
        self._of: dict[tuple[str, ...], dict[str, str]] = {}
        self._elsewhere = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]

    def of(self, targets: Collection[str]) -> dict[str, str]:
        """Return the digest of each user source file that `targets` depend on, keyed by path.

        Paths below the current directory are relative to it. C extensions have no source, so they are skipped.
        """
        key = tuple(targets)
        if key not in self._of:
            self._of[key] = self._digests(key)
        return dict(self._of[key])

    def _digests(self, targets: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        names, looked_at = list(targets), set[str]()
        while names:
            name = names.pop()
            if name in looked_at or name.partition(".")[0] in self._foreign:
                continue
            looked_at.add(name)
            for spec in modules.along(name) if all(part.isidentifier() for part in name.split(".")) else ():
                if not self._is_own(spec):
                    self._foreign |= {spec.name}  # so are its submodules
                    break
                if spec.origin and spec.has_location:  # a namespace package has no file
                    digest, imported = self._look_at(spec)
                    found[_shown(spec.origin)] = digest
                    names += imported
        return dict(sorted(found.items()))

    def _is_own(self, spec: ModuleSpec) -> bool:
        places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
        paths = [Path(os.path.abspath(place)) for place in places]
        return not all(map(self._is_foreign, paths)) and not any(map(_is_extension, paths))

    def _is_foreign(self, path: Path) -> bool:
        return bool(INSTALLED & set(path.parts)) or any(path.is_relative_to(place) for place in self._elsewhere)

    def _look_at(self, spec: ModuleSpec) -> tuple[str, list[str]]:
        if spec.name not in self._read:
            assert spec.origin is not None
            try:
                content = files.read_bytes(Path(spec.origin))
            except OSError:
                self._read[spec.name] = UNREADABLE, []
            else:
                package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
                digest = hashlib.sha256(content).hexdigest()[:16]
                self._read[spec.name] = digest, list(_imported(content, package))
        return self._read[spec.name]


def _is_extension(path: Path) -> bool:
    return path.name.endswith(tuple(EXTENSION_SUFFIXES))


def _imported(content: bytes, package: str) -> Iterator[str]:
    """Yield the dotted names that a source file imports. `from a import b` yields `a.b`, because `b` may be a module.

    Args:
        content: content of the file. If it has a syntax error, nothing is yielded.
        package: the package that relative imports start from.
    """
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = modules.imported_from(package, node.level, node.module)
            yield from (base if alias.name == "*" else f"{base}.{alias.name}" for alias in node.names)


def _shown(origin: str) -> str:
    path, here = Path(os.path.abspath(origin)), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def changed_files(before: dict[str, Any], now: dict[str, Any], moved_from: str) -> list[str]:
    """Return a line for each file that differs between two results of `Sources.of`.

    Args:
        before: the earlier result.
        now: the later result, from the current directory.
        moved_from: the directory of the earlier result. Files are matched by relative or absolute path.
    """
    here = Path.cwd()
    absolute = {os.path.join(moved_from, name): name for name in before}
    renamed = {name if name in before else absolute.get(str(here / name), name): now[name] for name in now}
    lines = [f"{name} (gone)" if name not in renamed else name for name in before if renamed.get(name) != before[name]]
    return [*lines, *(f"{name} (new)" for name in renamed if name not in before)]

"""Check the argument names of each `_target_` in a config before a run directory is created.

The names are read from the source of the function or of the class's `__init__`. Nothing is imported, because torch or a
user's module can take seconds to import. If the names cannot be determined from the source (`**kwargs`, decorators,
several base classes), errors appear only when the object is created.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from runner.config.optimizers import OWN_KEYS
from runner.config.schedule import SchedulerConfig
from runner.config.schema import SamplerConfig
from runner.config.targets import DATA, HYDRA_KEYS, instantiated_nodes, source_of
from runner.errors import nearest
from runner.system import modules

Names = tuple[str, ...]
"""Argument names in order. The name is empty for a positional-only argument."""
MAX_HOPS = 16
"""The maximum number of imports and base classes to follow."""
ELSEWHERE = ("launcher", "fork")
"""Not checked here: the command creates the launcher, and a trunk's config was checked when the trunk started."""


def argument_errors(plain: dict[str, Any], known: dict[str, Names | None]) -> list[str]:
    """Return one line for each argument in a resolved config that its target does not accept.

    Args:
        plain: the resolved config.
        known: argument names by target, or None where the source does not determine them. New results are added.
    """
    if plain["launcher"].get("python"):  # another Python has different modules
        return []
    checked = {name: node for name, node in plain.items() if name not in ELSEWHERE}
    return [line for key, node in instantiated_nodes(checked) for line in _errors(key, node, known)]


def _errors(key: str, node: dict[str, Any], known: dict[str, Names | None]) -> Iterator[str]:
    given = [name for name in node if name not in HYDRA_KEYS and name not in _taken_by_the_runner(key)]
    target = node["_target_"]
    if not given or not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return
    if target not in known:
        known[target] = names_of(target)
    found = known[target]
    if found is None:
        return
    names = [name for name in found[_passed_by_the_runner(key) :] if name]
    there = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else "it takes none"
    wrong = [name for name in given if name not in names]
    if len(wrong) == 1:
        name = wrong[0]
        yield f"{key}.{name}={node[name]}: {target} has no such argument{nearest(name, names)}; {there}"
    elif wrong:
        yield f"{key}: {target} has no arguments {', '.join(wrong)}; {there}"


def _taken_by_the_runner(key: str) -> Sequence[str]:
    """Return the options of a node that are for the runner, which passes them on only if the target accepts them."""
    match key.split("."):
        case ["sampler"]:
            return [each.name for each in fields(SamplerConfig)]
        case ["scheduler"] | ["optimizers", _, "scheduler"]:
            return [each.name for each in fields(SchedulerConfig)]
        case ["optimizer"]:
            return ["groups"]
        case ["optimizers", _]:
            return OWN_KEYS
        case ["eval", "metrics", _]:
            return ["takes"]
    return []


def _passed_by_the_runner(key: str) -> int:
    """Return how many positional arguments the runner passes before the config's arguments."""
    match key.split("."):
        case ["logger", _]:
            return 3
        case ["optimizer" | "sampler" | "scheduler"] | ["optimizers", _] | ["optimizers", _, "scheduler"]:
            return 1
    return 0


def names_of(target: str, hops: int = MAX_HOPS) -> Names | None:
    """Return the argument names of a function or class, or None if its source does not determine them.

    Args:
        target: the dotted name of the function or class.
        hops: the maximum number of imports and base classes to follow.
    """
    found = source_of(target) if hops else None
    if found is None or not f".{target}".endswith(f".{found[0].name.removeprefix(DATA)}.{target.rpartition('.')[2]}"):
        return None
    spec, source = found
    try:
        module = _Module(spec.name, spec.submodule_search_locations is not None, ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return module.names_of(target.rpartition(".")[2], hops)


class _Module:
    """The statements of a module's source.

    Args:
        name: the dotted name of the module.
        is_package: whether the source is the `__init__.py` of a package.
        tree: the parsed source.
    """

    def __init__(self, name: str, is_package: bool, tree: ast.Module) -> None:
        self.name = name
        self._package = name if is_package else name.rpartition(".")[0]
        self._body = tree.body

    def names_of(self, name: str, hops: int) -> Names | None:
        """Return the argument names of a function or class that the module defines or imports."""
        match self._bound(name):
            case ast.FunctionDef() as function:
                return None if function.decorator_list else _parameters(function, 0)
            case ast.ClassDef() as kind:
                return self._of_class(kind, hops)
            case ast.ImportFrom() as imported:
                where = self._dotted(ast.Name(name))
                return names_of(where, hops - 1) if where and imported else None
        return None

    def _bound(self, name: str) -> ast.stmt | None:
        """Return the only statement that binds `name`. Return None if several do, or if it may not be executed."""
        found = [statement for statement in self._body if _binds(statement, name)]
        simple = (ast.FunctionDef, ast.ClassDef, ast.ImportFrom, ast.Import)
        return found[0] if len(found) == 1 and isinstance(found[0], simple) else None

    def _of_class(self, kind: ast.ClassDef, hops: int) -> Names | None:
        if kind.keywords or any(_binds(statement, "__new__") for statement in kind.body):
            return None
        decorators = [self._dotted(each.func if isinstance(each, ast.Call) else each) for each in kind.decorator_list]
        own = [statement for statement in kind.body if _binds(statement, "__init__")]
        if decorators == ["dataclasses.dataclass"] and not own and not kind.bases:
            annotated = [each.target for each in kind.body if isinstance(each, ast.AnnAssign)]
            return tuple(each.id for each in annotated if isinstance(each, ast.Name))
        if decorators:
            return None
        if own:
            init = own[0] if len(own) == 1 else None
            return _parameters(init, 1) if isinstance(init, ast.FunctionDef) and not init.decorator_list else None
        if len(kind.bases) > 1:
            return None
        base = self._dotted(kind.bases[0]) if kind.bases else "object"
        return () if base == "object" else names_of(base, hops - 1) if base else None

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name that an expression refers to, or None if the expression is not a plain name."""
        if isinstance(node, ast.Attribute):
            value = self._dotted(node.value)
            return f"{value}.{node.attr}" if value else None
        if not isinstance(node, ast.Name):
            return None
        if node.id == "object" and not any(_binds(statement, "object") for statement in self._body):
            return "object"
        match self._bound(node.id):
            case ast.ClassDef() | ast.FunctionDef():
                return f"{self.name}.{node.id}"
            case ast.Import(names=aliases):
                return next((one.name if one.asname else node.id for one in aliases if _alias(one) == node.id), None)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                name = next(one.name for one in aliases if _alias(one) == node.id)
                return f"{modules.imported_from(self._package, level, module)}.{name}"
        return None


def _alias(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def _binds(statement: ast.AST, name: str) -> bool:
    """Return whether a statement, or a nested statement in the same scope, binds `name`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == name
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return any(_alias(alias) == name for alias in statement.names)
    if isinstance(statement, ast.Name):
        return statement.id == name and not isinstance(statement.ctx, ast.Load)
    return any(_binds(child, name) for child in ast.iter_child_nodes(statement))


def _parameters(function: ast.FunctionDef, skipped: int) -> Names | None:
    """Return a function's argument names after the first `skipped` ones, or None if it has `**kwargs`."""
    arguments = function.args
    if arguments.kwarg is not None:
        return None
    names = [*("" for _ in arguments.posonlyargs), *(each.arg for each in arguments.args)][skipped:]
    return (*names, *(each.arg for each in arguments.kwonlyargs))

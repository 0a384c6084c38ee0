"""Check config nodes with `_target_` before a run directory is created, and instantiate them.

If the check finds a class in the source of its module, it does not import it, because importing torch or a user's
module takes seconds. Names that are not in the source are imported, because they may be created on import or missing.
"""

from __future__ import annotations

import inspect
import pkgutil
import symtable
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

from runner.errors import UserError, nearest
from runner.system import modules

DATA, OF_DATA = "exactdata.", "runner.data."
"""The prefix of names in the package `exactdata`, and the prefix of the same names in `runner.data`."""
HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")


def with_one_name(node: Any) -> Any:
    """Rename each `_target_` in `exactdata` to its name in `runner.data`, so that both names give the same run."""
    if isinstance(node, list):
        return [with_one_name(value) for value in node]
    if not isinstance(node, dict):
        return node
    values = {key: with_one_name(value) for key, value in node.items()}
    if str(target := values.get("_target_")).startswith(DATA):
        values["_target_"] = OF_DATA + str(target).removeprefix(DATA)
    return values


def source_of(target: str) -> tuple[ModuleSpec, str] | None:
    """Return the module that defines a target, and its source. Names in `runner.data` are looked up in `exactdata`."""
    found = modules.source_of(target)
    if found is not None and f"{found[0].name}." == OF_DATA:
        return modules.source_of(DATA + target.removeprefix(OF_DATA)) or found
    return found


def instantiate(key: str, node: dict[str, Any], *arguments: Any, **more: Any) -> Any:
    """Instantiate the `_target_` at the config's `key`, with the caller's arguments added.

    Raises:
        UserError: the class does not exist, its arguments do not fit, or it raised an error for them.
    """
    make = bind(key, node)
    target = node.get("_target_")
    try:
        return make(*arguments, **more)
    except TypeError as error:
        raise UserError(f"{key} ({target}): {error}: check the options under {key}") from error
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error
    except (ValueError, OSError, MemoryError) as error:
        raise UserError(f"{key} ({target}): {error or 'not enough memory'}") from error
    except RuntimeError as error:
        # A RuntimeError of a shipped class comes from torch, e.g. because memory is too small.
        if not str(target).startswith("runner."):
            raise
        raise UserError(f"{key} ({target}): {next(iter(str(error).splitlines()), type(error).__name__)}") from error


def bind(key: str, node: dict[str, Any]) -> partial[Any]:
    """Return the `_target_` at the config's `key` as a partial, with the node's other values as keyword arguments.

    Hydra's keys keep their meaning (`_args_`, `_recursive_`, and `_partial_` of inner nodes), but Hydra only looks up
    the target. Arguments are passed as plain values and are not interpolated again.

    Raises:
        UserError: the target cannot be imported, an inner node cannot be instantiated, or a parameter that the target
            declares as boolean has a different value.
    """
    values = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
    positional = node.get("_args_", [])
    if node.get("_recursive_", True):
        values = {name: _instantiated(f"{key}.{name}", value) for name, value in values.items()}
        positional = _instantiated(f"{key}._args_", positional)
    made = partial(_looked_up(key, node.get("_target_")), *positional, **values)
    _check_booleans(key, made)
    return made


def named(key: str, node: dict[str, Any]) -> Any:
    """Return the function or class that `_target_` at the config's `key` names.

    Raises:
        UserError: the target cannot be imported.
    """
    return bind(key, {"_target_": node.get("_target_")}).func


def check_call(made: partial[Any], name: str, call: str, *arguments: Any) -> None:
    """Check that `made` can be called with these arguments. `name` and `call` describe the call in the error message.

    Raises:
        UserError: the arguments do not fit the signature.
    """
    try:
        signature = inspect.signature(made.func)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*made.args, *arguments, **made.keywords)
    except TypeError as error:
        raise UserError(f"{name} cannot be called as {call} with its options: {error}") from None


def _check_booleans(key: str, made: partial[Any]) -> None:
    """Reject non-boolean values for boolean parameters: `no` in an override is a string, which is true."""
    try:
        parameters = inspect.signature(made.func).parameters
    except (ValueError, TypeError):  # some callables written in C have no signature
        return
    for name, value in made.keywords.items():
        declared = parameters[name].annotation if name in parameters else None
        if declared in (bool, "bool") and not isinstance(value, bool):
            raise UserError(f"{key}.{name}={value} must be true or false")


def _instantiated(key: str, node: Any) -> Any:
    """Return `node` with each inner node that has a `_target_` replaced by its object."""
    if isinstance(node, list):
        return [_instantiated(f"{key}.{index}", value) for index, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" in node:
        return bind(key, node) if node.get("_partial_", False) else instantiate(key, node)
    return {name: _instantiated(f"{key}.{name}", value) for name, value in node.items()}


def _looked_up(key: str, target: Any) -> Callable[..., Any]:
    from hydra import utils
    from hydra.errors import InstantiationException

    # Hydra 1.4 warns unless the caller lists the allowed targets. All are allowed, because configs name users' classes.
    every_target = getattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
    allowed = {"_execution_whitelist_": every_target} if every_target else {}
    try:
        found = utils.instantiate({"_target_": target, "_partial_": True}, **allowed)
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(f"{key}._target_={target} cannot be used: {' '.join(str(cause).split())}") from error
    # Hydra's partial resolves its target at every call, and some start methods cannot send it to a worker process.
    return found.func if isinstance(found, partial) else found


CHANGES_TRAINING = "changes_training"
"""A callback class sets this attribute to declare that it changes weights, gradients or the optimizer."""


def changing_callbacks(plain: dict[str, Any]) -> list[str]:
    """Return the names of callbacks whose class declares that it changes what is trained.

    A class is imported only if the attribute's name occurs in its module's source.
    """
    found = []
    for name, node in plain["callbacks"].items():
        source = source_of(str(node.get("_target_"))) if isinstance(node, dict) else None
        if source is not None and CHANGES_TRAINING in source[1]:
            with suppress(Exception):  # the error is reported when the callback is created
                if getattr(pkgutil.resolve_name(node["_target_"]), CHANGES_TRAINING, False):
                    found.append(name)
    return found


def target_errors(plain: dict[str, Any], known: dict[str, str | None]) -> list[str]:
    """Return a line for each `_target_` in a resolved config that is not callable or does not exist.

    Args:
        plain: the resolved config.
        known: the error for each target, or None if it is usable. New results are added.
    """
    # A launcher that uses a different Python has different modules.
    checked = {"launcher": plain["launcher"]} if plain["launcher"].get("python") else plain
    found = [(key, node["_target_"]) for key, node in instantiated_nodes(checked)]
    for target in {str(target) for _, target in found} - known.keys():
        known[target] = _target_error(target)
    return [f"{key}._target_={target}: {error}" for key, target in found if (error := known[str(target)])]


def instantiated_nodes(node: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the values of each node that will be instantiated."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    if node.get("_target_"):  # without it, the typed options of the group apply, or a different check reports the error
        yield key, node
    if node.get("_recursive_", True):
        for name, part in node.items():
            yield from instantiated_nodes(part, f"{key}.{name}" if key else str(name))


def _target_error(target: str) -> str | None:
    """Return why `target` cannot be used, or None if it can."""
    if not all(part.isidentifier() for part in target.split(".")):
        return "write the dotted name of a class or function, such as my_package.my_module.MyClass"
    module, _, name = target.partition(".")
    if module == "__main__":
        return (
            "it is defined in a notebook's cell or in the script that runs, where no resumed run finds it: move it to "
            f"a file such as my_code.py, and write my_code.{name}"
        )
    return None if _is_defined_in_source(target) else _import_error(target)


def _import_error(target: str) -> str | None:
    try:
        found = pkgutil.resolve_name(target)
    except ModuleNotFoundError as error:
        return f"{error}; modules are searched in the current directory and on Python's path"
    except AttributeError as error:
        return f"{error}{_nearest_name(target)}; name a class or function in it"
    except Exception as error:  # noqa: BLE001 a module may raise anything when it is imported
        return f"it cannot be imported ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None if callable(found) else f"it is a {type(found).__name__}: name a class or function"


def _nearest_name(target: str) -> str:
    """Suggest a similar name from the module of `target`, if the module can be imported."""
    module, _, name = target.rpartition(".")
    return nearest(name, vars(sys.modules[module])) if module in sys.modules else ""


def _is_defined_in_source(target: str) -> bool:
    """Return whether a statement in a module binds `target`, without running the module."""
    names = [target, *([DATA + target.removeprefix(OF_DATA)] if target.startswith(OF_DATA) else [])]
    return any(map(_binds, names))


def _binds(target: str) -> bool:
    found = source_of(target)
    if found is None:
        return False
    spec, source = found
    try:
        table = symtable.symtable(source, str(spec.origin), "exec")
        symbol = table.lookup(target.removeprefix(f"{spec.name}.").partition(".")[0])
    except (LookupError, SyntaxError, ValueError):
        return False
    return symbol.is_assigned() or symbol.is_imported()

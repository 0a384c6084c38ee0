"""List every setting with its type, default and explanation. They come from the schema and the comments in conf/.

Imports neither torch nor Hydra.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import yaml

from runner.bounds import BOUNDS, OTHERS, SEARCH
from runner.config.hints import description, type_of, without_none
from runner.config.identity import FILLED_IN, as_text, kind_of
from runner.config.plain_yaml import Loader
from runner.config.schema import Command
from runner.config.search_path import conf_dir, groups
from runner.errors import UserError, nearest
from runner.system import files

LATER = {
    "free": "yes",
    "shape": "where the sampler can resume with it",
    "data": "with run.allow_data_change=true",
    "edit": "by `runner resume`, which marks the run as edited",
    "fixed": "no",
}
"""Whether settings of each kind (see `identity.kind_of`) may be changed in an existing run."""
LINE = re.compile(r"( *)(?:- )?([\w.]+):(?: +(?!#)(?P<value>.*?))?(?: +# *(?P<beside>.*))?$")
MEANS = re.compile(r"[\w\[\]{}-]+: ")


@dataclass(frozen=True)
class Setting:
    """A setting, as listed by `runner show --settings`.

    Attributes:
        key: the dotted key. `NAME` in it stands for a name that you choose.
        type: the type of the values in words; empty if any type is allowed.
        default: the value if the setting is not set, in the syntax of the command line.
        allowed: the range or the choices; empty if any value of the type is allowed.
        later: whether the setting may be changed in an existing run.
        about: a one-line explanation.
        option: the options of a config group that have this setting, such as `launcher=slurm`; empty if it always
            exists.
    """

    key: str
    type: str
    default: str
    allowed: str
    later: str
    about: str
    option: str = ""


@dataclass
class _File:
    """A file in conf/: its values, merged over those of the option that it extends, and its comments by dotted key."""

    values: dict[str, Any]
    comments: dict[str, str]


def settings(prefix: str = "") -> list[Setting]:
    """List all settings, or only the dotted key `prefix` and the settings below it.

    Raises:
        UserError: the setting does not exist.
    """
    found = [each for each in _all() if not prefix or f"{each.key}.".startswith(f"{prefix}.")]
    if not found:
        names = {each.key[: end.start()] for each in _all() for end in re.finditer(r"\.|$", each.key)}
        raise UserError(
            f"{prefix}: no such setting{nearest(prefix, sorted(names))}; pass one, such as train.steps, or a part of "
            f"the config: {', '.join(each.name for each in fields(Command))}"
        )
    return found


@cache
def _all() -> tuple[Setting, ...]:
    """Return all settings in the order of the schema. After each group follow the settings that its options add."""
    options = groups([conf_dir()])
    primary = _read("config")
    made = [_group("experiment", options["experiment"], primary)]
    for each in fields(Command):
        named = options.get(each.name, [])
        usual = str(primary.values.get(each.name)) if named else ""
        ordered = sorted(named, key=lambda name, usual=usual: name != usual)  # type: ignore[misc]
        found = {name: _read(f"{each.name}/{name}") for name in ordered}
        if named:
            made.append(_group(each.name, named, primary))
        rows = _typed(each.name, type_of(each.name), Command(), [primary, *found.values()])
        made += [row for row in rows if not (named and row.key == each.name)]
        made += _added(each.name, found)
    return tuple(made)


def _group(name: str, options: list[str], primary: _File) -> Setting:
    """Return the setting that selects an option of a config group."""
    about, default = primary.comments[name].partition(":")[0], as_text(primary.values[name])
    return Setting(name, "option of a group", default, ", ".join(options), "as the settings in it", _sentence(about))


def _typed(key: str, hint: Any, holder: Any, read: list[_File]) -> Iterator[Setting]:
    """Yield the settings in one part of the schema.

    Args:
        key: the dotted key of this part.
        hint: the type of this part.
        holder: the object that contains the part and its defaults. None below a name that the user chooses.
        read: the files that may explain the settings and set their defaults, the most important first.
    """
    hint, optional = without_none(hint)
    value = getattr(holder, key.rpartition(".")[2], None)
    if isinstance(hint, type) and is_dataclass(hint):
        about = _arguments(hint)
        for each in fields(hint):
            below = f"{key}.{each.name}"
            for row in _typed(below, typing.get_type_hints(hint)[each.name], value or hint(), read):
                yield row if row.about else Setting(**{**vars(row), "about": about.get(each.name, "")})
        return
    usual = next((each.values[key] for each in read[:2] if key in each.values), value)
    comment = next((each.comments[key] for each in read if key in each.comments), "")
    is_choice = isinstance(hint, type) and issubclass(hint, Enum)
    allowed = [member.name for member in hint] if is_choice else []
    if bound := {**BOUNDS, **OTHERS, **SEARCH}.get(key):
        allowed = [f"each {bound}" if typing.get_origin(hint) is dict else str(bound)]
    what = "choice" if is_choice else description(hint).removeprefix("a ").partition(" such")[0]
    later = "filled in" if key.startswith((*FILLED_IN, "fork.")) else LATER[kind_of(key)]
    default = as_text(usual.name if isinstance(usual, Enum) else usual)
    if any(name.startswith(f"{key}.") for each in read[:2] for name in each.values):
        default = "set by the option of the group"
    yield Setting(key, what, default, ", ".join([*allowed, *["null"] * optional]), later, _sentence(comment))
    if typing.get_origin(hint) is dict and is_dataclass(typing.get_args(hint)[1]):
        yield from _typed(f"{key}.NAME", typing.get_args(hint)[1], None, [])


def _added(group: str, found: Mapping[str, _File]) -> Iterator[Setting]:
    """Yield the settings that a group's options add to the schema. Options with the same explanation share one."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, read in found.items():
        for key, comment in read.comments.items():
            if key in read.values and type_of(key) in (None, Any) and not key.endswith("._target_"):
                rows.setdefault((key, _sentence(comment)), {})[name] = as_text(read.values[key])
    for (key, about), by in rows.items():
        same = len({*by.values()}) == 1
        default = next(iter(by.values())) if same else ", ".join(f"{value} ({name})" for name, value in by.items())
        value = found[next(iter(by))].values[key]
        what = "" if value is None or value == "???" else description(type(value)).removeprefix("a ")
        option = f"{group}={','.join(by)}"
        yield Setting(
            key,
            what.partition(" such")[0],
            default.replace("???", "must be set"),
            "",
            LATER[kind_of(key)],
            about,
            option,
        )


def _read(name: str) -> _File:
    """Read the primary config, or an option given as `GROUP/OPTION`."""
    text = files.read_regular(conf_dir() / f"{name}.yaml").decode()
    group, slash, _ = name.rpartition("/")
    values = yaml.load(text, Loader=Loader) or {}
    built_on, below = values.pop("defaults", []), {}
    if group and built_on and isinstance(built_on[0], str):
        below = _read(f"{group}/{built_on[0]}").values
    chosen = {key: value for each in built_on if isinstance(each, dict) and not group for key, value in each.items()}
    prefix = group + slash.replace("/", ".")
    own = {prefix + key: value for key, value in _leaves({**chosen, **values})}
    return _File({**below, **own}, {prefix + key: comment for key, comment in _comments(text).items()})


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. Lists and empty dictionaries are treated as values."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _comments(text: str) -> dict[str, str]:
    """Return the comment for each dotted key: the one on the same line, or else the one directly above.

    A comment on the same line continues on the following lines if they contain only a comment and are indented further.
    """
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above, beside = [], ""
    for line in text.splitlines():
        comment = re.fullmatch(r"( *)# ?(.*)", line)
        if comment and beside and len(comment[1]) > path[-1][0] + 8:
            found[beside] += f" {comment[2].strip()}"
            continue
        beside = ""
        if comment:
            above.append(comment[2].strip())
        elif (match := LINE.fullmatch(line)) is not None:
            indent = len(match[1])
            path = [*(each for each in path if each[0] < indent and each[1] != "defaults"), (indent, match[2])]
            key = ".".join(name for _, name in path)
            if match["beside"]:
                found[key], beside = match["beside"], key
            elif above:
                found[key] = " ".join(above)
            above = []
        else:
            above = []
    return found


def _sentence(comment: str) -> str:
    """Return the first sentence of a comment, and any sentences that explain a value, such as `null: none.`."""
    parts = re.split(r"(?<=\.)\s+|(?<=\.\))\s+", comment.strip())
    return " ".join(part for number, part in enumerate(parts) if number == 0 or MEANS.match(part))


def _arguments(kind: type) -> dict[str, str]:
    """Return the argument descriptions in a class's docstring, by name."""
    return dict(re.findall(r"^    (\w+): (.*)$", inspect.getdoc(kind) or "", re.MULTILINE))

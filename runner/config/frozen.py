"""Read and write a run's frozen config, `config.yaml`. It is resolved, and readable without Hydra."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.fork import planned, trunk_values
from runner.config.hints import without_none
from runner.config.own_target import Replaceable
from runner.config.plain_yaml import (
    CACHED,
    MAX_BYTES,
    check_structure,
    copied,
    escaped,
    parsed,
    read_plain,
    section,
    sections,
)
from runner.config.schema import Config, config_errors
from runner.config.targets import with_one_name
from runner.errors import RunDirError, refuse
from runner.rundir.paths import RunDir
from runner.system import files

# OmegaConf does not catch some mistakes. Then Python or the YAML reader raises its own error.
READ_ERRORS = (OmegaConfBaseException, ValueError, TypeError, AttributeError, OverflowError, yaml.YAMLError)

_hints = cache(get_type_hints)
_TEXTS: dict[tuple[str, str], str] = {}


@cache
def schema(kind: type = Config) -> DictConfig:
    """Return the types and defaults of a config. Merge values into a copy of it.

    `Replaceable` groups accept additional keys.
    """
    made: DictConfig = OmegaConf.structured(kind)
    for name, hint in get_type_hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, Replaceable):
            OmegaConf.set_struct(made[name], False)
    return made


def to_yaml(plain: dict[str, Any]) -> str:
    """Return the text of `config.yaml` for a resolved config."""
    return "".join(_section_text(name, value) for name, value in plain.items())


def _section_text(name: str, value: Any) -> str:
    """Return the text of one section. The text is cached, because the runs of a sweep share most sections."""
    key = name, repr(value)
    if key not in _TEXTS:
        if len(_TEXTS) == CACHED:
            _TEXTS.clear()
        _TEXTS[key] = OmegaConf.to_yaml(OmegaConf.create(escaped({name: value})))
    return _TEXTS[key]


def load_plain(run_dir: Path) -> dict[str, Any]:
    """Return the frozen config of a run as plain values.

    Raises:
        RunDirError: the config is missing or cannot be read.
    """
    run = RunDir(run_dir)
    try:
        text = files.read_regular(run.config, limit=MAX_BYTES).decode()
        # The values are merged into the schema, so that options added in later versions get their defaults.
        return _by_section(text) or plain_values(OmegaConf.merge(schema(), _values_of_all_sections(text)))
    except FileNotFoundError:
        raise RunDirError(f"{run.config} is missing: {run_dir} is not a run directory") from None
    except OSError as error:  # kept as the cause, because a transient error such as EIO says nothing about the run
        raise RunDirError(f"{run.config} cannot be read ({error.strerror or error})") from error
    except (*READ_ERRORS, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RunDirError(
            f"{run.config} is truncated or was edited by hand ({reason}): fix it, or remove it and rerun the command, "
            f"which writes it again ({run.code.name} lists the overrides)"
        ) from None


def over_schema(values: dict[str, Any]) -> dict[str, Any]:
    """Merge resolved values into the schema, section by section.

    Merged sections are cached, because the jobs of a sweep share most of them. The merge is needed because a user's
    primary config may not include the schema.

    Raises:
        READ_ERRORS: a value does not fit the schema.
    """
    values, names = with_one_name(values), [field.name for field in fields(Config)]
    if sorted(values) == sorted(names):
        with suppress(*READ_ERRORS):
            made: dict[str, Any] = copied({name: _merged(_section_text(name, values[name]))[1] for name in names})
            return made
    return plain_values(OmegaConf.merge(schema(), escaped(values)))


def _values_of_all_sections(text: str) -> dict[str, Any]:
    values = parsed(text)
    if lost := [field.name for field in fields(Config) if field.name not in values]:
        raise ValueError(f"it has no {', '.join(lost)}")
    return values


def _by_section(text: str) -> dict[str, Any] | None:
    """Return the values of a frozen config, merged into the schema section by section.

    Merged sections are cached, because the runs of a sweep share most of them. Return None if the text has errors, or
    is not formatted as `to_yaml` writes it.
    """
    try:
        check_structure(text)
        found = [_merged(part) for part in sections(text)] if "${" not in text else []
    except READ_ERRORS:
        return None
    names = [field.name for field in fields(Config)]
    return copied(dict(found)) if sorted(name for name, _ in found) == sorted(names) else None


@lru_cache(maxsize=CACHED)
def _merged(text: str) -> tuple[str, Any]:
    """Return the name of a config section, and its value merged into the schema."""
    name, value = section(text)
    return name, plain_values(OmegaConf.merge(_section_schema(name), {name: value}))[name]


@cache
def _section_schema(name: str) -> DictConfig:
    """Return the schema of one section."""
    (kept,) = (each for each in fields(Config) if each.name == name)
    only = field(default=kept.default) if kept.default is not MISSING else field(default_factory=kept.default_factory)
    return schema(make_dataclass("Part", [(name, get_type_hints(Config)[name], only)]))


def holds(run_dir: Path, plain: dict[str, Any]) -> bool:
    """Return whether a run's frozen config has exactly these values, in the current format."""
    try:
        return repr(read_plain(RunDir(run_dir).config)) == repr(plain)
    except (OSError, ValueError):
        return False


def load(run_dir: Path) -> Config:
    """Load the frozen config of a run. Nodes with `_target_` stay plain dictionaries.

    Raises:
        UserError: the config is missing, cannot be read, or does not fit the schema.
    """
    plain = load_plain(run_dir)
    refuse(f"{RunDir(run_dir).config}: {error}" for error in config_errors(to_config(plain)))
    return trained(plain)


def trained(plain: dict[str, Any]) -> Config:
    """Return the config a run trains with. Up to the fork, a branch uses its trunk's config."""
    config = to_config(plain)
    return config if config.fork.run is None else planned(config, trained(trunk_values(plain)))


def to_config(plain: dict[str, Any]) -> Config:
    """Convert a resolved config, already merged into the schema, to dataclasses."""
    config = _typed(Config, plain)
    assert isinstance(config, Config)
    return config


def _typed(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    kind = _kind(hint)
    if kind == "dataclass":
        hints = _hints(hint)
        made = hint(**{name: _typed(hints[name], part) for name, part in value.items() if name in hints})
        if isinstance(made, Replaceable):
            made.options.update({name: part for name, part in value.items() if name not in hints})
        return made
    if kind == "enum":
        return without_none(hint)[0][value]
    if kind == "dict":
        return {key: _typed(get_args(hint)[1], part) for key, part in value.items()}
    return dict(value) if isinstance(value, dict) else value


@cache
def _kind(hint: Any) -> str:
    hint = without_none(hint)[0]
    if isinstance(hint, type) and is_dataclass(hint):
        return "dataclass"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "enum"
    return "dict" if get_origin(hint) is dict and get_args(hint)[1] is not Any else "value"


def plain_values(config: DictConfig | ListConfig, resolve: bool = True) -> dict[str, Any]:
    """Return `config` as dictionaries, lists and scalars, with enums by name. Return {} if it is not a dictionary."""
    values = _without_tuples(OmegaConf.to_container(config, resolve=resolve, enum_to_str=True))
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _without_tuples(node: Any) -> Any:
    """Replace tuples, which OmegaConf 2.4 and later return, with lists, so that a frozen config reads back equal."""
    if isinstance(node, dict):
        return {key: _without_tuples(value) for key, value in node.items()}
    return [_without_tuples(value) for value in node] if isinstance(node, list | tuple) else node

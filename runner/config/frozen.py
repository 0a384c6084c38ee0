"""The frozen config of a run directory, `config.yaml`: resolved, and readable without the config tree or Hydra."""

from __future__ import annotations

import io
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.further import known_keys, takes_further
from runner.config.schema import Config, config_errors
from runner.errors import RunDirError, UserError
from runner.rundir.paths import RunDir
from runner.system import files

# What OmegaConf may raise: it lets some mistakes through to Python and to the YAML reader.
READ_ERRORS = (OmegaConfBaseException, ValueError, TypeError, AttributeError, yaml.YAMLError)
MAX_BYTES = 8 << 20  # room for 100,000 exclusions; most have a few thousand bytes
MAX_DEPTH = 100


def schema() -> DictConfig:
    """The schema for OmegaConf, with further keys allowed in the nodes that take them."""
    config = OmegaConf.structured(Config)
    for name, kind in get_type_hints(Config).items():
        if takes_further(kind):
            OmegaConf.set_struct(config[name], False)
    return config  # type: ignore[no-any-return]


def to_yaml(plain: dict[str, Any]) -> str:
    """The text of `config.yaml` for a resolved config."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(plain)))


def load_plain(run_dir: Path) -> dict[str, Any]:
    """The frozen config of a run as plain values.

    Raises:
        RunDirError: it is missing or cannot be read.
    """
    run = RunDir(run_dir)
    try:
        text = files.read_regular(run.config, limit=MAX_BYTES).decode()
        _check_structure(text)
        frozen = OmegaConf.load(io.StringIO(text))
        if lost := [field.name for field in fields(Config) if field.name not in frozen]:
            raise ValueError(f"it has no {', '.join(lost)}")
        # Over the schema's defaults, so that an option added since then has its default.
        return plain_values(OmegaConf.merge(schema(), frozen))
    except FileNotFoundError:
        raise RunDirError(f"{run.config} is missing: {run_dir} is not a run directory") from None
    except OSError as error:  # kept as the cause: one that may pass, such as EIO, decides nothing
        raise RunDirError(f"{run.config} cannot be read ({error.strerror or error})") from error
    except (*READ_ERRORS, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RunDirError(
            f"{run.config} is truncated or was edited by hand ({reason}): fix it, or remove it and rerun the command, "
            f"which writes it again ({run.code.name} lists the overrides)"
        ) from None


def _check_structure(text: str) -> None:
    """Refuse what a frozen config never has, and what would cost the reader its stack, or hours.

    Raises:
        ValueError: it refers to other parts of itself, or is nested too deeply.
        YAMLError: it is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"the alias *{event.anchor} refers to another part of the file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def load(run_dir: Path) -> Config:
    """The frozen config of a run; nodes with `_target_` stay plain dictionaries.

    Raises:
        UserError: it is missing, cannot be read, or does not fit the schema.
    """
    config = to_config(load_plain(run_dir))
    if errors := config_errors(config):
        raise UserError("\n".join(f"{RunDir(run_dir).config}: {error}" for error in errors))
    return config


def to_config(plain: dict[str, Any]) -> Config:
    """The dataclasses for a resolved config that has been merged into the schema."""
    config = _typed(Config, plain)
    assert isinstance(config, Config)
    return config


def _typed(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        if not takes_further(hint):
            return hint(**{name: _typed(hints[name], part) for name, part in value.items()})
        known = {name: _typed(hints[name], part) for name, part in value.items() if name in known_keys(hint)}
        options = {name: part for name, part in value.items() if name not in known}
        return hint(**known, options=options)  # type: ignore[call-arg]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint[value]
    if get_origin(hint) is dict:
        return {key: _typed(get_args(hint)[1], part) for key, part in value.items()}
    return value


def plain_values(config: DictConfig | ListConfig, resolve: bool = True) -> dict[str, Any]:
    """`config` as dictionaries, lists and scalars, enums by name; empty if it is not a dictionary."""
    values = _without_tuples(OmegaConf.to_container(config, resolve=resolve, enum_to_str=True))
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _without_tuples(node: Any) -> Any:
    """`node` with lists for tuples, which OmegaConf has from 2.4 on: a frozen config reads back equal."""
    if isinstance(node, dict):
        return {key: _without_tuples(value) for key, value in node.items()}
    return [_without_tuples(value) for value in node] if isinstance(node, list | tuple) else node


def escaped(node: Any) -> Any:
    """Resolved values with `${` escaped, so that OmegaConf reads them back unchanged."""
    if isinstance(node, dict):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", node)
    return node

"""Composition by Hydra, checks, and the frozen config of a run directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from runner.conf_tree import conf_dir
from runner.config.explain import ERRORS, Diagnosis, explain, unused_setting
from runner.config.identity import flatten, identity, readable_name
from runner.config.paths import anchor
from runner.config.targets import target_faults
from runner.errors import UserError
from runner.run_dir import RunDir
from runner.schema import Config, faults

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
# Dictionaries whose keys are names that users give: a new one needs no `+`.
OPEN = ("sampler.weights", "sampler.max_epochs", "phases", "data.loader")

ConfigStore.instance().store(name="schema", node=Config)


@dataclass(frozen=True)
class Composed:
    """One job: its config as objects and as plain values, and where it runs."""

    config: Config
    plain: dict[str, Any]  # resolved, paths absolute, enums by name
    overrides: tuple[str, ...]  # as given on the command line
    run_dir: Path  # absolute

    @cached_property
    def text(self) -> str:
        """The content of `config.yaml`."""
        return freeze(self.plain)


def opened(override: str) -> str:
    """`override` such that a new name in one of the `OPEN` dictionaries is taken without a `+`."""
    key, equals, value = override.partition("=")
    bare = key.lstrip("+")
    if not equals or key.startswith("~"):
        return override
    for prefix in OPEN:
        if bare == prefix and value.startswith("{"):
            return f"++{bare}={value}"
        if bare.startswith(f"{prefix}."):
            # As one dictionary, so that what does not exist yet gets the type that the schema gives it.
            names = bare.removeprefix(f"{prefix}.").split(".")
            return f"++{prefix}=" + "".join(f"{{{name}:" for name in names) + value + "}" * len(names)
    return override


class Composer:
    """Composes configs of one config tree.

    Args:
        config_dirs: further directories with groups and experiments, searched after the shipped ones.
        config_name: the primary config.

    Raises:
        UserError: a directory is not there.
    """

    def __init__(self, config_dirs: Sequence[str | Path] = (), config_name: str = CONFIG_NAME) -> None:
        version.setbase(VERSION_BASE)
        setup_globals()
        JobRuntime.instance().set("name", "runner")
        search_path = create_config_search_path(str(conf_dir()))
        for directory in config_dirs:
            path = Path(directory).resolve()
            if not path.is_dir():
                raise UserError(f"--config-dir {directory}: no such directory; give one that holds config groups")
            search_path.prepend("command-line", f"file://{path}", SearchPathQuery(provider="schema"))
        self.loader = ConfigLoaderImpl(search_path)
        self.config_name = config_name
        self._bases: dict[tuple[str | None, str | None], dict[str, Any]] = {}

    def expand(self, overrides: Sequence[str]) -> list[list[str]]:
        """The jobs of a sweep: all combinations of the values given, the last key varying fastest.

        Raises:
            UserError: overrides that cannot be read, all of them in one message.
        """
        alternatives: dict[str, list[str]] = {}
        unread = []
        for text in [*self._sweep_params(overrides), *overrides]:
            try:
                (override,) = OverridesParser.create(self.loader).parse_overrides([text])
            except HydraException as error:
                unread.append(explain(error, text, None))
                continue
            key = override.get_key_element()
            if not override.is_sweep_override():
                alternatives[key] = [text]
            elif override.is_discrete_sweep():
                alternatives[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            else:
                unread.append(f"{text}: an interval has no values to go through; use range(...) or a list of values")
        if unread:
            raise UserError("\n".join(unread))
        return [list(job) for job in product(*alternatives.values())]

    def jobs(self, overrides: Sequence[str]) -> list[Composed]:
        """All jobs of a sweep, checked.

        Raises:
            UserError: the faults of all jobs, each named once; or two jobs that are the same run.
        """
        found: dict[str, str] = {}  # fault -> the first job that has it
        jobs = []
        for number, job in enumerate(self.expand(overrides), start=1):
            try:
                jobs.append(self.compose(job))
            except UserError as error:
                for fault in str(error).splitlines():
                    found.setdefault(fault, f"job {number} ({' '.join(job)})")
        if found:
            raise UserError("\n".join(f"{job}: {fault}" for fault, job in found.items()))
        if not jobs:
            raise UserError("the sweep has no jobs: one of its settings has no value; give each at least one")
        seen: dict[Path, Composed] = {}
        for composed in jobs:
            twin = seen.setdefault(composed.run_dir, composed)
            if twin is not composed:
                raise UserError(
                    f"two jobs of the sweep are the same run {composed.run_dir}: "
                    f"({' '.join(twin.overrides)}) and ({' '.join(composed.overrides)}); give each value once, "
                    "and leave run.dir out of a sweep"
                )
        return jobs

    def _sweep_params(self, overrides: Sequence[str]) -> list[str]:
        """A sweep written in a config, as Hydra's basic sweeper has it: `hydra.sweeper.params`."""
        groups = [o for o in overrides if re.match(r"[+]*(experiment|hydra/)", o) and "," not in o]
        try:
            params = OmegaConf.select(self._hydra(groups), "hydra.sweeper.params")
        except ERRORS:
            return []  # the composition of the jobs says what is wrong
        return [f"{key}={value}" for key, value in params.items()] if params else []

    def _hydra(self, overrides: Sequence[str]) -> DictConfig:
        return self.loader.load_configuration(self.config_name, [opened(o) for o in overrides], RunMode.RUN)

    def compose(self, overrides: Sequence[str], base: Path | None = None) -> Composed:
        """One job, checked.

        Args:
            overrides: as on the command line, without sweeps.
            base: the directory that relative paths count from; the current one by default.

        Raises:
            UserError: all faults of the config, one a line.
        """
        base = Path.cwd() if base is None else base
        unused = {override: line for override in overrides if (line := unused_setting(override))}
        overrides = [override for override in overrides if override not in unused]
        try:
            hydra_config = self._hydra(overrides)
            plain = self._plain(hydra_config)
        except ERRORS as error:
            raise UserError("\n".join([*unused.values(), *self._faults(overrides, error)])) from None
        if found := [*unused.values(), *all_faults(plain)]:
            raise UserError("\n".join(found))
        anchor(plain, base)
        run_dir = Path(plain["run"]["dir"] or Path(plain["run"]["root"]) / self._name(hydra_config, plain, base))
        plain["run"]["dir"] = str(run_dir)
        return Composed(objects(plain), plain, tuple(overrides), run_dir)

    def _faults(self, overrides: Sequence[str], error: Exception) -> list[str]:
        """All faults of `overrides`, which together gave `error`."""
        groups = set(self.loader.list_groups(""))
        diagnosis = Diagnosis(groups, self._hydra, lambda config: all_faults(self._plain(config)))
        return diagnosis.faults(overrides, error)

    def _plain(self, config: DictConfig, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """`config` resolved; what it lacks is taken from the dotted keys of `given`."""
        HydraConfig.instance().set_config(config)
        config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        missing = sorted(key for key, value in flatten(_values(config, resolve=False)).items() if value == "???")
        if missing and given is None:
            raise UserError("\n".join(f"{key} must be given: {key}=..." for key in missing))
        for key in missing:
            OmegaConf.update(config, key, (given or {}).get(key))
        # A primary config of the user's need not start from the schema.
        return _values(OmegaConf.merge(OmegaConf.structured(Config), escaped(_values(config))))

    def _name(self, hydra_config: DictConfig, plain: dict[str, Any], base: Path) -> str:
        """Name of the run directory: readable, then the identity."""
        given = plain["run"]["name"]
        return f"{given or self._readable(hydra_config, plain, base)}-{identity(plain)}"

    def _readable(self, hydra_config: DictConfig, plain: dict[str, Any], base: Path) -> str:
        choices = hydra_config.hydra.runtime.choices
        experiment, data = choices.get("experiment"), choices.get("data")
        if (experiment, data) not in self._bases:
            chosen = [f"{k}={v}" for k, v in (("experiment", experiment), ("data", data)) if v is not None]
            self._bases[experiment, data] = self._plain(self._hydra(chosen), flatten(plain))
            anchor(self._bases[experiment, data], base)
        title = str(experiment or data or self.config_name).replace("/", "_")
        return readable_name(title, self._bases[experiment, data], plain)


def compose(
    overrides: Sequence[str], config_dirs: Sequence[str | Path] = (), config_name: str = CONFIG_NAME
) -> Composed:
    """One job from a command's overrides; see `Composer.compose`."""
    return Composer(config_dirs, config_name).compose(overrides)


def _values(config: DictConfig | ListConfig, resolve: bool = True) -> dict[str, Any]:
    """The plain values of `config`; empty if it is no dictionary."""
    values = OmegaConf.to_container(config, resolve=resolve, enum_to_str=True)
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def objects(plain: dict[str, Any]) -> Config:
    """The config that a resolved dictionary describes, once it has been merged into the schema."""
    config = _object(Config, plain)
    assert isinstance(config, Config)
    return config


def all_faults(plain: dict[str, Any]) -> list[str]:
    """Every fault of a resolved config, a line each: its values, and what it names by `_target_`."""
    return [*faults(objects(plain)), *target_faults(plain)]


def _object(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _object(hints[name], part) for name, part in value.items()})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint[value]
    if get_origin(hint) is dict:
        return {key: _object(get_args(hint)[1], part) for key, part in value.items()}
    return value


def escaped(node: Any) -> Any:
    """A resolved value such that reading it as a config gives it again: `${` is no interpolation any more."""
    if isinstance(node, dict):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", node)
    return node


def freeze(plain: dict[str, Any]) -> str:
    """The text of `config.yaml` for a resolved config."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(plain)))


def load_plain(run_dir: Path) -> dict[str, Any]:
    """The frozen config of a run as plain values.

    Raises:
        UserError: it is missing or cannot be read.
    """
    path = RunDir(run_dir).config
    try:
        frozen = OmegaConf.load(path)
        if lost := [field.name for field in fields(Config) if field.name not in frozen]:
            raise ValueError(f"it has no {', '.join(lost)}")
        # Over the schema's defaults, so that an option that came later has its default, not nothing.
        return _values(OmegaConf.merge(OmegaConf.structured(Config), frozen))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {run_dir} is not a run directory") from None
    except (*ERRORS, OSError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} was cut short or edited by hand ({reason}): put it right, or remove it and give the run's "
            f"command again, which writes it anew ({RunDir(run_dir).code.name} has the overrides)"
        ) from None


def load(run_dir: Path) -> Config:
    """The frozen config of a run; nodes with `_target_` stay plain dictionaries.

    Raises:
        UserError: it is missing, cannot be read, or does not fit the schema.
    """
    config = objects(load_plain(run_dir))
    if found := faults(config):
        raise UserError("\n".join(f"{RunDir(run_dir).config}: {fault}" for fault in found))
    return config

"""Compose the config tree with Hydra.

Only this module and `targets.bind` call Hydra. `config_loader` extends Hydra, and `explain` handles its errors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.config.config_loader import FROZEN_NAME, ConfigLoader, shown
from runner.config.frozen import schema
from runner.config.identity import flatten
from runner.config.plain_yaml import escaped
from runner.config.schema import Command
from runner.config.search_path import conf_dir, groups, project_dirs
from runner.errors import UserError
from runner.search.points import Dimension
from runner.system import files

CONFIG_NAME = "config"
# Hydra 1.3 warns if this argument is missing, and Hydra 1.4 warns if it is passed.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Dictionaries whose keys the user chooses. An override can add a key without `+`.
OPEN = (
    "sampler.weights",
    "sampler.max_epochs",
    "phases",
    "data.loader",
    "data.collate",
    "task",
    "train.loss",
    "eval.metrics",
    "eval.sets",
    "optimizers",
    "optimizer.groups",
    "callbacks",
    "user",
    "search.space",
)


# Parts of Hydra's own node that control how an application runs, and the groups that select its plugins.
HYDRA_PARTS = ("run", "sweep", "sweeper", "launcher", "mode", "callbacks", "job.chdir", "job.env_set")
PLUGINS = ("hydra/sweeper", "hydra/launcher")
# Hydra's default values for these parts. All other parts are null or empty.
HYDRA_DEFAULTS = {
    "hydra.run.dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}",
    "hydra.sweep.dir": "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",
    "hydra.sweep.subdir": "${hydra.job.num}",
    "hydra.sweeper._target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra.launcher._target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
}


class _FurtherDirectories(SearchPathPlugin):
    """Add the directories of a `ConfigTree` to Hydra's search path, after the shipped directory."""

    paths: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for path in self.paths:
            search_path.append("command-line", f"file://{path}")


ConfigStore.instance().store(name="schema", node=schema(Command))
Plugins.instance().register(_FurtherDirectories)


class ConfigTree:
    """The config tree: the shipped configs, and the configs in additional directories.

    Args:
        config_dirs: additional directories with groups and experiments. A shipped file takes precedence over a file
            with the same name.
        config_name: the name of the primary config.

    Raises:
        UserError: a directory does not exist.
    """

    def __init__(self, config_dirs: Sequence[str | Path] = (), config_name: str = CONFIG_NAME) -> None:
        config_dirs = [*config_dirs, *project_dirs()]
        self.config_dirs = [Path(directory).resolve() for directory in config_dirs]
        self.config_name = config_name
        for given, path in zip(config_dirs, self.config_dirs, strict=True):
            if not path.is_dir():
                raise UserError(f"--config-dir {given}: no such directory; pass one that holds config groups")
        self.options = groups([conf_dir(), *self.config_dirs])
        names = {group.partition("/")[0] for group in self.options}
        # Groups are applied in this order, so that a data option may select a sampler, and an experiment any option.
        self.groups = sorted(names, key=lambda name: (name == "experiment", name == "data", name))

    def group_of(self, override: str, groups: Collection[str] | None = None) -> str | None:
        """Return the config group in which `override` chooses an option, or None if it sets a value.

        Args:
            override: an override of a command.
            groups: the names of the config groups; by default, those of this tree.
        """
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        return key if key.partition("/")[0] in (*(self.groups if groups is None else groups), "hydra") else None

    def compose(
        self, overrides: Sequence[str], frozen: dict[str, Any] | None = None, resolved: bool = True
    ) -> DictConfig:
        """Compose the config, including Hydra's own node.

        Args:
            overrides: the overrides, without sweeps. `${hydra:...}` values can be resolved until the next composition.
            frozen: the resolved values of a run, used instead of the primary config. If an override chooses a group
                option, it replaces the frozen values of that group.
            resolved: whether the frozen values have no interpolations. If so, `${` in them is plain text.
        """
        name, loader = self.config_name, self._loader
        if frozen is not None:
            name = FROZEN_NAME
            chosen = {self.group_of(override) for override in overrides}
            values = {key: value for key, value in frozen.items() if key not in chosen}
            defaults = ["schema", "_self_", *({group: None} for group in self.groups)]
            node = escaped(values) if resolved else values
            ConfigStore.instance().store(name=name, node={"defaults": defaults, **node})
        try:
            with self._hydra():
                texts = [opened(text) for text in overrides]
                config = loader.load_configuration(name, texts, RunMode.RUN, from_shell=False)
        finally:
            if frozen is not None:  # freed, because it may be large and is not needed any more
                ConfigStore.instance().store(name=name, node={})
        if frozen is None:
            self._check_own_options(config.hydra.runtime.choices)
        HydraConfig.instance().cfg = cast(Any, config)  # set directly, without the copy that `set_config` makes
        return config

    def _check_own_options(self, choices: Mapping[str, Any]) -> None:
        """Raise an error if the user has a file for a chosen option but the shipped file with the same name is used.

        Raises:
            UserError: the message names the first such option.
        """
        for group, option in choices.items() if self.config_dirs else ():
            name = f"{group.partition('@')[0]}/{option}.yaml"
            shipped = conf_dir() / name
            for own in (directory / name for directory in self.config_dirs):
                if files.is_file(own) and files.is_file(shipped) and files.read_bytes(own) != files.read_bytes(shipped):
                    raise UserError(
                        f"{group}={option} is ambiguous: the runner comes with an option of this name, which differs "
                        f"from {own}; give that file another name"
                    )

    def hydra_changes(self, config: DictConfig) -> dict[str, Any]:
        """Return the settings in config files that would change how Hydra runs an application, by key.

        Hydra's defaults and the parameters of a sweep are omitted.
        """
        chosen = {key: config.hydra.runtime.choices.get(key) for key in PLUGINS}
        found = {key: option for key, option in chosen.items() if option != "basic"}
        for name in HYDRA_PARTS:
            if f"hydra/{name}" not in found and (part := OmegaConf.select(config.hydra, name)) not in (None, {}):
                value = OmegaConf.to_container(part, resolve=False) if OmegaConf.is_config(part) else part
                found |= flatten({f"hydra.{name}": value})
        changed = {key: value for key, value in found.items() if value not in (None, HYDRA_DEFAULTS.get(key))}
        return {key: value for key, value in changed.items() if not f"{key}.".startswith("hydra.sweeper.params.")}

    def apply(self, override: str, config: DictConfig) -> None:
        """Apply an override that sets a value to a composed config, as a composition would.

        Raises:
            HydraException: as in a composition; the value may already be partly set.
        """
        self._loader.apply(opened(override), config)

    def alternatives(self, override: str) -> tuple[str, list[str] | None]:
        """Return the key of an override, and the list of overrides that it expands to, one for each value of a sweep.

        The list is None for an interval, because its values cannot be enumerated.
        """
        parsed = self._loader.parse(override)
        key = parsed.get_key_element()
        if not parsed.is_sweep_override():
            return key, [override]
        if not parsed.is_discrete_sweep():
            return key, None
        return key, [f"{key}={value}" for value in parsed.sweep_string_iterator()]

    def dimension(self, override: str) -> Dimension | None:
        """Return the search dimension that an override defines, or None if it sets a single value.

        Raises:
            HydraException: the override cannot be parsed.
            UserError: the dimension has no values.
        """
        parsed = self._loader.parse(override)
        if not parsed.is_sweep_override():
            return None
        key, value = parsed.get_key_element(), parsed.value()
        if not isinstance(value, IntervalSweep):
            values = tuple(parsed.sweep_string_iterator())
            if not values:
                raise UserError(f"{override}: the range has no values: its first number must be below its second")
            return Dimension(key, values, ordered=isinstance(value, RangeSweep))
        assert value.start is not None
        assert value.end is not None
        ends = float(value.start), float(value.end)
        return Dimension(key, (), *ends, log="log" in value.tags, whole=isinstance(value.start, int))

    def run_hydra(self, flags: Sequence[str], overrides: Sequence[str]) -> None:
        """Run Hydra's command line for `--cfg`, `--info`, `--hydra-help` and `--shell-completion`. It prints to stdout.

        Hydra raises SystemExit at the end, or its own errors if HYDRA_FULL_ERROR=1.
        """
        main = hydra.main(config_path=str(conf_dir()), config_name=self.config_name, **VERSION_BASE)(lambda _: None)
        arguments, root = sys.argv, logging.getLogger()
        level, handlers = root.level, list(root.handlers)
        sys.argv = [arguments[0], *flags, *(opened(text) for text in overrides)]
        try:
            with self._search_path(), shown():
                main()
        finally:
            sys.argv = arguments
            GlobalHydra.instance().clear()
            root.setLevel(level)  # undoes `--info`, which enables all output of all loggers in the process
            root.handlers[:] = handlers

    @cached_property
    def _loader(self) -> ConfigLoader:
        with self._hydra():
            return ConfigLoader(GlobalHydra.instance().config_loader().get_search_path())

    @contextmanager
    def _hydra(self) -> Iterator[None]:
        with self._search_path(), hydra.initialize_config_dir(str(conf_dir()), job_name="runner", **VERSION_BASE):
            yield

    @contextmanager
    def _search_path(self) -> Iterator[None]:
        _FurtherDirectories.paths = self.config_dirs
        try:
            yield
        finally:
            _FurtherDirectories.paths = ()


def opened(override: str) -> str:
    """Rewrite `override` so that it can add a key to one of the `OPEN` dictionaries without a `+`."""
    key, equals, value = override.partition("=")
    if key.lstrip("+") == "init_from" and not value.startswith("{"):
        return f"{key}.path={value}"
    bare = key.lstrip("+")
    if not equals or key.startswith("~"):
        return override
    for prefix in OPEN:
        if bare == prefix and value.startswith(("{", "[")):
            return f"++{bare}={value}"
        if bare.startswith(f"{prefix}."):
            # The value is a dictionary, so that a new entry gets its type from the schema.
            names = bare.removeprefix(f"{prefix}.").split(".")
            return f"++{prefix}=" + "".join(f"{{{name}:" for name in names) + value + "}" * len(names)
    return override

"""Hydra's config loader, reading each file of the config tree once for all compositions.

Hydra reads the whole tree anew in each composition: that takes long, and a file that is edited while a sweep is
composed would give only some of the jobs another value. It has no public interface for keeping what it
has read. The classes here override methods of Hydra 1.3 that are internal; nothing else relies on its internals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from hydra._internal import hydra as hydra_main
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.config.sources import complete_sources, open_sources

Made = TypeVar("Made")

FROZEN_NAME = "frozen_config"  # a run's config in Hydra's store: another one in each composition, so it is not kept
KEPT_PARSED = 1 << 14  # a sweep may have any number of overrides


class ConfigLoader(ConfigLoaderImpl):
    """Composes configs as Hydra does.

    Args:
        config_search_path: where the config files are.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)
        parser = OverridesParser.create(self)
        self._parsed = lru_cache(KEPT_PARSED)(lambda text: parser.parse_overrides([text])[0])

    def parse(self, override: str) -> Override:
        """Parse an override, once.

        Raises:
            HydraException: it cannot be parsed.
        """
        return self._parsed(override)

    def apply(self, override: str, config: DictConfig) -> None:
        """Set in a composed config what `override` sets, as the last part of a composition does.

        Raises:
            HydraException: as a composition; then part of it may have been set.
        """
        parsed = [self.parse(override)]
        self.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
        self._apply_overrides_to_config(parsed, config)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        """Called by Hydra."""
        parsed, repository = [self.parse(text) for text in overrides], CachingConfigRepository(self.repository)
        self._process_config_searchpath(config_name, parsed, repository)
        return parsed, repository

    def _compose_config_from_defaults_list(self, *arguments: Any, **options: Any) -> DictConfig:
        """Called by Hydra between choosing the files and applying the overrides of values."""
        config = super()._compose_config_from_defaults_list(*arguments, **options)
        open_sources(config)
        return config

    @staticmethod
    def _embed_result_config(ret: ConfigResult, package_override: str | None) -> ConfigResult:
        """Called by Hydra for each file, which it may change in merging it."""
        embedded = ConfigLoaderImpl._embed_result_config(ret, package_override)
        if embedded.config is ret.config:
            embedded = copy.copy(ret)
            embedded.config = copy.deepcopy(ret.config)
        return embedded


class ShownLoader(ConfigLoader):
    """Composes what Hydra's own command line prints: the sources are complete, as in a run."""

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        """Called by Hydra."""
        config = super().load_configuration(*arguments, **options)
        complete_sources(config)
        return config


@contextmanager
def shown() -> Iterator[None]:
    """Let Hydra's own command line compose with `ShownLoader`."""
    module: Any = hydra_main
    module.ConfigLoaderImpl = ShownLoader
    try:
        yield
    finally:
        module.ConfigLoaderImpl = ConfigLoaderImpl


class _Repository(ConfigRepository):
    """The config files of a search path: each is looked for and read once.

    Args:
        config_search_path: where they are.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self._sources: dict[Hashable, ConfigSource | None] = {}
        self._configs: dict[Hashable, ConfigResult | None] = {}
        super().__init__(config_search_path)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Called by Hydra at first, and in each composition that `hydra.searchpath` adds directories to."""
        super().initialize_sources(config_search_path)
        self._paths = tuple((element.provider, element.path) for element in config_search_path.get_path())

    def __deepcopy__(self, memo: object) -> _Repository:
        """A copy for one composition, which may change the sources; what was read is shared."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Called by Hydra."""
        load = super().load_config
        if config_path == FROZEN_NAME:
            return load(config_path)
        return _once(self._configs, (self._paths, config_path), lambda: load(config_path))

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> ConfigSource | None:
        """Called by Hydra."""
        find = super()._find_object_source
        return _once(self._sources, (self._paths, config_path, object_type), lambda: find(config_path, object_type))


def _once(kept: dict[Hashable, Made], key: Hashable, make: Callable[[], Made]) -> Made:
    """What `kept` has for `key`, made if need be."""
    if key not in kept:
        kept[key] = make()
    return kept[key]

"""Load configs with Hydra, but read each file of the config tree only once for all compositions.

Hydra reads the complete tree in each composition. This is slow, and if you edit a file while a sweep is composed, only
some jobs would get the new value. Hydra has no public interface for caching what it has read. Therefore the classes
here override internal methods of Hydra 1.3. No other module relies on Hydra's internals.
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

FROZEN_NAME = "frozen_config"  # a run's config in Hydra's store; never cached, because it changes
KEPT_PARSED = 1 << 14  # large, because a sweep may have any number of overrides


class ConfigLoader(ConfigLoaderImpl):
    """Compose configs as Hydra does, but read each file only once.

    Args:
        config_search_path: the directories with the config files.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)
        parser = OverridesParser.create(self)
        self._parsed = lru_cache(KEPT_PARSED)(lambda text: parser.parse_overrides([text])[0])

    def parse(self, override: str) -> Override:
        """Parse an override, or return the cached result.

        Raises:
            HydraException: the override cannot be parsed.
        """
        return self._parsed(override)

    def apply(self, override: str, config: DictConfig) -> None:
        """Apply an override to a composed config, as Hydra does in the last step of a composition.

        Raises:
            HydraException: as in a composition; the value may already be partly set.
        """
        parsed = [self.parse(override)]
        self.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
        self._apply_overrides_to_config(parsed, config)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repository = [self.parse(text) for text in overrides], CachingConfigRepository(self.repository)
        self._process_config_searchpath(config_name, parsed, repository)
        return parsed, repository

    def _compose_config_from_defaults_list(self, *arguments: Any, **options: Any) -> DictConfig:
        """Compose the chosen files. Hydra calls this before it applies overrides of values."""
        config = super()._compose_config_from_defaults_list(*arguments, **options)
        open_sources(config)
        return config

    @staticmethod
    def _embed_result_config(ret: ConfigResult, package_override: str | None) -> ConfigResult:
        """Copy a file's config before it is embedded, because Hydra may modify it while merging."""
        embedded = ConfigLoaderImpl._embed_result_config(ret, package_override)
        if embedded.config is ret.config:
            embedded = copy.copy(ret)
            embedded.config = copy.deepcopy(ret.config)
        return embedded


class ShownLoader(ConfigLoader):
    """Compose the configs that Hydra's own command line prints. Sources are completed as in a run."""

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        config = super().load_configuration(*arguments, **options)
        complete_sources(config)
        return config


@contextmanager
def shown() -> Iterator[None]:
    """Make Hydra's own command line use `ShownLoader`."""
    module: Any = hydra_main
    module.ConfigLoaderImpl = ShownLoader
    try:
        yield
    finally:
        module.ConfigLoaderImpl = ConfigLoaderImpl


class _Repository(ConfigRepository):
    """The config files on a search path. Each file is looked up and read only once.

    Args:
        config_search_path: the directories with the config files.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self._sources: dict[Hashable, ConfigSource | None] = {}
        self._configs: dict[Hashable, ConfigResult | None] = {}
        super().__init__(config_search_path)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Set the sources. Hydra calls this at the start, and in each composition that sets `hydra.searchpath`."""
        super().initialize_sources(config_search_path)
        self._paths = tuple((element.provider, element.path) for element in config_search_path.get_path())

    def __deepcopy__(self, memo: object) -> _Repository:
        """Copy the repository for one composition, which may change its sources. The cached files are shared."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        load = super().load_config
        if config_path == FROZEN_NAME:
            return load(config_path)
        return _once(self._configs, (self._paths, config_path), lambda: load(config_path))

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> ConfigSource | None:
        find = super()._find_object_source
        return _once(self._sources, (self._paths, config_path, object_type), lambda: find(config_path, object_type))


def _once(kept: dict[Hashable, Made], key: Hashable, make: Callable[[], Made]) -> Made:
    """Return `kept[key]`. If it is missing, create it with `make` first."""
    if key not in kept:
        kept[key] = make()
    return kept[key]

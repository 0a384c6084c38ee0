"""Hydra's config loader, reading each file of the config tree once for all compositions.

Hydra reads and merges the whole tree anew in each composition: that takes most of its time, and a file that is edited
while a sweep is composed would give only some of the jobs another value. It has no public interface for keeping what it
has read. The classes here override methods of Hydra 1.3 that are internal; nothing else relies on its internals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")

FROZEN_NAME = "frozen_config"  # a run's config in Hydra's store: another one in each composition, so it is not kept
KEPT_PARSED, KEPT_MERGED = 1 << 14, 64  # a sweep may have any number of overrides, and of choices of groups


class ConfigLoader(ConfigLoaderImpl):
    """Composes configs as Hydra does.

    Args:
        config_search_path: where the config files are.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)
        self._parser = OverridesParser.create(self)
        self._parsed: dict[str, Override] = {}

    def parse(self, override: str) -> Override:
        """Parse an override, once.

        Raises:
            HydraException: it cannot be parsed.
        """
        return _once(self._parsed, override, lambda: self._parser.parse_overrides([override])[0], KEPT_PARSED)

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

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        """Called by Hydra to merge the files of the options chosen; it sets values in what this returns."""

        def merge() -> DictConfig:
            return super(ConfigLoader, self)._compose_config_from_defaults_list(defaults, repo)

        assert isinstance(repo, CachingConfigRepository)
        assert isinstance(repo.delegate, _Repository)
        if any(default.config_path == FROZEN_NAME for default in defaults):
            return merge()
        key = tuple((default.config_path, default.parent, default.package, default.is_self) for default in defaults)
        return copy.deepcopy(_once(repo.delegate.read.merged, key, merge, KEPT_MERGED))

    @staticmethod
    def _embed_result_config(ret: ConfigResult, package_override: str | None) -> ConfigResult:
        """Called by Hydra for each file, which it may change in merging it."""
        embedded = ConfigLoaderImpl._embed_result_config(ret, package_override)
        if embedded.config is ret.config:
            embedded = copy.copy(ret)
            embedded.config = copy.deepcopy(ret.config)
        return embedded


@dataclass(frozen=True)
class _Read:
    """What is known of the files of a search path."""

    found: dict[tuple[str, ObjectType | None], ConfigSource | None] = field(default_factory=dict)
    configs: dict[str, ConfigResult | None] = field(default_factory=dict)
    merged: dict[Hashable, DictConfig] = field(default_factory=dict)


class _Repository(ConfigRepository):
    """The config files of a search path: each is looked for and read once.

    Args:
        config_search_path: where they are.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self._paths: dict[Hashable, _Read] = {}
        super().__init__(config_search_path)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Called by Hydra at first, and in each composition that `hydra.searchpath` adds directories to."""
        super().initialize_sources(config_search_path)
        where = tuple((element.provider, element.path) for element in config_search_path.get_path())
        self.read = _once(self._paths, where, _Read)

    def __deepcopy__(self, memo: object) -> _Repository:
        """A copy for one composition, which may change the sources; what was read is shared."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Called by Hydra."""
        load = super().load_config
        if config_path == FROZEN_NAME:
            return load(config_path)
        return _once(self.read.configs, config_path, lambda: load(config_path))

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> ConfigSource | None:
        """Called by Hydra."""
        find = super()._find_object_source
        return _once(self.read.found, (config_path, object_type), lambda: find(config_path, object_type))


def _once(kept: dict[Key, Made], key: Key, make: Callable[[], Made], most: int = 1 << 30) -> Made:
    """What `kept` has for `key`, made if need be; `kept` is emptied before it has more than `most`."""
    if key not in kept:
        made = make()
        if len(kept) >= most:
            kept.clear()
        kept[key] = made
    return kept[key]

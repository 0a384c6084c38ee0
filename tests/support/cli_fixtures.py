"""Run the command line in an empty directory, with launchers that start nothing."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import fake_launcher
import pytest
from fake_launcher import Command, FakeLauncher
from hydra._internal import defaults_list
from hydra.core.default_element import InputDefault

from runner import __main__ as entry
from runner.config import search_path
from runner.config.config_loader import ConfigLoader
from runner.config.tree import ConfigTree
from runner.rundir.lease import Lease
from runner.system.signals import STOP, STOP_SIGNALS


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run `python -m runner ARGUMENTS` in this process. An attempt only adds an entry to `launched`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    FakeLauncher.reset()
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}

    def attempt(run_dir: Path, job: object = None, lease: Lease | None = None) -> int:
        FakeLauncher.launched.append(run_dir)
        return 0

    monkeypatch.setattr("runner.training.attempt.attempt", attempt)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["runner", *arguments])
        return entry.main()

    yield run
    STOP.signum = None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def write_launchers(directory: Path, **made: type) -> None:
    """Write a config directory with an option of `launcher` for each class."""
    (directory / "launcher").mkdir(parents=True)
    for name, launcher in made.items():
        node = {"_target_": f"{launcher.__module__}.{launcher.__name__}", "retry_failed": False, "dry_run": False}
        (directory / f"launcher/{name}.yaml").write_text(json.dumps({**node, "partition": None}))


@pytest.fixture
def conf(shared_conf: Path) -> Path:
    """Return a config directory with the launchers fake, here and unfinished. Tests do not change it."""
    return shared_conf


@pytest.fixture(scope="session")
def shared_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config directory behind `conf`."""
    directory = tmp_path_factory.mktemp("fake") / "conf"
    write_launchers(directory, fake=FakeLauncher, here=fake_launcher.HereLauncher, unfinished=fake_launcher.Unfinished)
    return directory


UNCHANGED: set[Path] = set()
"""Directories of config files that no test changes. A fixture that creates such a directory adds it."""

_own_loader = cast("cached_property[ConfigLoader]", ConfigTree.__dict__["_loader"])


@pytest.fixture(scope="session", autouse=True)
def config_files_read_once(shared_conf: Path) -> Iterator[None]:
    """Read the shipped config files and the `UNCHANGED` ones once per process, which is most of a command's time."""
    UNCHANGED.add(shared_conf)
    loaders: dict[tuple[Path, ...], ConfigLoader] = {}

    def loader(tree: ConfigTree) -> ConfigLoader:
        if not set(tree.config_dirs) <= UNCHANGED:
            return _own_loader.__get__(tree)
        key = (search_path.conf_dir(), *tree.config_dirs)
        if key not in loaders:
            loaders[key] = _own_loader.func(tree)
        return loaders[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigTree, "_loader", property(loader))
        yield


@pytest.fixture(scope="session", autouse=True)
def choices_mapped_if_needed() -> Iterator[None]:
    """Let Hydra map all choices only for a defaults list that needs the map: it takes a tenth of a composition."""
    mapped = defaults_list._create_interpolation_map

    def needed(overrides: Any, defaults: list[InputDefault], self_added: bool) -> Any:
        if any(default.is_interpolation() for default in defaults):
            return mapped(overrides, defaults, self_added)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults_list, "_create_interpolation_map", needed)
        yield


@pytest.fixture
def config_files_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each composer read the config files, as in a separate process."""
    monkeypatch.setattr(ConfigTree, "_loader", _own_loader)


@pytest.fixture
def run(command: Command, conf: Path) -> Command:
    """Run a training command with launcher=fake, or with the launcher passed as `launcher`."""

    def train(*arguments: str, launcher: str = "fake") -> int:
        return command("--config-dir", str(conf), f"launcher={launcher}", *arguments)

    return train

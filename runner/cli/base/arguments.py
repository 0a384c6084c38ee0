"""Parse the arguments of `python -m runner` without a command: overrides, and the supported flags of Hydra."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runner import __version__
from runner.cli.base.console import PROGRAM, Parser
from runner.errors import UserError
from runner.system import files

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def parser() -> Parser:
    """Return the argument parser. The caller has already handled `--help`."""
    made = Parser(prog=PROGRAM, allow_abbrev=False, add_help=False)
    add = made.add_argument
    add("overrides", nargs="*", metavar="key=value")
    add("-m", "--multirun", action="store_true")
    add("-n", "--dry-run", action="store_true")
    add("-c", "--cfg", choices=["job", "hydra", "all"])
    add("--resolve", action="store_true")
    add("-p", "--package")
    add("-i", "--info", nargs="?", const="all", choices=INFO)
    add("-cd", "--config-dir", metavar="DIR")
    add("-cn", "--config-name", metavar="NAME", default="config")
    add("-sc", "--shell-completion", action="store_true")
    add("--hydra-help", action="store_true")
    add("--version", action="version", version=f"runner {__version__}")
    add("-h", "--help", action="store_true")
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Flags and overrides may be in any order.

    Raises:
        UserError: a flag is unknown, or its value is not allowed.
    """
    return parser().parse_intermixed_args(list(arguments))


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--config-dir` to a command. It may be repeated."""
    parser.add_argument(
        "--config-dir", action="append", default=[], metavar="DIR", help="an additional config directory"
    )


def dirs(options: argparse.Namespace) -> list[str]:
    """Return the values of `--config-dir`."""
    return [options.config_dir] if options.config_dir else []


def runs_and_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `words` into run directories and settings.

    An existing directory is a run directory, even if its name looks like a setting. An empty word, e.g. from an unset
    variable, is neither.
    """
    settings = [word for word in words if ("=" in word or word[:1] in ("+", "~")) and not files.seems_dir(word)]
    return [word for word in words if word and word not in settings], settings


def one_run_and_settings(words: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """Split `words` into a single run directory and the settings.

    Raises:
        UserError: there is no run directory, or more than one. The message shows `usage`.
    """
    runs, settings = runs_and_settings(words)
    if len(runs) != 1:
        strange = f"{runs[1]}: " if runs else ""
        raise UserError(
            f"{strange}pass one run directory, and settings as key=value: {PROGRAM} {usage}; "
            f"{PROGRAM} status lists run directories"
        )
    return runs[0], settings

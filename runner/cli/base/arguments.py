"""Parse the arguments of `python -m runner` without a command: overrides, and the flags of Hydra that apply here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runner import __version__
from runner.cli.base.console import PROGRAM, Parser
from runner.errors import UserError
from runner.system import files

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def parser() -> Parser:
    """Return the parser. It accepts `--help`, which the caller handles before."""
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
    """Parse the arguments. Flags and overrides may be mixed in any order.

    Raises:
        UserError: an unknown flag, or a value that is not allowed.
    """
    return parser().parse_intermixed_args(list(arguments))


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Let a command take `--config-dir`, several times."""
    parser.add_argument(
        "--config-dir", action="append", default=[], metavar="DIR", help="an additional config directory"
    )


def dirs(options: argparse.Namespace) -> list[str]:
    """Return the additional config directories."""
    return [options.config_dir] if options.config_dir else []


def runs_and_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `words` into run directories and settings.

    A directory counts as a run directory even if its name looks like a setting. An empty word (an unset variable) is
    neither.
    """
    settings = [word for word in words if ("=" in word or word[:1] in ("+", "~")) and not files.seems_dir(word)]
    return [word for word in words if word and word not in settings], settings


def one_run_and_settings(words: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """Split `words` into the only run directory and the settings.

    Raises:
        UserError: there is no run directory, or several; the message shows the `usage`.
    """
    runs, settings = runs_and_settings(words)
    if len(runs) != 1:
        strange = f"{runs[1]}: " if runs else ""
        raise UserError(
            f"{strange}pass one run directory, and settings as key=value: {PROGRAM} {usage}; "
            f"{PROGRAM} status lists run directories"
        )
    return runs[0], settings

"""Print information without starting a run, for `--cfg`, `--info`, `--hydra-help` and `-sc`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from runner.cli.base.arguments import dirs, parse
from runner.errors import ExitStatus, UserError


def show(arguments: Sequence[str]) -> int:
    """Print the output of the flags and return the exit status.

    Raises:
        UserError: the flags cannot be combined, or the overrides cannot be composed.
    """
    options = parse(arguments)
    if options.multirun:
        raise UserError("--cfg, --info and --shell-completion describe one run: leave out -m")
    if options.shell_completion:
        from runner.cli.base.completion import complete

        return complete(options)
    if options.cfg == "job" and options.resolve:
        return _show_resolved(options)
    from runner.config.composition import Composer

    flags = [f"--{name}={value}" for name in ("cfg", "info", "package") if (value := getattr(options, name))]
    flags += [flag for flag, given in (("--resolve", options.resolve), ("--hydra-help", options.hydra_help)) if given]
    Composer(dirs(options), options.config_name).show(flags, options.overrides)
    return int(ExitStatus.FINISHED)


def _show_resolved(options: argparse.Namespace) -> int:
    """Print the config as it would be frozen in the run directory, or only the part given with `--package`."""
    from runner.config.composition import Composer
    from runner.config.frozen import to_yaml

    composed = Composer(dirs(options), options.config_name).compose(options.overrides)
    part: Any = composed.plain
    for name in (options.package or "").split(".") if options.package else []:
        if not isinstance(part, dict) or name not in part:
            raise UserError(f"-p {options.package}: there is no {name} in the config; see --cfg job")
        part = part[name]
    print(to_yaml(part).rstrip() if isinstance(part, dict) else part)
    return int(ExitStatus.FINISHED)

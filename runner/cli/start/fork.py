"""Start a branch of a run from its state after N steps: `runner fork RUN --step N [key=value ...]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.cli.base.arguments import add_config_dir, one_run_and_settings
from runner.cli.base.console import PROGRAM, Parser
from runner.errors import UserError

ABOUT = """\
Begins a run with the checkpoint, the records and the settings of RUN at a step, changed by key=value. Up to that step
the branch is RUN; from there on, a change acts like a phase that was planned for that step. RUN stays as it is.

The same command is the same branch: given again, it continues. Several values make several branches (-m seed=1,2); a
sweep may also name several trunks: python -m runner -m fork=A@700,B@700 seed=1,2."""


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} fork",
        usage=f"{PROGRAM} fork [-h] [-m] [--config-dir DIR] RUN --step N [key=value ...]",
        description=ABOUT,
    )
    made.add_argument("words", nargs="*", metavar="RUN", help="the run directory of the trunk, such as outputs/NAME")
    made.add_argument("--step", metavar="N", required=True, help="of a checkpoint of RUN")
    made.add_argument("-n", "--dry-run", action="store_true", help="only print what would be done, and why")
    made.add_argument("-m", "--multirun", action="store_true", help="several values of a setting: several branches")
    add_config_dir(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: RUN is not a run directory, a setting is wrong, or the checkpoint does not exist.
    """
    options = parser().parse_intermixed_args(list(arguments))
    run, overrides = one_run_and_settings(options.words, "fork outputs/NAME --step N key=value")
    if named := [word for word in overrides if re.match(r"[+~]*fork\b", word)]:
        raise UserError(f"{named[0]}: RUN and --step say what it is a branch of: leave it out")
    from runner.cli.start.start import start

    directories = [word for directory in options.config_dir for word in ("--config-dir", directory)]
    flags = [*directories, *(["-m"] if options.multirun else []), *(["-n"] if options.dry_run else [])]
    return start([*flags, f"fork='{run}@{options.step}'", *overrides])

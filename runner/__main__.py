"""`python -m runner [overrides]`: compose, check, hand the runs to the launcher.

python -m runner data=mixture sampler.temperature=0.7
python -m runner -m launcher=slurm seed=1,2,3
python -m runner --help
"""

from __future__ import annotations

import os
import sys

from runner.errors import UserError
from runner.signals import STOP

# Flags that show something and start nothing: a Ctrl-C may end them at once.
HELP = ("-h", "--help")
SHOWING = ("--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")


def main() -> int:
    """Exit status of the command in `sys.argv`; see `runner.errors.ExitStatus`."""
    if any(argument in HELP for argument in sys.argv[1:]):
        from runner import usage

        print(usage.text(usage.config_dirs(sys.argv[1:])), end="")
        return 0
    shows = any(argument.partition("=")[0] in SHOWING for argument in sys.argv[1:])
    if not shows:
        STOP.install()  # before the imports, which take longest: a signal meanwhile counts
    # `python -m` has it there already; the command `runner` finds classes beside the user's as well.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from runner.command import parse, show, start

    try:
        arguments = parse(sys.argv[1:])
        return show(arguments) if shows else start(arguments)
    except KeyboardInterrupt:  # while something was shown: runs have a flag instead
        return 130
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return int(error.status)


if __name__ == "__main__":
    sys.exit(main())

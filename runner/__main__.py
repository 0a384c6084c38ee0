"""Run a command. `python -m runner [overrides]` trains. If the first word contains no `=`, it names a command.

Each command is a module (see `runner.cli.base.commands`). Its `main(arguments)` returns the exit status. Each module
imports only what it needs, so that quick commands do not wait for torch or Hydra.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise

from runner.cli.base.commands import COMMANDS, WITH_CLASSES, module
from runner.cli.base.help import config_dirs, text
from runner.data.messages import words_of_config
from runner.errors import ExitStatus, FileError, UserError, nearest
from runner.system import processes
from runner.system.signals import STOP
from runner.system.terminal import flush_output, outlive_terminal

HELP = ("-h", "--help")
# Flags that print and start nothing. Ctrl-C may end these commands immediately.
PRINTS = ("--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")
# Flags whose value is the next word.
TAKES_VALUE = ("-c", "--cfg", "-i", "--info", "-p", "--package", "-cd", "--config-dir", "-cn", "--config-name")


def main() -> int:
    """Run the command in `sys.argv` and return its exit status, a `runner.errors.ExitStatus`."""
    processes.end_with_parent()
    outlive_terminal()
    try:
        status = run(sys.argv[1:])
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        status = int(ExitStatus.FINISHED)
    flush_output()
    return status


def run(arguments: Sequence[str]) -> int:
    """Run the command in `arguments` and return its exit status. User errors of all commands are printed here."""
    try:
        with words_of_config():
            return _dispatch(arguments)
    except UserError as error:
        from runner.cli.base.console import print_errors

        return print_errors(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        from runner.cli.base.console import print_errors

        return print_errors(FileError(f"{error.filename or 'the file system'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the status that a shell reports
    except SystemExit as end:  # argparse has printed a command's help, or a user's class has called sys.exit
        if end.code is None or isinstance(end.code, int):
            return end.code or int(ExitStatus.FINISHED)
        print(end.code, file=sys.stderr)
        return int(ExitStatus.FAILED)


def _dispatch(arguments: Sequence[str]) -> int:
    word = arguments[0] if arguments else ""
    if word == "help":  # `runner help status` means `runner status --help`
        return _dispatch([*arguments[1:], "--help"])
    if not word or word[0] in "-+~" or "=" in word:
        return _train(arguments)
    if word not in COMMANDS:
        raise UserError(
            f"unknown command {word!r}{nearest(word, COMMANDS)}: the commands are {', '.join(COMMANDS)}; "
            "settings are written key=value"
        )
    if word in WITH_CLASSES:
        _find_own_classes()
    if word in ("resume", "fork") and not set(HELP) & set(arguments):
        STOP.install()
    return int(module(word).main(arguments[1:]))


def _train(arguments: Sequence[str]) -> int:
    """Start, resume or print the runs that the overrides describe."""
    _refuse_late_command(arguments)
    if set(HELP) & set(arguments):
        print(text(config_dirs(arguments)), end="")
        return int(ExitStatus.FINISHED)
    if any(argument.partition("=")[0] in PRINTS for argument in arguments):
        _find_own_classes()
        from runner.cli.base.show import show

        return show(arguments)
    STOP.install()  # before the slow imports, so that no signal is lost while they run
    _find_own_classes()
    from runner.cli.start.start import start

    return start(arguments)


def _find_own_classes() -> None:
    """Add the current directory to `sys.path`, because the `runner` script does not. `python -m` does.

    The config may name classes defined in the current directory.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _refuse_late_command(arguments: Sequence[str]) -> None:
    """Raise an error if a flag precedes the command, as in `runner --json status`.

    Raises:
        UserError: a command follows a flag.
    """
    for number, (before, word) in enumerate(pairwise(arguments), start=1):
        if word in COMMANDS and before not in TAKES_VALUE:
            rest = " ".join([*arguments[:number], *arguments[number + 1 :]])
            raise UserError(f"the command {word!r} must come first: python -m runner {word} {rest}")


if __name__ == "__main__":
    sys.exit(main())

"""Complete `runner` commands in a shell: command names, flags, config groups, options and settings.

`runner -sc install=SHELL` prints a script for the shell. The script calls `runner -sc query=SHELL`. It passes the line
typed so far in COMP_LINE and the cursor position in COMP_POINT. Hydra's own completion completes groups and settings.
"""

from __future__ import annotations

import argparse
import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout, suppress

from runner.cli.base.arguments import parser
from runner.cli.base.commands import COMMANDS, WITH_SETTINGS, module
from runner.cli.base.help import config_dirs
from runner.errors import ExitStatus, UserError
from runner.system import processes

# A candidate that is a complete word ends in a space. bash splits words at `=` and `:`, so the script removes the part
# before.
BASH = """\
_runner_complete() {
    local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT} word prefix
    word=${line##* }
    prefix=${word%"${COMP_WORDS[COMP_CWORD]}"}
    [[ ${COMP_WORDS[COMP_CWORD]} == [=:] ]] && prefix=$word
    COMPREPLY=($(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT "${COMP_WORDS[0]}" -sc query=bash 2> /dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -o nospace -o default -F _runner_complete runner
"""
FISH = """\
function __runner_complete
    set -l found (COMP_LINE=(commandline -cp) runner -sc query=fish 2> /dev/null)
    test -n "$found"; and string join \\n $found; or __fish_complete_path (commandline -ct)
end
complete -c runner -f -a '(__runner_complete)'
"""
INSTALL = {"bash": BASH, "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + BASH, "fish": FISH}
UNINSTALL = {
    "bash": "complete -r runner; unset -f _runner_complete\n",
    "zsh": "compdef -d runner; unset -f _runner_complete\n",
    "fish": "complete -e -c runner; functions -e __runner_complete\n",
}


def complete(options: argparse.Namespace) -> int:
    """Perform the action in `-sc ACTION=SHELL` and return the exit status.

    Raises:
        UserError: the action or the shell is unknown.
    """
    action, _, shell = "".join(options.overrides).partition("=")
    if action not in ("install", "uninstall", "query") or shell not in INSTALL:
        raise UserError(
            f"-sc {' '.join(options.overrides)}: write install=SHELL or uninstall=SHELL with bash, zsh or fish, "
            'for example eval "$(runner -sc install=bash)"'
        )
    if action == "query":
        line = processes.environment.get("COMP_LINE", "")
        found = candidates(line[: int(processes.environment.get("COMP_POINT") or len(line))])
        print("".join(f"{word if shell == 'fish' or word[-1] in '=./' else word + ' '}\n" for word in found), end="")
    else:
        print((INSTALL if action == "install" else UNINSTALL)[shell], end="")
    return int(ExitStatus.FINISHED)


def candidates(line: str) -> list[str]:
    """Return the completions of the last word in `line`. If `line` ends in a space, that word is empty."""
    words = line.split()
    current = "" if line[-1:].isspace() else words.pop() if words else ""
    # Skip the program, which is `runner` or `python -m runner`.
    start = next((i + 1 for i, word in enumerate(words) if os.path.basename(word) == "runner"), len(words))
    words = words[start:]
    command = words[0] if words and words[0] in COMMANDS else None
    if current.startswith("-"):
        found = _flags(command)
    elif command is None:
        found = [*([] if words else [*COMMANDS, "help"]), *_settings(words, current)]
        found = list(COMMANDS) if words[:1] == ["help"] else found
    else:
        # Without candidates, the shell completes files and directories.
        found = _settings(words, current) if command in WITH_SETTINGS and current else []
    return sorted({word for word in found if word and word.startswith(current)})


def _flags(command: str | None) -> list[str]:
    """Return the flags of a command from its usage text. If the command is None, return the flags of training."""
    if command is None:
        usage = parser().format_help()
    else:
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            module(command).main(["--help"])
        usage = printed.getvalue().partition("\n\n")[0] + " --help"
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", usage)


def _settings(words: list[str], current: str) -> list[str]:
    """Return Hydra's completions of `current`, given the overrides in `words`."""
    from runner.config.composition import Composer

    settings = [word for word in words if "=" in word and not word.startswith("-")]
    processes.environment["COMP_LINE"] = " ".join(["runner", *settings, current])
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        Composer(config_dirs(words)).show(["--shell-completion"], ["query=fish"])  # fish: one candidate per line
    return printed.getvalue().splitlines()

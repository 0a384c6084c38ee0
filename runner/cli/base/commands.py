"""List the commands of `python -m runner` and their descriptions."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# name: (its package, its positional arguments, its description). The code is in the module `runner.cli.PACKAGE.NAME`.
COMMANDS = {
    "init": ("start", "DIR", "write a small project to begin with"),
    "prepare": ("start", "[key=value ...]", "tokenize and pack documents ahead of time"),
    "status": ("look", "[DIR]", "what each run in a directory is doing"),
    "search": ("look", "DIR", "the trials of a search, and the best one"),
    "logs": ("look", "RUN", "what a run prints"),
    "resume": ("start", "RUN... [key=value ...]", "resume runs from their directories"),
    "show": ("look", "RUN --model|--attempts", "the model or the attempts of a run; --settings: every setting"),
    "diff": ("look", "A B", "how two runs differ, and from which step on"),
    "inspect": ("look", "RUN", "which samples a step saw, what a resume would change"),
    "checkpoints": ("runs", "RUN", "list, verify, compare, export and prune checkpoints"),
    "fork": ("start", "RUN --step N [key=value ...]", "begin a branch of a run"),
    "evaluate": ("start", "RUN [--step N|best|all]", "evaluate checkpoints of a run"),
    "pin": ("runs", "RUN [--step N|best]", "keep a checkpoint for good"),
    "note": ("runs", 'RUN ["text"]', "add a note to a run, or list its notes"),
    "cancel": ("runs", "RUN...", "end the jobs of runs, and withdraw them"),
    "mv": ("runs", "RUN TARGET", "move or rename a run"),
    "rm": ("runs", "RUN...", "remove runs"),
    "archive": ("runs", "RUN FILE.tar", "pack a run into one file"),
    "report": ("look", "[DIR]", "compare runs: tables, curves, where the time went"),
    "doctor": ("doctor", "[key=value ...]", "check a cluster and a config before submitting"),
    "chaos": ("chaos", "[key=value ...]", "test whether a config survives being killed"),
}
# Commands that accept settings, and commands that create classes named in a config.
WITH_SETTINGS = ("prepare", "resume", "fork", "evaluate", "doctor", "chaos")
WITH_CLASSES = (*WITH_SETTINGS, "checkpoints", "inspect", "show")


def module(name: str) -> ModuleType:
    """Import the module of a command. Its `main(arguments)` returns the exit status."""
    return import_module(f"runner.cli.{COMMANDS[name][0]}.{name}")

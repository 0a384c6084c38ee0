"""The commands of `python -m runner`: which there are, and what each does."""

from __future__ import annotations

# name: (its main arguments, what it does). The command NAME is the module `runner.cli.NAME`.
COMMANDS = {
    "status": ("[DIR]", "what each run in a directory is doing"),
    "resume": ("RUN... [key=value ...]", "resume runs from their directories"),
    "inspect": ("RUN", "which samples a step saw, what a resume would change"),
    "checkpoints": ("RUN", "list, verify, compare, export and prune checkpoints"),
    "fork": ("RUN --step N [key=value ...]", "begin a branch of a run"),
    "evaluate": ("RUN [--step N|best|all]", "evaluate checkpoints of a run"),
    "pin": ("RUN [--step N|best]", "keep a checkpoint for good"),
    "mv": ("RUN TARGET", "move or rename a run"),
    "rm": ("RUN...", "remove runs"),
    "archive": ("RUN FILE.tar", "pack a run into one file"),
    "report": ("[DIR]", "compare runs: tables, curves, where the time went"),
    "doctor": ("[key=value ...]", "check a cluster and a config before submitting"),
    "chaos": ("[key=value ...]", "test whether a config survives being killed"),
}
# Those that take settings, and those that create classes that a config names.
WITH_SETTINGS = ("resume", "fork", "evaluate", "doctor", "chaos")
WITH_CLASSES = (*WITH_SETTINGS, "checkpoints", "inspect")

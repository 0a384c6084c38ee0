"""The commands of `python -m runner`: which there are, and what each does."""

from __future__ import annotations

# name: (its main arguments, what it does). The command NAME is the module `runner.cli.NAME`.
COMMANDS = {
    "status": ("[DIR]", "what each run in a directory is doing"),
    "resume": ("RUN... [key=value ...]", "resume runs from their directories"),
    "metrics": ("RUN...", "losses and evaluations as a summary, CSV or plot"),
    "inspect": ("RUN", "which samples a step saw, what a resume would change"),
    "checkpoints": ("RUN", "list, verify, compare, export and prune checkpoints"),
    "doctor": ("[key=value ...]", "check a cluster and a config before submitting"),
    "chaos": ("[key=value ...]", "test whether a config survives being killed"),
}
# Those that take settings, and create the classes that the config names.
WITH_SETTINGS = ("resume", "doctor", "chaos")

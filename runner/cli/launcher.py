"""From the config group `launcher` to a `runner.contracts.Launcher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.config.composition import Composed
from runner.config.identity import differences
from runner.config.targets import instantiate
from runner.contracts import Launcher
from runner.errors import UserError

# Attributes and methods of the protocol.
MEMBERS = (*Launcher.__annotations__, *(name for name in vars(Launcher) if not name.startswith("_")))


def make_launcher(node: dict[str, Any]) -> Launcher:
    """The launcher that `node` (the config group `launcher`, resolved) describes.

    Raises:
        UserError: it names no class, the class refuses the options, or lacks members of a launcher.
    """
    target = node.get("_target_")
    if target is None:
        raise UserError("launcher has no _target_: choose launcher=local or launcher=slurm")
    launcher = instantiate("launcher", node)
    if lacks := [name for name in MEMBERS if not hasattr(launcher, name)]:
        raise UserError(
            f"launcher._target_={target} is not a launcher: it lacks {', '.join(lacks)} (see runner.contracts.Launcher)"
        )
    made: Launcher = launcher
    return made


def common_launcher(jobs: Sequence[Composed]) -> Launcher:
    """The launcher of all `jobs`.

    Raises:
        UserError: their configs differ in it, or it cannot be created.
    """
    node = jobs[0].plain["launcher"]
    for job in jobs[1:]:
        if changed := differences({"launcher": node}, {"launcher": job.plain["launcher"]}):
            raise UserError(
                f"{changed[0]} differs between {jobs[0].run_dir.name} and {job.run_dir.name}: the runs of one command "
                f"share a launcher; set {changed[0].key}=... for all, or run a command for each value"
            )
    return make_launcher(node)

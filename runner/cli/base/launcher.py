"""Create the `runner.contracts.Launcher` that the config group `launcher` selects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runner.config.composition import Composed
from runner.config.identity import differences
from runner.config.schema import Config, rank_invariant
from runner.config.targets import instantiate
from runner.contracts import Finding, Launcher, RankCounts
from runner.errors import UserError, refuse

# The attributes and methods of the protocol.
MEMBERS = (*Launcher.__annotations__, *(name for name in vars(Launcher) if not name.startswith("_")))


def make_launcher(node: dict[str, Any]) -> Launcher:
    """Create a launcher from `node`, the resolved config group `launcher`.

    Raises:
        UserError: `node` names no class, the class rejects the options, or the class lacks members of `Launcher`.
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
    """Create the launcher that all `jobs` have in common.

    Raises:
        UserError: the configs select different launchers, the launcher cannot be created, or a config does not allow a
            number of ranks that the launcher may use.
    """
    node = jobs[0].plain["launcher"]
    for job in jobs[1:]:
        if changed := differences({"launcher": node}, {"launcher": job.plain["launcher"]}):
            raise UserError(
                f"{changed[0]} differs between {jobs[0].run_dir.name} and {job.run_dir.name}: the runs of one command "
                f"share a launcher; set {changed[0].key}=... for all, or run a command for each value"
            )
    launcher = make_launcher(node)
    counts = launcher.rank_counts()
    refuse(dict.fromkeys(error for job in jobs for error in rank_count_errors(counts, job.config)))
    return launcher


def rank_count_errors(ranks: RankCounts, config: Config) -> list[str]:
    """Return why some of these numbers of ranks cannot train with the same batches; empty if all of them can."""
    option, train, sampler = ranks.option, config.train, config.sampler.kind
    whole, micro = train.global_batch_size, train.batch_size
    errors = []
    if ranks.vary and whole is None:
        errors.append(
            f"{option}: with another number of ranks the batches would be others, and so would the run: set "
            f"train.global_batch_size=N, the samples of a step over all ranks (train.batch_size={micro} is per rank)"
        )
    if ranks.vary and not (sampler.value.elastic or sampler.value.is_own) and not config.data.loader:
        errors.append(
            f"{option}: sampler={sampler.name} resumes with the same number of ranks only: choose sampler=elastic"
        )
    if ranks.vary and whole is not None and train.grad_accum_steps is not None:
        errors.append(
            f"{option}: train.grad_accum_steps={train.grad_accum_steps} fits one number of ranks only: remove it, it "
            "follows from train.global_batch_size"
        )
    uneven = [] if whole is None or rank_invariant(config) else [n for n in ranks.counts if whole % (n * micro)]
    if uneven:
        every = math.lcm(*ranks.counts) * micro
        errors.append(
            f"{option}: train.global_batch_size={whole} is not a multiple of train.batch_size={micro} x {uneven[0]} "
            f"ranks: set it to a multiple of {every}, or allow other numbers of ranks"
        )
    return errors


def idle_ranks(ranks: RankCounts, config: Config) -> list[Finding]:
    """Return a warning if the largest number of ranks exceeds the micro-batches per step, which leaves ranks idle."""
    whole, micro, most = config.train.global_batch_size, config.train.batch_size, ranks.counts[-1]
    if whole is None or not rank_invariant(config) or most * micro <= whole:
        return []
    count = whole // micro
    text = (
        f"{ranks.option}: a step has {count} micro-batches (train.global_batch_size={whole} / "
        f"train.batch_size={micro}), so {most - count} of {most} ranks would have nothing to do"
    )
    return [Finding("warning", text, f"lower train.batch_size, or allow {count} ranks at most")]

"""Parse the command line of `runner chaos`, and choose the few settings that a drill changes in the configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.chaos.faults import KINDS
from runner.cli.base.console import PROGRAM, Parser
from runner.config.schema import Config, rank_invariant
from runner.errors import UserError, nearest
from runner.system import processes

DEFAULT_KILLS = 10
MIN_STEPS = 6
LEASE_TIMEOUT_S = 2  # time a new attempt waits for a frozen holder; short, to keep the drill short
REPORTS = (".html", ".json")
# Settings that users cannot set, because the drill sets them.
OWN = {
    "run.dir": "use --root",
    "run.lease_timeout_s": "remove it",
    "launcher.dry_run": "remove it",
    "launcher.wait": "remove it",
}
EPILOG = """\
Faults
{kinds}

Examples
  python -m runner chaos experiment=smoke data=mixture --kills 12 --report chaos.html

Exit status: 0 identical, every fault was injected, and the run did what each requires; 1 otherwise; 2 an error in the
command; 75 interrupted: rerun the command to continue the drill.
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line of a drill."""

    overrides: tuple[str, ...]
    flags: tuple[str, ...]  # flags passed to `python -m runner`: --config-dir, --config-name
    config_dirs: tuple[str, ...]
    config_name: str
    kills: int | None
    kinds: tuple[str, ...] | None
    seed: int
    report: Path | None
    root: Path | None
    json: bool


def parse(arguments: Sequence[str]) -> Options:
    """Parse the arguments. Flags and overrides may be in any order.

    Raises:
        UserError: an argument is invalid.
    """
    given = _parser().parse_intermixed_args(list(arguments))
    for override in given.overrides:
        key = override.partition("=")[0].lstrip("+~")
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override!r} is not an override: write key=value, as for python -m runner")
        if key in OWN:
            raise UserError(f"{override}: the drill sets this itself; {OWN[key]}")
    if given.kills is not None and given.kills < 1:
        raise UserError(f"--kills {given.kills}: must be 1 or more")
    if given.seed < 0:
        raise UserError(f"--seed {given.seed}: must be 0 or more")
    if given.report is not None and given.report.suffix not in REPORTS:
        raise UserError(f"--report {given.report}: the name must end in one of {', '.join(REPORTS)}")
    if int(processes.environment.get("WORLD_SIZE", "1")) > 1:
        raise UserError("runner chaos starts the runs itself: run it without torchrun")
    flags = [f"--config-dir={given.config_dir}"] if given.config_dir else []
    flags += [f"--config-name={given.config_name}"] if given.config_name else []
    return Options(
        overrides=tuple(given.overrides),
        flags=tuple(flags),
        config_dirs=(given.config_dir,) if given.config_dir else (),
        config_name=given.config_name or "config",
        kills=given.kills,
        kinds=_kinds(given.faults) if given.faults is not None else None,
        seed=given.seed,
        report=given.report,
        root=given.root,
        json=given.json,
    )


def _parser() -> Parser:
    width = max(map(len, KINDS))
    kinds = "\n".join(f"  {name:{width}}  {kind.about}" for name, kind in KINDS.items())
    parser = Parser(
        prog=f"{PROGRAM} chaos",
        description="Run a configuration to its end, run it again under faults, and compare the two bit for bit.",
        epilog=EPILOG.format(kinds=kinds),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="as for python -m runner")
    add("--kills", type=int, metavar="N", help=f"faults to inject; default: {DEFAULT_KILLS}, or one of each kind")
    add("--faults", metavar="KIND,...", help="kinds to choose from; default: all that the launcher allows")
    add("--seed", type=int, default=0, metavar="S", help="the same seed plans the same faults; default: 0")
    add("--report", type=Path, metavar="FILE", help="write a report: .html, with the curves, or .json")
    add("--root", type=Path, metavar="DIR", help="directory of the runs; default: <run.root>/chaos/<run>")
    add("--json", action="store_true", help="print the result as JSON")
    add("--config-dir", metavar="DIR", help="an additional directory of config groups and experiments")
    add("--config-name", metavar="NAME", help="another primary config")
    return parser


def _kinds(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            raise UserError(f"--faults {name}: no such fault{nearest(name, KINDS)}; choose from {', '.join(KINDS)}")
    if not names:
        raise UserError(f"--faults {text!r} names none; choose from {', '.join(KINDS)}")
    return tuple(dict.fromkeys(names))


def choose_kinds(asked: tuple[str, ...] | None, local: bool, fixed_ranks: str | None = None) -> tuple[str, ...]:
    """Return the kinds of fault to inject with this launcher.

    Args:
        asked: the kinds that the user asked for. If None, all possible kinds are chosen.
        local: whether the launcher starts processes on this machine.
        fixed_ranks: why the number of ranks cannot change, with a remedy. None if it can change.

    Raises:
        UserError: a kind cannot be injected with this launcher or into this run.
    """
    possible = tuple(name for name, kind in KINDS.items() if (kind.on_this_machine if local else kind.in_a_job))
    for name in asked or ():
        if name not in possible:
            where = "needs a process on this machine" if not local else "needs a Slurm job"
            raise UserError(f"--faults {name}: {where}; with this launcher choose from {', '.join(possible)}")
        if KINDS[name].any_ranks and fixed_ranks is not None:
            raise UserError(f"--faults {name}: {fixed_ranks}")
    return asked or tuple(name for name in possible if fixed_ranks is None or not KINDS[name].any_ranks)


def fixed_ranks(config: Config, possible: Sequence[int]) -> str | None:
    """Return why a run cannot resume on a different number of ranks with the same result, or None if it can.

    Args:
        config: the config of the run. The returned reason includes a remedy.
        possible: the numbers of ranks that are possible on this machine.
    """
    if not rank_invariant(config):
        return (
            "the result of this run depends on its number of ranks: set train.global_batch_size=N, sampler=elastic and "
            "strategy=ddp, and remove data.loader and train.rank_invariant=false (docs/rank-invariant.md)"
        )
    if len(possible) < 2:
        return "this machine has one GPU to use: set launcher.gpus=[] for ranks on the CPU"
    return None


def required_settings(config: Config, faults: int) -> tuple[list[str], list[str]]:
    """Return the overrides that the drill needs, and a sentence about each one that changes the configuration.

    Raises:
        UserError: the run is too short, or the number of its steps is not known.
    """
    steps, options = config.known_steps, config.checkpoint
    if steps is None:
        raise UserError(
            f"train.epochs={config.train.epochs:g}: a drill plans its faults by steps: "
            "set train.epochs=null and train.steps=N"
        )
    if steps < MIN_STEPS:
        raise UserError(f"train.steps={steps}: must be {MIN_STEPS} or more, to leave room for faults")
    overrides, notes = [f"run.lease_timeout_s={LEASE_TIMEOUT_S}"], []
    every = max(1, min(options.every_steps or steps, steps // (faults + 2)))
    if every != options.every_steps:
        overrides.append(f"checkpoint.every_steps={every}")
        notes.append(f"checkpoint.every_steps={every} (was {options.every_steps or 'null'}): saves between the faults")
    if options.keep_last < 2:
        overrides.append("checkpoint.keep_last=2")
        notes.append(f"checkpoint.keep_last=2 (was {options.keep_last}): a corrupt checkpoint needs one before it")
    return overrides, notes

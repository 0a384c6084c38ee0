"""Run `runner chaos [overrides]`: train a configuration, train it again under faults, and compare the runs bit for bit.

python -m runner chaos experiment=smoke
python -m runner chaos data=mixture train.steps=200 --kills 20 --report chaos.html
python -m runner chaos --help
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from runner.chaos import report
from runner.chaos.compare import compare
from runner.chaos.display import Display
from runner.chaos.drill import Drill
from runner.chaos.faults import KINDS
from runner.chaos.plan import PlannedFault, make_plan
from runner.chaos.slurm_target import SlurmTarget
from runner.chaos.stage import BrokenError
from runner.chaos.target import LocalTarget, Target
from runner.cli.base.launcher import make_launcher
from runner.cli.chaos.chaos_options import DEFAULT_KILLS, Options, choose_kinds, fixed_ranks, parse, required_settings
from runner.errors import ExitStatus, UserError
from runner.system import files
from runner.system.signals import handled

RANKS = range(1, 5)  # the fault `shape` chooses a number of ranks from this range
LOCAL, SLURM = "launch.local.LocalLauncher", "launch.slurm.SlurmLauncher"


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: an argument or the configuration is wrong.
    """
    for signum in {signal.SIGTERM, signal.SIGHUP} & set(handled()):
        signal.signal(signum, _interrupt)
    try:
        return _run(parse(arguments))
    except KeyboardInterrupt:
        print("interrupted: the runs were stopped; rerun the command to continue the drill", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _run(options: Options) -> int:
    console = Console(stderr=options.json)
    command = _Command(options)
    display = Display(console, len(command.plan))
    result = command.carry_out(display)
    report.show(result, console)
    if options.report is not None:
        report.write(result, options.report)
        display.say(f"wrote {options.report}")
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    return int(ExitStatus.FINISHED if result.good else ExitStatus.FAILED)


@dataclass
class _Command:
    """The drill that the command line describes."""

    options: Options

    def __post_init__(self) -> None:
        from runner.config.composition import Composer

        options = self.options
        composer = Composer(options.config_dirs, options.config_name)
        composed = composer.compose(options.overrides)
        self.plain = composed.plain
        target = composed.plain["launcher"].get("_target_")
        if target not in (LOCAL, SLURM):
            raise UserError(f"launcher._target_={target}: the drill needs launcher=local or launcher=slurm")
        self.local = target == LOCAL
        launcher = make_launcher(composed.plain["launcher"])
        self.ranks = possible_ranks(composed.plain["launcher"]) if self.local else []
        fixed = fixed_ranks(composed.config, self.ranks)
        kinds = choose_kinds(options.kinds, self.local, fixed)
        self.start_ranks = launcher.rank_counts().counts[0]
        self.note = None if options.kinds or not self.local or fixed is None else f"without the fault shape: {fixed}"
        self.kills = options.kills or max(DEFAULT_KILLS, len(kinds))
        self.extra, self.settings = required_settings(composed.config, self.kills)
        self.config = composer.compose([*options.overrides, *self.extra]).config
        evaluates = self.config.evaluation_interval > 0
        triggers = {
            kind: [name for name in KINDS[kind].triggers_for(self.local) if name != "evaluation" or evaluates]
            for kind in kinds
        }
        self.plan: list[PlannedFault] = make_plan(triggers, self.kills, self.config.steps, options.seed)
        self.left_out = [kind for kind in kinds if kind not in {fault.kind for fault in self.plan}]
        self.name = composed.run_dir.name
        self.root = (options.root or composed.run_dir.parent / "chaos" / self.name).absolute()
        self.key = {
            "overrides": list(options.overrides),
            "flags": list(options.flags),
            "plan": [list(vars(fault).values()) for fault in self.plan],
            "code": _code(composed.plain),
        }

    def target(self, run_dir: Path, log: Path) -> Target:
        """Return the target of faults for the run in `run_dir`."""
        overrides = [*self.options.overrides, *self.extra, f"run.dir={run_dir}"]
        command = [sys.executable, "-m", "runner", *self.options.flags, *overrides]
        return LocalTarget(command, log, self.start_ranks) if self.local else SlurmTarget(command, run_dir, log)

    @cached_property
    def drill(self) -> Drill:
        config = self.config
        return Drill(
            self.root,
            self.target,
            self._display,
            steps=config.steps,
            save_every=config.checkpoint.every_steps or config.steps,
            eval_every=config.evaluation_interval,
            seed=self.options.seed,
            ranks=self.ranks,
        )

    def carry_out(self, display: Display) -> report.Result:
        """Train the reference run, inject the faults, and compare."""
        self._display = display
        errors: list[str] = []
        try:
            self._announce(display, continued=self.drill.open(self.key))
            self.drill.run_reference()
            try:
                self.drill.run_under_faults(self.plan)
            except BrokenError as error:
                errors.append(f"the run under faults did not finish: {error}")
            result = self._result(errors)
            if not result.identical and not errors:
                result.errors += self._diagnosis(display)
        finally:
            display.close()
        self.drill.mark_over(self.key)
        return result

    def _announce(self, display: Display, continued: bool) -> None:
        count = len(self.plan)
        done = len(self.drill.outcomes())
        display.say(
            f"{count} faults from seed {self.options.seed}" + (f", {done} injected already" if continued else "")
        )
        for note in self.settings:
            display.say(f"  set for the drill: {note}")
        if self.note:
            display.say(f"  {self.note}")
        if self.left_out:
            display.say(f"  not among {count} faults: {', '.join(self.left_out)}; a higher --kills injects all kinds")

    def _result(self, errors: list[str]) -> report.Result:
        drill, outcomes = self.drill, self.drill.outcomes()
        killed = drill.killed()
        finished = [run for run in killed if files.exists(run.finished)]
        return report.Result(
            command=shlex.join(["python", "-m", "runner", *sys.argv[1:]]),
            config=self.name,
            settings=self.settings,
            seed=self.options.seed,
            plan=self.plan,
            outcomes=outcomes,
            comparisons={run.path.name: compare(drill.reference, run) for run in finished},
            errors=[*errors, *drill.leftover_errors()],
            reference=drill.reference,
            killed=killed,
        )

    def _diagnosis(self, display: Display) -> list[str]:
        """Compare two runs without faults. If they differ, the faults are not the cause."""
        if _code(self.plain) != self.key["code"]:
            return ["the code was changed during the drill, so two programs were compared: run the drill again"]
        display.say("not identical: one more run without faults shows whether the faults are the reason")
        again = self.drill.run_reference("reference-again")
        found = compare(self.drill.reference, again)
        if found.identical:
            return ["two runs without faults are identical: the difference comes from resuming after a fault"]
        first = str(found.differences[0]).replace("under faults", "in a second run without faults")
        advice = "look for unseeded randomness (a generator of your own, time, the order of a set)"
        if self.config.train.device != "cpu" and not self.config.train.deterministic:
            advice += "; on a GPU set train.deterministic=true"
        return [
            f"two runs without faults differ as well ({first}): the configuration itself is not reproducible; {advice}"
        ]


def possible_ranks(node: dict[str, Any]) -> list[int]:
    """Return the numbers of ranks that the local launcher in `node` could start on this machine."""
    return [count for count in RANKS if not make_launcher({**node, "ranks": count}).check([])]


def _code(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of the code, because an interrupted drill must not continue with different code."""
    from runner.rundir import provenance

    code = provenance.describe_code(plain)
    return {name: code[name] for name in ("python", "packages", "runner", "modules")}

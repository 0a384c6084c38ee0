"""`python -m runner.chaos [overrides]`: run a configuration, run it again under faults, compare bit for bit.

python -m runner.chaos experiment=smoke
python -m runner.chaos data=mixture train.steps=200 --kills 20 --report chaos.html
python -m runner.chaos --help
"""

from __future__ import annotations

import json
import os
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
from runner.chaos.drill import BrokenError, Drill
from runner.chaos.faults import KINDS
from runner.chaos.options import DEFAULT_KILLS, Options, choose_kinds, forced, parse
from runner.chaos.plan import Planned, make_plan
from runner.chaos.slurm import SlurmVictim
from runner.chaos.victim import LocalVictim, Victim
from runner.errors import ExitStatus, UserError

LOCAL, SLURM = "launch.local.LocalLauncher", "launch.slurm.SlurmLauncher"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the command."""
    signal.signal(signal.SIGTERM, _interrupt)
    # `python -m` has it there already; an entry point finds classes beside the user's as well.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _run(parse(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return int(error.status)
    except KeyboardInterrupt:
        print("interrupted: the runs were stopped; the same command goes on", file=sys.stderr)
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
        for path in report.write(result, options.report):
            display.say(f"written: {path}")
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    return int(ExitStatus.FINISHED if result.good else ExitStatus.FAILED)


@dataclass
class _Command:
    """The drill that the options ask for."""

    options: Options

    def __post_init__(self) -> None:
        from runner.config import Composer

        options = self.options
        composer = Composer(options.config_dirs, options.config_name)
        composed = composer.compose(options.overrides)
        target = composed.plain["launcher"].get("_target_")
        if target not in (LOCAL, SLURM):
            raise UserError(f"launcher._target_={target}: the drill knows how to strike at launcher=local and slurm")
        self.local = target == LOCAL
        kinds = choose_kinds(options.kinds, self.local)
        self.kills = options.kills or max(DEFAULT_KILLS, len(kinds))
        self.extra, self.settings = forced(composed.config, self.kills)
        self.config = composer.compose([*options.overrides, *self.extra]).config
        evaluates = bool(self.config.eval.every_steps and self.config.data.eval_sources)
        moments = {
            kind: [moment for moment in KINDS[kind].at(self.local) if moment != "evaluation" or evaluates]
            for kind in kinds
        }
        self.plan: list[Planned] = make_plan(moments, self.kills, self.config.train.steps, options.seed)
        self.left_out = [kind for kind in kinds if kind not in {fault.kind for fault in self.plan}]
        self.name = composed.run_dir.name
        self.root = (options.root or composed.run_dir.parent / "chaos" / self.name).absolute()
        self.key = {
            "overrides": list(options.overrides),
            "flags": list(options.flags),
            "plan": [list(vars(fault).values()) for fault in self.plan],
            "code": _code(),
        }

    def victim(self, run_dir: Path, log: Path) -> Victim:
        """Attempts at the run in `run_dir`."""
        overrides = [*self.options.overrides, *self.extra, f"run.dir={run_dir}"]
        command = [sys.executable, "-m", "runner", *self.options.flags, *overrides]
        return LocalVictim(command, log) if self.local else SlurmVictim(command, run_dir, log)

    @cached_property
    def drill(self) -> Drill:
        """Where the drill takes place."""
        config = self.config
        return Drill(
            self.root,
            self.victim,
            self._display,
            steps=config.train.steps,
            save_every=config.checkpoint.every_steps or config.train.steps,
            eval_every=config.eval.every_steps,
            seed=self.options.seed,
        )

    def carry_out(self, display: Display) -> report.Result:
        """Reference, faults, comparison."""
        self._display = display
        troubles: list[str] = []
        try:
            self._announce(display, goes_on=self.drill.open(self.key))
            self.drill.run_reference()
            try:
                self.drill.run_under_faults(self.plan)
            except BrokenError as error:
                troubles.append(f"the run under faults did not come to its end: {error}")
            result = self._result(troubles)
            if not result.identical and not troubles:
                result.troubles += self._diagnosis(display)
        finally:
            display.close()
        self.drill.over(self.key)
        return result

    def _announce(self, display: Display, goes_on: bool) -> None:
        count = len(self.plan)
        struck = len(self.drill.outcomes())
        display.say(f"{count} faults from seed {self.options.seed}" + (f", going on after {struck}" if goes_on else ""))
        for words in self.settings:
            display.say(f"  set for the drill: {words}")
        if self.left_out:
            display.say(f"  not among {count} faults: {', '.join(self.left_out)}; a higher --kills has all kinds")

    def _result(self, troubles: list[str]) -> report.Result:
        drill, outcomes = self.drill, self.drill.outcomes()
        killed = drill.killed()
        finished = [run for run in killed if run.finished.exists()]
        return report.Result(
            command=shlex.join(["python", "-m", "runner.chaos", *sys.argv[1:]]),
            config=self.name,
            settings=self.settings,
            seed=self.options.seed,
            plan=self.plan,
            outcomes=outcomes,
            comparisons={run.path.name: compare(drill.reference, run) for run in finished},
            troubles=[*troubles, *drill.faults_of_runs()],
            reference=drill.reference,
            killed=killed,
        )

    def _diagnosis(self, display: Display) -> list[str]:
        """Whether two runs without faults are the same: if not, it is not the faults."""
        if _code() != self.key["code"]:
            return ["the code was changed while the drill went on: two programs were compared, run it again"]
        display.say("not identical: one more run without faults tells whether the faults are to blame")
        again = self.drill.run_reference("reference-again")
        found = compare(self.drill.reference, again)
        if found.identical:
            return ["two runs without faults are identical: the difference comes from going on after a fault"]
        first = str(found.differences[0]).replace("under faults", "in a second run without faults")
        advice = "look for randomness that is not seeded (a generator of your own, time, the order of a set)"
        if self.config.train.device != "cpu" and not self.config.train.deterministic:
            advice += "; on a GPU set train.deterministic=true"
        return [
            f"two runs without faults differ as well ({first}): the configuration itself is not repeatable; {advice}"
        ]


def _code() -> dict[str, Any]:
    """With which code the runs are made: an interrupted drill does not go on with another."""
    from runner import capsule

    code = capsule.record()
    return {name: code[name] for name in ("python", "packages", "runner")}


if __name__ == "__main__":
    sys.exit(main())

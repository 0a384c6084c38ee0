"""Evaluate checkpoints of a run: `runner evaluate RUN [--step N|best|last|all] [key=value ...]`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner.cli.base.arguments import add_config_dir, one_run_and_settings
from runner.cli.base.console import PROGRAM, Parser, console, say, shown, skip_corrupt, table, tell, without_nan
from runner.cli.base.launcher import make_launcher
from runner.cli.start.resume import jobs
from runner.config.identity import evaluation_digest
from runner.contracts import Launcher
from runner.errors import ExitStatus, RunDirError, UserError, refuse
from runner.rundir.evaluations import Request, evaluated
from runner.rundir.find import run_dir
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.trust import reading
from runner.system import files, processes
from runner.system.signals import STOP

if TYPE_CHECKING:
    from runner.config.composition import Composed

ATTEMPT = "runner.training.evaluate:attempt"
# Settings of an evaluation that affect its results, and settings that do not.
RESULTS = ("eval", "data.eval_sources", "data.collate")
PLACE = ("launcher", "train.device", "run.threads", "data.cache_dir")
SUBMISSION_WAIT_S = 120.0


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} evaluate",
        usage=f"{PROGRAM} evaluate [-h] [--step STEP] [--submit] [--json] RUN [key=value ...]",
        description="Evaluates checkpoints of a run, each once, and adds the results to its records. "
        "key=value changes eval and data.eval_sources for these evaluations; launcher=slurm submits them.",
    )
    made.add_argument("words", nargs="*", metavar="RUN", help="a run directory, such as outputs/NAME")
    made.add_argument("--step", default="last", help="a step, best, last or all (default: last)")
    made.add_argument("--submit", action="store_true", help="as a job, by the launcher of the run")
    made.add_argument("--json", action="store_true", help="print JSON")
    add_config_dir(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: RUN is not a run directory, a setting is wrong, or the checkpoint does not exist.
    """
    options = parser().parse_intermixed_args(list(arguments))
    given, overrides = one_run_and_settings(options.words, "evaluate outputs/NAME key=value")
    _check(options, overrides)
    run = run_dir(given)
    from runner.config.composition import Composer
    from runner.config.frozen import load_plain

    found, unusable = jobs(Composer(options.config_dir), [run.path], overrides)
    refuse(unusable, RunDirError)
    composed = found[0]
    settings = evaluation_digest(composed.plain)
    changed = settings != evaluation_digest(load_plain(run.path))
    own = [text for text in overrides if changed and _is_of(text, RESULTS)]
    request = Request(settings, options.step, tuple(own), composed.plain)
    if (launcher := _submitting_launcher(options.submit, overrides, composed)) is not None:
        return _submit(run, request, composed, launcher)
    return _evaluate(run, request, options.json)


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    errors = [
        f"{text} is not of an evaluation: set eval or data.eval_sources"
        for text in overrides
        if not _is_of(text, (*RESULTS, *PLACE))
    ]
    if not re.fullmatch(r"\d{1,12}|best|last|all", options.step):
        errors.append(f"--step {options.step}: must be a step, best, last or all")
    if int(processes.environment.get("WORLD_SIZE", "1")) > 1:
        errors.append("evaluate does not run under torchrun: run it alone, or submit it (launcher=slurm)")
    refuse(errors)
    options.step = options.step.lstrip("0") or "0" if options.step.isdigit() else options.step


def _is_of(text: str, keys: Sequence[str]) -> bool:
    key = text.lstrip("+~").partition("=")[0]
    return key in keys or key.startswith(tuple(f"{each}." for each in keys))


# Evaluate here


def _evaluate(run: RunDir, request: Request, as_json: bool) -> int:
    from runner.config.frozen import trained
    from runner.system.distributed import World
    from runner.training.evaluate import Work, wanted

    config = trained(request.config)
    with reading(run):
        steps = wanted(run, request, skip_corrupt)
        before = evaluated(run, request.settings).keys()
    STOP.install()
    work = Work(run, request, config, World(), lambda: bool(STOP), say=tell)
    done = work.do()
    records = evaluated(run, request.settings)
    found = [records[step] for step in steps if step in records]
    if as_json:
        print(json.dumps(list(map(without_nan, found)), indent=2))
    else:
        _print_table(found)
    if not done:
        tell(f"interrupted after {len(work.added)} of {len(steps)} checkpoints: rerun the command for the others")
        return int(ExitStatus.INTERRUPTED)
    if not as_json:
        earlier = sum(record["step"] in before for record in found)
        others = len(found) - earlier - len(work.added)
        beside = f", {others} by another command" if others > 0 else ""
        where = f"; results in {shown(run.evaluations)}" if found else ""
        say(f"{len(work.added)} evaluated now, {earlier} before{beside}{where}")
    damaged = any(files.is_dir(run.checkpoint(step)) for step in work.unusable)
    return int(ExitStatus.FAILED if damaged else ExitStatus.FINISHED)


def _print_table(records: Sequence[dict[str, Any]]) -> None:
    names = list(
        dict.fromkeys(name for record in records for name, value in record.items() if isinstance(value, float))
    )
    listing = table("step", *names)
    for record in records:
        listing.add_row(str(record["step"]), *(f"{record[name]:.4f}" if name in record else "" for name in names))
    console().print(listing)


# Evaluate in a job


def _submitting_launcher(submit: bool, overrides: Sequence[str], composed: Composed) -> Launcher | None:
    """Return the launcher that submits the evaluation, or None if it runs in this process.

    Raises:
        UserError: --submit is set, but the run's launcher trains on this machine.
    """
    if not submit and not any(_is_of(text, ("launcher",)) for text in overrides):
        return None
    launcher = make_launcher(composed.plain["launcher"])
    if not launcher.in_process:
        return launcher
    if submit:
        raise UserError("--submit: the launcher of this run runs it on this machine; add launcher=slurm")
    return None


def _submit(run: RunDir, request: Request, composed: Composed, launcher: Launcher) -> int:
    """Submit the evaluation, unless its job is already queued or there is nothing to evaluate.

    Raises:
        UserError: the job cannot be submitted.
    """
    from runner.training.evaluate import every_set, wanted

    every_set(composed.config)  # raises errors here, before the job is submitted
    directory = request.directory(run)
    with reading(run):
        done = evaluated(run, request.settings).keys()
        missing = set(wanted(run, request)) - done
    if not missing:
        say(f"nothing to do: {len(done)} checkpoints are evaluated, results in {shown(run.evaluations)}")
        return int(ExitStatus.FINISHED)
    if launcher.dry_run:
        print(launcher.preview([directory]))
        return int(ExitStatus.FINISHED)

    def is_queued() -> bool:
        job = launcher.jobs([directory]).get(directory)
        if job is None or not job.live:
            return False
        say(f"job {job.job_id} is {job.state}: {len(done)} checkpoints are evaluated")
        return True

    try:
        if is_queued():
            return int(ExitStatus.FINISHED)
        refuse(launcher.check([directory]))
        with Lease.acquire(
            RunDir(directory).submission,
            None,
            composed.config.run.lease_timeout_s,
            wait_s=SUBMISSION_WAIT_S,
            within=run.path,
        ) as lease:
            if is_queued():  # another shell submitted it while this command waited
                return int(ExitStatus.FINISHED)
            request.write(directory, lease.guard)
            return launcher.launch([directory], ATTEMPT, [lease.guard])
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"the evaluation was not submitted ({where}{error.strerror or error})") from None

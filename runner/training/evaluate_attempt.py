"""One attempt at a submitted evaluation: evaluate until it is done or this job is asked to stop, then requeue it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from runner.contracts import Job
from runner.errors import ExitStatus
from runner.rundir.evaluations import Request, given_up
from runner.rundir.paths import RunDir
from runner.rundir.trust import check_trusted
from runner.system import processes
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training.attempt import beginning, carry_out


def attempt(directory: str | os.PathLike[str], job: Job) -> int:
    """Carry out the request in `directory`, that of a submitted evaluation; the exit status. Errors are printed.

    The attempt counts as begun once a checkpoint is evaluated, or there was none to evaluate: a job that is killed
    before that three times in a row is not started again.
    """
    STOP.install()
    path = Path(directory).absolute()
    if job.auto_restarts and int(processes.environment.get("RANK", "0")) == 0:
        # At once, and not after the batch: the job may be killed before that is done.
        STOP.listen(lambda signum: print(f"{job.cause(signum)}: stopping after this batch", flush=True), job.cause)
    return carry_out(path, job, lambda world: _evaluate(path, job, world))


def _evaluate(directory: Path, job: Job, world: World) -> ExitStatus:
    run = RunDir(directory.parent.parent)
    with beginning(job):
        from runner.config.frozen import trained
        from runner.training.evaluate import Work
        from runner.training.model.build import choose_device

        check_trusted(run)
        check_trusted(RunDir(directory))
        request = Request.read(directory)
        config = trained(request.config)
        config = replace(config, run=replace(config.run, dir=str(run.path)))
    if world.size > 1:
        world.start(choose_device(config.train.device, world))
    work = Work(
        run,
        request,
        config,
        world,
        stop=lambda: bool(STOP),
        holder=job.identity(),
        on_progress=job.on_started,
        given_up=lambda: given_up(directory),
    )
    with beginning(job):  # no attempt log counts failures: those of the disk are failed starts here too
        outcome = work.do()
    if outcome == "stopped":
        return world.run_on_main(lambda: _interrupted(job)) if world.is_main else _yielded(job, world)
    if world.is_main:
        print(f"evaluated: {outcome}, results in {run.evaluations}" if outcome == "done" else _ended(run, outcome))
    return ExitStatus.FINISHED if outcome in ("done", "given up") else ExitStatus.FAILED


def _ended(run: RunDir, outcome: str) -> str:
    if outcome == "given up":
        return "the evaluation was given up (--forget)"
    return f"{run.path} has stopped ({outcome}); what it has saved is evaluated, rerun the command once it trains again"


def _interrupted(job: Job) -> ExitStatus:
    STOP.wait_for_listener()
    cause = job.requeue_if_needed(job.cause(STOP.signum or 0))
    print(f"{cause} ({STOP.name}): the evaluation continues with the next checkpoint that has no results")
    return ExitStatus.INTERRUPTED


def _yielded(job: Job, world: World) -> ExitStatus:
    """On the other ranks: rank 0 decides how the job ends."""
    job.yield_verdict()
    return world.run_on_main(lambda: ExitStatus.INTERRUPTED)

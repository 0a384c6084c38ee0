"""Play the scenario of jobs: runs are submitted to Slurm, stopped, requeued, and resumed.

The command (`runner.cli.start`), the launcher, the job in `launch`, the batch script's text in a real bash, and the
attempt with its lease, log and budgets are real. Small models replace Slurm (`slurm`), the script that submitit writes,
and the training: a step is a pause, a save has a few bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import launch.job
import launch.slurm
from launch import batch, display, requeue, submission
from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence
from runner.cli.base import launcher
from runner.cli.start import start
from runner.config import frozen, targets
from runner.config.composition import Composed, Composer
from runner.contracts import is_same_job
from runner.errors import ExitStatus, UserError
from runner.rundir import lease, provenance
from runner.rundir.attempt_log import Finish, ended_attempts, status_of
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes
from runner.system.signals import STOP
from simulation.batch import Answer, Batch
from simulation.disk import ROOT
from simulation.engine import Host, Process, Task, World
from simulation.saves import save
from simulation.scenario import COMMON, Scenario
from simulation.slurm import HOLD_S, Job, Refused, Slurm

RUNS = Path(ROOT) / "outputs"
STEPS = 4
LEASE_S = 12.0
CODE = {"python": "3", "packages": {}, "runner": {"source": "", "digest": ""}, "repositories": {}}
JOBS_KINDS = {
    "preempt": "a job of higher priority needs a node",
    "limit": "a job's time limit is near",
    "scancel": "the user cancels a job, perhaps while it asks to be requeued",
    "requeue": "an administrator requeues a job",
    "cut": "a node is cut off from Slurm, and runs on or hangs",
    "suspend": "a job is suspended, and resumed later",
    "term": "a rank is sent SIGTERM",
    "late": "Slurm's next answers come late or never, or it never gets the requests",
    "away": "Slurm's controller is away for a while",
    "refuse": "Slurm refuses to requeue anything for a while",
    "amnesia": "Slurm's controller loses its state",
    "again": "the user gives the command again, perhaps in two shells",
    "interrupt": "the user interrupts a command with Ctrl-C",
    "memory": "ranks are killed soon after they start, a few times",
    "broken": "the environment of the jobs is broken for a while",
    "hold": "a job in the queue is held",
}


@cache
def _composed(runs: int, retry_failed: bool) -> tuple[Composed, ...]:
    """Return the runs of a command. They are composed once, before any story."""
    if (runs, retry_failed) != (1, False):
        (first,) = _composed(1, False)
        return tuple(_varied(first, number, retry_failed) for number in range(1, runs + 1))
    options = [
        "launcher=slurm",
        "launcher.check_folder=false",
        f"train.steps={STEPS}",
        f"run.lease_timeout_s={LEASE_S}",
        "train.hang_timeout_s=null",
        "seed=1",
        f"run.dir={RUNS / 'run1'}",
    ]
    return (Composer().compose(options),)


def _varied(first: Composed, number: int, retry_failed: bool) -> Composed:
    """Return the run as if composed for another run of the same command."""
    plain = deepcopy(first.plain)
    plain["launcher"]["retry_failed"], plain["seed"] = retry_failed, number
    run_dir = RUNS / f"run{number}"
    plain["run"]["dir"] = str(run_dir)
    config = replace(first.config, seed=number, run=replace(first.config.run, dir=str(run_dir)))
    made = replace(first, config=config, plain=plain, run_dir=run_dir)
    made.text  # noqa: B018 caches the text
    return made


@cache
def _launcher(retry_failed: bool) -> Any:
    """Return the launcher of a command. Hydra's part is the same in every story."""
    return targets.instantiate("launcher", _composed(1, retry_failed)[0].plain["launcher"])


def _load(really: Callable[[Path], Any], run_dir: Path) -> Any:
    """Return the frozen config of a run. Configs written by commands are known and not parsed."""
    text = b""
    with suppress(OSError):
        text = files.read_regular(RunDir(run_dir).config)
    known = _configs()
    return known[text] if text in known else really(run_dir)


@cache
def _configs() -> dict[bytes, Any]:
    return {each.text.encode(): each.config for retried in (False, True) for each in _composed(2, retried)}


class Jobs(Scenario):
    """One run, or two as an array, and commands that start them at random times."""

    name = "jobs"
    kinds = COMMON | JOBS_KINDS
    horizon = 1500
    network = True
    host_names = ("login", "node1", "node2")

    def __init__(self, world: World, seed: str) -> None:
        super().__init__(world, seed)
        for host in self.hosts:  # Slurm needs clocks that agree (munge refuses others)
            host.offset_s, host.drift = self.random.uniform(-0.5, 0.5), 0.0
        self.slurm = Slurm(world, self.random, self.hosts[1:], self._begin_batch)
        self.slurm.sbatch = self._sbatch  # type: ignore[method-assign]
        self.slurm.on_submit.append(self._submitted)
        self.limit_s = self.random.choice((None, None, None, 60.0, 200.0))
        self.notice_s = self.random.choice((5.0, 20.0))
        self.step_s = self.random.choice((1.0, 4.0, 12.0))
        self.save_s = self.random.choice((0.1, 2.0, 10.0))
        self.count = self.random.choice((1, 1, 2))
        self._commands = 0
        self._broken_until = 0.0
        self._killed_next = 0
        self._acquired: dict[Path, int] = {}
        self._finished: dict[Path, int] = {}  # by number of the attempt that finished the run
        self._ranks: dict[tuple[Job, int], Process] = {}  # by start of a job
        self._batches: dict[tuple[Job, int], Process] = {}
        self._locked: set[Path] = set()
        self._began: dict[Process, dict[Path, Job | str]] = {}

    @property
    def runs(self) -> list[RunDir]:
        """Return the run directories."""
        return [RunDir(each.run_dir) for each in _composed(self.count, False)]

    # ---- replacements

    @contextmanager
    def around(self) -> Iterator[None]:
        """Replace training, submitit and the code's description.

        Slow down heartbeats, which have their own scenario.
        """
        session = ModuleType("runner.training.session")
        session.Session = SimpleNamespace(open=partial(_Session, self))  # type: ignore[attr-defined]
        with ExitStack() as restored:

            def put(module: Any, name: str, value: Any) -> None:
                restored.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)

            put(batch, "script", _script)
            put(submission, "new_name", lambda: f"{self.world.number():032x}")
            put(launch.display, "console", lambda: None)
            put(display, "show_submitted", lambda *_: None)
            put(provenance, "describe_code", lambda *_: CODE)
            put(frozen, "load", partial(_load, frozen.load))
            put(launcher, "make_launcher", lambda node: _launcher(node["retry_failed"]))
            put(lease, "MIN_INTERVAL_S", 2.0)
            put(lease, "POLL_S", 1.0)  # a waiting job must notice a signal in the shortest grace time
            put(checkpoint_dir, "_COUNT", count())  # part of names, which must be repeatable
            before = sys.modules.get(session.__name__)
            sys.modules[session.__name__] = session
            try:
                yield
            finally:
                del sys.modules[session.__name__]
                if before is not None:
                    sys.modules[session.__name__] = before

    def run(self, *command: Any, **options: Any) -> Any:
        """Run a command of Slurm. There are no other commands."""
        words = [str(word) for word in command[0]]
        if "git" in words[:1]:
            raise FileNotFoundError(2, "there is no git in this world")
        return self.slurm.run(words, **options)

    # ---- the user

    def begin(self) -> None:
        """Start the command once, and perhaps again later."""
        self.disk.make_dir(RUNS)
        self.disk.watchers.append(self._watch)
        _composed(self.count, True)
        _configs()
        for retry_failed in (False, True):
            _launcher(retry_failed)
        self._command()
        for _ in range(self.random.choice((0, 1, 2))):
            self.world.at(self.random.uniform(1.0, 400.0), self._command)

    def _command(self, retry_failed: bool = False) -> None:
        self._commands += 1
        jobs = _composed(self.count, retry_failed)
        process = self.spawn(self.hosts[0], f"command {self._commands}", partial(self._start, jobs))
        self._began[process] = {run.path: self._live_since_before(run.path) for run in self.runs}

    def _live_since_before(self, run: Path) -> Job | str:
        """Return the job that job.json names if it is queued or running, or "finished", or ""."""
        with self.world.outside():
            recorded = files.read_object(RunDir(run).job)
            done = Finish.of(RunDir(run)).steps
        if done:
            return "finished"
        job = self.slurm.jobs.get(str(recorded.get("job_id")))
        if job is None or str(recorded.get("submission")) not in job.path:  # Slurm reuses ids
            return ""
        return job if not job.is_over and job.state != "COMPLETING" else ""

    def _start(self, jobs: Sequence[Composed]) -> None:
        STOP.install()
        try:
            status = start.start_runs(jobs)
        except UserError as error:
            print(error)
            status = int(error.status)
        except OSError as error:  # one line, as in `runner.__main__.run`
            if error.filename is None:
                raise
            print(error)
            status = int(ExitStatus.FAILED)
        sys.exit(status)

    def _sbatch(self, path: str, process: Process) -> str:
        text = files.read_text(Path(path))
        script = json.loads(text.partition("\n")[0].removeprefix("# "))
        noted = [Path(script["folder"]) / f"{script['submission']}-{index}.json" for index in range(script["count"])]
        script["runs"] = [Path(files.read_object(path)["run_dir"]) for path in noted]
        script["text"], script["by"], script["orphan"] = text, process, not process.alive
        job_id = self.slurm.submit(script, script["name"], path, len(script["runs"]), self.limit_s, self.notice_s)
        return f"Submitted batch job {job_id}\n"

    def _submitted(self, job: Job) -> None:
        """Check that a later command submits no run that was finished, queued or running all the time."""
        run, process = self._run_of(job), job.script["by"]
        before = self._began.get(process, {}).get(run, "")
        self.must(before != "finished", f"{process.name} submits {run.name}, which was finished before it began")
        live = isinstance(before, Job) and any(before is each for each in self.slurm.live())
        name = before.job_id if isinstance(before, Job) else ""
        self.must(
            not live, f"{process.name} submits {run.name}, whose job {name} was queued or running since before it began"
        )

    # ---- jobs

    def _run_of(self, job: Job) -> Path:
        run: Path = job.script["runs"][job.array[1] if job.array else 0]
        return run

    def _environment(self, job: Job) -> dict[str, str]:
        assert job.host is not None
        uptime = (self.world.now - job.host.booted) * (1 + job.host.drift)
        return {
            "SLURM_JOB_ID": str(job.number),
            "SLURM_JOB_UID": str(processes.user_id()),
            "SLURM_JOB_NAME": job.name,
            "SLURMD_NODENAME": job.host.name,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "RUNNER_JOB_FOLDER": job.script["folder"],
            "REQUEUE_SUBMISSION": job.script["submission"],
            "RUNNER_BATCH_BEGAN": f"{job.host.boot_id} {uptime:.2f}",
            **({"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {}),
            **(
                {"SLURM_ARRAY_JOB_ID": str(job.array[0]), "SLURM_ARRAY_TASK_ID": str(job.array[1])} if job.array else {}
            ),
        }

    def _begin_batch(self, job: Job) -> Process:
        self.must(not job.cancelled, f"job {job.job_id} was cancelled, and is started again")
        assert job.host is not None
        environment = self._environment(job)
        name = f"batch {job.job_id}.{job.restarts}"
        process = self.spawn(job.host, name, partial(self._batch, job, environment), **environment)
        # The shell of a batch script survives these signals from its first line on.
        process.handlers |= dict.fromkeys((15, 10, 12), lambda *_: None)
        self._batches[job, job.restarts] = process
        return process

    def _batch(self, job: Job, environment: dict[str, str]) -> None:
        world, process, number = self.world, self.world.current.process, job.starts  # type: ignore[union-attr]

        def scontrol(words: Sequence[str]) -> Answer:
            try:
                done = processes.run(["scontrol", *words], timeout=120.0)
            except processes.TimeoutExpired:
                return 1, ""
            return done.returncode, str(done.stdout or done.stderr).rstrip("\n")

        def srun(_: Sequence[str]) -> Answer:
            world.step("srun")
            host = job.host
            if job.starts != number or host is None or not job.is_running:
                return 1, ""
            rank = self.spawn(host, f"rank {job.job_id}.{job.restarts}", partial(self._rank, job), **environment)
            self._ranks[job, job.restarts] = rank
            self.slurm.join(job, rank)
            if self._killed_next:
                self._killed_next -= 1
                world.at(self.random.uniform(0.1, 20.0), partial(self._no_memory, rank))
            waiters: list[Task] = []
            rank.on_end.append(lambda _: world.wake(waiters))
            while rank.alive:
                world.wait(waiters, None)
            return (rank.status if rank.status is not None and rank.status >= 0 else 137), ""

        def sleep(words: Sequence[str]) -> Answer:
            clock.sleep(float(words[0]))
            return 0, ""

        def date(_: Sequence[str]) -> Answer:
            return 0, self.slurm._time(clock.wall())

        def echo(words: Sequence[str]) -> Answer:
            process.output.append(" ".join(words))
            world.tell(process.output[-1], process.name)
            return 0, ""

        commands: dict[str, Callable[[Sequence[str]], Answer]] = {
            "scontrol": scontrol,
            "srun": srun,
            "sleep": sleep,
            "date": date,
            "echo": echo,
        }
        folder = Path(job.script["folder"])
        sys.exit(Batch(world, self.disk, job.script["text"], folder, _mark(job), environment, commands).run())

    def _rank(self, job: Job) -> None:
        """Run the command that srun starts."""
        folder = Path(job.script["folder"])
        if self.world.now < self._broken_until:
            self.world.tell("cannot start: the environment is broken", f"rank {job.job_id}")
            sys.exit(1)
        try:
            launch.job.main(str(folder))
        except SystemExit as end:
            if end.code == ExitStatus.LOCKED:
                self._locked.add(Path(files.read_object(batch.start_file(folder, job.job_id))["run_dir"]))
            if isinstance(end.code, str):
                sys.exit(1)
            raise
        except OSError:  # the disk refuses a call
            sys.exit(1)

    # ---- strikes

    def _some_job(self, choice: float, states: Sequence[str] = ()) -> Job | None:
        jobs = [job for job in self.slurm.live() if (job.state in states if states else job.is_running)]
        return jobs[int(choice * len(jobs))] if jobs else None

    def strike(self, kind: str, choice: float) -> None:
        """Let a strike happen."""
        rest = Random(f"jobs {choice}")
        if kind in self.STRIKES:
            self.STRIKES[kind](self, choice, rest)
        elif kind in self.STRIKES_AT_JOBS:
            job = self._some_job(choice)
            if job is not None:
                self.STRIKES_AT_JOBS[kind](self, job, rest)
        else:
            self._hinder(kind, self.choose(choice))
            super().strike(kind, choice)

    def _again(self, choice: float, rest: Random) -> None:
        for _ in range(rest.choice((1, 1, 2))):
            self._command(rest.random() < 0.3)

    def _interrupt(self, choice: float, rest: Random) -> None:
        commands = [process for process in self._began if process.alive]
        if commands:
            self.world.signal(commands[int(choice * len(commands))], 2)

    def _late(self, choice: float, rest: Random) -> None:
        self.slurm.lost += [rest.choice((0, 1, 2)) for _ in range(rest.choice((1, 1, 2, 4, 10)))]

    def _away(self, choice: float, rest: Random) -> None:
        self.slurm.away_until = max(self.slurm.away_until, self.world.now + rest.choice((5.0, 40.0, 300.0)))
        self.world.tell("is away for a while", "slurmctld")

    def _refuse(self, choice: float, rest: Random) -> None:
        self.slurm.refuses_until = self.world.now + rest.choice((5.0, 40.0, 300.0))
        self.world.tell("refuses to requeue for a while", "slurmctld")

    def _amnesia(self, choice: float, rest: Random) -> None:
        self.slurm.lose_state()

    def _broken(self, choice: float, rest: Random) -> None:
        self._broken_until = self.world.now + rest.choice((10.0, 150.0, 800.0))
        self.world.tell("is broken for a while", "environment")

    def _memory(self, choice: float, rest: Random) -> None:
        self._killed_next = rest.choice((1, 2, 4, 8))
        for rank in list(self._ranks.values()):
            self._no_memory(rank)

    def _no_memory(self, rank: Process) -> None:
        if rank.alive:
            self._hinder("kill", rank)
            self.world.kill(rank, "is killed: there is no memory")

    def _hold(self, choice: float, rest: Random) -> None:
        waiting = self._some_job(choice, ("PENDING",))
        if waiting is not None:
            waiting.held, waiting.reason = True, "JobHeldAdmin"
            self.world.tell("is held", f"job {waiting.job_id}")

    def _scancel(self, choice: float, rest: Random) -> None:
        if rest.random() < 0.3:
            self.slurm.cancels_requeued += 1
            return
        waiting = self._some_job(choice, ("PENDING", "COMPLETING")) if rest.random() < 0.3 else None
        job = waiting or self._some_job(choice)
        if job is not None:
            self.slurm.cancel(job, _lag(rest))

    def _term(self, choice: float, rest: Random) -> None:
        """Send SIGTERM from elsewhere, perhaps to a rank that Slurm has forgotten."""
        ranks = [(rank, start) for start, rank in self._ranks.items() if rank.alive]
        if ranks:
            rank, (job, restarts) = ranks[int(choice * len(ranks))]
            job.truth.setdefault(restarts, set()).add("term")
            self.world.signal(rank, 15)

    def _preempt(self, job: Job, rest: Random) -> None:
        mode = rest.choice(("REQUEUE", "REQUEUE", "CANCEL", "SUSPEND"))
        if mode == "SUSPEND":
            self._suspend(job, rest)
        else:
            self.slurm.preempt(job, mode, rest.choice((0.0, self.slurm.grace_s)), _lag(rest))

    def _limit(self, job: Job, rest: Random) -> None:
        self.slurm.shorten(job, rest.choice((3.0, 15.0, 60.0)), self.notice_s)

    def _requeue(self, job: Job, rest: Random) -> None:
        job.happens("requeued")
        with suppress(Refused):
            self.slurm.requeue(job)

    def _hinder(self, kind: str, process: Process | None) -> None:
        """Note events that keep a job from requeueing in time."""
        for job in self.slurm.jobs.values():
            if process in job.processes and kind in ("kill", "freeze", "error"):
                job.hindered = True
                if kind == "kill" and process is job.batch:
                    job.happens("batch script killed")

    def _suspend(self, job: Job, rest: Random) -> None:
        self.slurm.suspend(job)
        self.world.at(rest.choice((1.0, 30.0, 300.0)), partial(self.slurm.resume, job))

    def _cut(self, job: Job, rest: Random) -> None:
        host = job.host
        assert host is not None
        if host.cut_off:
            return
        host.cut_off = True
        self.world.tell("is cut off from Slurm", host.name)
        self.world.at(rest.choice((1.0, 10.0)), partial(self._found_lost, host))
        if rest.random() < 0.5:  # say its memory is full, as that of the next one will be; it recovers for a while
            self.world.suspend(host, HOLD_S + rest.uniform(0.0, 60.0))
            self._killed_next += rest.choice((0, 1))
            self.world.at(900.0, partial(self.slurm.node_back, host))
        else:
            self.world.at(rest.choice((30.0, 200.0, 900.0)), partial(self.slurm.node_back, host))

    def _found_lost(self, host: Host) -> None:
        if host.cut_off:
            self.slurm.node_lost(host)

    STRIKES: ClassVar[dict[str, Callable[[Jobs, float, Random], None]]] = {
        "again": _again,
        "interrupt": _interrupt,
        "late": _late,
        "away": _away,
        "refuse": _refuse,
        "amnesia": _amnesia,
        "broken": _broken,
        "memory": _memory,
        "hold": _hold,
        "scancel": _scancel,
        "term": _term,
    }
    STRIKES_AT_JOBS: ClassVar[dict[str, Callable[[Jobs, Job, Random], None]]] = {
        "preempt": _preempt,
        "limit": _limit,
        "requeue": _requeue,
        "cut": _cut,
        "suspend": _suspend,
    }

    def power_loss(self, host: Host) -> None:
        """Cut the power. A node is then down for Slurm until it is back, and the login node is unusable."""
        if host is not self.hosts[0]:
            self.slurm.node_lost(host)
        super().power_loss(host)
        if host is not self.hosts[0]:
            self.world.at(60.0, partial(self.slurm.node_back, host))

    # ---- checks

    def begins(self, run: RunDir, record: dict[str, Any], fence: int) -> None:
        """Check an attempt before it trains: not after three failed attempts of its job without a new checkpoint.

        Nor after an attempt of a later start of its job. From now on no older attempt saves anything, unless the disk
        has refused to remove its temporary files.
        """
        with self.world.outside():
            holder = lease.read_holder(run.lease)
            if holder is not None and holder[0] > fence:
                return  # it was frozen, and notices that at its first write
            ended = ended_attempts(run)
            if not checkpoint_dir.leftovers(run.checkpoints):
                self._acquired[run.path] = max(self._acquired.get(run.path, 0), fence)
        stuck = [
            line
            for line in ended[-3:]
            if is_same_job(line, record)
            and line["cause"] in ("killed", "crash", "node failure", "time limit", "failed")
            and (line.get("checkpoint_step") or 0) <= (line.get("start_step") or 0)
        ]
        later = [
            line for line in ended if is_same_job(line, record) and line["restart_count"] > record["restart_count"]
        ]
        self.must(not later, f"{run.path.name} is trained by {record}, an earlier start than {later}")
        # The files of such a job never got their names, so it has nothing to train.
        orphans = [job.job_id for job in self.slurm.all_jobs if job.script["orphan"] and _is_of(job, record)]
        self.must(not orphans, f"{run.path.name} is trained by the job of a command that was gone: {orphans}")
        self.must(len(stuck) < 3, f"{run.path.name} is tried again after three attempts without progress: {stuck}")

    def _watch(self, what: str, path: str, to: str) -> None:
        target = to or path
        if what != "rename" or not re.search(r"/checkpoints/step_\d+$|/finished\.json$", target):
            return
        run = Path(ROOT, *Path(target).relative_to(ROOT).parts[:2])
        fence = int(match[1]) if (match := re.search(r"\.tmp-(?:lease-)?(\d+)-", path)) else 0
        # The finisher writes the mark again if the disk refused the sync of its name.
        again = target.endswith("finished.json") and fence == self._finished.get(run)
        self.must(again or run not in self._finished, f"{target} is written although the run was finished")
        newest = self._acquired.get(run, 0)
        self.must(
            fence == 0 or fence >= newest, f"number {fence} writes {target} although number {newest} has begun to work"
        )
        if target.endswith("finished.json"):
            self._finished[run] = fence

    def on_end(self, process: Process) -> None:
        """Check the end of a process: no traceback, and no run with two jobs after the last command."""
        self.must(not process.errors, f"{process.name} ended with a traceback:\n{''.join(process.errors)}")
        others = [each for each in self._began if each.alive]
        if process in self._began and process.status == 0 and not others:
            for run in self.runs:
                live = [
                    job.job_id
                    for job in self.slurm.live()
                    if self._run_of(job) == run.path
                    and job.after == ""
                    and not job.cancelled
                    # A request that outlived its command may arrive after the check of the queue. That job exits.
                    and not job.script["orphan"]
                ]
                self.must(len(live) < 2, f"{process.name} leaves {run.path.name} with the jobs {live}")

    def finish(self) -> None:
        """Check that each run resumes or gives a reason. Then finish all runs with the command, without strikes."""
        self._calm()
        self.world.run()
        self._must_be_quiet()
        for run in self.runs:
            self._judge(run)
        for _ in range(4):
            if all(Finish.of(run).steps == STEPS for run in self.runs):
                break
            self._command(retry_failed=True)
            self.world.run()
            self._must_be_quiet()
        for run in self.runs:
            self.must(Finish.of(run).steps == STEPS, f"{run.path.name} cannot be finished: {status_of(run)}")
        before = len(self.slurm.all_jobs)
        self._command()
        self.world.run()
        self.must(len(self.slurm.all_jobs) == before, "finished runs were submitted")
        self._judge_causes()

    def _calm(self) -> None:
        self.disk.full = False
        self._broken_until = 0.0
        self._killed_next = 0
        self.slurm.calm()

    def _must_be_quiet(self) -> None:
        alive = [process.name for process in self.world.processes if process.alive]
        self.must(not alive, f"these do not end: {alive}")
        queued = [f"{job.job_id} ({job.state}, {job.reason})" for job in self.slurm.live()]
        self.must(not queued, f"jobs are left in the queue: {queued}")

    def _judge(self, run: RunDir) -> None:
        """Check that an unfinished run without a job gives a reason."""
        if Finish.of(run).steps == STEPS:
            return
        jobs = [job for job in self.slurm.all_jobs if self._run_of(job) == run.path and not job.withdrawn]
        if not jobs:
            return  # the command was killed before it submitted anything, or was refused
        said = status_of(run).get("state")
        if said in ("failed", "crash loop", "cancelled", "stuck"):
            return
        if run.path in self._locked:  # it waited five minutes for a live process, and reported so in its log
            return
        with suppress(OSError):
            name = f"/{_mark(jobs[-1])}.starts"
            notes = [data for path, data in self.disk.tree().items() if path.endswith(name)]
            if any(b"not requeued" in note for note in notes):
                return
        self.must(
            self._is_excused(jobs[-1]),
            f"{run.path.name} stands at step {run.newest_step()}, says {said!r}, and none of its jobs is left: "
            + ", ".join(f"{job.job_id} {job.state} after {job.restarts} restarts {job.truth}" for job in jobs),
        )

    def _is_excused(self, job: Job) -> bool:
        """Return whether no program could have requeued this job, or none should."""
        if job.cancelled or job.state == "NODE_FAIL":  # the site forbids a requeue after a lost node
            return True
        last = job.truth.get(job.began_with, set())
        # Slurm ends a job as FAILED, for good, when its batch script is killed. No process of it is left on the node.
        if {"lost", "batch script killed"} & last:
            return True
        # The disk refused the record of the end every time, and the log reports it.
        rank = self._ranks.get((job, job.began_with))
        if rank is not None and any("could not be recorded" in line for line in rank.output):
            return True
        # The disk refused the note of the last failed start. Or an earlier start, on a node that was cut off and slept,
        # has
        # overwritten that note. The log reports both.
        batch = self._batches.get((job, job.began_with))
        if batch is not None and any("not requeued" in line for line in batch.output):
            return True
        # While Slurm was ending the job, its machine died or Slurm did not answer. No process is left to requeue it,
        # and the
        # runner never requeues on a guess.
        return job.state in ("TIMEOUT", "PREEMPTED") and (job.hindered or "node failure" in last)

    def _judge_causes(self) -> None:
        """Check that the recorded cause of each attempt is a true one, unless Slurm's answers were lost."""
        for run in self.runs:
            for line in ended_attempts(run):
                cause = line["cause"]
                (job,) = (job for job in self.slurm.all_jobs if _is_of(job, line))
                restarts = int(line.get("restart_count") or 0)
                truth = job.truth.get(restarts, set())
                rank = self._ranks.get((job, restarts))
                if rank in self.slurm.troubled:
                    continue
                named = {each: {each} for each in ("preempted", "time limit")}
                named |= {"cancelled": {"cancelled", "lost"}, "interrupted": {"term", "lost"}}
                self.must(
                    cause not in named or truth & named[cause],
                    f"attempt {line['attempt']} of {run.path.name} is recorded as {cause!r}: what happened is {truth}",
                )


def _is_of(job: Job, attempt: dict[str, Any]) -> bool:
    """Return whether an attempt was one of this job. The id is not enough, because Slurm reuses ids."""
    return (job.job_id, job.script["submission"]) == (attempt.get("job_id"), attempt.get("submission"))


def _mark(job: Job) -> str:
    """Return the prefix of the names of a job's marker files."""
    return requeue.mark(job.job_id, job.script["submission"])


def _lag(rest: Random) -> float:
    """Return the seconds between a signal and the state that explains it."""
    return rest.choice((0.0, 0.0, rest.uniform(0.05, 1.3)))


def _script(folder: Path, python: str, runs: int, parameters: dict[str, Any]) -> str:
    """Return the script that submitit writes: the options, and the lines around srun."""
    name = next(line for line in parameters["setup"] if line.startswith("REQUEUE_SUBMISSION=")).partition("=")[2]
    told = {"count": runs, "folder": str(folder), "name": parameters["job_name"], "submission": name}
    return "\n".join([f"# {json.dumps(told)}", *parameters["setup"], "srun"]) + "\n"


class _Session:
    """A replacement for training: a step is a pause, a save a checkpoint of a few bytes."""

    def __init__(self, story: Jobs, run: RunDir, config: Any, world: Any, log: Any, held: lease.Lease) -> None:
        self._story, self._run, self._log = story, run, log
        self.account = log.account
        self.recorder = SimpleNamespace(close=lambda: None)
        self.early_end = None
        self._fence = Fence(held.fence, held.check_fence)
        Directory(run.checkpoints, self._fence).sweep()
        self.step = run.newest_step()
        story.begins(run, log.record, held.fence)
        clock.sleep(story.random.uniform(0.1, 3.0))
        log.resumed(self.step)

    def train(self, total: int) -> bool:
        """Train to the end, or to the first step boundary after a signal."""
        while self.step < total:
            if STOP:
                self._save()
                return False
            clock.sleep(self._story.step_s)
            self.step += 1
            self._log.update(step=self.step)
            if self.step % 2 == 0 or self.step == total:
                self._save()
        return True

    def _save(self) -> None:
        if self._run.newest_step() >= self.step:
            return
        clock.sleep(self._story.save_s)
        save(self._run, self.step, self._fence)

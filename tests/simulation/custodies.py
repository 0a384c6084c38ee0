"""Play the scenario of custody: runs are moved, removed, archived, forked and pruned while other processes use them."""

from __future__ import annotations

import json
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from runner.__main__ import run as run_command
from runner.checkpoint.files import choice, pins
from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files.choice import Intact, Retention
from runner.checkpoint.files.directory import Directory, Folder
from runner.checkpoint.files.store import Fence
from runner.cli.runs import checkpoints, housekeeping
from runner.cli.start import edits, plan, start
from runner.contracts import JobInfo
from runner.errors import CheckpointError, ExitStatus, UserError
from runner.metrics import jsonl
from runner.rundir import custody, evaluations, provenance, submitted_jobs
from runner.rundir import lease as leases
from runner.rundir.attempt_log import Finish, last_step
from runner.rundir.lease import Lease, acquire_for_job
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.distributed import World as Ranks
from runner.training import attempt as attempts
from runner.training.evaluate import Work
from simulation.disk import ROOT, Node
from simulation.engine import Process, World
from simulation.saves import save
from simulation.scenario import COMMON, Scenario

RUNS = Path(ROOT) / "runs"
TRUNK = RUNS / "a-1a2b3c4d"
ELSEWHERE = Path(ROOT) / "elsewhere" / "old"
ARCHIVE = Path(ROOT) / "a.tar"
TIMEOUT_S = 4.0
LAST_TIMEOUT_S = 0.5
"""Timeout of the last commands. No other process lives then."""
EVERY, KEPT, TOTAL = 2, 2, 10
"""The trunk saves every second step, keeps the two newest checkpoints, and ends after ten steps."""
BEGUN = 4
"""Step of the trunk's newest checkpoint when a story begins."""
LEASES = ("lease", "submission")
MOMENTS = ("commits", "deletes", "removes", "packs", "moves", "submits", "holds")
"""Actions during which a process may be interrupted, see `Custodies._moment_of`."""
STEPS_LATER = (0, 0, 1, 2, 4, 8, 16, 24, 32)
"""Numbers of calls between that moment and the interruption."""
INTERRUPTED_S = (3.0, 20.0, 90.0)
MADE_BY_OTHERS = re.compile(r".*\.pinned|evaluations/.*")
"""Files that processes without the lease may add to a run."""
LEFT = re.compile(r"\.tmp-|\.removed-")


@dataclass(frozen=True)
class Settings:
    """Config of a run in this scenario, in place of `runner.config.schema.Config`."""

    known_steps: int
    fork: Any
    run: Any = field(default_factory=lambda: SimpleNamespace(lease_timeout_s=TIMEOUT_S, allow_data_change=False))
    train: Any = field(default_factory=lambda: SimpleNamespace(epochs=None))
    checkpoint: Any = field(default_factory=lambda: SimpleNamespace(every_steps=EVERY))


@dataclass(frozen=True)
class Order:
    """A composed run of a command, in place of `runner.config.composition.Composed`."""

    run_dir: Path
    plain: dict[str, Any]
    overrides: tuple[str, ...] = ()
    resumed: bool = False

    @property
    def config(self) -> Settings:
        """Return the settings for training."""
        return settings(self.plain)

    @property
    def text(self) -> str:
        """Return the content of the run's config.yaml."""
        return json.dumps(self.plain, indent=1) + "\n"


def settings(plain: dict[str, Any]) -> Settings:
    """Return the settings in a config."""
    return Settings(int(plain["steps"]), SimpleNamespace(**{"was": {}, **plain["fork"]}))


def order(run_dir: Path, name: str, steps: int = TOTAL, trunk: Path | None = None, at: int | None = None) -> Order:
    """Return the composed run of a command that starts the run `name` in `run_dir`."""
    return Order(run_dir, {"name": name, "steps": steps, "fork": {"run": str(trunk) if trunk else None, "step": at}})


def frozen(run_dir: Path) -> dict[str, Any]:
    """Return the config of a run, as `runner.config.frozen.load_plain` reads it."""
    found: dict[str, Any] = json.loads(files.read_regular(RunDir(run_dir).config))
    return found


@dataclass
class Trap:
    """A strike that waits for a process to reach a moment.

    Attributes:
        kind: kind of the strike.
        moment: one of `MOMENTS`, or None for any of them.
        skips: how many such moments to skip.
        rest: draws the other decisions.
    """

    kind: str
    moment: str | None
    skips: int
    rest: Random


@dataclass
class Job:
    """A job in the queue of this world, and the job of an attempt (`runner.contracts.Job`)."""

    number: int
    run_dir: Path
    submitter: Process
    state: str = "pending"
    process: Process | None = None
    auto_restarts = True

    @property
    def live(self) -> bool:
        """Return whether the job is queued or running."""
        return self.state in ("pending", "running")

    def identity(self) -> dict[str, Any]:
        """Return the job's fields in a lease."""
        return {"job_id": str(self.number), "restart_count": 0, "node": None}


class Queue:
    """A launcher with a queue (`runner.contracts.Launcher`)."""

    in_process = dry_run = wait = False
    retry_failed = True

    def __init__(self, scenario: Custodies) -> None:
        self._scenario = scenario

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Submit the runs."""
        for run_dir, guard in zip(run_dirs, guards, strict=True):
            try:
                self._scenario.submit(run_dir, guard)
            except OSError as error:
                self._scenario.not_submitted(run_dir, error)
                return int(ExitStatus.USAGE)
        return 0

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """Return the queue's records of the runs, found through each run's job.json."""
        found = {}
        for run_dir in run_dirs:
            number = files.read_object(RunDir(run_dir).job).get("job_id")
            job = self._scenario.queue.get(number)  # type: ignore[arg-type]
            if job is not None:
                found[run_dir] = JobInfo(str(job.number), job.state)
        return found


LAUNCHER = f"{Queue.__module__}.{Queue.__qualname__}"


class Custodies(Scenario):
    """A trunk that is trained, submitted, evaluated, forked, pinned, pruned, moved, packed and removed concurrently."""

    name = "custody"
    kinds = COMMON | {
        "command": "somebody gives one more command",
        "interrupt": "who commits, deletes, packs, moves or submits something is killed or frozen just then",
        "meet": "somebody gives a command just when another one commits, deletes, packs, moves or submits something",
        "blackout": "every machine loses power once all is over: what was reported as done must be there",
    }
    horizon = 500

    def __init__(self, world: World, seed: str) -> None:
        super().__init__(world, seed)
        self.queue: dict[int, Job] = {}
        self._numbers = 0
        self._count = 0
        self._moment = self.random.choice((0.0, self.random.uniform(0.0, 8.0)))
        self._troubled: set[Process] = set()
        self._working: dict[Process, tuple[str, str]] = {}  # (activity, name of the run)
        self._fences: dict[Process, int] = {}
        self._acquired: dict[str, int] = {}  # the highest number that began to train, by run
        self._committed: dict[str, set[int]] = {"a": set()}  # steps whose commit has returned
        self._pinned: set[int] = set()  # steps of the trunk that a command has reported as pinned
        self._movers: set[Process] = set()
        self._frozen_looking: set[Process] = set()  # frozen in their last look at the leases
        self._traps: list[Trap] = []
        self._blackout = False
        self._is_watched = self.random.random() < 0.3  # a user pins the oldest checkpoint whenever there is a new one
        self._to_remove = False  # a command to remove the trunk was given
        self._packed: dict[str, bytes] | None = None
        self._reported = False  # an archive was reported as complete
        self._finished: dict[str, bytes] | None = None

    # ---- replacements for what a story cannot have

    @contextmanager
    def around(self) -> Iterator[None]:
        """Replace Hydra's configs, Slurm's queue and the attempt with torch in the code that starts runs."""
        launcher = SimpleNamespace(load=lambda: lambda: Queue(self))
        stand_ins: dict[tuple[Any, str], Any] = {
            (plan, "load_plain"): frozen,
            (plan, "trained"): settings,
            (edits, "holds"): lambda run_dir, plain: True,
            (provenance, "describe_code"): dict,
            (provenance, "code_changes"): lambda *_: [],
            (provenance, "describe_sources"): lambda *_: {},
            (submitted_jobs, "_known_launcher"): lambda name: launcher,
            (checkpoint_dir, "_COUNT"): count(),  # part of names, which must be repeatable
            (custody, "TIMEOUT_S"): TIMEOUT_S,
            (leases, "MIN_INTERVAL_S"): TIMEOUT_S / 6,  # heartbeats would otherwise be a third of all calls
            (attempts, "attempt"): self._attempt_under,
        }
        check = custody.Custody.check
        stand_ins[custody.Custody, "check"] = lambda held: self._look_at_leases(check, held)
        made = [mock.patch.object(module, name, value) for (module, name), value in stand_ins.items()]
        for each in made:
            each.start()
        try:
            yield
        finally:
            for each in made:
                each.stop()

    # ---- the processes

    def begin(self) -> None:
        """Write a run with some checkpoints, and start two to four commands on it."""
        self.disk.watchers.append(self._watch)
        self.disk.make_dir(RUNS)
        self._make_trunk(finished=self.random.random() < 0.2)
        first = self.random.choice((None, None, self._submit, self._submit, self._submit, *[self._resume] * 5))
        if self._finished is None and first is not None:
            self._command(first, late=False)
        for _ in range(self.random.choice((1, 2, 2, 3))):
            self._another()

    def _make_trunk(self, finished: bool) -> None:
        made, run = order(TRUNK, "a"), RunDir(TRUNK)
        files.make_dirs(run.checkpoints)
        files.write_atomic(run.code, "{}\n")
        files.write_atomic(run.config, made.text)
        steps = TOTAL if finished else BEGUN
        lines = "".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, steps + 1))
        files.write_atomic(run.metrics, lines)
        files.write_atomic(run.timings, "")
        for step in range(steps - EVERY * (KEPT - 1), steps + 1, EVERY):
            save(run, step, Fence())
            self._committed["a"].add(step)
        if finished:
            files.write_json(run.finished, {"steps": steps})
            self._finished = _contents(run.path)

    def _another(self, late: bool = True) -> None:
        self._command(
            self.random.choice(
                (
                    *(self._move, self._move, self._move_into, self._remove, self._remove, self._archive),
                    *(self._archive, self._fork, self._fork, self._pin, self._prune, self._resume),
                    *(self._submit, self._evaluate, self._evaluate),
                )
            ),
            late,
        )

    def _command(self, what: Callable[[], int | None], late: bool = True) -> Process:
        self._count += 1
        # Most begin at about the same moment, because only concurrent commands can conflict.
        early, soon = self.random.uniform(0.0, 0.3), self.random.uniform(0.0, 12.0)
        delay_s = self.random.choice((early, self._moment + early, self._moment + 3 * early, soon)) * late
        name = f"{what.__name__.strip('_').replace('_', '-')} {self._count}"
        return self.spawn(self.random.choice(self.hosts), name, partial(self._run_command, what, delay_s))

    def _run_command(self, what: Callable[[], int | None], delay_s: float) -> None:
        clock.sleep(delay_s)
        process = self._own()
        try:
            self.world.tell(f"is done: {what() or 0}", process.name)
        except UserError as error:
            self.world.tell(f"is refused: {error}", process.name)
            self.must("malformed" not in str(error), f"{process.name} took sound records for malformed ones: {error}")
        except OSError as error:
            if error.filename is None or (process not in self._troubled and not self.disk.full):
                raise
            self.world.tell(f"fails: {error}", process.name)

    def _carry_out(self, *words: str) -> int:
        """Run `python -m runner WORDS`."""
        process = self._own()
        status = run_command(words)
        text = "; ".join(process.output)
        self.world.tell(f"prints: {text}", process.name)
        self.must("malformed" not in text, f"{process.name} took sound records for malformed ones: {text}")
        self._reported |= status == 0 and words[0] == "archive"
        if status == 0 and words[0] in ("mv", "rm"):
            moved = process in self._movers or ".removed-" in text
            self.must(moved or not self._places("a"), f"{process.name} reports success and has moved nothing: {text}")
        return int(status)

    def strike(self, kind: str, choice: float) -> None:
        """Let a strike happen."""
        if kind == "command":
            self._another()
            return
        if kind == "blackout":
            self._blackout = True
            return
        if kind in ("interrupt", "meet"):
            rest = Random(f"{kind} {choice}")
            self._traps.append(
                Trap(kind, rest.choice((*MOMENTS, None, None, None)), rest.choice((0, 0, 1, 2, 4, 8)), rest)
            )
            return
        process = self.choose(choice)
        if process is not None and kind in ("freeze", "error"):
            self._troubled.add(process)
        if process is not None and kind == "freeze":
            self._perhaps_resume(process)
        if process is not None and kind == "suspend":  # freezes all of the machine; others take over
            self._troubled |= {each for each in self.world.processes if each.alive and each.host is process.host}
        super().strike(kind, choice)

    def _moment_of(self, what: str, path: str, to: str) -> str | None:
        """Return the entry of `MOMENTS` for a change of a name."""
        if what == "mkdir":
            return "deletes" if path.endswith("-taken") else None  # the next call takes the checkpoint away
        if what == "rmdir":
            return "removes"
        if what == "link":
            return "packs" if to == str(ARCHIVE) else None
        if what == "create":  # the first and the last of the leases that a command needs to move, pack or remove a run
            return "holds" if re.fullmatch(r".*/(submission|lease)/\d+\.json", path) else None
        if what != "rename":
            return None
        if re.fullmatch(r".*/checkpoints/step_\d+", to):
            return "commits"
        if to.endswith("-taken/taken"):
            return "takes"
        if to.endswith("/job.json"):
            return "submits"
        return "moves" if Path(path).parent in (RUNS, ELSEWHERE, ELSEWHERE.parent) else None

    def _spring(self, moment: str, process: Process) -> None:
        """Start the strike that waits for this moment, if any, perhaps some calls later."""
        for trap in self._traps:
            if moment not in ((trap.moment,) if trap.moment else MOMENTS):
                continue
            trap.skips -= 1
            if trap.skips < 0:
                self._traps.remove(trap)
                if trap.kind == "meet":
                    # Without delay, because another command may fit between just two calls.
                    self.world.strike_at(self.world.steps, partial(self._meet, process, moment, trap.rest))
                else:
                    later = self.world.steps + trap.rest.choice(STEPS_LATER)
                    self.world.strike_at(later, partial(self._interrupt, process, trap.rest))
                return

    def _interrupt(self, process: Process, rest: Random) -> None:
        how = rest.choice(("kill", "freeze", "freeze", "power"))
        if not process.alive:
            return
        if how == "kill":
            self.world.kill(process)
        elif how == "power":
            self.power_loss(process.host)
        else:
            self._troubled.add(process)
            self.world.freeze(process)
            self.world.at(rest.choice(INTERRUPTED_S) * rest.uniform(0.5, 1.5), partial(self.world.thaw, process))
            self._perhaps_resume(process)

    def _meet(self, process: Process, moment: str, rest: Random) -> None:
        """Give a command, with time for a part of it before the process continues."""
        if not process.alive or process.stopped:
            return
        self.world.freeze(process)
        self.world.at(rest.uniform(0.02, 0.2), partial(self.world.thaw, process))
        if moment == "deletes":
            self._command(self._pin, late=False)
            if rest.random() < 0.5:  # the process is killed before it has seen the pin
                self._traps.append(Trap("interrupt", "takes", 0, rest))
        else:
            self._another(late=False)

    def _perhaps_resume(self, process: Process) -> None:
        """Resume a run that seems to be dead, as a user would."""
        if self._working.get(process, ("", ""))[0] == "trains" and self.random.random() < 0.7:
            self.world.at(0.0, partial(self._command, self._resume))

    def on_end(self, process: Process) -> None:
        """Check that a process ends only when its work ends, without a traceback."""
        if process.killed_by is not None:
            self._perhaps_resume(process)
        self._working.pop(process, None)
        for job in self.queue.values():
            if job.process is process:
                job.state = "completed"
        self.must(not process.errors, f"{process.name} ended with a traceback:\n{''.join(process.errors)}")

    def _own(self) -> Process:
        assert self.world.current is not None
        return self.world.current.process

    # ---- where the runs are

    def _places(self, name: str) -> list[Path]:
        """Return every path of a complete run, under any name."""
        found: list[Path] = []
        self._find_places(self.disk.root, Path(ROOT), name, found)
        return found

    def _find_places(self, directory: Node, path: Path, name: str, found: list[Path]) -> None:
        config = directory.entries.get("config.yaml")
        if config is not None:
            if "code.json" in directory.entries and f'"name": "{name}"'.encode() in config.data:
                found.append(path)
            return
        for entry, node in sorted(directory.entries.items()):
            if stat.S_ISDIR(node.kind):
                self._find_places(node, path / entry, name, found)

    def _place(self) -> Path:
        """Return the trunk's path as a user who gives a command believes it."""
        found = [path for path in self._places("a") if not path.name.startswith(".")]
        return found[0] if found and self.random.random() < 0.8 else TRUNK

    # ---- the commands

    def _look_at_leases(self, check: Callable[[custody.Custody], None], held: custody.Custody) -> None:
        process = self._own()
        freezes = process.freezes
        self._frozen_looking.discard(process)
        check(held)
        if process.freezes > freezes:
            self._frozen_looking.add(process)

    def _move(self) -> int:
        return self._carry_out("mv", str(self._place()), str(RUNS / f"b{self._own().pid}"))

    def _move_into(self) -> int:
        return self._carry_out("mv", str(self._place()), f"{ELSEWHERE}/")

    def _remove(self) -> int:
        self._to_remove = True
        return self._carry_out("rm", str(self._place()), "--yes", *(["--force"] if self.random.random() < 0.5 else []))

    def _archive(self) -> int:
        return self._carry_out("archive", str(self._place()), str(ARCHIVE))

    def _prune(self) -> int:
        return self._carry_out("checkpoints", str(self._place()), "--prune", "--keep-last", str(KEPT))

    def _pin(self) -> int:
        place = self._place()
        with self.world.outside():
            steps = sorted(RunDir(place).checkpoint_steps())
        if not steps:
            return 0
        step = steps[0] if self.random.random() < 0.7 else self.random.choice(steps)
        status = self._carry_out("pin", str(place), "--step", str(step))
        if status == 0:
            self._pinned.add(step)
        return status

    def _resume(self) -> int:
        """Run `runner resume` on this machine."""
        place = self._place()
        if not files.is_file(RunDir(place).config):
            raise UserError(f"{place} is not a run directory")
        made: Any = replace(order(place, "a"), resumed=True)
        queue: Any = Queue(self)
        planned = plan.plan_runs([made], queue, True)[0]
        return int(start.run_here(planned)) if planned.starts else 0

    def _submit(self) -> int:
        """Run `runner resume` with a queue."""
        place = self._place()
        if not files.is_file(RunDir(place).config):
            raise UserError(f"{place} is not a run directory")
        return self._start(replace(order(place, "a"), resumed=True))

    def _fork(self) -> int:
        """Fork a branch from the newest checkpoint."""
        trunk = self._place()
        step = choice.choose(Directory(checkpoints.checkpoints_of(trunk)), "last").step
        return self._branch(trunk, step)

    def _branch(self, trunk: Path, step: int) -> int:
        if not files.is_file(RunDir(trunk).config):
            raise UserError(f"{trunk} is not a run directory")
        name = f"branch{self._count}"
        return self._start(order(RUNS / f"{name}-5e6f7a8b", name, TOTAL, trunk, step))

    def _start(self, made: Any) -> int:
        queue: Any = Queue(self)
        planned = plan.plan_runs([made], queue, False)
        if not planned[0].starts:
            return 0
        return int(start._start_all(planned, queue, False))

    def _evaluate(self) -> int:
        """Run `runner evaluate` on every checkpoint, with made-up results."""
        run = RunDir(self._place())
        if not files.is_file(run.config):
            raise UserError(f"{run.path} is not a run directory")
        digest = self.random.choice(("0f0f", "a1a1"))
        request = evaluations.Request(digest, self.random.choice(("all", "last")))
        evaluator: Any = SimpleNamespace(results=partial(self._results, run))
        config: Any = settings(frozen_of(run.path))
        work = Work(run, request, config, Ranks(), lambda: False, _evaluator=evaluator, say=_quiet)
        work.do()
        return 0

    def _results(self, run: RunDir, chosen: Intact, stop: Callable[[], bool]) -> dict[str, float]:
        clock.sleep(self.random.uniform(0.2, 2.0))
        return {"eval_loss": float(chosen.step)}

    @contextmanager
    def _at_work(self, what: str, name: str) -> Iterator[None]:
        """Mark this process as working on a run, which must not be moved in the block."""
        process = self._own()
        self._working[process] = (what, name)
        try:
            yield
        finally:
            self._working.pop(process, None)

    # ---- jobs

    def submit(self, run_dir: Path, guard: files.Guard) -> None:
        """Put a run into the queue, as a launcher does."""
        self._numbers += 1
        number, process = self._numbers, self._own()
        files.write_json(RunDir(run_dir).job, {"launcher": LAUNCHER, "job_id": number}, guard=guard)
        job = self.queue[number] = Job(number, run_dir, process)
        self.world.tell(f"submits {run_dir.name} as job {number}", process.name)
        self.world.at(self.random.uniform(0.0, 5.0), partial(self._begin_job, job))

    def not_submitted(self, run_dir: Path, error: OSError) -> None:
        """Report an error of the file system, as a launcher does: an injected one, or the run's directory is gone.

        The directory is gone if a process was frozen in the call that moves it, and has just woken up.
        """
        process = self._own()
        moved = isinstance(error, FileNotFoundError) and not self._is_run(str(run_dir))
        self.must(moved or process in self._troubled or self.disk.full, f"{process.name} cannot submit: {error}")
        self.world.tell(f"cannot submit {run_dir.name}: {error}", process.name)

    def _begin_job(self, job: Job) -> None:
        if job.state != "pending":
            return
        job.state = "running"
        host = self.random.choice(self.hosts)
        job.process = self.spawn(
            host, f"job {job.number}", partial(self._run_command, partial_named(self._attempt, job.run_dir, job), 0.0)
        )

    # ---- attempts

    def _attempt_under(self, run_dir: Path, job: Job | None = None, lease: Lease | None = None) -> int:
        """Replace `runner.training.attempt.attempt`, with the same order of actions and no model."""
        return self._attempt(run_dir, job, lease)

    def _attempt(self, run_dir: Path, job: Job | None, lease: Lease | None = None) -> int:
        plain = frozen_of(run_dir)
        wanted = settings(plain)
        lease = lease or acquire_for_job(RunDir(run_dir), job, TIMEOUT_S, _quiet)  # type: ignore[arg-type]
        with lease:
            try:
                self._train(replace(RunDir(run_dir), guard=lease.guard), plain["name"], wanted, lease)
            except OSError as error:
                raise UserError(f"{error.filename}: {error.strerror}") from error
        return 0

    def _train(self, run: RunDir, name: str, wanted: Settings, lease: Lease) -> None:
        process, fence = self._own(), Fence(lease.fence, lease.check_fence)
        with self._at_work("trains", name):
            if Finish.of(run).covers(wanted.known_steps, None):
                lease.check_fence()
                return
            self._fences[process] = lease.fence
            files.write_json(run.attempt, {"fence": lease.fence}, guard=run.guard)
            Directory(run.checkpoints, fence).sweep()
            if process not in self._troubled:  # no older attempt can train now, unless a sweep was refused
                self._acquired[name] = max(self._acquired.get(name, 0), lease.fence)
            newest = choice.newest(Directory(run.checkpoints))
            step = newest.step if newest else 0
            self.world.tell(f"trains {name} from step {step} as number {lease.fence}", process.name)
            recorded = last_step(run)
            lease.check_fence()
            self.must(recorded >= step, f"the records of {name} end at step {recorded}, and it resumes at {step}")
            metrics, timings = jsonl.resume_records(run, step)
            with suppress(OSError), metrics, timings:
                while step < wanted.known_steps:
                    clock.sleep(self.random.uniform(0.1, 1.5))
                    step += 1
                    metrics.write({"step": step, "loss": 0.5})
                    if step % EVERY == 0:
                        self._save_and_delete(run, name, step, fence, metrics)
                metrics.sync()
                lease.check_fence()
                if step not in run.checkpoint_steps():
                    raise UserError("the last checkpoint cannot be saved")
                files.write_json(run.finished, {"steps": step}, guard=run.guard)

    def _save_and_delete(self, run: RunDir, name: str, step: int, fence: Fence, metrics: jsonl.JsonlWriter) -> None:
        """Save as the saver does. The next save repeats what the disk refuses."""
        try:
            Directory(run.checkpoints, fence).sweep()
            if choice.judge(Folder(run.checkpoint(step))) is None:
                metrics.sync()
                save(run, step, fence)
                self._committed.setdefault(name, set()).add(step)
        except (OSError, CheckpointError) as error:
            fence.check()
            self.world.tell(f"cannot save step {step}: {error}", self._own().name)
        try:
            found = choice.candidates(Directory(run.checkpoints))
            for each in Retention(KEPT).to_delete(found, pins.pinned(run.checkpoints)):
                Directory(run.checkpoints, fence).delete(each.path.name)
            Directory(run.checkpoints, fence).sweep()
        except (OSError, CheckpointError) as error:
            self.world.tell(f"cannot delete what is old: {error}", self._own().name)

    # ---- checks

    def _watch(self, what: str, path: str, to: str) -> None:
        task = self.world.current
        if task is None:
            return
        process = task.process
        if self._traps and (moment := self._moment_of(what, path, to)) is not None:
            self._spring(moment, process)
        if what == "rename" and Path(path).parent.name != "checkpoints" and self._is_run(to):
            self._moved(process, Path(path), Path(to))
        if what == "rename" and self._is_watched and re.fullmatch(r".*/checkpoints/step_\d+", to):
            self.world.at(self.random.uniform(0.0, 0.05), partial(self._command, self._pin, False))
        if what == "link" and to == str(ARCHIVE):
            self._check_packed(process)
        if what == "unlink" and (aside := re.match(r".*/\.[^/]+\.removed-\d+-(\d+)-[^/]+", path)):
            self._check_removed(process, Path(aside[0]), int(aside[1]))
        if what in ("rename", "unlink") and self._working.get(process, ("", ""))[0] == "trains":
            self._check_fence(process, Path(path))
            self._check_fence(process, Path(to or path))

    def _is_run(self, path: str) -> bool:
        with self.world.outside():
            return custody.is_run(RunDir(Path(path)))

    def _saved(self, run_dir: Path) -> list[int]:
        with self.world.outside():
            return list(RunDir(run_dir).checkpoint_steps())

    def _moved(self, process: Process, source: Path, target: Path) -> None:
        """Check that no process was working on a run that was renamed."""
        with self.world.outside():
            name = str(frozen(target).get("name"))
        self.world.tell(f"renames {source.name} to {target.name}", process.name)
        self._movers.add(process)
        for other, (doing, run) in self._working.items():
            if run == name and other is not process and other.alive and other not in self._troubled:
                self._may_not(process, f"moved {source.name} while {other.name} {doing} it")
        for job in self.queue.values():
            if job.live and job.run_dir == source and job.submitter not in self._troubled:
                self._may_not(process, f"moved {source.name}, which has job {job.number} in the queue")
        if target.name.startswith("."):
            self.must(name != "a" or self._to_remove, f"{process.name} removes {source.name}, which nobody asked for")

    def _check_removed(self, process: Process, aside: Path, number: int) -> None:
        """Check that a removal deletes no work of a process that acquired the run before its rename."""
        with self.world.outside():
            holder = leases.read_holder(RunDir(aside).lease)
        newest = holder[0] if holder else 0
        self.must(newest <= number, f"{process.name} deletes {aside.name}, which number {newest} has taken over")

    def _may_not(self, process: Process, what: str) -> None:
        """Fail, unless the process was frozen in its last look at the leases or in this call."""
        self.must(process.just_thawed or process in self._frozen_looking, f"{process.name} {what}")

    def _check_fence(self, process: Process, path: Path) -> None:
        """Check that an older attempt changes no names once a newer one works on the run."""
        if path.parent.name != "checkpoints" or not re.fullmatch(r"step_\d+", path.name):
            return
        with self.world.outside():
            name = str(frozen(path.parent.parent).get("name"))
            if self._working[process] != ("trains", name):
                return
        newer = self._acquired.get(name, 0)
        own = self._fences[process]
        self.must(own >= newer, f"{process.name}, number {own}, changed {path.name} although number {newer} trains")

    def _check_packed(self, process: Process) -> None:
        """Check, when an archive gets its name, that it holds the files of the run."""
        places = [path for path in self._places("a") if not path.name.startswith(".")]
        self._packed = self._content_of_archive()
        self.must(self._packed is not None, "an archive that cannot be read got its name")
        for place in places:
            with self.world.outside():
                # Files that a superseded process saves when it wakes up are not committed any more.
                mine = {name: data for name, data in _contents(place).items() if ".tmp-" not in name}
                there = {name: data for name, data in mine.items() if not MADE_BY_OTHERS.fullmatch(name)}
            packed = self._packed or {}
            lacks = [name for name in there if packed.get(name) != there[name]]
            if lacks:
                self._may_not(process, f"gave the archive its name, which lacks {lacks} of {place.name}")

    def _content_of_archive(self) -> dict[str, bytes] | None:
        """Return the content of the archive by path in the run, or None if it is damaged."""
        try:
            with (
                self.world.outside(),
                files.open_regular(ARCHIVE) as file,
                tarfile.open(fileobj=file, mode="r") as tar,
            ):
                return {
                    each.name.partition("/")[2]: reader.read()
                    for each in tar
                    if (reader := tar.extractfile(each)) is not None
                }
        except (OSError, EOFError, tarfile.TarError):
            return None

    def finish(self) -> None:
        """Run the last commands, which complete those of killed processes. Then check that everything is in order."""
        self._check_places()
        self._traps.clear()
        for host in self.hosts * self._blackout:
            self.power_loss(host)
        self.disk.full = False
        for job in self.queue.values():
            job.state = "completed"
        with mock.patch.object(custody, "TIMEOUT_S", LAST_TIMEOUT_S):
            self.spawn(self.hosts[0], "caretaker", self._tidy)
            self.world.run()
        self._check_places()
        self._check_runs()
        self._check_strays()
        # A branch whose command was killed early is incomplete. The rerun command would complete it.
        begun = [
            f"{path}/"
            for path in self._directories(self.disk.root, Path(ROOT))
            if path.name.startswith("branch") and not self._is_run(str(path))
        ]
        left = [name for name in _names(self.disk.root, ROOT) if LEFT.search(name)]
        if not self._places("a"):
            begun.append(f"{ARCHIVE.with_name('.' + ARCHIVE.name)}.tmp-")  # the next archive of this name removes it
        # A run with the same name removes refused and removed files, and the next result of a step an older one.
        begun += [f"{path.parent}/.{path.name}.removed-" for path in self._directories(self.disk.root, Path(ROOT))]
        left = [name for name in left if not name.startswith(tuple(begun)) and "/evaluations/step_" not in name]
        self.must(not left, f"these are left behind: {left}")

    def _tidy(self) -> None:
        """Rerun the commands that were killed, and continue each run for some steps, as users do at last."""
        for folder in (RUNS, ELSEWHERE, ELSEWHERE.parent):
            with self.world.outside():
                names = sorted(files.list_dir(folder)) if files.is_dir(folder) else []
            removed = {found["name"]: None for name in names if (found := housekeeping._REMOVED.fullmatch(name))}
            for name in removed:
                if name not in names:
                    self._carry_out("rm", str(folder / name), "--yes")
        self.must(files.exists(ARCHIVE) or not self._reported, "an archive that was reported as done is gone")
        if self._packed is not None and files.exists(ARCHIVE):
            self._check_archive()
            files.remove(ARCHIVE)
        for name in ("a", *(f"branch{number}" for number in range(1, self._count + 1))):
            for place in self._places(name):
                self._continue(place, name)

    def _continue(self, place: Path, name: str) -> None:
        """Take each lease of the run and sweep. Pack the run again if a killed archive left files."""
        run = RunDir(place)
        with custody.custody(run) as held:
            Directory(run.checkpoints, Fence(held.lease.fence, held.lease.check_fence)).sweep()
        if name == "a" and any(".tmp-" in entry for entry in self.disk.root.entries):
            self._carry_out(
                "archive", str(place), str(ARCHIVE)
            )  # the next archive of this name sweeps the files of a killed one

    def _check_places(self) -> None:
        places = self._places("a")
        self.must(len(places) <= 1, f"the run is at several places: {', '.join(map(str, places))}")
        if not places:
            self.must(self._to_remove, "the run is lost")

    def _check_archive(self) -> None:
        if self._packed is not None and files.exists(ARCHIVE):
            self.must(self._content_of_archive() == self._packed, "the archive is damaged")

    def _check_strays(self) -> None:
        """Check that nothing recreates a moved run. Only an empty directory may be left, after kills or troubles."""
        for path in self._directories(self.disk.root, Path(ROOT)):
            if path.name.startswith(".") or path.name.startswith("branch") or self._is_run(str(path)):
                continue
            left = sorted(_contents(path))
            self.must(not left, f"{path} is no run, or no run any more, and holds {left}")
            ended_early = self._troubled or any(process.killed_by for process in self.world.processes)
            self.must(ended_early, f"{path} is left behind, empty but for leases")

    def _directories(self, directory: Node, path: Path) -> Iterator[Path]:
        """Yield the directories that could be runs."""
        for entry, node in sorted(directory.entries.items()):
            if node.is_dir and path / entry in (RUNS, ELSEWHERE, ELSEWHERE.parent):
                yield from self._directories(node, path / entry)
            elif node.is_dir:
                yield path / entry

    def _check_runs(self) -> None:
        for place in self._places("a"):
            run = RunDir(place)
            found = {each.step: choice.corruption_of(each) for each in choice.candidates(Directory(run.checkpoints))}
            # A save whose last sync fails is reported as failed but may exist. Then retention counts it.
            whole = {step for step, corruption in found.items() if corruption is None}
            kept = set(sorted(self._committed["a"] | whole)[-KEPT:])
            names = files.list_dir(run.checkpoints)
            kept |= {step for step in self._pinned if f"step_{step:08d}.pinned" in names}
            lost = sorted(step for step in kept if found.get(step, "it is gone"))
            self.must(not lost, f"checkpoints {lost} are lost; there are {sorted(found)}")
            if self._finished is not None:
                now = {name: data for name, data in _contents(place).items() if not MADE_BY_OTHERS.fullmatch(name)}
                changed = sorted(
                    name for name in now.keys() | self._finished.keys() if now.get(name) != self._finished.get(name)
                )
                self.must(not changed, f"the finished run was changed: {changed}")


def partial_named(function: Callable[..., int], *arguments: Any) -> Callable[[], int]:
    """Return a call of `function` that counts as a separate command."""
    return lambda: function(*arguments)


def frozen_of(run_dir: Path) -> dict[str, Any]:
    """Return the config with which an attempt trains.

    Raises:
        UserError: there is none.
    """
    try:
        return frozen(run_dir)
    except FileNotFoundError:
        raise UserError(f"{run_dir} is not a run directory") from None
    except OSError as error:
        raise UserError(f"{run_dir} cannot be read ({error.strerror})") from error


def _contents(run: Path) -> dict[str, bytes]:
    """Return the files of a run except its leases, by path in the run."""
    found = {}
    for folder, folders, names in files.walk(run):
        if Path(folder) == run:
            folders[:] = [name for name in folders if name not in LEASES]
        for name in names:
            path = Path(folder) / name
            found[str(path.relative_to(run))] = files.read_bytes(path)
    return found


def _names(directory: Node, prefix: str) -> Iterator[str]:
    for name, node in sorted(directory.entries.items()):
        yield f"{prefix}/{name}"
        if node.is_dir:
            yield from _names(node, f"{prefix}/{name}")


def _quiet(message: str) -> None:
    """Ignore the messages of a command at work."""

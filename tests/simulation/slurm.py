"""A simulated Slurm: one controller, a few nodes, and the commands that query them.

Its output is in the form that `launch.scheduler` reads, dated by the controller's clock. A job is started, stopped,
killed and requeued as on real clusters (see docs/slurm.md): its processes get signals, and only when all of them are
gone, the job leaves the state COMPLETING. A controller that is away does nothing, and catches up when it is back. A
node that is cut off continues to run its processes, while its jobs are given to other nodes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from random import Random
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

from runner.contracts import SLURM_OVER, SLURM_SUSPENDED, SLURM_WAITING
from runner.system import processes
from simulation.engine import BrokenPromiseError, Host, Process, Task, World

HOLD_S = 120.0
"""Delay of a requeued job, in seconds."""
MIN_AGE_S = 300.0
"""Seconds for which Slurm remembers a job once it is over (MinJobAge)."""
UNREACHABLE = "Unable to contact slurm controller (connect failure)"
UNKNOWN = "Invalid job id specified"
SILENT = "Socket timed out on send/recv operation"
GIVES_UP_S = 60.0
"""Maximum seconds that a command waits for an answer."""
PENDING = "Job is pending execution"
DISABLED = "Requested operation is presently disabled"
BUSY = "Job can not be altered now, try again later"
PARTITIONS = (
    "PartitionName=low Default=YES DefaultTime=NONE GraceTime={grace:.0f} MaxTime=UNLIMITED Nodes=node[1-2] "
    "TotalNodes=2 PreemptMode=REQUEUE\n"
)
CONFIG = "KillWait = {kill_wait:.0f} sec\nMaxArraySize = 1001\nPreemptType = preempt/partition_prio\n"


class Refused(Exception):  # noqa: N818 the message that a command prints before it exits with 1
    """Slurm's error message."""


@dataclass(eq=False)
class Job:
    """A job as the controller knows it.

    Attributes:
        number: SLURM_JOB_ID.
        array: (id of the array, number of the task), or None.
        script: the submitted script.
        name: name of the job.
        path: path of the script.
        submitted: time of the submission or the last requeue, like all times by the controller's clock.
        state: as in squeue(1).
        restarts: number of requeues.
        starts: number of starts, which identifies a start.
        began_with: `restarts` at the beginning of this start.
        after: its next state, once its processes are gone.
        truth: the real events of each start, by `restarts` at that time.
        cancelled: whether the user or a command of the runner has cancelled it.
        withdrawn: whether a command cancelled it because it could not record the job, or another job has the run.
        user: the user's number.
        seen_by: processes that Slurm has shown the record of this job of another user.
        hindered: whether something kept this start from requesting a requeue in time.
    """

    number: int
    array: tuple[int, int] | None
    script: Any
    name: str
    path: str
    submitted: float
    eligible: float
    limit_s: float | None
    notice_s: float
    state: str = "PENDING"
    reason: str = "None"
    restarts: int = 0
    may_requeue: bool = True
    held: bool = False
    starts: int = 0
    began_with: int = 0
    began: float | None = None
    end: float | None = None
    preempted: float | None = None
    suspended: float = 0.0
    host: Host | None = None
    after: str = ""
    processes: list[Process] = field(default_factory=list)
    batch: Process | None = None
    truth: dict[int, set[str]] = field(default_factory=dict)
    cancelled: bool = False
    withdrawn: bool = False
    hindered: bool = False
    user: int = 0
    seen_by: set[Process] = field(default_factory=set)

    @property
    def job_id(self) -> str:
        """Return `12`, or `12_3` for a task of an array."""
        return f"{self.array[0]}_{self.array[1]}" if self.array else str(self.number)

    @property
    def is_strange(self) -> bool:
        """Return whether the job belongs to another user or project."""
        return self.script is None

    @property
    def is_over(self) -> bool:
        """Return whether it has ended for good."""
        return self.state in SLURM_OVER

    @property
    def is_running(self) -> bool:
        """Return whether its processes should work."""
        return not self.is_over and self.state not in SLURM_WAITING and self.state != "COMPLETING"

    def happens(self, what: str) -> None:
        """Note an event of this start."""
        self.truth.setdefault(self.began_with, set()).add(what)


class Slurm:
    """The controller and its command-line interface.

    Args:
        world: the world of the cluster.
        random: draws durations.
        nodes: machines that run jobs.
        begin: starts the batch script of a job and returns its process.
    """

    def __init__(self, world: World, random: Random, nodes: list[Host], begin: Callable[[Job], Process]) -> None:
        self.world = world
        self.nodes = nodes
        self.jobs: dict[str, Job] = {}
        self.all_jobs: list[Job] = []
        self.grace_s = random.choice((0.0, 3.0, 8.0, 20.0, 60.0))
        self.kill_wait_s = random.choice((2.0, 5.0, 30.0))
        self.epilog_s = random.choice((0.1, 0.1, 3.0, 40.0))
        self.offset_s = random.uniform(-1.0, 1.0)
        self.away_until = 0.0
        self.refuses_until = 0.0
        """Time until which it requeues nothing."""
        self.cancels_requeued = 0
        """Number of the next requeue requests that coincide with a cancellation by the user."""
        self.lost: list[int] = []
        """For each of the next answers: 0 late, 1 lost, 2 the request is lost."""
        self.on_submit: list[Callable[[Job], object]] = []
        self.troubled: set[Process] = set()
        """Processes that did not get every answer in time."""
        self.requeues = random.random() < 0.85
        """Whether jobs may be requeued by default. Otherwise a job must first ask for it."""
        self._random = random
        self._begin = begin
        self._next = 1
        self._losses = 0
        self._busy: dict[Host, Job] = {}
        self._left: dict[Host, list[Process]] = {node: [] for node in nodes}
        self._down: dict[Host, float] = {}

    # ---- clocks and alarms

    @property
    def now(self) -> float:
        """Return the time by the controller's clock."""
        return self.world.now + self.offset_s

    @property
    def is_away(self) -> bool:
        """Return whether the controller does not answer."""
        return self.world.now < self.away_until

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        """Let the controller act after `seconds`, or once it is back."""

        def act() -> None:
            if self.is_away:
                self.world.at(self.away_until - self.world.now + self._random.uniform(0.1, 2.0), act)
            else:
                action()

        self.world.at(seconds, act)

    def _of_start(self, job: Job, action: Callable[[Job], object]) -> Callable[[], object]:
        """Return `action`, which does nothing if the job is forgotten or in another start by then."""
        number = job.starts

        def act() -> None:
            if job.starts == number and self.jobs.get(job.job_id) is job:
                action(job)

        return act

    # ---- the life of a job

    def submit(self, script: Any, name: str, path: str, tasks: int, limit_s: float | None, notice_s: float) -> str:
        """Put a job, or an array of `tasks` tasks, into the queue. Return its id."""
        first = self._next
        self._next += tasks
        for task in range(tasks):
            # The last task of an array has the id of the array.
            number = first + (task + 1) % tasks
            array = (first, task) if tasks > 1 else None
            now = float(int(self.now))
            job = Job(number, array, script, name, path, now, now, limit_s, notice_s, user=processes.user_id())
            job.may_requeue = self.requeues
            self.jobs[job.job_id] = job
            self.all_jobs.append(job)
            self.world.tell(f"is submitted as job {job.job_id}", f"job {job.job_id}")
            for action in self.on_submit:
                action(job)
        self._schedule_soon()
        return str(first)

    def _schedule_soon(self) -> None:
        self._later(self._random.uniform(0.5, 10.0), self.schedule)

    def schedule(self) -> None:
        """Start the jobs that can start."""
        for job in list(self.jobs.values()):
            if job.state != "PENDING" or job.held or job.is_strange:
                continue
            if job.eligible > self.now:
                self._later(job.eligible - self.now + 0.5, self.schedule)
                continue
            job.reason = "Resources"
            free = [node for node in self.nodes if node not in self._busy and node not in self._down]
            if not free:
                continue
            self._start(job, self._random.choice(free))

    def _start(self, job: Job, host: Host) -> None:
        job.starts += 1
        job.state, job.reason, job.host, job.after = "RUNNING", "None", host, ""
        job.began_with, job.preempted, job.hindered = job.restarts, None, False
        job.began = float(int(self.now))
        job.end = None if job.limit_s is None else job.began + job.limit_s
        job.truth.setdefault(job.restarts, set())
        job.processes = []
        self._busy[host] = job
        self.world.tell(f"starts on {host.name}, restarts {job.restarts}", f"job {job.job_id}")
        job.batch = self._begin(job)
        self.join(job, job.batch)
        if job.limit_s is not None:
            early = self._random.uniform(0.0, min(60.0, job.limit_s / 4))
            self._later(max(job.limit_s - job.notice_s - early, 0.1), self._of_start(job, self._notice))
            self._later(job.limit_s, self._of_start(job, self._limit))

    def join(self, job: Job, process: Process) -> None:
        """Add a process to the present start of a job."""
        number = job.starts
        job.processes.append(process)

        def ended(_: Process) -> None:
            if job.starts == number and process in job.processes:
                job.processes.remove(process)
                self._lost_one(job, process)
            for left in self._left.values():
                if process in left:
                    left.remove(process)

        process.on_end.append(ended)

    def _lost_one(self, job: Job, process: Process) -> None:
        """Handle the end of a job's process, which its node reports to the controller."""
        if job.host is None:
            return
        if process is job.batch and job.state != "COMPLETING":
            status = process.status
            self._later(
                self._random.uniform(0.01, 0.3), self._of_start(job, lambda each: self._batch_ended(each, status))
            )
        elif not job.processes and job.state == "COMPLETING":
            self._later(self._random.uniform(0.01, self.epilog_s), self._of_start(job, self._finalize))

    def _batch_ended(self, job: Job, status: int | None) -> None:
        if job.state == "COMPLETING" or not (job.is_running):
            return
        self._complete(job, "COMPLETED" if status == 0 else "FAILED")
        for process in list(job.processes):
            self.world.kill(process, "is killed: the batch script has ended")
        self._check_gone(job)

    def _complete(self, job: Job, after: str, reason: str = "None") -> None:
        """Begin to end the job, which then gets the state `after`."""
        job.state, job.after, job.reason = "COMPLETING", after, reason
        job.end = float(int(self.now))

    def _check_gone(self, job: Job) -> None:
        if not job.processes:
            self._later(self._random.uniform(0.01, self.epilog_s), self._of_start(job, self._finalize))

    def _finalize(self, job: Job) -> None:
        if job.state != "COMPLETING" or job.processes:
            return
        self._release(job)
        job.state = job.after
        self.world.tell(f"is {job.state}", f"job {job.job_id}")
        if job.state == "PENDING":
            self._held_back(job)
        else:
            self._forget_later(job)
        self._schedule_soon()

    def _release(self, job: Job) -> None:
        if job.host is not None and self._busy.get(job.host) is job:
            del self._busy[job.host]

    def _held_back(self, job: Job) -> None:
        job.state, job.reason = "PENDING", "JobHeldAdmin" if job.held else "BeginTime"
        job.eligible = self.now + HOLD_S
        job.began = job.end = job.host = job.batch = None
        self._later(HOLD_S + self._random.uniform(0.5, 5.0), self.schedule)

    def _forget_later(self, job: Job) -> None:
        def forget() -> None:
            if job.is_over and self.jobs.get(job.job_id) is job:
                del self.jobs[job.job_id]

        self.world.at(MIN_AGE_S, forget)

    def _send(self, job: Job, signum: int) -> None:
        if job.host is None or job.host.cut_off:
            return
        for process in list(job.processes):
            if signum != signal.SIGUSR2 or process is not job.batch:
                self.world.signal(process, signum)

    def _ask_to_stop(self, job: Job) -> None:
        """Send SIGCONT and SIGTERM now, and SIGKILL after KillWait."""
        self._send(job, signal.SIGCONT)
        self._send(job, signal.SIGTERM)
        self._later(self.kill_wait_s, self._of_start(job, self._kill))
        self._check_gone(job)

    def _kill(self, job: Job) -> None:
        if job.state == "COMPLETING":
            self._send(job, signal.SIGKILL)

    # ---- events of a job

    def _notice(self, job: Job) -> None:
        if job.is_running:
            job.happens("time limit")
            self._send(job, signal.SIGUSR2)

    def _limit(self, job: Job) -> None:
        left_s = (job.end or 0.0) - self.now
        if left_s > 1.0:  # a suspension has moved the limit
            self._later(left_s, self._of_start(job, self._limit))
        elif job.is_running and job.state not in SLURM_SUSPENDED:
            self.world.tell("has reached its time limit", f"job {job.job_id}")
            job.happens("time limit")
            self._complete(job, "TIMEOUT", "TimeLimit")
            self._ask_to_stop(job)

    def shorten(self, job: Job, seconds: float, notice_s: float) -> None:
        """Shorten the time limit of a job."""
        if job.is_running and job.began is not None:
            job.end = float(int(self.now + seconds))
            self._later(max(seconds - notice_s, 0.0), self._of_start(job, self._notice))
            self._later(seconds, self._of_start(job, self._limit))

    def preempt(self, job: Job, mode: str, grace_s: float, lag_s: float) -> None:
        """Preempt a job for one of higher priority. With a lag, the signal comes before the state that explains it."""
        if not job.is_running or job.preempted is not None or job.state in SLURM_SUSPENDED:
            return
        self.world.tell(f"is preempted ({mode}, grace time {grace_s:.0f} s)", f"job {job.job_id}")
        job.happens("preempted")
        if lag_s:
            self._send(job, signal.SIGTERM)

        def explain(job: Job) -> None:
            if not job.is_running:
                return
            job.preempted = float(int(self.now))
            if grace_s:
                job.end = min(job.end or float("inf"), float(int(self.now + grace_s)))
                self._send(job, signal.SIGCONT)
                self._send(job, signal.SIGTERM)
                self._later(grace_s, self._of_start(job, over))
            else:
                over(job)

        def over(job: Job) -> None:
            if not job.is_running:
                return
            if mode == "REQUEUE" and job.may_requeue:
                job.preempted = None
                self._requeue_running(job)
            else:
                self._complete(job, "PREEMPTED")
            if grace_s:
                self._send(job, signal.SIGKILL)
                self._check_gone(job)
            else:
                self._ask_to_stop(job)

        if lag_s:
            self._later(lag_s, self._of_start(job, explain))
        else:
            explain(job)

    def _requeue_running(self, job: Job) -> None:
        """Requeue a running job."""
        self._complete(job, "PENDING")
        job.restarts += 1
        job.submitted = float(int(self.now))

    def cancel(self, job: Job, lag_s: float = 0.0) -> None:
        """Cancel a job like scancel, which does not touch a job that is already ending."""
        if job.is_over or (job.state == "COMPLETING" and job.after != "PENDING"):
            return
        job.cancelled = True
        job.happens("cancelled")
        self.world.tell("is cancelled", f"job {job.job_id}")
        if lag_s and job.is_running:
            self._send(job, signal.SIGTERM)
            self.world.at(lag_s, partial(self._cancel, job))  # carried out even if the controller is away then
        else:
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        if job.state == "COMPLETING":
            if job.after == "PENDING":
                job.after = "CANCELLED"
            elif job.after != "CANCELLED":
                # The job has ended otherwise, and the scancel is forgotten.
                job.cancelled = False
        elif job.state in SLURM_WAITING:
            job.state, job.end = "CANCELLED", self.now
            self._forget_later(job)
        elif not job.is_over and job.preempted == float(int(self.now)):
            # Slurm's times are whole seconds: a job that ends in the second of its preemption seems preempted.
            self._later(1.0, partial(self._cancel, job))
        elif not job.is_over:
            suspended = job.state in SLURM_SUSPENDED
            self._complete(job, "CANCELLED")
            if suspended:
                self._send(job, signal.SIGKILL)
                self._check_gone(job)
            else:
                self._ask_to_stop(job)

    def requeue(self, job: Job, incomplete: bool = False) -> None:
        """Requeue a job like `scontrol requeue [incomplete]`.

        Raises:
            Refused: the job is not requeued.
        """
        if job.state in SLURM_WAITING or (job.state == "COMPLETING" and job.after == "PENDING"):
            raise Refused(PENDING)
        if incomplete and (job.is_over or job.state == "COMPLETING"):
            return  # Slurm reports success
        if not job.may_requeue:
            raise Refused(DISABLED)
        if job.is_over:
            job.restarts += 1
            job.submitted = float(int(self.now))
            self._held_back(job)
        elif job.state == "COMPLETING":
            job.after = "PENDING"
            job.restarts += 1
            job.submitted = float(int(self.now))
        elif job.state in SLURM_SUSPENDED:  # killed without a signal, and held
            self._requeue_running(job)
            job.held = True
            self._send(job, signal.SIGKILL)
            self._check_gone(job)
        else:
            self._requeue_running(job)
            self._ask_to_stop(job)
        self.world.tell(f"is requeued, restarts {job.restarts}", f"job {job.job_id}")

    def suspend(self, job: Job) -> None:
        """Suspend a job like `scontrol suspend` or a preemption that suspends."""
        if job.is_running and job.host is not None and not job.host.cut_off and job.state == "RUNNING":
            self.world.tell("is suspended", f"job {job.job_id}")
            # The suspension stops its time limit, but not the grace time of a preemption.
            job.hindered |= "preempted" in job.truth[job.began_with]
            job.happens("suspended")
            job.state, job.suspended = "SUSPENDED", self.now
            for process in job.processes:
                self.world.freeze(process)

    def resume(self, job: Job) -> None:
        """Resume a job like `scontrol resume`."""
        if job.state in SLURM_SUSPENDED:
            self.world.tell("is resumed", f"job {job.job_id}")
            job.state = "RUNNING"
            if job.end is not None:
                job.end = float(int(job.end + self.now - job.suspended))
                self._later(job.end - self.now, self._of_start(job, self._limit))
            for process in job.processes:
                self.world.thaw(process)

    # ---- events of nodes and of the controller

    def node_lost(self, host: Host) -> None:
        """Let the controller find that a node does not answer. Its jobs are requeued, whatever still runs there."""
        if host in self._down:
            return
        self._down[host] = self.now
        self.world.tell("is DOWN for Slurm", host.name)
        job = self._busy.pop(host, None)
        if job is None:
            return
        job.happens("node failure")
        self._left[host] += job.processes
        job.processes, job.batch = [], None
        if job.state == "COMPLETING":
            job.state = job.after
        elif job.may_requeue:
            job.state = "PENDING"
            job.restarts += 1
            job.submitted = float(int(self.now))
        else:
            job.state = "NODE_FAIL"
        job.starts += 1  # nothing of the old start concerns the job any more
        job.end = float(int(self.now))
        if job.state == "PENDING":
            self._held_back(job)
        else:
            job.reason = "NodeDown" if job.state == "NODE_FAIL" else job.reason
            self._forget_later(job)
        self._schedule_soon()

    def node_back(self, host: Host) -> None:
        """Let a node answer again, and kill its remaining processes."""
        host.cut_off = False
        if host in self._down:
            del self._down[host]
            self.world.tell("is back for Slurm", host.name)
            for process in list(self._left[host]):
                self.world.kill(process, "is killed: its job is not here any more")
            self._left[host].clear()
            self._schedule_soon()

    def lose_state(self) -> None:
        """Restart the controller without its state: it knows no job, ids begin at 1, and nodes end their processes."""
        self.world.tell("has lost its state", "slurmctld")
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self._busy.clear()
        self._next = 1
        for job in jobs:
            job.happens("lost")
            job.starts += 1
            job.state = "REVOKED" if not job.is_over else job.state
            for process in list(job.processes):
                self._later(self._random.uniform(0.5, 60.0), partial(self.world.kill, process))
        self._losses += 1
        self._later(self._random.uniform(1.0, 30.0), partial(self._strangers, self._losses))

    def _strangers(self, losses: int) -> None:
        """Give the first ids to jobs of other users or with other names. They run on other nodes for a long time."""
        if losses != self._losses:
            return  # a controller that has just lost its state takes longer than that to come back
        for _ in range(self._random.choice((0, 1, 1, 2))):
            number, self._next = self._next, self._next + 1
            user = processes.user_id() + self._random.choice((0, 1))
            now = float(int(self.now)) + 1.0
            job = Job(number, None, None, "something-else", "", now, now, None, 0.0, "RUNNING", user=user)
            job.began = now
            self.jobs[job.job_id] = job
            self.world.tell(f"is submitted by {'another user' if job.user else 'the user'}", f"job {number}")

    def calm(self) -> None:
        """Stop all disturbances: the controller answers, all nodes are up, no job is held."""
        self.away_until = self.refuses_until = 0.0
        self.cancels_requeued = 0
        self.lost.clear()
        for host in self.nodes:
            self.node_back(host)
        for job in list(self.jobs.values()):
            self.resume(job)
            job.held = False
        self._schedule_soon()

    def live(self) -> list[Job]:
        """Return the jobs that wait, run or end, without foreign ones."""
        return [job for job in self.jobs.values() if not job.is_over and not job.is_strange]

    # ---- the commands

    def run(self, command: list[str], **options: Any) -> CompletedProcess[str]:
        """Run one of Slurm's commands like `subprocess.run`."""
        world = self.world
        words = list(command)
        world.step(" ".join(words[:4])[:60])
        task = world.current
        assert task is not None
        process, timeout = task.process, float(options.get("timeout") or GIVES_UP_S)
        waiters: list[Task] = []
        answer: list[tuple[int, str, str]] = []
        trouble = self.lost.pop(0) if self.lost else -1
        there_s, back_s = self._random.uniform(0.003, 0.15), self._random.uniform(0.003, 0.1)
        if trouble == 0:
            there_s, back_s = self._random.choice(((20.0, 0.1), (0.1, 20.0), (6.0, 6.0)))
        if trouble >= 0 or self.is_away or process.host.cut_off:
            self._trouble(process)

        def arrive() -> None:
            if self.is_away or process.host.cut_off:
                self._trouble(process)
                world.at(min(self._random.uniform(3.0, 20.0), timeout + 1.0), lambda: reply((1, "", UNREACHABLE)))
                return
            result = self._carry_out(words, process)
            if trouble != 1:
                world.at(back_s, lambda: reply(result))

        def reply(result: tuple[int, str, str]) -> None:
            answer.append(result)
            world.wake(waiters)

        if trouble != 2:
            world.at(there_s, arrive)
        began = world.now
        while not answer:
            left = timeout - (world.now - began)
            if left <= 0:
                break
            world.wait(waiters, left)
        if not answer:
            world.tell(f"gets no answer from {words[0]}", process.name)
            if options.get("timeout") is None:
                return CompletedProcess(words, 1, "", f"{words[0]}: error: {SILENT}\n")
            raise TimeoutExpired(words, timeout)
        status, output, error = answer[0]
        return CompletedProcess(words, status, output, f"{words[0]}: error: {error}\n" if error else "")

    def _trouble(self, process: Process) -> None:
        self.troubled.add(process)
        for job in self.jobs.values():
            job.hindered |= process in job.processes

    def _carry_out(self, words: list[str], process: Process) -> tuple[int, str, str]:
        try:
            with self.world.outside():
                return 0, self._answer(words, process), ""
        except Refused as refused:
            return 1, "", str(refused)

    def _answer(self, words: list[str], process: Process) -> str:
        match words:
            case ["sbatch", *_, path]:
                return self.sbatch(path, process)
            case ["scontrol", "show", *rest]:
                return self._show(rest, process)
            case ["squeue", *rest]:
                return self._queue(rest)
        self._change(words, process)
        return ""

    def _change(self, words: list[str], process: Process) -> None:
        match words:
            case ["scancel", *job_ids]:
                for job_id in job_ids:
                    for job in self._own(job_id, process):
                        job.withdrawn = True
                        self.cancel(job)
            case ["scontrol", "requeue", *rest]:
                for job in self._own(rest[-1], process):
                    if self.world.now < self.refuses_until:
                        job.hindered = True
                        raise Refused(BUSY)
                    if self.cancels_requeued and job.is_running and not job.is_strange:
                        self.cancels_requeued -= 1
                        self.cancel(job)
                    self.requeue(job, "incomplete" in rest)
            case ["scontrol", "update", job_id, "requeue=1"]:
                for job in self._own(job_id.partition("=")[2], process):
                    job.may_requeue = True
            case ["scontrol", "release", job_id]:
                for job in self._own(job_id, process):
                    job.held = False
                self._schedule_soon()
            case _:
                raise AssertionError(f"this Slurm does not know {words}")

    def _show(self, words: list[str], process: Process) -> str:
        match words:
            case ["job", "-o", job_id]:
                found = self._found(job_id)
                for job in found:
                    job.seen_by.add(process)
                return "".join(map(self._record, found))
            case ["node", "-o", name]:
                return self._node(name)
            case ["partition", *_]:
                return PARTITIONS.format(grace=self.grace_s)
            case ["config"]:
                return CONFIG.format(kill_wait=self.kill_wait_s)
        raise AssertionError(f"this Slurm does not know scontrol show {words}")

    def sbatch(self, path: str, process: Process) -> str:
        """Submit a script. The scenario replaces this method, because it knows the content of scripts."""
        raise NotImplementedError

    def _own(self, job_id: str, process: Process) -> list[Job]:
        """Return the jobs that a command changes. No process may change a foreign job after Slurm has shown it as such.

        Raises:
            BrokenPromiseError: a process changes such a job.
            Refused: there is no such job, or it is another user's.
        """
        found = self._found(job_id)
        for job in found:
            if job.is_strange and process in job.seen_by:
                raise BrokenPromiseError(f"{process.name} changes job {job_id}, which it was shown to be a stranger's")
            if job.user != processes.user_id():
                raise Refused("Access/permission denied")
        return found

    def _found(self, job_id: str) -> list[Job]:
        """Return one job, or all tasks of an array.

        Raises:
            Refused: no job has this id.
        """
        found = [self.jobs[job_id]] if job_id in self.jobs else []
        if not found:
            found = [job for job in self.jobs.values() if job.array and str(job.array[0]) == job_id]
        if not found:
            raise Refused(UNKNOWN)
        return found

    def _time(self, seconds: float | None) -> str:
        return "Unknown" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")

    def _record(self, job: Job) -> str:
        array = f"ArrayJobId={job.array[0]} ArrayTaskId={job.array[1]} " if job.array else ""
        user = job.user
        preempted = self._time(job.preempted) if job.preempted is not None else "None"
        return (
            f"JobId={job.number} {array}JobName={job.name} UserId=somebody({user}) GroupId=somebody({user}) "
            f"Priority=1 JobState={job.state} Reason={job.reason} Dependency=(null) Requeue={int(job.may_requeue)} "
            f"Restarts={job.restarts} BatchFlag=1 ExitCode=0:0 SubmitTime={self._time(job.submitted)} "
            f"EligibleTime={self._time(job.eligible)} StartTime={self._time(job.began)} EndTime={self._time(job.end)} "
            f"Deadline=N/A PreemptTime={preempted} SuspendTime=None Partition=low Command={job.path} WorkDir=/\n"
        )

    def _node(self, name: str) -> str:
        for host in self.nodes:
            if host.name == name:
                state = "DOWN*" if host in self._down else "ALLOCATED" if host in self._busy else "IDLE"
                boot = self._time(host.booted + self.offset_s)
                return f"NodeName={name} NodeHostName={name} State={state} BootTime={boot} SlurmdStartTime={boot}\n"
        raise Refused(f"Node {name} not found")

    def _queue(self, options: list[str]) -> str:
        given = {name: value for name, _, value in (option.partition("=") for option in options)}
        if given.get("--format") == "%i|%T|%o":
            own = [job for job in self.jobs.values() if job.user == processes.user_id()]
            return "".join(f"{job.job_id}|{job.state}|{job.path}\n" for job in own)
        found: list[Job] = []
        for job_id in given["--jobs"].split(","):
            try:
                found += self._found(job_id)
            except Refused:
                continue
        if not found:
            raise Refused(UNKNOWN)
        return "".join(self._row(job, given["--Format"]) for job in found)

    def _row(self, job: Job, columns: str) -> str:
        cells = {
            "JobArrayID": job.job_id,
            "State": job.state,
            "RestartCnt": str(job.restarts),
            "SubmitTime": self._time(job.submitted),
            "UserID": str(job.user),
            "Reason": job.reason,
            "BatchHost": job.host.name if job.host is not None else "n/a",
            "Name": job.name,
            "StartTime": "N/A",
            "PendingTime": "0",
            "Command": job.path,
        }
        row = ""
        for column in columns.split(","):
            name, _, width = column.partition(":")
            size = int("".join(letter for letter in width if letter.isdigit()))
            row += f"{cells[name][:size]:<{size}}{width.lstrip('0123456789')}"
        return row + "\n"

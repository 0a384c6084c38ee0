"""Runs as jobs of a Slurm cluster: one job, or one job array for a sweep.

submitit writes the batch script and calls sbatch. What it is given to run is tiny, a run directory and the
name of a function (`launch.job.start`), so that nothing but the run directory says what a run is.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import socket
import sys
import time as clock
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from launch import JOB_FILE, LOGS, STATUS_FILE, Finding, JobInfo, display, read_object, scheduler, write_job
from launch.checks import check_cluster, check_options, examine_cluster, minutes
from launch.job import start

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

# submitit's files of a sweep, beside the runs: one batch script, one pickle and one log a task.
SWEEP_FOLDER = ".slurm"
MAX_KILLS = 3  # in a row and before an attempt could begin: the environment is broken

# Variables by which a user tells Slurm's commands where the cluster is; all others of SLURM_* describe a job.
KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
# What each batch script says in any case, and options that sbatch's variables call otherwise.
OURS = ("requeue", "no_requeue", "signal", "open_mode", "job_name", "array_inx", "output", "error", "wait")
ENVIRONMENT_NAME = {"time": "timelimit", "mem": "mem_per_node"}
# Options that submitit knows by the same name.
SAME_NAME = (
    *("partition", "nodes", "cpus_per_task", "gpus_per_node", "gpus_per_task", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "qos", "account", "constraint", "nodelist", "exclude", "dependency", "comment"),
)
# A signal to the batch script must neither end it before srun has ended nor reach srun as "ignored".
TRAP = "trap : TERM USR1 USR2"
# A task that was killed (out of memory, say, or preempted before Python could take signals) takes the job with
# it, and so does an srun that could not start any. Slurm would let it end there; if it was not Slurm that ended it,
# the job goes back into the queue. Attempts that bring nothing stop themselves; those that cannot begin are counted
# here, unless they were preempted. As a trap it also runs when the user's setup has said `set -e`.
AFTER = """\
said={folder}/$SLURM_JOB_ID.said
rm -f "$said"
come_back() {{
    status=$?
    if [ $status -eq 0 ] || [ -z "${{began:-}}" ] || [ -e "$said" ]; then rm -f "$said"; exit $status; fi
    job=$SLURM_JOB_ID
    if [ -n "${{SLURM_ARRAY_JOB_ID:-}}" ]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
    unset SLURM_TIME_FORMAT
    kills={folder}/$SLURM_JOB_ID.kills
    counted=
    for try in $(seq {tries}); do
        [ "$try" = 1 ] || sleep {pause_s}
        state=$(scontrol show job -o "$job") || continue
        state=${{state%% Command=*}}
        word=${{state##* JobState=}}
        case ${{word%% *}} in {not_running}) exit $status ;; esac
        case $state in *" Restarts=${{SLURM_RESTART_COUNT:-0}} "*) ;; *) exit $status ;; esac
        case $state in *" PreemptTime=2"*) counted=no ;; esac
        if [ -z "$counted" ]; then
            [ "$(cat "$kills" 2>/dev/null | wc -l)" -lt {max_kills} ] || exit $status
            echo "status $status" >> "$kills"
            counted=yes
        fi
        echo "[launch] no rank could say how it ended (status $status): job $job goes back into the queue"
        scontrol requeue incomplete "$job" && exit $status
        scontrol update jobid="$job" requeue=1
    done
    exit $status
}}
trap come_back EXIT"""
# The last line before the ranks are started: what goes wrong above is the user's setup, and final.
BEGIN = "began=yes"
TRIES, PAUSE_S = 360, 10  # an hour: a controller that is away for that long ends no job meanwhile


@dataclass
class SlurmLauncher:
    """Submits runs to Slurm (a `launch.Launcher`). The options are explained in conf/launcher/slurm.yaml."""

    in_process: ClassVar[bool] = False

    partition: str | None = None
    time: int | str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    mem: str | None = None
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    reservation: str | None = None
    dependency: str | None = None
    comment: str | None = None
    job_name: str | None = None
    signal_delay_s: int = 120
    array_parallelism: int = 256
    setup: list[str] = field(default_factory=list)
    srun_args: list[str] = field(default_factory=list)
    additional: dict[str, Any] = field(default_factory=dict)
    python: str | None = None
    max_timeouts: int | None = None
    requeue_killed: bool = True
    check_folder: bool = True
    wait: bool = False
    dry_run: bool = False
    retry_failed: bool = False

    def check(self, run_dirs: list[Path]) -> list[str]:
        """The faults of the options, of this machine and of the cluster; Slurm itself is asked last."""
        faults = check_options(self)
        if missing := scheduler.missing():
            faults.append(
                f"launcher=slurm needs {', '.join(missing)}, not on PATH on {socket.gethostname()}: run this on a "
                "login node of the cluster, or choose launcher=local"
            )
        if faults:
            return faults
        try:
            faults = check_cluster(self, run_dirs)
            if not faults:
                with self._only_ours():
                    scheduler.ask("sbatch", "--test-only", text=self.preview(run_dirs))
        except scheduler.SchedulerError as error:
            faults.append(f"launcher=slurm: Slurm would refuse this job: {error}")
        return faults

    def examine(self, save_s: float | None) -> list[Finding]:
        """Preemption, grace and time limit of the partition, against the time that a save takes."""
        try:
            return examine_cluster(self, save_s)
        except scheduler.SchedulerError as error:
            remedy = "ask the administrators whether slurmctld runs"
            return [Finding("fault", f"Slurm does not answer: {error}", remedy)]

    def preview(self, run_dirs: list[Path]) -> str:
        """The batch script."""
        executor = self._executor(_folder(run_dirs), _name(run_dirs))
        if len(run_dirs) > 1:
            executor.parameters["map_count"] = len(run_dirs)
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def launch(self, run_dirs: list[Path], attempt: str) -> int:
        """Submit the runs and return at once; 0 when they are submitted, else 2."""
        if not run_dirs:
            return 0
        console = Console()
        if self.dry_run:
            console.print(self.preview(run_dirs), markup=False, highlight=False, soft_wrap=True)
            return 0
        run_dirs = [run_dir.absolute() for run_dir in run_dirs]
        try:
            job_ids = self._submit(run_dirs, attempt)
        except (OSError, RuntimeError) as error:  # RuntimeError: submitit's, with what sbatch said
            lines = str(error).strip().splitlines() or [type(error).__name__]
            print(f"error: nothing was submitted: {lines[-1]}", file=sys.stderr)
            return 2
        display.submitted(list(zip(run_dirs, job_ids, strict=True)), console)
        return 0

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the runs until they have ended; 0 when all of them finished, or at a Ctrl-C, else 1."""
        console = Console()

        def states() -> dict[Path, str]:
            try:
                known = self.jobs(run_dirs)
            except OSError:  # the controller is away for a moment
                return dict.fromkeys(run_dirs, "waiting")
            return {run_dir: display.state_of(run_dir, known.get(run_dir)) for run_dir in run_dirs}

        try:
            display.follow(run_dirs, states, console)
        except KeyboardInterrupt:
            console.print("no longer followed; the jobs go on (scancel stops them, runner.status shows them)")
            return 0
        return 0 if set(states().values()) == {"finished"} else 1

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """The runs with a job that Slurm remembers, by one call of squeue; of two jobs the one that lives.

        Raises:
            OSError: some of them were submitted and Slurm does not answer.
        """
        ids = {run_dir: _job_ids(run_dir) for run_dir in run_dirs}
        known = scheduler.known_jobs(job_id for of_run in ids.values() for job_id in of_run)
        found = {run_dir: [known[job_id] for job_id in of_run if job_id in known] for run_dir, of_run in ids.items()}
        return {run_dir: max(infos, key=lambda info: info.live) for run_dir, infos in found.items() if infos}

    def _submit(self, run_dirs: list[Path], attempt: str) -> list[str]:
        """Submit the runs and leave their ids in the run directories; after a failure there is no trace."""
        folder = _folder(run_dirs)
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        arguments = [str(run_dir) for run_dir in run_dirs], [attempt] * len(run_dirs)
        try:
            # submitit prints what it raises as well.
            with contextlib.redirect_stderr(io.StringIO()), self._only_ours():
                executor = self._executor(folder, _name(run_dirs))
                jobs = executor.map_array(start, *arguments, [self.max_timeouts] * len(run_dirs))
        except BaseException:
            for leftover in set(folder.iterdir()) - before:
                leftover.unlink()
            raise
        try:
            for run_dir, job in zip(run_dirs, jobs, strict=True):
                self._register(run_dir, job.job_id, folder)
        except OSError:
            scheduler.ask("scancel", jobs[0].job_id.partition("_")[0])
            raise
        return [job.job_id for job in jobs]

    def _register(self, run_dir: Path, job_id: str, folder: Path) -> None:
        """Leave the job's id in the run directory, and links to its logs where they are elsewhere."""
        launcher = f"{type(self).__module__}.{type(self).__qualname__}"
        job = {"job_id": job_id, "launcher": launcher, "submitted": clock.time(), "folder": str(folder)}
        write_job(run_dir, job)
        logs = run_dir / LOGS
        logs.mkdir(exist_ok=True)
        if logs == folder:
            return
        for task in range(self.nodes * self.tasks_per_node):
            name = f"{job_id}_{task}_log.out"
            link = logs / name
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(folder / name, logs))

    @contextlib.contextmanager
    def _only_ours(self) -> Iterator[None]:
        """Hide from sbatch what would beat the batch script.

        A user's SBATCH_* stand above its lines, so they are defaults only for what the config does not set; and the
        variables of the job that the command is given in would be taken by the new one for its own (array task,
        restarts, memory).
        """
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        names = (*(ENVIRONMENT_NAME.get(name, name) for name in (*given, *self.additional)), *OURS)
        ours = {f"SBATCH_{name.lstrip('-').replace('-', '_').upper()}" for name in names}
        hidden = {
            name: os.environ.pop(name)
            for name in list(os.environ)
            if name in ours or (name.startswith("SLURM_") and name not in KEPT)
        }
        try:
            yield
        finally:
            os.environ.update(hidden)

    def _executor(self, folder: Path, name: str) -> SlurmExecutor:
        from submitit.slurm.slurm import SlurmExecutor

        executor = SlurmExecutor(folder, python=self.python or shlex.quote(sys.executable))
        executor.update_parameters(**self._parameters(folder, name))
        return executor

    def _port(self) -> list[str]:
        """For several ranks: a port that is free on the first node, unless the user's setup chose one."""
        if self.nodes * self.tasks_per_node == 1:
            return []
        python = self.python or shlex.quote(sys.executable)
        return [f"export MASTER_PORT=${{MASTER_PORT:-$({python} -m launch.rendezvous)}}"]

    def _parameters(self, folder: Path, name: str) -> dict[str, Any]:
        """submitit's names for the options; None leaves an option to Slurm."""
        extra = {
            "requeue": True,
            "open-mode": "append",
            # Without "B:" it reaches the tasks, not the shell of the batch script.
            "signal": f"USR2@{self.signal_delay_s}",
            **({"reservation": self.reservation} if self.reservation else {}),
            **{key.lstrip("-").replace("_", "-"): value for key, value in self.additional.items()},
        }
        cpus = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        after = AFTER.format(
            folder=shlex.quote(str(folder)),
            not_running="|".join(sorted(scheduler.NOT_RUNNING)),
            max_kills=MAX_KILLS if self.requeue_killed else 0,
            tries=TRIES,
            pause_s=PAUSE_S,
        )
        return {
            **{option: getattr(self, option) for option in SAME_NAME},
            "time": None if self.time is None else minutes(self.time),
            "job_name": self.job_name or name,
            "ntasks_per_node": self.tasks_per_node,
            "exclusive": True if self.exclusive else None,
            "array_parallelism": self.array_parallelism,
            "signal_delay_s": self.signal_delay_s,
            "setup": [TRAP, *after.splitlines(), *self.setup, *self._port(), BEGIN],
            "stderr_to_stdout": True,
            "wckey": None,
            # A task that dies ends the step at once; a restart adds to the log of the run.
            "srun_args": ["--kill-on-bad-exit=1", "--open-mode=append", *cpus, *self.srun_args],
            "additional_parameters": extra,
        }


def _job_ids(run_dir: Path) -> list[str]:
    """The job that was submitted last, and the one that trained last: a kill may have kept the two apart."""
    if not (run_dir / JOB_FILE).exists():
        return []  # never submitted
    found = (read_object(run_dir / name).get("job_id") for name in (JOB_FILE, STATUS_FILE))
    return [job_id for job_id in found if isinstance(job_id, str) and scheduler.JOB_ID.fullmatch(job_id)]


def _folder(run_dirs: list[Path]) -> Path:
    """Where submitit's files go: to the run's logs, or beside the runs of a sweep."""
    first = run_dirs[0].absolute()
    return first / LOGS if len(run_dirs) == 1 else first.parent / SWEEP_FOLDER


def _name(run_dirs: list[Path]) -> str:
    return run_dirs[0].name if len(run_dirs) == 1 else f"sweep-of-{len(run_dirs)}"

"""Runs as jobs of a Slurm cluster: one job, or one job array for a sweep.

submitit writes the batch script and calls sbatch. What it pickles is tiny, a run directory and the name of a function
(see `launch.job.start`): everything about a run is in its directory.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from launch import display, requeue, scheduler
from launch.checks import cluster_errors, cluster_findings, minutes, option_errors
from launch.job import start
from launch.options import SlurmOptions
from runner.contracts import Finding, JobInfo
from runner.rundir.paths import RunDir
from runner.system import clock, files

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

# Where a sweep's batch script, pickles and logs are, beside its runs.
SWEEP_FOLDER = ".slurm"

# Variables that tell Slurm's commands where the cluster is; all others of SLURM_* describe the job that one is in.
CLUSTER_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
# Options that every batch script sets.
ALWAYS_SET = ("requeue", "no_requeue", "signal", "open_mode", "job_name", "array_inx", "output", "error", "wait")
# Options that sbatch's variables name differently.
VARIABLE_NAME = {"time": "timelimit", "mem": "mem_per_node"}
# Options that submitit knows by the same name.
SAME_NAME = (
    *("partition", "nodes", "cpus_per_task", "gpus_per_node", "gpus_per_task", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "qos", "account", "constraint", "nodelist", "exclude", "dependency", "comment"),
)


class SlurmLauncher(SlurmOptions):
    """Submits runs to Slurm (a `runner.contracts.Launcher`)."""

    in_process: ClassVar[bool] = False

    def check(self, run_dirs: list[Path]) -> list[str]:
        """The errors of the options, of this machine and of the cluster; Slurm itself is asked last."""
        errors = option_errors(self)
        if missing := scheduler.missing_commands():
            errors.append(
                f"launcher=slurm needs {', '.join(missing)}, not on PATH on {socket.gethostname()}: run this on a "
                "login node of the cluster, or set launcher=local"
            )
        if errors:
            return errors
        try:
            errors = cluster_errors(self, run_dirs)
            if not errors:
                with self._no_conflicting_variables():
                    scheduler.ask("sbatch", "--test-only", text=self.preview(run_dirs))
        except scheduler.SchedulerError as error:
            errors.append(f"launcher=slurm: Slurm would refuse this job: {error}")
        return errors

    def examine(self, save_s: float | None) -> list[Finding]:
        """Preemption, grace time and time limit of the partition, compared with the time that a save takes."""
        try:
            return cluster_findings(self, save_s)
        except scheduler.SchedulerError as error:
            remedy = "ask the administrators whether slurmctld runs"
            return [Finding("error", f"Slurm does not answer: {error}", remedy)]

    def preview(self, run_dirs: list[Path]) -> str:
        """The batch script."""
        executor = self._executor(_folder(run_dirs), _name(run_dirs))
        if len(run_dirs) > 1:
            executor.parameters["map_count"] = len(run_dirs)
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def launch(self, run_dirs: list[Path], attempt: str) -> int:
        """Submit the runs and return at once; 0 if they are submitted, else 2."""
        if self.dry_run:
            print(self.preview(run_dirs))
            return 0
        run_dirs = [run_dir.absolute() for run_dir in run_dirs]
        try:
            job_ids = self._submit(run_dirs, attempt)
        except (OSError, RuntimeError) as error:  # RuntimeError: submitit's, with the message of sbatch
            lines = str(error).strip().splitlines() or [type(error).__name__]
            print(f"error: nothing was submitted: {lines[-1]}", file=sys.stderr)
            return 2
        display.show_submitted(list(zip(run_dirs, job_ids, strict=True)), Console())
        return 0

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the runs until they are over; 0 if all of them finished, and after a Ctrl-C, else 1."""
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
            console.print("the jobs keep running: `runner status` shows them, scancel stops them")
            return 0
        return 0 if set(states().values()) == {"finished"} else 1

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """The jobs that Slurm remembers, by one call of squeue; of two jobs of one run, the live one.

        Raises:
            OSError: some of the runs were submitted and Slurm does not answer.
        """
        ids = {run_dir: _job_ids(run_dir) for run_dir in run_dirs}
        known = scheduler.known_jobs(job_id for of_run in ids.values() for job_id in of_run)
        found = {run_dir: [known[job_id] for job_id in of_run if job_id in known] for run_dir, of_run in ids.items()}
        return {run_dir: max(infos, key=lambda info: info.live) for run_dir, infos in found.items() if infos}

    def _submit(self, run_dirs: list[Path], attempt: str) -> list[str]:
        """Submit the runs and write the job ids into their directories; a failure leaves no trace."""
        folder = _folder(run_dirs)
        files.make_dirs(folder)
        before = set(files.list_dir(folder))
        arguments = [str(run_dir) for run_dir in run_dirs], [attempt] * len(run_dirs)
        try:
            # submitit prints the error that it raises as well.
            with contextlib.redirect_stderr(io.StringIO()), self._no_conflicting_variables():
                executor = self._executor(folder, _name(run_dirs))
                jobs = executor.map_array(start, *arguments, [self.max_timeouts] * len(run_dirs))
        except BaseException:
            for leftover in set(files.list_dir(folder)) - before:
                files.remove(folder / leftover)
            raise
        try:
            for run_dir, job in zip(run_dirs, jobs, strict=True):
                self._register(run_dir, job.job_id, folder)
        except OSError:
            scheduler.ask("scancel", jobs[0].job_id.partition("_")[0])
            raise
        return [job.job_id for job in jobs]

    def _register(self, run_dir: Path, job_id: str, folder: Path) -> None:
        """Write the job id into the run directory, with links to logs that are elsewhere."""
        launcher = f"{type(self).__module__}.{type(self).__qualname__}"
        job = {"job_id": job_id, "launcher": launcher, "submitted": clock.wall(), "folder": str(folder)}
        files.write_json(RunDir(run_dir).job, job)
        logs = RunDir(run_dir).logs
        files.make_dirs(logs)
        if logs == folder:
            return
        for task in range(self.tasks):
            name = f"{job_id}_{task}_log.out"
            files.symlink(logs / name, os.path.relpath(folder / name, logs))

    @contextlib.contextmanager
    def _no_conflicting_variables(self) -> Iterator[None]:
        """Hide variables from sbatch that would override the batch script.

        A user's SBATCH_* override its lines, so they may only set what the config does not. The variables of the job
        that the command runs in would be taken for the new job's (array task, restarts, memory).
        """
        set_here = [name for name, value in vars(self).items() if value not in (None, False)]
        names = (*(VARIABLE_NAME.get(name, name) for name in (*set_here, *self.additional)), *ALWAYS_SET)
        conflicting = {f"SBATCH_{name.lstrip('-').replace('-', '_').upper()}" for name in names}
        hidden = {
            name: os.environ.pop(name)
            for name in list(os.environ)
            if name in conflicting or (name.startswith("SLURM_") and name not in CLUSTER_VARIABLES)
        }
        try:
            yield
        finally:
            os.environ.update(hidden)

    def _executor(self, folder: Path, name: str) -> SlurmExecutor:
        from submitit.slurm.slurm import SlurmExecutor

        executor = SlurmExecutor(folder, python=self._python())
        executor.update_parameters(**self._parameters(folder, name))
        return executor

    def _python(self) -> str:
        """The command that starts Python, as the shell reads it."""
        return self.python or shlex.quote(sys.executable)

    def _setup(self, folder: Path) -> list[str]:
        """The lines of the batch script before srun."""
        # For several ranks: a port that is free on the first node, unless the user's setup has chosen one.
        port = f"export MASTER_PORT=${{MASTER_PORT:-$({self._python()} -m launch.rendezvous)}}"
        return [
            *requeue.script_lines(folder, self.requeue_killed),
            *self.setup,
            *([port] if self.tasks > 1 else []),
            requeue.ARM_SCRIPT,
        ]

    def _parameters(self, folder: Path, name: str) -> dict[str, Any]:
        """The options by submitit's names; None leaves an option to Slurm."""
        extra = {
            "requeue": True,
            "open-mode": "append",
            # Without "B:" the signal reaches the tasks, not the shell of the batch script.
            "signal": f"USR2@{self.signal_delay_s}",
            **({"reservation": self.reservation} if self.reservation else {}),
            **{key.lstrip("-").replace("_", "-"): value for key, value in self.additional.items()},
        }
        cpus = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        return {
            **{option: getattr(self, option) for option in SAME_NAME},
            "time": None if self.time is None else minutes(self.time),
            "job_name": self.job_name or name,
            "ntasks_per_node": self.tasks_per_node,
            "exclusive": True if self.exclusive else None,
            "array_parallelism": self.array_parallelism,
            "signal_delay_s": self.signal_delay_s,
            "setup": self._setup(folder),
            "stderr_to_stdout": True,
            "wckey": None,
            # A task that dies ends the step at once; a restart appends to the log of the run.
            "srun_args": ["--kill-on-bad-exit=1", "--open-mode=append", *cpus, *self.srun_args],
            "additional_parameters": extra,
        }


def _job_ids(run_dir: Path) -> list[str]:
    """The job that was submitted last and the one that trained last: a kill may have kept the two apart."""
    run = RunDir(run_dir)
    if not run.job.exists():
        return []  # never submitted
    found = (files.read_object(path).get("job_id") for path in (run.job, run.status))
    return [job_id for job_id in found if isinstance(job_id, str) and scheduler.JOB_ID.fullmatch(job_id)]


def _folder(run_dirs: list[Path]) -> Path:
    """Where submitit's files go: the logs of a single run, or a directory beside the runs of a sweep."""
    first = run_dirs[0].absolute()
    return RunDir(first).logs if len(run_dirs) == 1 else first.parent / SWEEP_FOLDER


def _name(run_dirs: list[Path]) -> str:
    return run_dirs[0].name if len(run_dirs) == 1 else f"sweep-of-{len(run_dirs)}"

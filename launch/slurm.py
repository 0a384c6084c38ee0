"""Submit runs to Slurm: one job, or one job array for a sweep.

A job receives only a run directory and the name of a function (see `launch.job.start`). Everything else is read from
the run directory.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, ClassVar

from launch import batch, display, node_range, requeue, scheduler, submission
from launch.checks import cluster_errors, cluster_findings, minutes, option_errors, path_errors, start_errors
from launch.environment import environment_lines, examine_environment
from launch.options import SlurmOptions
from launch.scheduler import RecordedJob
from runner.contracts import Finding, JobInfo, RankCounts, is_same_job
from runner.errors import ExitStatus, SupersededError, UserError
from runner.rundir.paths import RunDir
from runner.rundir.state import sweep_of
from runner.system import clock, files, processes

# Variables with which Slurm's commands find the cluster. All other SLURM_* variables describe the current job.
CLUSTER_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
# Options that every batch script sets.
ALWAYS_SET = ("requeue", "no_requeue", "signal", "open_mode", "job_name", "array_inx", "output", "error", "wait")
# Options that have a different name in sbatch's environment variables.
VARIABLE_NAME = {"time": "timelimit", "mem": "mem_per_node"}
# Options that have the same name in submitit.
SAME_NAME = (
    *("partition", "cpus_per_task", "gpus_per_node", "mem", "mem_per_cpu", "mem_per_gpu"),
    *("qos", "account", "constraint", "nodelist", "exclude", "dependency", "comment"),
)


class SlurmLauncher(SlurmOptions):
    """Submit runs to Slurm (a `runner.contracts.Launcher`)."""

    in_process: ClassVar[bool] = False

    @cached_property
    def _sweep(self) -> str:
        """Return the sweep name shared by all arrays that this command submits."""
        return submission.new_name()

    @cached_property
    def _live(self) -> dict[Path, str]:
        """Return the ids of the live jobs of this command's runs, as found by `jobs`."""
        return {}

    def rank_counts(self) -> RankCounts:
        """Return the possible numbers of ranks: tasks per node times each allowed number of nodes."""
        nodes, each = self.node_counts, self.tasks_per_node
        if not isinstance(each, int) or each < 1:
            raise UserError(f"launcher.tasks_per_node={each!r} must be a whole number, 1 or more")
        counts = range(nodes[0] * each, nodes[-1] * each + 1, each)
        return RankCounts(counts, f"launcher.nodes={self.nodes}", per_node=each)

    def check(self, run_dirs: list[Path]) -> list[str]:
        """Return errors in the options, on this machine and on the cluster.

        sbatch itself reports jobs that Slurm refuses. `sbatch --test-only` is not used, because it also refuses jobs
        that sbatch would queue.
        """
        errors = [*option_errors(self), *path_errors(run_dirs)]
        if missing := scheduler.missing_commands():
            errors.append(
                f"launcher=slurm needs {', '.join(missing)}, not on PATH on {processes.host_name()}: run this on a "
                "login node of the cluster, or set launcher=local"
            )
        if errors:
            return errors
        try:
            return cluster_errors(self, run_dirs)
        except scheduler.SchedulerError as error:
            return [f"launcher=slurm: Slurm does not answer ({error}): nothing was submitted, rerun the command later"]

    def examine(self, save_s: float | None) -> list[Finding]:
        """Report the partition's preemption mode, grace time and time limit, and check the environment of jobs."""
        try:
            found = cluster_findings(self, save_s)
            with self._no_conflicting_variables():
                found.append(examine_environment(self._environment_of_jobs(), self._python()))
                found += start_errors(self) or [self._examine_start()]
        except scheduler.SchedulerError as error:
            remedy = "ask the administrators whether slurmctld runs"
            return [Finding("error", f"Slurm does not answer: {error}", remedy)]
        return found

    def _own_options(self) -> dict[str, Any]:
        """Return the user's additional options, keyed by sbatch's long option names."""
        return {str(key).lstrip("-").replace("_", "-"): value for key, value in self.additional.items()}

    def _environment_of_jobs(self) -> str:
        """Return the value of sbatch's --export."""
        return str(self._own_options().get("export") or processes.environment.get("SBATCH_EXPORT") or "ALL")

    def _examine_start(self) -> Finding:
        """Check whether Slurm could start such a job now. Even if it could not, sbatch may queue the job."""
        try:
            scheduler.ask("sbatch", "--test-only", text=self.preview([Path("/tmp/run")]))
        except scheduler.SchedulerError as error:
            if "invalid" in str(error).lower():  # an option is invalid; other reasons may be temporary
                return Finding("error", f"sbatch would refuse this job: {error}", "correct the option that it names")
            remedy = "sbatch decides; if it accepts the job, the job may wait for long"
            return Finding("warning", f"Slurm could not start this job now: {error}", remedy)
        return Finding("ok", "Slurm would accept this job")

    def preview(self, run_dirs: list[Path]) -> str:
        """Return the text of the batch scripts, one for each job array."""
        try:
            parts = self._arrays(run_dirs)
        except scheduler.SchedulerError:
            parts = [run_dirs]
        folder, name = _submission_folder(run_dirs), _job_name(run_dirs)
        return "\n".join(self._script(len(part), len(run_dirs), folder, name) for part in parts)

    def _script(self, runs: int, total: int, folder: Path, name: str, unique: str = "") -> str:
        """Return the batch script for `runs` of a command's `total` runs, as the submission `unique`."""
        # The arrays of a large sweep share the limit of concurrent runs.
        parallel = max(1, self.array_parallelism * runs // total)
        parameters = {**self._parameters(folder, name, unique, total), "array_parallelism": parallel}
        return batch.script(folder, self._python(), runs, parameters)

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Submit the runs and return at once.

        Return 0 if all runs are submitted, 75 if that is unknown for some (rerunning the command finds out), else 2.
        """
        if self.dry_run:
            print(self.preview(run_dirs))
            return 0
        run_dirs = [run_dir.absolute() for run_dir in run_dirs]
        rights = dict(zip(run_dirs, guards, strict=False))
        runs = [RunDir(run_dir, rights.get(run_dir)) for run_dir in run_dirs]
        submitted: list[str] = []
        error: OSError | RuntimeError | None = None
        try:
            for job_id in submission.settle(runs):
                print(f"job {job_id} was submitted by a command that could not record it: cancelled", file=sys.stderr)
            parts = iter(runs)
            for size in map(len, self._arrays(run_dirs)):
                part = list(islice(parts, size))
                submitted += self._submit(part, attempt, _submission_folder(run_dirs), _job_name(run_dirs), len(runs))
        except (OSError, RuntimeError) as refused:  # a RuntimeError has sbatch's message
            error = refused
        except KeyboardInterrupt:
            print("interrupted: a job may have been submitted; rerun the command, which finds out", file=sys.stderr)
            raise
        if submitted:
            display.show_submitted(list(zip(run_dirs, submitted, strict=False)), display.console())
        if error is None:
            return 0
        done = f"{len(submitted)} of {len(run_dirs)} runs were submitted" if submitted else "nothing was submitted"
        more = "; rerun the command to submit the others" if submitted else ""
        if isinstance(error, submission.UncertainError):
            done = (
                f"{done}, and of more it is not known" if submitted else "it is not known whether a job was submitted"
            )
            more = "; rerun the command, which finds out"
        print(f"error: {done}: {_refusal(error)}{more}", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED if isinstance(error, submission.UncertainError) else ExitStatus.USAGE)

    def _arrays(self, run_dirs: list[Path]) -> list[list[Path]]:
        """Split the runs into job arrays of the largest size that the cluster allows.

        Raises:
            SchedulerError: Slurm does not answer.
        """
        if len(run_dirs) == 1:
            return [run_dirs]
        most = max(1, int(scheduler.show_config().get("MaxArraySize", "1001")))  # indices go from 0 to one less
        return [run_dirs[first : first + most] for first in range(0, len(run_dirs), most)]

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the runs until all have ended. Return 0 if all finished or after a Ctrl-C, else 1."""
        console = display.console()

        def states() -> dict[Path, str]:
            try:
                known = self.jobs(run_dirs)
            except OSError:  # the controller may be unavailable for a moment
                return dict.fromkeys(run_dirs, "waiting")
            return {run_dir: display.state_of(run_dir, known.get(run_dir)) for run_dir in run_dirs}

        try:
            display.follow(run_dirs, states, console)
        except KeyboardInterrupt:
            console.print("the jobs keep running: `runner status` shows them, `runner cancel` ends them")
            return 0
        return 0 if set(states().values()) == {"finished"} else 1

    def cancel(self, run_dirs: list[Path]) -> dict[Path, str]:
        """Cancel the jobs of these runs with one scancel call, but no later job with the same id.

        Raises:
            OSError: Slurm does not answer, or refuses.
        """
        found = {run_dir: info for run_dir, info in self.jobs(run_dirs).items() if info.live}
        if found:
            scheduler.ask("scancel", *(info.job_id for info in found.values()))
        return {run_dir: f"job {info.job_id}" for run_dir, info in found.items()}

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """Return the jobs that Slurm remembers, using one squeue call. If a run has two jobs, return the live one.

        Jobs that were abandoned because no attempt could begin are included, with the reason.

        Raises:
            OSError: some of the runs were submitted and Slurm does not answer.
        """
        recorded = {run_dir: _recorded_jobs(run_dir) for run_dir in run_dirs}
        known = scheduler.known_jobs(job for of_run in recorded.values() for job in of_run)
        found = {}
        for run_dir, of_run in recorded.items():
            infos = [known[job] for job in of_run if job in known]
            info = max(infos, key=lambda info: info.live) if infos else None
            info = _with_failed_start(run_dir, of_run[0], info) if of_run else None
            if info is not None:
                found[run_dir] = info
            self._live.pop(run_dir, None)
            if info is not None and info.live:
                self._live[run_dir] = info.job_id
        return found

    def _submit(self, runs: list[RunDir], attempt: str, folder: Path, name: str, total: int) -> list[str]:
        """Submit runs as one job or array and record it in their directories. Remove all traces after a failure.

        Args:
            runs: runs of one array, each with its guard.
            attempt: see `launch`.
            folder: directory for the files of the submission.
            name: name of the job.
            total: number of runs that the command submits, in all arrays.

        Raises:
            RuntimeError: sbatch refused; the message is sbatch's own.
            UncertainError: the job may be in the queue; its note is kept in the run directories.
            OSError: a file cannot be written; there is no job.
            RunDirError: other users can write to `folder`; there is no job.
            SupersededError: another command has taken over.
        """
        created = not files.exists(folder)
        for run in runs:
            run.check_guard()
        if total == 1:
            with files.owned():
                runs[0].make_dirs(folder)
        else:
            files.make_dirs(folder, files.OWNED)
        batch.check_folder(folder)
        unique, is_asked, sweep = submission.new_name(), False, self._sweep_of(runs)
        notice_s = None if "signal" in self._own_options() else self.signal_delay_s
        options = (self.max_timeouts, self.requeue_killed, notice_s)
        starts = [batch.Start(str(run.path), attempt, unique, *options) for run in runs]
        try:
            with self._no_conflicting_variables(), files.owned():
                text = self._script(len(runs), total, folder, name, unique)
                submission.begin(runs, unique)
                is_asked = True
                ids = batch.submit(text, folder, starts)
        except BaseException as error:
            if is_asked:
                submission.abandon(runs, unique, error)
            for leftover in files.list_dir(folder):
                if unique in leftover:
                    files.remove(folder / leftover)
            if created:
                with contextlib.suppress(OSError):  # not empty: another command uses it
                    files.remove_dir(folder)
            raise
        try:
            identity = {"submission": unique, **self._identity(ids[0], name, unique), "sweep": sweep}
            for run, each in zip(runs, ids, strict=True):
                self._register(run, each, folder, identity)
        except (OSError, SupersededError) as error:
            job_id = ids[0].partition("_")[0]
            try:
                submission.cancel(unique)
            except scheduler.SchedulerError as silent:
                raise submission.UncertainError(
                    f"job {job_id} is not recorded ({error}) nor cancelled ({silent})"
                ) from error
            submission.end(runs, unique)
            raise
        submission.end(runs, unique)
        return ids

    def _sweep_of(self, runs: Sequence[RunDir]) -> str:
        """Return the sweep name of earlier submissions if all `runs` have the same one, else a new name."""
        before = {name for run in runs if (name := sweep_of(run)) is not None}
        return before.pop() if len(before) == 1 else self._sweep

    def _identity(self, job_id: str, name: str, unique: str) -> dict[str, str | None]:
        """Return the facts that distinguish the job from later ones with its id.

        The submit time is missing if Slurm does not answer.
        """
        try:
            record = scheduler.show_job(job_id)
        except scheduler.SchedulerError:
            record = {}
        if scheduler.submission_in(record.get("Command", "")) != unique:
            record = {}  # Slurm has lost the job and reused its id
        given = record.get("JobName", self.job_name or name)  # launcher.additional may set a different name
        # A requeue resets the submit time of this task only, so it then differs from the array's other tasks.
        submitted = record.get("SubmitTime") if record.get("Restarts", "0") == "0" else None
        return {"user": str(processes.user_id()), "name": given, "submit_time": submitted}

    def _register(self, run: RunDir, job_id: str, folder: Path, identity: dict[str, str | None]) -> None:
        """Record the job in the run directory, and link logs that are in other directories."""
        launcher = f"{type(self).__module__}.{type(self).__qualname__}"
        job = {"job_id": job_id, **identity, "launcher": launcher, "submitted": clock.wall(), "folder": str(folder)}
        files.write_json(run.job, job, guard=run.guard)
        logs = run.logs
        if logs == folder:
            return
        with files.owned():
            run.make_dirs(logs)
        for task in range(self.tasks):
            name = f"{job_id}_{task}_log.out"
            files.symlink(logs / name, os.path.relpath(folder / name, logs))

    @contextlib.contextmanager
    def _no_conflicting_variables(self) -> Iterator[None]:
        """Hide environment variables from sbatch that would override the batch script.

        A user's SBATCH_* variables override the script's lines, so they may only set options that the config does not
        set. If the command runs inside a job, the new job would inherit that job's variables (array task, restarts,
        memory).
        """
        set_here = [name for name, value in vars(self).items() if value not in (None, False)]
        names = (*(VARIABLE_NAME.get(name, name) for name in (*set_here, *self.additional)), *ALWAYS_SET)
        conflicting = {f"SBATCH_{name.lstrip('-').replace('-', '_').upper()}" for name in names}
        hidden = {
            name: processes.environment.pop(name)
            for name in list(processes.environment)
            if name in conflicting or (name.startswith("SLURM_") and name not in CLUSTER_VARIABLES)
        }
        try:
            yield
        finally:
            processes.environment.update(hidden)

    def _python(self) -> str:
        """Return the command that starts Python, quoted for the shell."""
        return self.python or shlex.quote(sys.executable)

    def _setup(self, folder: Path, unique: str) -> list[str]:
        """Return the lines of the batch script before srun."""
        # For several ranks, find a free port on the first node, unless the user's setup has set one.
        port = f"export MASTER_PORT=${{MASTER_PORT:-$({self._python()} -m launch.rendezvous)}}"
        return [
            *environment_lines(),
            *requeue.script_lines(folder, self.requeue_killed, unique),
            *requeue.setup_lines(self.setup),
            *node_range.script_lines(self),
            *([port] if self.tasks > 1 else []),
            requeue.ARM_SCRIPT,
        ]

    def _after_live(self, total: int) -> str:
        """Return a dependency on this command's live runs if they and `total` new runs would exceed the limit.

        Slurm limits each array separately, and a rerun of a sweep submits another array.
        """
        if not self._live or len(self._live) + total <= self.array_parallelism:
            return ""
        return ":".join(["afterany", *self._live.values()])

    def _parameters(self, folder: Path, name: str, unique: str, total: int) -> dict[str, Any]:
        """Return the options under submitit's names. None leaves an option to Slurm."""
        # submitit derives the number of tasks from a single number of nodes; `extra` overrides it.
        size = {"ntasks_per_node": self.tasks_per_node, "gpus_per_task": self.gpus_per_task}
        extra = {
            **node_range.submission_options(self),
            "requeue": True,
            "open-mode": "append",
            # Without "B:" the signal reaches the tasks, not the shell of the batch script.
            "signal": f"USR2@{self.signal_delay_s}",
            **({"reservation": self.reservation} if self.reservation else {}),
            **self._own_options(),
        }
        cpus = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        return {
            **{option: getattr(self, option) for option in SAME_NAME},
            "dependency": ",".join(filter(None, [self.dependency, self._after_live(total)])) or None,
            **({} if self.is_elastic else size),
            "nodes": self.node_counts[-1],
            "time": None if self.time is None else minutes(self.time),
            "job_name": self.job_name or name,
            "exclusive": True if self.exclusive else None,
            "signal_delay_s": self.signal_delay_s,
            "setup": self._setup(folder, unique),
            "stderr_to_stdout": True,
            "wckey": None,
            # If a task dies, the job step ends at once. A restart appends to the run's log.
            "srun_args": ["--kill-on-bad-exit=1", "--open-mode=append", *cpus, *self.srun_args],
            "additional_parameters": extra,
        }


def _recorded_jobs(run_dir: Path) -> list[RecordedJob]:
    """Return the job that was submitted last and the job that trained last, which may differ after a kill.

    The first one may not be recorded, because the command that submitted it was killed.
    """
    run = RunDir(run_dir)
    status = files.read_object(run.status)
    if not files.exists(run.job) and status.get("launcher") is None:
        return []  # never submitted
    job = files.read_object(run.job)
    user, name, submitted = (_text_or_none(job.get(key)) for key in ("user", "name", "submit_time"))
    # If Slurm did not report the submit time, use the time of the record: the job was submitted earlier.
    noted = _slurm_time(job.get("submitted"), scheduler.CLOCKS_DIFFER_S) if submitted is None else None
    found = [RecordedJob(str(job.get("job_id")), user, name, submitted, noted, _text_or_none(job.get("submission")))]
    # Append this job even if the ids are equal: Slurm may have lost its state and reused the id for the run's next job.
    named, seen = _text_or_none(status.get("job_name")), _slurm_time(status.get("updated"))
    earliest = submitted if is_same_job(status, job) else None
    trained = _text_or_none(status.get("submission"))
    found.append(RecordedJob(str(status.get("job_id")), user, named, earliest, seen, trained))
    return [each for each in found if scheduler.is_job_id(each.job_id)]


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _slurm_time(seconds: object, more_s: float = 0.0) -> str | None:
    """Format seconds since 1970, plus `more_s`, as `scheduler.ask` makes Slurm print times."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(float(seconds) + more_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")  # type: ignore[arg-type]
    return None


def _with_failed_start(run_dir: Path, job: RecordedJob, info: JobInfo | None) -> JobInfo | None:
    """Add to a job's info why its last start failed before an attempt could begin."""
    recorded = _text_or_none(files.read_object(RunDir(run_dir).job).get("folder"))
    # The folder of a sweep is next to its first run; the other folders are for runs that were moved since.
    folders = [Path(recorded)] if recorded and files.seems_dir(recorded) else []
    folders += [RunDir(run_dir).logs, batch.sweep_folder(run_dir.absolute().parent, job.user)]
    reason = next((why for each in folders if (why := _failed_start(each, job))), "")
    if not reason or (info is not None and info.job_id != job.job_id):
        return info
    if info is not None and info.state in ("pending", "requeued"):
        return replace(info, reason=f"{info.reason or 'waiting'}; its last start ended early: {reason}")
    if reason.startswith(requeue.GIVEN_UP) and (info is None or info.state == "failed"):
        return JobInfo(job.job_id, "failed", reason=reason)
    return info


def _failed_start(folder: Path, job: RecordedJob) -> str:
    """Return why a job's last start failed before an attempt could begin, or "" if it did not or that is unknown."""
    with contextlib.suppress(OSError):
        return requeue.failed_starts(requeue.starts_file(folder, requeue.mark(job.job_id, job.submission)))[1]
    return ""


def _refusal(error: Exception) -> str:
    """Return the last line of sbatch's message, or an explanation of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "temporarily unavailable" in lines[-1].lower() or "queue full" in str(error):
        return f"the cluster's queue is full (MaxJobCount): wait until some jobs are over ({lines[-1]})"
    return lines[-1]


def _submission_folder(run_dirs: list[Path]) -> Path:
    """Return the folder for a submission's files: a single run's log directory, or a folder next to a sweep's runs."""
    first = run_dirs[0].absolute()
    return RunDir(first).logs if len(run_dirs) == 1 else batch.sweep_folder(first.parent, str(processes.user_id()))


def _job_name(run_dirs: list[Path]) -> str:
    """Name a job after its run, and an array after the common prefix of its runs' names or after its search."""
    if len(run_dirs) == 1 and run_dirs[0].parent.name != "slots":
        return run_dirs[0].name
    if run_dirs[0].parent.name == "slots":
        return run_dirs[0].parent.parent.name  # of a search
    parts = zip(*(run_dir.name.split("-") for run_dir in run_dirs), strict=False)
    common = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, parts)]
    return "-".join([*common, f"sweep-of-{len(run_dirs)}"])

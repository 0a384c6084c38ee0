"""Submitting runs and looking up their jobs, with Slurm's commands faked on PATH (slurm/ has real ones)."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_slurm import RUNNING, SUBMITTED, FakeSlurm, job_line, row, runs, slurm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import ROOT

from launch import display, job, requeue, scheduler
from launch.job import LAUNCHER, SlurmJob
from launch.local import LocalLauncher
from launch.scheduler import RecordedJob
from launch.slurm import SlurmLauncher
from runner.contracts import Job, Launcher
from runner.errors import RunDirError
from runner.rundir import submitted_jobs
from runner.rundir.paths import RunDir
from runner.system import processes

__all__ = ["runs", "slurm"]


def test_launchers_and_jobs_have_the_shapes_of_the_contracts() -> None:
    local: Launcher = LocalLauncher()
    slurm: Launcher = SlurmLauncher()
    job: type[Job] = SlurmJob
    assert isinstance(local, Launcher)
    assert isinstance(slurm, Launcher)
    assert job is SlurmJob


# Submission


def sweep_folder(first: Path) -> Path:
    return first.parent / f".slurm-{os.getuid()}"


def test_a_sweep_is_one_job_array_and_each_run_records_its_task(slurm: FakeSlurm, runs: list[Path]) -> None:
    launcher = SlurmLauncher(partition="low", array_parallelism=2)
    assert launcher.launch(runs, "somewhere:attempt") == 0
    assert len(slurm.calls("sbatch")) == 1
    assert [json.loads((run / "job.json").read_text())["job_id"] for run in runs] == ["12_0", "12_1", "12_2"]
    script = (sweep_folder(runs[0]) / "12_submission.sh").read_text()
    assert "--array=0-2%2" in script
    # The logs are found in the run directory, too, if Slurm writes them elsewhere.
    (sweep_folder(runs[0]) / "12_1_0_log.out").write_text("hello")
    assert (runs[1] / "logs" / "12_1_0_log.out").read_text() == "hello"


def test_the_limit_of_a_sweep_holds_when_more_of_it_is_submitted(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs[:2], "somewhere:attempt")
    slurm.prints("squeue", row("12_0", "RUNNING", Name="sweep-of-2") + row("12_1", "PENDING", Name="sweep-of-2"))
    for limit, waits in ((2, True), (3, False)):
        launcher = SlurmLauncher(array_parallelism=limit, dependency="afterok:9")
        assert len(launcher.jobs(runs)) == 2
        ids = ",afterany:12_0:12_1" if waits else ""
        assert f"#SBATCH --dependency=afterok:9{ids}\n" in launcher.preview(runs[2:])
    assert "dependency" not in SlurmLauncher(array_parallelism=1).preview(runs)


def test_each_user_has_a_private_folder_of_jobs(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use shared outputs, with a umask for a group."""
    before = os.umask(0o002)
    try:
        assert SlurmLauncher().launch(runs, "somewhere:attempt") == 0
        assert stat.S_IMODE(sweep_folder(runs[0]).stat().st_mode) == 0o755
        sweep_folder(runs[0]).chmod(0o555)
        monkeypatch.setattr(processes, "user_id", lambda: 4242)
        assert SlurmLauncher().launch(runs, "somewhere:attempt") == 0
    finally:
        os.umask(before)
    assert (runs[0].parent / ".slurm-4242" / "12_0_start.json").exists()


def test_a_folder_of_jobs_that_others_can_write_is_refused(slurm: FakeSlurm, runs: list[Path]) -> None:
    """The command and the job check this, because they run programs that its files name."""
    folder = sweep_folder(runs[0])
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RunDirError, match=f"{folder} can be written by everybody.*chmod go-w {folder}"):
        SlurmLauncher().launch(runs, "somewhere:attempt")
    assert not slurm.calls("sbatch")
    with pytest.raises(SystemExit, match="can be written by everybody"):
        job.main(str(folder))


def test_batch_script_sets_options_that_protect_a_run(slurm: FakeSlurm, runs: list[Path]) -> None:
    script = SlurmLauncher(signal_delay_s=45, cpus_per_task=3).preview(runs[:1])
    for option in ("--requeue", "--open-mode=append", "--signal=USR2@45"):
        assert f"#SBATCH {option}\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun")]
    for option in ("--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=3"):
        assert option in srun
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_option_reaches_the_batch_script(slurm: FakeSlurm, runs: list[Path]) -> None:
    script = SlurmLauncher(
        partition="low",
        time="1:00:00",
        nodes=2,
        tasks_per_node=4,
        gpus_per_node=4,
        mem="64G",
        qos="q",
        account="a",
        constraint="c",
        exclude="n9",
        nodelist="n1",
        exclusive=True,
        reservation="r",
        dependency="afterok:1",
        comment="hello world",
        job_name="j",
        setup=["module load cuda"],
        srun_args=["--cpu-bind=cores"],
        additional={"licenses": "matlab", "mail_user": "me"},
    ).preview(runs[:1])
    for option in (
        *("partition=low", "time=60", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "mem=64G", "qos=q"),
        *("account=a", "constraint=c", "exclude=n9", "nodelist=n1", "exclusive", "reservation=r"),
        *("dependency=afterok:1", "comment='hello world'", "job-name=j", "licenses=matlab", "mail-user=me"),
    ):
        assert f"#SBATCH --{option}\n" in script, option
    assert "\nmodule load cuda\ntrap - ERR\nexport MASTER_PORT=" in script
    assert "--cpu-bind=cores" in script
    assert "wckey" not in script


SBATCH_THAT_COUNTS = """\
#!/bin/sh
[ ! -e {folder}/full ] || {{ echo "sbatch: error: Batch job submission failed: $(cat {folder}/full)" >&2; exit 1; }}
echo "$1" >> {folder}/submitted
echo "Submitted batch job $(wc -l < {folder}/submitted)0"
{then}
"""


def test_sweep_above_the_clusters_limit_is_split(slurm: FakeSlurm, tmp_path: Path) -> None:
    runs = [tmp_path / "outputs" / f"run{index:02}" for index in range(23)]  # MaxArraySize is 11
    for run in runs:
        run.mkdir(parents=True)
    launcher = SlurmLauncher(array_parallelism=12)
    assert launcher.check(runs) == []
    (slurm.folder / "sbatch").write_text(SBATCH_THAT_COUNTS.format(folder=slurm.folder, then=""))
    assert launcher.launch(runs, "somewhere:attempt") == 0
    ids = [json.loads((run / "job.json").read_text())["job_id"] for run in runs]
    assert ids == [*(f"10_{task}" for task in range(11)), *(f"20_{task}" for task in range(11)), "30"]
    scripts = [(sweep_folder(runs[0]) / f"{job}_submission.sh").read_text() for job in (10, 20, 30)]
    assert ["--array=0-10%5" in script for script in scripts] == [True, True, False]
    assert launcher.preview(runs).count("#!/bin/bash") == 3
    for index, run in enumerate(runs):  # the task of a run's id makes an attempt at that run
        start = json.loads((sweep_folder(runs[0]) / f"{ids[index]}_start.json").read_text())
        assert start["run_dir"] == str(run)


def test_the_preview_is_of_a_job_array_from_two_runs_on(slurm: FakeSlurm, runs: list[Path]) -> None:
    for count in (1, 2):
        found = re.findall(r"#SBATCH --array=(\d+-\d+)", SlurmLauncher().preview(runs[:count]))
        assert found == ["0-1"] * (count == 2)


@pytest.mark.parametrize("refusal", ["Resource temporarily unavailable", "Slurm job queue full", "Invalid account"])
def test_submitted_jobs_are_kept_after_an_error(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: str
) -> None:
    runs = [tmp_path / "outputs" / f"run{index:02}" for index in range(12)]
    for run in runs:
        run.mkdir(parents=True)
    text = SBATCH_THAT_COUNTS.format(folder=slurm.folder, then=f"echo '{refusal}' > {slurm.folder}/full")
    (slurm.folder / "sbatch").write_text(text)
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    out, error = capsys.readouterr()
    assert [(run / "job.json").exists() for run in runs] == [True] * 11 + [False]
    assert "run10" in out
    assert "run11" not in out
    assert error.startswith("error: 11 of 12 runs were submitted: ")
    assert refusal in error
    assert ("MaxJobCount" in error) == (refusal != "Invalid account")
    assert error.endswith("rerun the command to submit the others\n")
    assert error.count("\n") == 1


def test_the_environment_of_the_batch_script_reaches_the_ranks(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SBATCH_EXPORT=NONE, srun would pass none of it, not even Slurm's own variables."""
    monkeypatch.setenv("PYTHONPATH", "/my modules")
    (slurm.folder / "srun").write_text("#!/bin/sh\nenv\n")
    script = SlurmLauncher().preview(runs[:1])
    for theirs, path in ((None, "/my modules"), ("/theirs", "/theirs")):
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "12", **({"PYTHONPATH": theirs} if theirs else {})}
        (runs[0] / "logs").mkdir(exist_ok=True)
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
        assert {"SLURM_EXPORT_ENV=ALL", f"PYTHONPATH={path}"} <= set(done.stdout.splitlines())


def test_refused_submission_is_one_line_and_leaves_nothing(
    slurm: FakeSlurm, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account\n")
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: nothing was submitted: ")
    assert "Invalid account" in error
    assert not any(list(run.iterdir()) for run in runs)
    assert not (sweep_folder(runs[0])).exists()


def test_a_refused_submission_removes_only_its_own_files(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Accepted jobs run already, and other commands submit runs of the same folder."""
    runs = [tmp_path / "outputs" / f"run{index:02}" for index in range(12)]
    for run in runs:
        run.mkdir(parents=True)
    folder = sweep_folder(runs[0])
    theirs = {
        f"{'0' * 32}-0.json",
        f".submission_file_{'1' * 32}.sh",
        "12_0_0_log.out",
        "12_0.starts",
        "12_1.0.verdict",
    }
    refusing = slurm.folder / "refusing"
    (slurm.folder / "sbatch").write_text(
        f"#!/bin/sh\nif [ ! -e {refusing} ]; then touch {refusing}; echo Submitted batch job 12; exit 0; fi\n"
        f"cd {folder}; touch {' '.join(theirs)}; echo full >&2; exit 1\n"
    )
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    names = {path.name for path in folder.iterdir()}
    assert theirs <= names
    assert len([name for name in names if name.endswith("_start.json")]) == 11
    assert {name for name in names if name.endswith(".json") and "_" not in name} == {f"{'0' * 32}-0.json"}


def test_submission_is_cancelled_if_its_id_cannot_be_recorded(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[2] / "logs").write_text("a file where the folder should be")
    slurm.prints("squeue", "11|RUNNING|/x/.submission_file_0.sh\n12_0|PENDING|@script@\n12_1|PENDING|@script@\n")
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    assert slurm.calls("scancel") == ["scancel 12"]


@pytest.mark.parametrize("recorded", [True, False])
def test_reused_id_of_a_submitted_job_is_not_taken_for_it(slurm: FakeSlurm, runs: list[Path], recorded: bool) -> None:
    """Slurm lost its state while the command slept: the new job is neither the run's job nor cancelled."""
    slurm.prints("scontrol_show_job", job_line(JobName="theirs", SubmitTime=SUBMITTED, Command="/x/other.sh"))
    slurm.prints("squeue", "12|RUNNING|/x/.submission_file_0.sh\n")
    if not recorded:
        (runs[2] / "logs").write_text("a file where the folder should be")
    assert SlurmLauncher().launch(runs[2:], "somewhere:attempt") == (0 if recorded else 2)
    assert not slurm.calls("scancel")
    if recorded:
        job = json.loads((runs[2] / "job.json").read_text())
        assert (job["name"], job["submit_time"]) == (runs[2].name, None)


def test_a_users_sbatch_variables_do_not_override_the_config(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clear them: sbatch prefers its variables to the lines of the batch script. Those that do not conflict stay."""
    for name in ("NO_REQUEUE", "SIGNAL", "PARTITION", "TIMELIMIT", "GRES", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "theirs")
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\nenv >> {tmp_path}/env\necho Submitted batch job 12\n")
    launcher = SlurmLauncher(partition="low", time=60, additional={"gres": "gpu:1"})
    assert launcher.launch(runs, "somewhere:attempt") == 0
    given = (tmp_path / "env").read_text()
    assert [line for line in given.splitlines() if line.startswith("SBATCH_")] == ["SBATCH_ACCOUNT=theirs"]
    assert os.environ["SBATCH_PARTITION"] == "theirs"


def test_a_command_of_slurm_survives_the_signals_of_its_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals reach all processes of a job from the start, in any session. A requeue is answered all the same."""
    (slurm.folder / "scontrol").write_text("#!/bin/sh\nkill -USR2 $$; kill -INT $$; echo JobState=RUNNING\n")

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(*arguments, **options)
        process.send_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(processes, "start", start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert scheduler.show_job("12") == {"JobState": "RUNNING"}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_users_squeue_filters_do_not_hide_a_live_job(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clear squeue's variables. A job that it does not list would be submitted a second time."""
    for name in ("SQUEUE_PARTITION", "SQUEUE_USERS", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "theirs")
    (slurm.folder / "squeue").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho '{row('12', 'RUNNING').strip()}'\n")
    assert list(scheduler.known_jobs([RecordedJob("12")])) == [RecordedJob("12")]
    assert "theirs" not in (tmp_path / "env").read_text()


def test_users_texts_are_not_mistaken_for_the_state_of_a_job(slurm: FakeSlurm) -> None:
    record = {"JobName": "a JobState=FAILED b", **RUNNING, "Command": "/x JobState=FAILED", "Comment": "Restarts=9"}
    slurm.shows_job(**record)
    assert RUNNING.items() <= scheduler.show_job("12").items()


def test_job_submitted_inside_another_inherits_nothing(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "5", "SLURM_RESTART_COUNT": "2"}
    given = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for name, value in {**inside, **given}.items():
        monkeypatch.setenv(name, value)
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\nenv >> {slurm.folder}/seen\necho Submitted batch job 12\n")
    launcher = SlurmLauncher(partition="low")
    assert launcher.check(runs[:1]) == []
    assert launcher.launch(runs[:1], "somewhere:attempt") == 0
    seen = (slurm.folder / "seen").read_text().splitlines()
    assert {line for line in seen if line.startswith(("SLURM_", "SBATCH_"))} == {f"{k}={v}" for k, v in given.items()}
    assert os.environ["SLURM_ARRAY_TASK_ID"] == "5"


SBATCH_THAT_WAITS = """\
#!/bin/sh
echo "sbatch $*" >> {folder}/calls
while [ ! -e {folder}/go ]; do sleep 0.05; done
echo Submitted batch job 12
"""


@pytest.mark.slow
def test_two_shells_at_once_submit_one_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The second shell waits while sbatch runs for the first, and then finds the job in the queue."""
    (slurm.folder / "sbatch").write_text(SBATCH_THAT_WAITS.format(folder=slurm.folder))
    slurm.prints("squeue", row("12", "PENDING", "Resources"))
    run = tmp_path / "run"
    submit = [sys.executable, "-m", "runner", "launcher=slurm", "launcher.check_folder=false", f"run.dir={run}"]

    def shell() -> subprocess.Popen[str]:
        return subprocess.Popen(submit, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    with shell() as first:
        while not slurm.calls("sbatch"):
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        with shell() as second:
            assert second.stderr is not None
            assert f"{run} is in use by process {first.pid}" in second.stderr.readline()
            (slurm.folder / "go").touch()
            assert "pending, job 12" in second.communicate()[0]
        first.communicate()
    assert first.returncode == second.returncode == 0
    assert len(slurm.calls("sbatch")) == 1


# Jobs in the queue


def test_the_jobs_of_all_runs_come_from_one_call_of_squeue(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.prints(
        "squeue",
        row("12_0", "RUNNING", restarts=1, Name="sweep-of-3")
        + row("12_1", "PENDING", "BeginTime", restarts=2, Name="sweep-of-3")
        + row("12_7", "PENDING", "Priority", Name="sweep-of-3"),
    )
    jobs = SlurmLauncher().jobs(runs)
    assert [(run.name, info.state, info.node) for run, info in jobs.items()] == [
        ("run0", "running", "n1"),
        ("run1", "requeued", None),
    ]
    assert len(slurm.calls("squeue")) == 1


@pytest.mark.parametrize(
    ("slurm_state", "state", "live"),
    [
        ("COMPLETING", "ending", True),
        ("SUSPENDED", "suspended", True),
        ("STOPPED", "suspended", True),
        ("SIGNALING", "running", True),
        ("REVOKED", "cancelled", False),
        ("REQUEUE_HOLD", "pending", True),
        ("COMPLETED", "completed", False),
        ("CANCELLED", "cancelled", False),
        ("OUT_OF_MEMORY", "failed", False),
    ],
)
def test_slurms_job_states_are_translated(slurm: FakeSlurm, slurm_state: str, state: str, live: bool) -> None:
    slurm.prints("squeue", row("12", slurm_state))
    (info,) = scheduler.known_jobs([RecordedJob("12")]).values()
    assert (info.state, info.live) == (state, live)


def test_a_run_is_followed_while_its_job_is_completing(slurm: FakeSlurm, runs: list[Path]) -> None:
    """The job may be about to be requeued: it is over only once it has left the queue."""
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    (runs[0] / "status.json").write_text(json.dumps({"state": "requeued", "job_id": "12"}))
    slurm.prints("squeue", row("12", "COMPLETING", restarts=1, Name="run0"))
    (info,) = SlurmLauncher().jobs(runs).values()
    assert not display.is_over(display.state_of(runs[0], info))


@pytest.mark.parametrize("job_id", ["12", "11"])
@pytest.mark.parametrize("slurm_state", ["PENDING", "RUNNING", "COMPLETING"])
@pytest.mark.parametrize(("since_s", "state"), [(1.0, "finished"), (-1.0, None)])
def test_a_finished_run_is_not_followed_to_the_end_of_its_job(
    slurm: FakeSlurm, runs: list[Path], job_id: str, slurm_state: str, since_s: float, state: str | None
) -> None:
    """The job may linger, or find the run already finished. But a longer run may have been submitted since."""
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    (runs[0] / "status.json").write_text(json.dumps({"state": "finished", "job_id": job_id}))
    (runs[0] / "finished.json").write_text('{"steps": 300}')
    finished = (runs[0] / "job.json").stat().st_mtime + since_s
    os.utime(runs[0] / "finished.json", (finished, finished))
    slurm.prints("squeue", row("12", slurm_state, Name="run0"))
    state = state or {"COMPLETING": "finished"}.get(slurm_state, slurm_state.lower())
    shown = display.state_of(runs[0], SlurmLauncher().jobs(runs)[runs[0]])
    assert (shown, display.is_over(shown)) == (state, state == "finished")


@pytest.mark.parametrize(
    ("recorded", "slurm_state", "state"),
    [
        ("finished", "COMPLETED", "finished"),
        ("failed", "FAILED", "failed"),
        ("running", "CANCELLED", "cancelled"),
        ("requeued", "FAILED", "failed"),
        (None, "FAILED", "failed"),
        ("running", "COMPLETED", "killed"),
    ],
)
def test_how_a_followed_run_ended(
    slurm: FakeSlurm, runs: list[Path], recorded: str | None, slurm_state: str, state: str
) -> None:
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    if recorded:
        (runs[0] / "status.json").write_text(json.dumps({"state": recorded, "job_id": "12"}))
    slurm.prints("squeue", row("12", slurm_state, restarts=1, Name="run0"))
    shown = display.state_of(runs[0], SlurmLauncher().jobs(runs)[runs[0]])
    assert shown == state
    assert display.is_over(shown)


def test_live_job_is_found_among_later_submissions(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[0] / "job.json").write_text('{"job_id": "13"}')
    (runs[0] / "status.json").write_text('{"job_id": "12"}')
    (runs[1] / "status.json").write_text('{"job_id": "none"}')  # torchrun's, say
    slurm.prints("squeue", row("13", "FAILED") + row("12", "RUNNING"))
    assert [(run.name, info.job_id) for run, info in SlurmLauncher().jobs(runs).items()] == [("run0", "12")]


def test_jobs_that_slurm_has_forgotten_are_not_live(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.fails("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    assert SlurmLauncher().jobs(runs) == {}


MALFORMED_IDS = ["99999999999999999999", "4294967295", "4294967294", "0", "１２", "12_", "1\n", None]


@pytest.mark.parametrize("job_id", MALFORMED_IDS)
def test_a_malformed_job_id_hides_no_other_job(slurm: FakeSlurm, runs: list[Path], job_id: str | None) -> None:
    """Slurm's squeue would refuse the whole query."""
    (runs[0] / "job.json").write_text(json.dumps({"job_id": job_id}))
    (runs[1] / "job.json").write_text(json.dumps({"job_id": "12"}))
    slurm.prints("squeue", row("12", "RUNNING"))
    assert [run.name for run in SlurmLauncher().jobs(runs)] == ["run1"]
    assert " --jobs=12 " in slurm.calls("squeue")[0]


def test_query_refused_by_squeue_does_not_lose_the_jobs(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[0] / "job.json").write_text(json.dumps({"job_id": "12"}))
    slurm.fails("squeue", "squeue: error: Invalid job id: 12x\n")
    with pytest.raises(scheduler.SchedulerError, match="Invalid job id"):
        SlurmLauncher().jobs(runs)


def mark_of(run: Path) -> str:
    """Return the prefix of the names of the marker files of a run's job."""
    recorded = json.loads((run / "job.json").read_text())
    return requeue.mark(recorded["job_id"], recorded["submission"])


@pytest.mark.parametrize("content", ["² full", "9" * 5000 + " full", "-1 full", "full full"])
def test_a_malformed_count_of_failed_starts_hides_no_job(slurm: FakeSlurm, runs: list[Path], content: str) -> None:
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    starts = requeue.starts_file(runs[0] / "logs", mark_of(runs[0]))
    starts.write_text(content)
    slurm.prints("squeue", row("12", "RUNNING", Name="run0"))
    assert requeue.failed_starts(starts) == (0, "full")
    assert SlurmLauncher().jobs(runs)[runs[0]].state == "running"


def test_reason_of_a_failed_start_is_found_in_the_jobs_files(slurm: FakeSlurm, tmp_path: Path) -> None:
    """In a sweep whose runs have several parents, they are next to the first run."""
    runs = [tmp_path / name / "run" for name in ("a", "b")]
    for run in runs:
        run.mkdir(parents=True)
    SlurmLauncher().launch(runs, "somewhere:attempt")
    for run in runs:
        requeue.starts_file(sweep_folder(runs[0]), mark_of(run)).write_text(f"3 {requeue.GIVEN_UP}full")
    reasons = [info.reason for info in SlurmLauncher().jobs(runs).values()]
    assert reasons == [f"{requeue.GIVEN_UP}full"] * 2


@pytest.mark.parametrize("folder", ["\0", "\ud800", "/" + "x" * 300, 3, None])
def test_a_malformed_folder_hides_no_job(slurm: FakeSlurm, runs: list[Path], folder: object) -> None:
    (runs[0] / "job.json").write_text(json.dumps({"job_id": "12", "folder": folder}))
    slurm.prints("squeue", row("12", "RUNNING"))
    assert SlurmLauncher().jobs(runs)[runs[0]].state == "running"


@pytest.mark.parametrize("name", ["mine", "x" * 300, "x" * 254 + " yz", "trailing "])
def test_a_requeued_job_is_known_by_the_name_that_slurm_gave_it(slurm: FakeSlurm, runs: list[Path], name: str) -> None:
    slurm.shows_job(JobName=name, UserId="me(0)", SubmitTime=SUBMITTED)
    SlurmLauncher(additional={"job-name": name}).launch(runs[:1], "somewhere:attempt")
    slurm.prints("squeue", row("12", restarts=1, Name=name[:255], SubmitTime="2026-01-02T00:00:00"))
    assert [info.state for info in SlurmLauncher().jobs(runs).values()] == ["requeued"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    time=st.sampled_from(["2025-12-31T23:59:59", SUBMITTED, "2026-01-01T00:00:01"]),
    user=st.sampled_from([os.getuid(), 99999]),
    name=st.sampled_from(["run0", "theirs", "a | b"]),
    restarts=st.integers(0, 2),
    state=st.sampled_from(["PENDING", "RUNNING", "COMPLETED"]),
)
def test_a_job_with_a_reused_id_is_not_ours(time: str, user: int, name: str, restarts: int, state: str) -> None:
    """Slurm sets the submit time anew at a requeue. Until then it must be the recorded time."""
    ours = RecordedJob("12", str(os.getuid()), "run0", SUBMITTED)
    shown = row("12", state, restarts=restarts, SubmitTime=time, UserID=str(user), Name=name)
    same = user == os.getuid() and (time == SUBMITTED if restarts == 0 else name == "run0" and time >= SUBMITTED)
    with mock.patch.object(scheduler, "ask", return_value=shown):
        assert list(scheduler.known_jobs([ours])) == ([ours] if same else [])


def test_run_whose_job_id_was_reused_is_submitted_again(slurm: FakeSlurm, runs: list[Path]) -> None:
    """Slurm's state was lost, or the ids have started again."""
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    recorded = json.loads((runs[0] / "job.json").read_text())
    assert (recorded["user"], recorded["name"], recorded["submit_time"]) == (str(os.getuid()), "run0", SUBMITTED)
    slurm.prints("squeue", row("12", "PENDING", Name="run0"))
    assert [info.state for info in SlurmLauncher().jobs(runs).values()] == ["pending"]
    slurm.prints("squeue", row("12", "PENDING", Name="theirs", SubmitTime="2026-02-01T00:00:00"))
    assert SlurmLauncher().jobs(runs) == {}


def test_job_without_a_submit_time_is_known_by_user_and_name(slurm: FakeSlurm, runs: list[Path]) -> None:
    slurm.fails("scontrol_show_job", "Unable to contact slurm controller\n")
    assert SlurmLauncher().launch(runs[:1], "somewhere:attempt") == 0
    slurm.prints("squeue", row("12", Name="run0"))
    assert [info.state for info in SlurmLauncher().jobs(runs).values()] == ["pending"]
    slurm.prints("squeue", row("12", Name="theirs"))
    assert SlurmLauncher().jobs(runs) == {}


@pytest.mark.parametrize(("minutes", "restarts", "ours"), [(4, 0, True), (6, 0, False), (6, 1, True)])
def test_later_job_of_the_same_name_is_another_one(
    slurm: FakeSlurm, runs: list[Path], minutes: int, restarts: int, ours: bool
) -> None:
    """The other job was submitted five minutes after the record, as clocks may differ. A requeue sets the time anew."""
    slurm.fails("scontrol_show_job", "Unable to contact slurm controller\n")
    assert SlurmLauncher().launch(runs[:1], "somewhere:attempt") == 0
    recorded = json.loads((runs[0] / "job.json").read_text())["submitted"]
    shown = datetime.fromtimestamp(recorded + 60 * minutes, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    slurm.prints("squeue", row("12", Name="run0", SubmitTime=shown, restarts=restarts))
    assert bool(SlurmLauncher().jobs(runs)) == ours


@pytest.mark.parametrize("name", ["run0", "renamed"])
@pytest.mark.parametrize(("restarts", "submitted"), [(0, SUBMITTED), (1, SUBMITTED), (1, "2026-01-02T00:00:00")])
def test_job_is_known_by_the_submission_in_its_batch_script(
    slurm: FakeSlurm, runs: list[Path], name: str, restarts: int, submitted: str
) -> None:
    """Names and requeues do not matter: sweeps of the same size have the same name."""
    slurm.shows_job(JobName="run0", SubmitTime=SUBMITTED)
    assert SlurmLauncher().launch(runs[:1], "somewhere:attempt") == 0
    own = json.loads((runs[0] / "job.json").read_text())["submission"]
    for unique in (own, "b" * 32):
        script = f"/a|b/.submission_file_{unique}-1.sh"
        slurm.prints("squeue", row("12", Name=name, SubmitTime=submitted, restarts=restarts, Command=script))
        assert bool(SlurmLauncher().jobs(runs)) == (unique == own)


def test_task_requeued_before_its_array_is_known(slurm: FakeSlurm, runs: list[Path]) -> None:
    """The task was stopped right after sbatch, so Slurm's time is the requeue time of the requested task."""
    slurm.prints("scontrol_show_job", "JobId=12 JobName=sweep Restarts=1 SubmitTime=2026-01-01T00:02:00\n")
    assert SlurmLauncher().launch(runs[:2], "somewhere:attempt") == 0
    tasks = [str(json.loads((run / "job.json").read_text())["job_id"]) for run in runs[:2]]
    name = json.loads((runs[1] / "job.json").read_text())["name"]
    slurm.prints("squeue", row(tasks[1], "RUNNING", restarts=1, SubmitTime="2026-01-01T00:01:00", Name=name))
    assert [info.job_id for info in SlurmLauncher().jobs(runs).values()] == tasks[1:]


def test_a_job_that_only_its_attempt_recorded_is_known(slurm: FakeSlurm, runs: list[Path]) -> None:
    """The command was killed before it wrote job.json."""
    recorded = {"job_id": "12", "job_name": "run0", "launcher": LAUNCHER, "updated": 1767225600.0}  # SUBMITTED
    (runs[0] / "status.json").write_text(json.dumps(recorded))
    (runs[1] / "status.json").write_text(json.dumps({**recorded, "job_id": "13", "launcher": None}))  # torchrun's
    slurm.prints("squeue", row("12", "RUNNING", Name="run0") + row("13", "RUNNING", Name="run0"))
    assert [info.job_id for info in SlurmLauncher().jobs(runs).values()] == ["12"]
    found, unanswered = submitted_jobs.jobs([RunDir(run) for run in runs])
    assert ([info.job_id for info in found.values()], unanswered) == (["12"], {})
    slurm.prints("squeue", row("12", "RUNNING", Name="theirs"))
    assert SlurmLauncher().jobs(runs) == {}
    assert f"{SlurmLauncher.__module__}.{SlurmLauncher.__qualname__}" == LAUNCHER


def test_job_that_trained_last_is_not_a_later_submission(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[0] / "job.json").write_text(json.dumps({"job_id": "13", "user": str(os.getuid())}))
    (runs[0] / "status.json").write_text(json.dumps({"job_id": "12", "updated": 1767225600.0}))  # SUBMITTED
    slurm.prints("squeue", row("12", "RUNNING"))
    assert [info.job_id for info in SlurmLauncher().jobs(runs).values()] == ["12"]
    slurm.prints("squeue", row("12", "RUNNING", SubmitTime="2026-01-01T00:00:01"))
    assert SlurmLauncher().jobs(runs) == {}


@pytest.mark.parametrize(("submitted", "known"), [("00:00:30", True), ("00:02:00", False)])
def test_job_recorded_by_its_attempt_is_known_by_an_old_id(
    slurm: FakeSlurm, runs: list[Path], submitted: str, known: bool
) -> None:
    """Slurm lost its state, and the command that resubmitted the run was killed: the next submitted twice."""
    earlier = {"job_id": "12", "user": str(os.getuid()), "name": "run0", "submit_time": SUBMITTED}
    (runs[0] / "job.json").write_text(json.dumps(earlier))
    status = {"job_id": "12", "job_name": "run0", "launcher": LAUNCHER, "updated": 1767225660.0}  # SUBMITTED + 60 s
    (runs[0] / "status.json").write_text(json.dumps(status))
    slurm.prints("squeue", row("12", "RUNNING", SubmitTime=f"2026-01-01T{submitted}", Name="run0"))
    assert [info.job_id for info in SlurmLauncher().jobs(runs).values()] == ["12"] * known


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldAdmin", "held by Slurm or an administrator: `scontrol release 12`"),
        ("launch failed requeued held", "`scontrol release 12`"),
        ("job requeued in held state", "`scontrol release 12`"),
        ("JobArrayTaskLimit", "launcher.array_parallelism"),
        ("Resources", "nodes with what it asks for are not free yet"),
        ("PartitionDown", "its partition is down"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "UnavailableNodes:n1: a node that it needs is not available"),
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit"),
    ],
)
def test_why_a_job_waits_is_explained(slurm: FakeSlurm, runs: list[Path], reason: str, words: str) -> None:
    (runs[0] / "job.json").write_text('{"job_id": "12"}')
    slurm.prints("squeue", row("12", "PENDING", reason))
    assert words in str(SlurmLauncher().jobs(runs)[runs[0]].reason)


def test_silent_controller_is_not_an_empty_queue(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(scheduler.SchedulerError, match="Unable to contact"):
        SlurmLauncher().jobs(runs)


def test_slurm_is_not_asked_about_runs_that_were_never_submitted(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher().jobs(runs) == {}
    assert not slurm.calls("squeue")

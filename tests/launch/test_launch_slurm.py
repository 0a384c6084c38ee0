"""Submitting runs and asking for their jobs, with Slurm's commands faked on PATH (slurm/ has the real ones)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_slurm import RUNNING, FakeSlurm, runs, slurm
from runs import ROOT

from launch import display, scheduler
from launch.job import SlurmJob
from launch.local import LocalLauncher
from launch.slurm import SlurmLauncher
from runner.contracts import Job, Launcher

__all__ = ["runs", "slurm"]


def test_launchers_and_jobs_have_the_shapes_that_the_commands_rely_on() -> None:
    local: Launcher = LocalLauncher()
    slurm: Launcher = SlurmLauncher()
    job: type[Job] = SlurmJob
    assert isinstance(local, Launcher)
    assert isinstance(slurm, Launcher)
    assert job is SlurmJob


# Submission


def test_a_sweep_is_one_job_array_and_each_run_records_its_task(slurm: FakeSlurm, runs: list[Path]) -> None:
    launcher = SlurmLauncher(partition="low", array_parallelism=2)
    assert launcher.launch(runs, "somewhere:attempt") == 0
    assert len(slurm.calls("sbatch")) == 1
    assert [json.loads((run / "job.json").read_text())["job_id"] for run in runs] == ["12_0", "12_1", "12_2"]
    script = (runs[0].parent / ".slurm" / "12_submission.sh").read_text()
    assert "--array=0-2%2" in script
    # The logs are found in the run directory, too, if Slurm writes them elsewhere.
    (runs[0].parent / ".slurm" / "12_1_0_log.out").write_text("hello")
    assert (runs[1] / "logs" / "12_1_0_log.out").read_text() == "hello"


def test_the_batch_script_sets_the_options_that_keep_a_run_from_being_lost(slurm: FakeSlurm, runs: list[Path]) -> None:
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
    assert "\nmodule load cuda\nexport MASTER_PORT=" in script
    assert "--cpu-bind=cores" in script
    assert "wckey" not in script


def test_a_refused_submission_is_one_line_and_leaves_nothing_behind(
    slurm: FakeSlurm, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Socket timed out\n")
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: nothing was submitted: ")
    assert "Socket timed out" in error
    assert not any((run / "job.json").exists() for run in runs)
    assert not list((runs[0].parent / ".slurm").iterdir())


def test_a_submission_is_cancelled_if_its_job_id_cannot_be_recorded(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[2] / "logs").write_text("a file where the folder should be")
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    assert slurm.calls("scancel") == ["scancel 12"]


def test_a_users_sbatch_variables_do_not_override_the_config(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sbatch prefers its variables to the lines of the batch script; those that do not conflict stay."""
    for name in ("NO_REQUEUE", "SIGNAL", "PARTITION", "TIMELIMIT", "GRES", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "theirs")
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\nenv >> {tmp_path}/env\necho Submitted batch job 12\n")
    launcher = SlurmLauncher(partition="low", time=60, additional={"gres": "gpu:1"})
    assert launcher.launch(runs, "somewhere:attempt") == 0
    given = (tmp_path / "env").read_text()
    assert [line for line in given.splitlines() if line.startswith("SBATCH_")] == ["SBATCH_ACCOUNT=theirs"]
    assert os.environ["SBATCH_PARTITION"] == "theirs"


def test_a_users_squeue_filters_do_not_hide_a_live_job(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """squeue reads them from its variables; a job that it does not list would be submitted a second time."""
    for name in ("SQUEUE_PARTITION", "SQUEUE_USERS", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "theirs")
    (slurm.folder / "squeue").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho '12|RUNNING|None|0|n1|'\n")
    assert list(scheduler.known_jobs(["12"])) == ["12"]
    assert "theirs" not in (tmp_path / "env").read_text()


def test_users_texts_are_not_mistaken_for_the_state_of_a_job(slurm: FakeSlurm) -> None:
    record = {"JobName": "a JobState=FAILED b", **RUNNING, "Command": "/x JobState=FAILED", "Comment": "Restarts=9"}
    slurm.shows_job(**record)
    assert RUNNING.items() <= scheduler.show_job("12").items()


def test_a_job_that_is_submitted_inside_another_inherits_nothing_from_it(
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
[ "$1" = --test-only ] && exit
echo "sbatch $*" >> {folder}/calls
while [ ! -e {folder}/go ]; do sleep 0.05; done
echo Submitted batch job 12
"""


@pytest.mark.slow
def test_two_shells_at_once_submit_one_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The second one waits while sbatch runs for the first, and then finds the job in the queue."""
    (slurm.folder / "sbatch").write_text(SBATCH_THAT_WAITS.format(folder=slurm.folder))
    slurm.prints("squeue", "12|PENDING|Resources|0|n/a|\n")
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
        "12_0  |RUNNING  |None  |1  |n1  |\n12_1 |PENDING |BeginTime |2 |n/a |\n12_7|PENDING|Priority|0||\n",
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
        ("SUSPENDED", "running", True),
        ("SIGNALING", "running", True),
        ("REVOKED", "cancelled", False),
        ("REQUEUE_HOLD", "pending", True),
        ("COMPLETED", "completed", False),
        ("CANCELLED", "cancelled", False),
        ("OUT_OF_MEMORY", "failed", False),
    ],
)
def test_slurms_job_states_are_translated(slurm: FakeSlurm, slurm_state: str, state: str, live: bool) -> None:
    slurm.prints("squeue", f"12|{slurm_state}|None|0|n1|\n")
    info = scheduler.known_jobs(["12"])["12"]
    assert (info.state, info.live) == (state, live)


def test_a_run_is_followed_while_its_job_is_completing(slurm: FakeSlurm, runs: list[Path]) -> None:
    """It may be about to be requeued: it is over only once it has left the queue."""
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    (runs[0] / "status.json").write_text(json.dumps({"state": "requeued", "job_id": "12"}))
    slurm.prints("squeue", "12|COMPLETING|None|1|n1|\n")
    (info,) = SlurmLauncher().jobs(runs).values()
    assert not display.is_over(display.state_of(runs[0], info))


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
    slurm.prints("squeue", f"12|{slurm_state}|None|1|n1|\n")
    shown = display.state_of(runs[0], SlurmLauncher().jobs(runs)[runs[0]])
    assert shown == state
    assert display.is_over(shown)


def test_a_live_job_is_found_even_if_another_one_was_submitted_after_it(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[0] / "job.json").write_text('{"job_id": "13"}')
    (runs[0] / "status.json").write_text('{"job_id": "12"}')
    (runs[1] / "status.json").write_text('{"job_id": "none"}')  # torchrun's, say
    slurm.prints("squeue", "13|FAILED|None|0|n1|\n12|RUNNING|None|0|n1|\n")
    assert [(run.name, info.job_id) for run, info in SlurmLauncher().jobs(runs).items()] == [("run0", "12")]


def test_jobs_that_slurm_has_forgotten_are_not_live(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.fails("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    assert SlurmLauncher().jobs(runs) == {}


def test_a_controller_that_does_not_answer_is_not_mistaken_for_an_empty_queue(
    slurm: FakeSlurm, runs: list[Path]
) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(scheduler.SchedulerError, match="Unable to contact"):
        SlurmLauncher().jobs(runs)


def test_slurm_is_not_asked_about_runs_that_were_never_submitted(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher().jobs(runs) == {}
    assert not slurm.calls("squeue")

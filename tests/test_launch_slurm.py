"""Submitting, checking and leaving, with Slurm's commands faked on PATH (tests/slurm has the real ones)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, slurm
from runs import ROOT

from launch import checks, display, job, rendezvous, scheduler
from launch.slurm import SlurmLauncher

__all__ = ["slurm"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "outputs" / f"run{index}" for index in range(3)]
    for run in made:
        run.mkdir(parents=True)
    return made


def job_line(**fields: str) -> str:
    return " ".join(f"{key}={value}" for key, value in {"JobId": "12", **fields}.items()) + "\n"


# Times


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 2),
        ("2:00:00", 120),
        ("1-0", 1440),
        ("1-02:30", 1590),
        ("1-00:00:01", 1441),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: int | str, expected: int) -> None:
    assert checks.minutes(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "1:2:3:4", "1h", "-5", "1-", "2 days", "1.5"])
def test_a_time_that_slurm_refuses_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time that Slurm knows"):
        checks.minutes(text)


# Checks


def test_a_sound_submission_has_no_faults(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher(partition="low", time="2:00:00").check(runs) == []
    assert slurm.calls("sbatch") == ["sbatch --test-only"]
    assert not list(runs[0].iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "lwo"}, ("launcher.partition='lwo'", "did you mean 'low'", "low, high")),
        ({"time": "soon"}, ("launcher.time", "'soon'", "D-HH:MM:SS")),
        ({"time": "2-0"}, ("launcher.time=2-0", "'low'", "1-00:00:00")),
        ({"nodes": 0}, ("launcher.nodes=0", "from 1")),
        ({"time": 1, "signal_delay_s": 60}, ("launcher.signal_delay_s=60", "1 to 59")),
        ({"mem": "4G", "mem_per_cpu": "1G"}, ("launcher.mem", "exclude each other")),
        ({"max_timeouts": 0}, ("launcher.max_timeouts=0", "from 1")),
        ({"time": 0}, ("launcher.time=0", "1 minute or more")),
        ({"signal_delay_s": "soon"}, ("launcher.signal_delay_s=soon", "from 1 to 65535")),
        ({"setup": "module load cuda"}, ("launcher.setup='module load cuda'", "must be a list", "[module load cuda]")),
    ],
)
def test_faults_are_one_line_each_and_submit_nothing(
    slurm: FakeSlurm, runs: list[Path], options: dict[str, object], words: tuple[str, ...]
) -> None:
    faults = SlurmLauncher(**{"partition": "low", **options}).check(runs)  # type: ignore[arg-type]
    assert len(faults) == 1
    assert "\n" not in faults[0]
    assert all(word in faults[0] for word in words), faults[0]
    assert not slurm.calls("sbatch")


def test_all_faults_of_the_options_come_at_once(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert len(SlurmLauncher(nodes=0, tasks_per_node=0, time="x").check(runs)) == 3


def test_what_slurm_itself_would_refuse_is_found_before_anything_is_submitted(
    slurm: FakeSlurm, runs: list[Path]
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification\n")
    (fault,) = SlurmLauncher(qos="fast").check(runs)
    assert fault.endswith("Invalid qos specification")


def test_a_machine_without_slurm_is_told_so(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (fault,) = SlurmLauncher().check(runs)
    assert "sbatch" in fault
    assert "login node" in fault


def test_a_controller_that_does_not_answer_is_a_fault(slurm: FakeSlurm, runs: list[Path]) -> None:
    slurm.fails("scontrol_show_partition", "slurm_load_partitions error: Unable to contact slurm controller\n")
    (fault,) = SlurmLauncher().check(runs)
    assert "Unable to contact slurm controller" in fault


def test_a_sweep_larger_than_an_array_may_be_is_a_fault(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert SlurmLauncher().check([tmp_path / str(index) for index in range(11)]) == []
    (fault,) = SlurmLauncher().check([tmp_path / str(index) for index in range(12)])
    assert "12 runs" in fault
    assert "11 tasks" in fault


def test_a_folder_that_the_nodes_cannot_see_is_a_fault(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.prints("scontrol_show_node", "NodeName=n1 NodeHostName=faraway\n")
    monkeypatch.setattr(checks, "file_system_of", lambda path: "ext4")
    (fault,) = SlurmLauncher(partition="low").check(runs)
    assert str(runs[0].parent) in fault
    assert "faraway cannot see it" in fault
    assert SlurmLauncher(partition="low", check_folder=False).check(runs) == []


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert checks.file_system_of(tmp_path / "not" / "there", mounts) == "nfs4"
    assert checks.file_system_of(Path("/"), mounts) == "ext4"


# Submission


def test_a_sweep_is_one_array_and_each_run_knows_its_task(slurm: FakeSlurm, runs: list[Path]) -> None:
    launcher = SlurmLauncher(partition="low", array_parallelism=2)
    assert launcher.launch(runs, "somewhere:attempt") == 0
    assert len(slurm.calls("sbatch")) == 1
    assert [json.loads((run / "job.json").read_text())["job_id"] for run in runs] == ["12_0", "12_1", "12_2"]
    script = (runs[0].parent / ".slurm" / "12_submission.sh").read_text()
    assert "--array=0-2%2" in script
    # Logs are found in the run directory, also where Slurm writes them elsewhere.
    (runs[0].parent / ".slurm" / "12_1_0_log.out").write_text("hello")
    assert (runs[1] / "logs" / "12_1_0_log.out").read_text() == "hello"


def test_the_script_asks_for_what_keeps_a_run_from_being_lost(slurm: FakeSlurm, runs: list[Path]) -> None:
    script = SlurmLauncher(signal_delay_s=45, cpus_per_task=3).preview(runs[:1])
    for option in ("--requeue", "--open-mode=append", "--signal=USR2@45"):
        assert f"#SBATCH {option}\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun")]
    for option in ("--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=3"):
        assert option in srun
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_option_reaches_the_script(slurm: FakeSlurm, runs: list[Path]) -> None:
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


def test_a_refused_submission_is_one_line_and_leaves_no_job(
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


def test_a_submission_that_cannot_be_noted_down_is_cancelled(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[2] / "logs").write_text("a file where the folder should be")
    assert SlurmLauncher().launch(runs, "somewhere:attempt") == 2
    assert slurm.calls("scancel") == ["scancel 12"]


def test_a_users_defaults_do_not_beat_the_config(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sbatch takes its variables before the lines of the batch script; the others of the user's stay."""
    for name in ("NO_REQUEUE", "SIGNAL", "PARTITION", "TIMELIMIT", "GRES", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "theirs")
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\nenv >> {tmp_path}/env\necho Submitted batch job 12\n")
    launcher = SlurmLauncher(partition="low", time=60, additional={"gres": "gpu:1"})
    assert launcher.launch(runs, "somewhere:attempt") == 0
    given = (tmp_path / "env").read_text()
    assert [line for line in given.splitlines() if line.startswith("SBATCH_")] == ["SBATCH_ACCOUNT=theirs"]
    assert os.environ["SBATCH_PARTITION"] == "theirs"


def test_a_users_filters_do_not_hide_a_live_job(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """squeue takes them from its variables and then knows of no job, which would be submitted a second time."""
    for name in ("SQUEUE_PARTITION", "SQUEUE_USERS", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "theirs")
    (slurm.folder / "squeue").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho '12|RUNNING|None|0|n1|'\n")
    assert list(scheduler.known_jobs(["12"])) == ["12"]
    assert "theirs" not in (tmp_path / "env").read_text()


def test_texts_of_the_users_are_not_taken_for_the_state(slurm: FakeSlurm) -> None:
    said = {"JobName": "a JobState=FAILED b", **RUNNING, "Command": "/x JobState=FAILED", "Comment": "Restarts=9"}
    slurm.prints("scontrol_show_job", job_line(**said))
    assert RUNNING.items() <= scheduler.show_job("12").items()


def test_a_job_that_is_submitted_inside_another_inherits_nothing_of_it(
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


def test_a_dry_run_submits_nothing(slurm: FakeSlurm, runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert SlurmLauncher(dry_run=True).launch(runs, "somewhere:attempt") == 0
    assert "#SBATCH --requeue" in capsys.readouterr().out
    assert not slurm.calls("sbatch")


SBATCH_THAT_WAITS = """\
#!/bin/sh
[ "$1" = --test-only ] && exit
echo "sbatch $*" >> {folder}/calls
while [ ! -e {folder}/go ]; do sleep 0.05; done
echo Submitted batch job 12
"""


@pytest.mark.slow
def test_two_shells_at_once_submit_one_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The second waits while sbatch works for the first, and then finds the job in the queue."""
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


# The queue


def test_live_jobs_come_from_one_call_and_know_their_restarts(slurm: FakeSlurm, runs: list[Path]) -> None:
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
    ("said", "state", "live"),
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
def test_what_slurm_calls_a_job(slurm: FakeSlurm, said: str, state: str, live: bool) -> None:
    slurm.prints("squeue", f"12|{said}|None|0|n1|\n")
    info = scheduler.known_jobs(["12"])["12"]
    assert (info.state, info.live) == (state, live)


def test_a_run_is_followed_while_its_job_gives_its_node_back(slurm: FakeSlurm, runs: list[Path]) -> None:
    """It may be about to come back: an end it is only when it has left the queue."""
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    (runs[0] / "status.json").write_text(json.dumps({"state": "requeued", "job_id": "12"}))
    slurm.prints("squeue", "12|COMPLETING|None|1|n1|\n")
    (info,) = SlurmLauncher().jobs(runs).values()
    assert not display.is_over(display.state_of(runs[0], info))


@pytest.mark.parametrize(
    ("said", "slurm_says", "state"),
    [
        ("finished", "COMPLETED", "finished"),
        ("failed", "FAILED", "failed"),
        ("running", "CANCELLED", "cancelled"),
        ("requeued", "FAILED", "failed"),
        (None, "FAILED", "failed"),
        ("running", "COMPLETED", "killed"),
    ],
)
def test_the_end_of_a_run_that_was_followed(
    slurm: FakeSlurm, runs: list[Path], said: str | None, slurm_says: str, state: str
) -> None:
    SlurmLauncher().launch(runs[:1], "somewhere:attempt")
    if said:
        (runs[0] / "status.json").write_text(json.dumps({"state": said, "job_id": "12"}))
    slurm.prints("squeue", f"12|{slurm_says}|None|1|n1|\n")
    shown = display.state_of(runs[0], SlurmLauncher().jobs(runs)[runs[0]])
    assert shown == state
    assert display.is_over(shown)


def test_a_job_that_trains_is_found_though_another_was_submitted_after_it(slurm: FakeSlurm, runs: list[Path]) -> None:
    (runs[0] / "job.json").write_text('{"job_id": "13"}')
    (runs[0] / "status.json").write_text('{"job_id": "12"}')
    (runs[1] / "status.json").write_text('{"job_id": "none"}')  # torchrun's, say
    slurm.prints("squeue", "13|FAILED|None|0|n1|\n12|RUNNING|None|0|n1|\n")
    assert [(run.name, info.job_id) for run, info in SlurmLauncher().jobs(runs).items()] == [("run0", "12")]


def test_jobs_that_slurm_has_forgotten_are_not_alive(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.fails("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    assert SlurmLauncher().jobs(runs) == {}


def test_a_silent_controller_is_not_taken_for_an_empty_queue(slurm: FakeSlurm, runs: list[Path]) -> None:
    SlurmLauncher().launch(runs, "somewhere:attempt")
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(scheduler.SchedulerError, match="Unable to contact"):
        SlurmLauncher().jobs(runs)


def test_without_submitted_runs_nobody_is_asked(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher().jobs(runs) == {}
    assert not slurm.calls("squeue")


# Inside the job


@pytest.fixture
def inside(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(job, "RETRY_S", 0.01)
    monkeypatch.setattr(job, "LOOK_AGAIN_S", 0.01)
    yield slurm
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()
            thread.join()


RUNNING = {"JobState": "RUNNING", "Restarts": "0", "Reason": "None", "PreemptTime": "None"}
GONE = {**RUNNING, "JobState": "COMPLETING"}
AT = "2026-01-01T00:00:00"
# The table of what really arrives, as measured on a real cluster, and how the job is then put back: Slurm would put
# back a cancelled one as well, unless it is asked for a job that is not over (`incomplete`).
CAUSES = [
    (signal.SIGTERM, {**RUNNING, "PreemptTime": "2026-01-01T00:00:00"}, "preempted", "incomplete 12_1"),
    (signal.SIGUSR2, {**RUNNING, "PreemptTime": "2026-01-01T00:00:00"}, "preempted", "incomplete 12_1"),
    (signal.SIGUSR2, RUNNING, "time limit", "incomplete 12_1"),
    (signal.SIGUSR1, RUNNING, "time limit", "incomplete 12_1"),
    # Until the last node has answered to the signal, this is what Slurm says of a job that runs.
    (signal.SIGTERM, {**RUNNING, "JobState": "SIGNALING", "PreemptTime": AT}, "preempted", "incomplete 12_1"),
    (signal.SIGTERM, {**RUNNING, "JobState": "STOPPED", "PreemptTime": AT}, "preempted", "incomplete 12_1"),
    (signal.SIGTERM, {**RUNNING, "JobState": "COMPLETING"}, "cancelled", None),
    (signal.SIGTERM, {**RUNNING, "JobState": "COMPLETING", "Reason": "TimeLimit"}, "time limit", "12_1"),
    (signal.SIGTERM, {"JobState": "COMPLETING", "Restarts": "1"}, "requeued", None),
    (signal.SIGTERM, RUNNING, "interrupted", "incomplete 12_1"),
    (signal.SIGINT, RUNNING, "cancelled", None),
    # PreemptMode=CANCEL without a grace ends the job in the second of the preemption; a scancel in a grace does not.
    (signal.SIGTERM, {**GONE, "PreemptTime": AT, "EndTime": AT}, "preempted", "12_1"),
    (signal.SIGTERM, {**GONE, "PreemptTime": AT, "EndTime": "2026-01-01T00:00:04"}, "cancelled", None),
    # The batch script or the node is lost while this process lives on.
    (signal.SIGTERM, {**GONE, "Reason": "JobLaunchFailure"}, "node failure", "12_1"),
    (signal.SIGTERM, {**GONE, "Reason": "NodeDown"}, "node failure", "12_1"),
]


@pytest.mark.parametrize(("signum", "state", "cause", "requeues"), CAUSES)
def test_the_cause_is_read_from_the_state_of_the_job_and_decides(
    inside: FakeSlurm, signum: int, state: dict[str, str], cause: str, requeues: str | None
) -> None:
    inside.prints("scontrol_show_job", job_line(**state))
    here = job.SlurmJob()
    assert here.cause(signum) == cause
    assert here.leave(cause) == cause
    # A task of an array is asked for and requeued by this form of its id: the other may stand for all of them.
    assert set(inside.calls("scontrol show job")) <= {"scontrol show job -o 12_1"}
    assert inside.calls("scontrol requeue")[-1:] == ([f"scontrol requeue {requeues}"] if requeues else [])


def test_a_signal_that_is_here_before_the_state_that_explains_it(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.prints("scontrol_show_job", job_line(**RUNNING))
    later = job_line(**{**GONE, "Restarts": "1"})
    monkeypatch.setattr("launch.job.time.sleep", lambda seconds: inside.prints("scontrol_show_job", later))
    assert job.SlurmJob().cause(signal.SIGTERM) == "requeued"


def test_a_step_longer_than_the_notice_puts_the_job_back_before_it_is_killed(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there to leave in time; and what has put the job back itself keeps the cause."""
    monkeypatch.setattr(job, "LAST_S", 3600.0)  # the end is nearer than that: at once
    soon = (datetime.now() + timedelta(minutes=1)).isoformat(timespec="seconds")
    inside.prints("scontrol_show_job", job_line(**RUNNING, EndTime=soon))
    here = job.SlurmJob()
    assert here.cause(signal.SIGUSR2) == "time limit"
    deadline = time.monotonic() + 60
    while not inside.calls("scontrol requeue") and time.monotonic() < deadline:
        time.sleep(0.01)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert inside.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1"]
    inside.prints("scontrol_show_job", job_line(JobState="COMPLETING", Restarts="1"))
    assert here.leave("time limit") == "time limit"
    assert len(inside.calls("scontrol requeue")) == 1


def test_a_job_that_is_cancelled_in_its_notice_is_not_put_back(inside: FakeSlurm) -> None:
    here = job.SlurmJob()
    inside.prints("scontrol_show_job", job_line(**GONE))
    here._requeue_unfinished()
    assert not inside.calls("scontrol requeue")


def test_nothing_is_put_back_while_slurm_is_silent(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been cancelled: to put it back on a guess would undo what a person wanted."""
    inside.fails("scontrol_show_job", "Unable to contact slurm controller\n")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            inside.prints("scontrol_show_job", job_line(**GONE))

    monkeypatch.setattr("launch.job.time.sleep", pause)
    assert job.SlurmJob().leave("preempted") == "cancelled"
    assert not inside.calls("scontrol requeue")


def test_a_job_that_is_cancelled_just_before_it_is_put_back_stays_away(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.prints("scontrol_show_job", job_line(**RUNNING))
    requeue = scheduler.requeue

    def cancelled_first(job_id: str, only_running: bool) -> None:
        inside.prints("scontrol_show_job", job_line(**GONE))
        requeue(job_id, only_running)

    monkeypatch.setattr(scheduler, "requeue", cancelled_first)
    assert job.SlurmJob().leave("preempted") == "cancelled"
    assert inside.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1"]


def test_a_job_that_the_site_does_not_requeue_is_allowed_to_come_back(inside: FakeSlurm) -> None:
    inside.prints("scontrol_show_job", job_line(**RUNNING))
    inside.fails("scontrol_requeue_incomplete", "Requested operation is presently disabled for job 12_1\n")
    (inside.folder / "scontrol_update_jobid=12_1.then").write_text("scontrol_requeue_incomplete.err")
    assert job.SlurmJob().leave("preempted") == "preempted"
    assert inside.calls("scontrol update") == ["scontrol update jobid=12_1 requeue=1"]
    assert len(inside.calls("scontrol requeue")) == 2


def test_a_silent_controller_is_no_refusal(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is away: to leave then would end the job for good."""
    inside.fails("scontrol_show_job", "Unable to contact slurm controller\n")
    pauses = 0

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3 * job.REFUSALS:
            inside.prints("scontrol_show_job", job_line(**RUNNING))

    monkeypatch.setattr("launch.job.time.sleep", pause)
    assert job.SlurmJob().leave("interrupted") == "interrupted"
    assert len(inside.calls("scontrol requeue")) == 1


def test_what_cannot_be_put_back_here_is_left_to_the_batch_script(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python may be in a container without Slurm's commands; the batch script is not."""
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    here = job.SlurmJob()
    cause = here.cause(signal.SIGUSR2)
    assert here.leave(cause) == "time limit"
    here.say_end()
    assert not job.said_file(tmp_path, "13").exists()


@pytest.mark.parametrize("decides", [True, False])
def test_the_end_of_an_attempt_is_told_to_the_batch_script(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decides: bool
) -> None:
    """But not by a rank that ends because another one did."""
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    module = type(sys)("somewhere")

    def attempt(run_dir: Path, job: job.SlurmJob) -> int:
        if not decides:
            job.defer()
        return 1

    module.attempt = attempt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somewhere", module)
    before = {signum: signal.getsignal(signum) for signum in (*job.STOP_SIGNALS, signal.SIGCONT)}
    try:
        with pytest.raises(SystemExit) as left:
            job.start(str(tmp_path), "somewhere:attempt")
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert left.value.code == 1
    assert job.said_file(tmp_path, "13").exists() == decides


# The end of the batch script, where no rank said how it ended:
# (state of the job, kills before, status of srun) -> (is put back, kills after)
ENDS = [
    (RUNNING, 0, 137, True, 1),
    (RUNNING, 2, 143, True, 3),
    (RUNNING, 3, 137, False, 3),  # the environment is broken
    (RUNNING, 0, 1, True, 1),  # a memory limit, or an srun that reached no controller
    (RUNNING, 0, 0, False, 0),
    ({"JobName": "my JobState=FAILED run", **RUNNING, "Command": "/x JobState=FAILED Restarts=7"}, 0, 137, True, 1),
    ({**RUNNING, "Restarts": "1"}, 0, 137, False, 0),  # the job runs again already, elsewhere
    ({**RUNNING, "JobState": "SIGNALING"}, 0, 137, True, 1),
    (GONE, 0, 137, False, 0),  # Slurm itself ended it
    ({**RUNNING, "PreemptTime": AT}, 3, 143, True, 3),  # before Python took signals, any number of times
]


@pytest.mark.parametrize(("state", "before", "status", "back", "after"), ENDS)
@pytest.mark.parametrize("setup", [[], ["set -euo pipefail"]])
def test_a_killed_task_puts_the_job_back_from_the_batch_script(
    slurm: FakeSlurm,
    tmp_path: Path,
    state: dict[str, str],
    before: int,
    status: int,
    back: bool,
    after: int,
    setup: list[str],
) -> None:
    slurm.prints("scontrol_show_job", job_line(**state) + "\n")
    kills = job.kills_file(tmp_path / "run" / "logs", "13")
    kills.parent.mkdir(parents=True)
    kills.write_text("status 137\n" * before)
    assert batch_script(slurm, tmp_path / "run", f"exit {status}", setup) == status
    assert slurm.calls("scontrol requeue") == (["scontrol requeue incomplete 12_1"] if back else [])
    assert len(kills.read_text().splitlines()) == after


def batch_script(slurm: FakeSlurm, run: Path, srun: str, setup: list[str]) -> int:
    """Run the batch script of a run as task 1 of array 12 with `srun` as its ranks; its status."""
    (slurm.folder / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (run / "logs").mkdir(parents=True, exist_ok=True)
    script = SlurmLauncher(setup=setup).preview([run])
    environment = {**os.environ, "SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "unbound" not in done.stderr
    assert sorted(path.name for path in (run / "logs").iterdir()) in ([], ["13.kills"]), done.stderr
    return done.returncode


def test_an_attempt_that_said_how_it_ended_is_not_put_back(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Whatever becomes of the other ranks then."""
    slurm.prints("scontrol_show_job", job_line(**RUNNING) + "\n")
    said = job.said_file(tmp_path / "run" / "logs", "13")
    said.parent.mkdir(parents=True)
    assert batch_script(slurm, tmp_path / "run", f"touch {said}; exit 137", []) == 137
    assert not slurm.calls("scontrol requeue")
    said.touch()  # what is left of an earlier attempt says nothing of this one
    assert batch_script(slurm, tmp_path / "run", "exit 137", []) == 137
    assert len(slurm.calls("scontrol requeue")) == 1


def test_a_setup_that_fails_is_final(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.prints("scontrol_show_job", job_line(**RUNNING) + "\n")
    assert batch_script(slurm, tmp_path / "run", "exit 0", ["exit 3"]) == 3
    assert not slurm.calls("scontrol requeue")


def test_the_batch_script_waits_for_a_controller_that_is_away(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends no job while it is away, and what it does not hear it cannot put back."""
    monkeypatch.setattr("launch.slurm.PAUSE_S", 0.1)
    slurm.prints("scontrol_show_job", job_line(**RUNNING) + "\n")
    slurm.fails("scontrol_show_job", "Unable to contact slurm controller\n")
    slurm.fails("scontrol_requeue_incomplete", "Unable to contact slurm controller\n")

    def comes_back() -> None:
        for call, fault in (
            ("scontrol show", "scontrol_show_job"),
            ("scontrol requeue", "scontrol_requeue_incomplete"),
        ):
            while len(slurm.calls(call)) < 2:
                time.sleep(0.01)
            (slurm.folder / f"{fault}.err").unlink()

    threading.Thread(target=comes_back, daemon=True).start()
    assert batch_script(slurm, tmp_path / "run", "exit 137", []) == 137
    assert len(slurm.calls("scontrol requeue")) >= 2
    # One kill, however often it was tried to put the job back.
    assert len(job.kills_file(tmp_path / "run" / "logs", "13").read_text().splitlines()) == 1


def test_a_job_that_is_queued_already_counts_as_requeued(inside: FakeSlurm) -> None:
    inside.prints("scontrol_show_job", job_line(**RUNNING))
    inside.fails("scontrol_requeue_incomplete", "Job is pending execution for job 12_1\n")
    assert job.SlurmJob().leave("preempted") == "preempted"
    assert len(inside.calls("scontrol requeue")) == 1


def test_a_job_that_is_cancelled_while_it_saves_does_not_come_back(inside: FakeSlurm) -> None:
    inside.prints("scontrol_show_job", job_line(**{**RUNNING, "JobState": "COMPLETING"}))
    assert job.SlurmJob().leave("preempted") == "cancelled"
    assert not inside.calls("scontrol requeue")


def test_a_refused_requeue_is_tried_again_rather_than_lost(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.prints("scontrol_show_job", job_line(**RUNNING))
    inside.fails("scontrol_requeue_incomplete", "Unable to contact slurm controller\n")
    sleep, pauses = time.sleep, []

    def pause(seconds: float) -> None:
        if seconds == job.RETRY_S:  # others sleep too
            pauses.append(seconds)
        if len(pauses) == 3:
            inside.prints("scontrol_requeue_incomplete", "")
        sleep(seconds)

    monkeypatch.setattr("launch.job.time.sleep", pause)
    assert job.SlurmJob().leave("time limit") == "time limit"
    assert len(inside.calls("scontrol requeue")) == 4


def test_a_silent_controller_leaves_the_signal_to_tell_the_cause(inside: FakeSlurm) -> None:
    inside.fails("scontrol_show_job", "slurm_load_jobs error: Unable to contact slurm controller\n")
    assert job.SlurmJob().cause(signal.SIGUSR2) == "time limit"
    assert job.SlurmJob().cause(signal.SIGTERM) == "interrupted"


def test_a_kill_is_told_from_a_lost_node(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    before = {"job_id": "12_1", "restart_count": 0}
    assert job.SlurmJob().lost(before) == "node failure"
    job.kills_file(tmp_path, "13").write_text("status 137\n")
    here = job.SlurmJob()
    here.begun()
    assert here.lost(before) == "killed"
    assert not job.kills_file(tmp_path, "13").exists()
    assert job.SlurmJob().lost({"job_id": "11", "restart_count": 0}) == "killed"


def test_ranks_and_rendezvous_follow_from_slurm_alone(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    given = {"NTASKS": "8", "PROCID": "5", "LOCALID": "1", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]"}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    inside.prints("scontrol_show_hostnames", "localhost\nn2\n")
    rendezvous.export()
    first = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    assert first == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    port = int(os.environ["MASTER_PORT"])
    assert port in rendezvous.PORTS
    # A node whose name nobody resolves is reached by the address that Slurm itself uses.
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    inside.prints("scontrol_show_hostnames", "no-such-host.invalid\n")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    rendezvous.export()
    assert os.environ["MASTER_ADDR"] == "10.0.0.7"
    assert int(os.environ["MASTER_PORT"]) != port


@contextmanager
def neighbours() -> Iterator[int]:
    """A port on which somebody listens, and nobody on the next one."""
    while True:
        with socket.socket() as taken, socket.socket() as free:
            taken.bind(("", 0))
            taken.listen()
            first = taken.getsockname()[1]
            try:
                free.bind(("", first + 1))
            except (OSError, OverflowError):
                continue
            free.close()
            yield first
            return


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with neighbours() as first:
        monkeypatch.setattr(rendezvous, "PORTS", range(first, first + 2))
        assert {rendezvous.free_port() for _ in range(5)} == {first + 1}
        monkeypatch.setattr(rendezvous, "PORTS", range(first, first + 1))
        with pytest.raises(OSError, match=f"{first} to {first} is free"):
            rendezvous.free_port()


def test_a_signal_before_the_attempt_has_handlers_is_handed_on(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {signum: signal.getsignal(signum) for signum in job.STOP_SIGNALS}
    try:
        here = job.SlurmJob()
        here.catch_signals()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert here.early_signal == signal.SIGUSR2
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

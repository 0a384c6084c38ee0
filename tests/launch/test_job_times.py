"""When a job began and how long it waited, from reports of Slurm and the batch script, damaged or not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm, job_line, slurm

from launch import job, requeue
from runner.system import processes

__all__ = ["slurm"]


@pytest.fixture
def inside(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Set the environment of job 12 for this process."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return slurm


@pytest.mark.parametrize(
    ("times", "waited"),
    [
        (("12:00:00", "12:00:00", "12:00:07"), {"hold_s": 0.0, "queue_s": 7.0}),
        (("12:00:00", "12:02:00", "12:02:30"), {"hold_s": 120.0, "queue_s": 30.0}),
        (("12:00:05", "12:00:04", "12:00:04"), {"hold_s": 0.0, "queue_s": 0.0}),  # Slurm's clock was set
        (("12:00:00", "Unknown", "12:00:04"), {}),
        (("12:00:00", "12:00:00", "(null)"), {}),
    ],
)
def test_the_wait_is_divided_by_slurms_own_times(
    inside: FakeSlurm, times: tuple[str, str, str], waited: dict[str, float]
) -> None:
    at: dict[str, Any] = {
        f"{name}Time": f"2026-01-01T{text}" if text[0].isdigit() else text
        for name, text in zip(("Submit", "Eligible", "Start"), times, strict=True)
    }
    inside.prints("scontrol_show_job", job_line(**at) + "\n")
    assert job.SlurmJob().waited() == waited


@pytest.mark.parametrize(
    ("state", "preempted", "told"),
    [
        ("RUNNING", "2026-01-01T12:00:09", True),
        ("RUNNING", "2026-01-01T11:00:00", False),  # an earlier start of it was
        ("RUNNING", "None", False),
        ("COMPLETING", "2026-01-01T12:00:09", False),  # the signals are on their way
    ],
)
def test_early_preemption_is_announced_to_the_process(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, state: str, preempted: str, told: bool
) -> None:
    """The signal reached the processes of that time. With PreemptMode=CANCEL nothing else requeues the job."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(processes, "send_signal", lambda pid, signum: sent.append((pid, signum)))
    times = {"StartTime": "2026-01-01T12:00:07", "PreemptTime": preempted}
    inside.prints("scontrol_show_job", job_line(JobState=state, **times) + "\n")
    job.SlurmJob().waited()
    assert sent == ([(os.getpid(), signal.SIGTERM)] if told else [])


def test_record_of_a_reused_job_id_is_ignored(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm has lost this job: neither the wait nor a preemption of the later job belongs to it."""
    sent: list[int] = []
    monkeypatch.setattr(processes, "send_signal", lambda pid, signum: sent.append(signum))
    at = dict.fromkeys(("SubmitTime", "EligibleTime", "StartTime", "PreemptTime"), "2026-01-01T12:00:00")
    script = f"/x/.submission_file_{'b' * 32}-1.sh"
    inside.prints("scontrol_show_job", job_line(JobState="RUNNING", **at, Command=script))
    assert job.SlurmJob(submission="a" * 32).waited() == {}
    assert sent == []


def test_the_wait_is_unknown_while_slurm_is_silent(inside: FakeSlurm) -> None:
    inside.fails("scontrol_show_job", "slurm_load_jobs error: Unable to contact slurm controller")
    assert job.SlurmJob().waited() == {}


def test_the_job_began_with_its_batch_script_on_this_machine(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds in which modules are loaded and srun starts belong to the job."""
    up, process = time.clock_gettime(time.CLOCK_BOOTTIME), processes.began()
    age = time.monotonic() - process
    monkeypatch.setenv(requeue.BATCH_BEGAN, f"{processes.boot_id()} {up - age - 30:.2f}")
    assert job.SlurmJob().began() == pytest.approx(process - 30, abs=0.5)


@pytest.mark.parametrize("given", ["", "another-boot 5.0", "{boot}", "{boot} soon", "{boot} nan", "{boot} 1e18"])
def test_elsewhere_it_began_with_this_process(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(requeue.BATCH_BEGAN, given.format(boot=processes.boot_id()))
    assert job.SlurmJob().began() == pytest.approx(processes.began(), abs=0.5)


def test_the_batch_script_passes_on_when_it_began(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    lines = [*requeue.script_lines(tmp_path, requeue_killed=True), f"printenv {requeue.BATCH_BEGAN}", "trap - EXIT"]
    script.write_text("#!/bin/bash\nset -eu\n" + "\n".join(lines) + "\n")
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    done = subprocess.run(
        ["bash", str(script)], env={**os.environ, "SLURM_JOB_ID": "12"}, capture_output=True, text=True, check=True
    )
    boot, seconds = done.stdout.split()
    assert boot == processes.boot_id()
    assert before - 0.02 <= float(seconds) <= time.clock_gettime(time.CLOCK_BOOTTIME)

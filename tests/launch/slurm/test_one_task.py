"""Jobs of one task on a real cluster: after any interruption by Slurm, they end bit-identical."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import PATIENCE, Cluster
from jobs import COMMON, SLURM, STEPS, Job, environment, preempt, runner
from references import Reference
from runs import ROOT, TINY, assert_same_run

from launch.slurm import SlurmLauncher

pytestmark = pytest.mark.slurm


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Job:
    return Job(tmp_path / "run", [*COMMON, "launcher.nodelist=n1"], cluster=cluster)


@pytest.mark.promise("a Slurm job preempted three times ends bit for bit like the undisturbed run")
def test_preempted_three_times_no_step_is_lost(job: Job, cluster: Cluster, reference: Reference) -> None:
    job.submit(**job.hold(20))
    assert job.row()["state"] in ("pending", "running")
    for step in (20, 40, 60):
        job.wait_for_step(step)
        assert job.row()["state"] == "running"
        preempt(cluster, "n1")
        # It saved and exited within the grace time, and did not end as COMPLETED.
        job.wait_for_state("PENDING")
        assert job.row()["state"] == "requeued"
        job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["preempted", "preempted", "preempted", "finished"]
    assert job.steps_lost() == 0
    # Slurm reports the job's submission until it forgets the job.
    assert json.loads((job.path / "job.json").read_text())["submission"] in job.slurm()["Command"]
    # scontrol gets an answer, although signals reach every process of the job.
    assert "cannot requeue" not in job.log()
    assert job.row()["state"] == "finished"
    assert_same_run(job, reference(COMMON))


@pytest.mark.slow
def test_job_preempted_while_python_starts_is_requeued(
    job: Job, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """Python cannot handle a signal yet, and there is no grace time: the batch script requeues the job."""
    slow, reached = tmp_path / "slow", tmp_path / "reached"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, pathlib, time\n"
        f"reached = pathlib.Path({str(reached)!r})\n"
        "if 'SLURM_PROCID' in os.environ and not reached.exists():\n"
        "    reached.touch()\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(slow))
    job.submit("launcher.partition=cancels")
    cluster.wait(reached.exists, 180, f"the start of Python: {job.log()}")
    preempt(cluster, "n1")
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["finished"]
    assert_same_run(job, reference(COMMON))


def slow_scontrol(cluster: Cluster, directory: Path, condition: str, waits: str) -> str:
    """Return an option for a job whose scontrol, if `condition` holds, begins only when `waits` has failed."""
    real = shutil.which("scontrol", path=cluster.environment["PATH"])
    script = directory / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\ntrap '' TERM\nreal={real}\n"
        f'if {condition}; then while {waits}; do sleep 0.2; done; fi\nexec $real "$@"\n'
    )
    script.chmod(0o755)
    return f"launcher.setup=['export PATH={script.parent}:$PATH']"


@pytest.mark.slow
def test_job_preempted_between_look_and_request_is_requeued(job: Job, cluster: Cluster, tmp_path: Path) -> None:
    """Slurm reports success, and does nothing, for a job that was to be requeued only if it still runs."""
    asked = tmp_path / "asked"
    condition = f'[ "$1 $2" = "requeue incomplete" ] && mkdir {asked}'
    slow = slow_scontrol(cluster, tmp_path, condition, '$real show job -o "$3" | grep -q " JobState=RUNNING "')
    job.submit("launcher.partition=cancels", slow, **job.hold(20))
    job.wait_for_step(20)
    job.ends_in(300)
    for process in job.processes():
        process.send_signal(signal.SIGUSR2)
    cluster.wait(asked.exists, 180, f"the request: {job.log()}")
    preempt(cluster, "n1")
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["time limit", "finished"]


@pytest.mark.slow
def test_near_its_time_limit_a_job_requeues_itself(cluster: Cluster, tmp_path: Path, reference: Reference) -> None:
    """One job saves at the notice. Another's step outlasts the notice: it is requeued until its budget is spent."""
    job, stuck = (
        Job(tmp_path / name, [*COMMON, f"launcher.nodelist={node}"], cluster=cluster)
        for name, node in (("run", "n1"), ("stuck", "n2"))
    )
    job.submit("launcher.time=60", **job.hold(20))
    stuck.submit("launcher.time=60", "launcher.max_timeouts=1", **stuck.hold(20), HELD_S="1000")
    for each, seconds in ((job, 45), (stuck, 15)):
        each.wait_for_step(20)
        each.ends_in(seconds)
    for process in stuck.processes():  # as Slurm does, but at once
        process.send_signal(signal.SIGUSR2)
    stuck.wait_for_requeue()
    job.wait_for_requeue()
    assert job.causes() == ["time limit"]
    assert job.attempts()[0]["end_step"] < STEPS
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["time limit", "finished"]
    assert job.steps_lost() == 0
    assert_same_run(job, reference(COMMON))
    # The attempt was killed in its step; the next one records the cause that it had noted, and counts it.
    assert stuck.ends() == "FAILED"
    assert stuck.causes() == ["time limit", "timeouts"]
    row = stuck.row()
    assert row["state"] == "failed"
    assert "increase launcher.time" in row["reason"]


@pytest.mark.slow
def test_job_preempted_in_its_last_step_is_requeued(job: Job, cluster: Cluster) -> None:
    """The time limit's notice came first and left minutes. The preemption leaves none, and the step is longer."""
    job.submit("launcher.partition=cancels", STEP_SLEEP_S="1000")
    cluster.wait(lambda: "starting at step 0" in job.log(), 180, f"the start of training: {job.log()}")
    job.ends_in(300)
    for process in job.processes():
        process.send_signal(signal.SIGUSR2)
    cluster.wait(lambda: job.under_way().get("cause") == "time limit", 180, "the notice")
    preempt(cluster, "n1")
    job.wait_for_requeue()
    cluster.wait((job.path / "attempts.jsonl").exists, 180, f"the next attempt: {job.log()}")
    assert job.causes() == ["time limit"]
    assert "requeued job" in job.log()
    cluster.run("scancel", job.job_id)


@pytest.mark.promise("a Slurm job that is cancelled is never requeued; the rerun command resumes")
def test_scancel_stops_the_run_and_a_rerun_resumes_it(job: Job, cluster: Cluster, reference: Reference) -> None:
    """Cancel it before it starts, and while it trains."""
    held = job.submit("+launcher.additional.hold=true")
    assert job.row()["state"] == "pending"
    cluster.run("scancel", held)
    assert job.row()["state"] == "cancelled"
    first = job.submit(**job.hold(20))
    assert first != held
    job.wait_for_step(20)
    cluster.run("scancel", first)
    assert job.ends() == "CANCELLED"
    assert job.slurm()["Restarts"] == "0"
    assert job.causes() == ["cancelled"]
    assert job.row()["state"] == "cancelled"
    assert job.submit() not in (held, first)
    assert job.ends() == "COMPLETED"
    assert job.steps_lost() == 0
    assert_same_run(job, reference(COMMON))


@pytest.mark.promise("two shells that run the same command at once submit one Slurm job")
def test_two_shells_at_once_submit_one_job(job: Job, cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner", *SLURM, *job.overrides, f"run.dir={job.path}"]
    env = {**cluster.environment, **environment(**job.hold(5))}
    shells = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [shell.wait(120 * PATIENCE) for shell in shells] == [0, 0]
    scripts = cluster.run("squeue", "-h", "-o", "%o").splitlines()  # the jobs of other tests have the same name
    assert sum(script.startswith(f"{job.path}/") for script in scripts) == 1
    job.wait_for_step(5)
    cluster.run("scancel", job.job_id)
    assert job.ends() == "CANCELLED"


@pytest.mark.slow
def test_requeued_by_an_administrator_it_reads_the_frozen_config(
    cluster: Cluster, tmp_path: Path, reference: Reference
) -> None:
    # The config that the job was submitted with is edited while it runs; the attempt after must not see it.
    tree = tmp_path / "conf"
    (tree / "experiment").mkdir(parents=True)
    mine = tree / "experiment" / "mine.yaml"
    shutil.copy(ROOT / "conf" / "experiment" / "smoke.yaml", mine)
    overrides = [each for each in COMMON if each != "experiment=smoke"]
    job = Job(tmp_path / "run", ["--config-dir", str(tree), "experiment=mine", *overrides], cluster=cluster)
    job.submit("launcher.nodelist=n1", **job.hold(20))
    job.wait_for_step(20)
    mine.write_text(mine.read_text() + "optimizer:\n  lr: 99\n")
    cluster.run("scontrol", "requeue", job.job_id)
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["requeued", "finished"]
    assert job.steps_lost() == 0
    assert_same_run(job, reference(COMMON))


@pytest.mark.slow
def test_a_crash_loop_stops(job: Job, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.write_text("kill")
    job.overrides += ["train.steps=20", "eval.every_steps=0", "+train.loss.fail_at=5"]
    job.submit(FAIL_FILE=str(fault))
    for _ in range(3):
        job.wait_for_requeue()
    assert job.ends() == "FAILED"
    assert job.causes() == ["killed", "killed", "killed", "crash loop"]
    assert job.row()["state"] == "crash loop"


@pytest.mark.slow
def test_hanging_job_is_requeued_and_finishes_later(cluster: Cluster, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    sources = "+data.sources={rows: {_target_: hanging.Blocked, length: 80}}"
    overrides = [*TINY, "data=own", sources, "train.batch_size=4", "train.steps=9", "eval.every_steps=0"]
    overrides += ["checkpoint.every_steps=100", "train.hang_timeout_s=2", "launcher.nodelist=n1"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    job.submit(HANG_FILE=str(fifo), HANG_IN="data")
    job.cluster.wait((job.path / "attempts.jsonl").exists, 180, "the hang")
    fifo.unlink()
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["hang", "finished"]
    assert "read_block" in job.attempts()[0]["reason"]
    assert [path.name for path in (job.path / "hang").iterdir()] == ["attempt1-rank0.txt"]


@pytest.mark.slow
def test_refusals_of_slurm_are_one_line_and_submit_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read Slurm's real messages about its partitions; other messages are tested with fakes."""
    root = tmp_path / "outputs"
    done = runner(cluster, "launcher=slurm", *COMMON, "launcher.mem=99T", f"run.root={root}")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "nothing was submitted: sbatch: error: Batch job submission failed" in line
    assert not root.exists()
    assert str(tmp_path) not in cluster.run("squeue", "-h", "-o", "%Z %o")
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    for options, words in (
        ({"partition": "lwo"}, "did you mean 'low'"),
        ({"time": "2-0"}, "exceeds the limit of partition 'low': 1-00:00:00"),
        ({"nodes": 7}, "exceeds the 2 nodes of partition 'low'"),
    ):
        (error,) = SlurmLauncher(**options).check([root / "run"])
        assert words in error


@pytest.mark.slow
def test_task_killed_while_the_controller_is_away_is_requeued(
    job: Job, cluster: Cluster, tmp_path: Path, reference: Reference
) -> None:
    """The batch script waits for the controller: if it ended, the job would fail for good."""
    killed, asked, away = (tmp_path / name for name in ("killed", "asked", "away"))
    # Stop the controller when the script is about to ask. Earlier, Slurm itself would lose a minute.
    slow = slow_scontrol(cluster, tmp_path, f"[ -e {killed} ] && mkdir {asked}", f"[ ! -e {away} ]")
    job.submit("checkpoint.every_steps=10", slow, **job.hold(35))
    job.wait_for_step(35)
    (process,) = job.processes()
    killed.touch()
    process.kill()
    cluster.wait(asked.exists, 120, f"the batch script asking: {job.log()}")
    cluster.stop_controller()
    try:
        away.touch()
        cluster.wait(lambda: "Unable to contact slurm controller" in job.log(), 120, "the answer")
    finally:
        cluster.start_controller()
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["killed", "finished"]
    assert job.steps_lost() <= 20
    assert_same_run(job, reference(COMMON))

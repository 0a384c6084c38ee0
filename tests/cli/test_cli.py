"""Training commands: what they start, skip and refuse, and that nothing is written before all checks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_launcher import Command, FakeLauncher, QueueLauncher, fail, finish, run_dirs

from runner.cli.start import start
from runner.config.composition import Composer
from runner.config.frozen import load, load_plain
from runner.contracts import JobInfo
from runner.errors import ExitStatus
from runner.rundir import submitted_jobs
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock


def test_a_run_is_frozen_and_launched(run: Command) -> None:
    assert run("data=mixture", "seed=4") == 0
    (path,) = run_dirs()
    assert FakeLauncher.launched == [path]
    assert load(path).seed == 4
    code = json.loads((path / "code.json").read_text())
    assert "data=mixture" in code["overrides"]
    assert code["packages"]["hydra-core"]
    assert list(Path.cwd().iterdir()) == [Path("outputs").absolute()]  # no .hydra, no multirun.yaml


@pytest.mark.slow
def test_the_same_command_resumes_the_same_run(run: Command) -> None:
    assert run("seed=4") == run("seed=4") == 0
    assert len(run_dirs()) == 1
    assert len(FakeLauncher.launched) == 2


@pytest.mark.slow
def test_a_finished_run_is_not_started_unless_it_is_made_longer(
    run: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train.steps=10", "scheduler=constant")
    (path,) = run_dirs()
    finish(path, 10)
    assert run("train.steps=10", "scheduler=constant") == 0
    assert run("train.steps=7", "scheduler=constant") == 0
    assert "finished, all 10 steps" in capsys.readouterr().out
    assert len(FakeLauncher.launched) == 1
    assert run("train.steps=20", "scheduler=constant") == 0
    assert FakeLauncher.launched == [path, path]
    assert load(path).train.steps == 20


@pytest.mark.parametrize(
    "arguments",
    [
        ("model=gtp",),
        ("-m", "seed=1,2,3,4,5,6,-7"),
        ("-m", "seed=1,1"),
        ("-m", "launcher.partition=a,b"),
        ("--unknown-flag",),
        ("launcher.nosuch=1",),
        ("+launcher.nosuch=1",),
        ("train.steps=0",),
        ("launcher=unfinished",),
    ],
)
@pytest.mark.slow
def test_a_config_error_writes_and_starts_nothing(
    run: Command, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(*arguments) == ExitStatus.USAGE
    assert run_dirs() == []
    assert FakeLauncher.launched == []
    captured = capsys.readouterr().err.splitlines()
    assert captured
    assert all(line.startswith("error: ") for line in captured)


def test_an_error_of_the_launcher_writes_and_starts_nothing(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    FakeLauncher.errors = ["launcher.partition=x: no such partition"]
    assert run("-m", "seed=1,2") == ExitStatus.USAGE
    assert run_dirs() == FakeLauncher.launched == []
    assert capsys.readouterr().err == "error: launcher.partition=x: no such partition\n"


def test_a_class_that_lacks_members_of_a_launcher_is_refused(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(launcher="unfinished") == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    lacks = "in_process, rank_counts, dry_run, wait, check, examine, preview, launch, follow, cancel, jobs"
    assert f"launcher._target_=fake_launcher.Unfinished is not a launcher: it lacks {lacks}" in line


@pytest.mark.slow
def test_rerunning_a_sweep_starts_only_unfinished_runs(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("-m", "seed=1,2,3,4,5")
    assert run(*sweep) == 0
    one, two, three, four, five = run_dirs()
    assert FakeLauncher.launched == [one, two, three, four, five]
    FakeLauncher.launched.clear()
    capsys.readouterr()
    finish(one, 300)
    fail(two)
    FakeLauncher.queued[three] = JobInfo("12_2", "running")
    fail(four, "crash loop")
    assert run(*sweep, "launcher.dry_run=true") == ExitStatus.FAILED
    assert FakeLauncher.launched == []
    capsys.readouterr()
    assert run(*sweep) == ExitStatus.FAILED
    assert FakeLauncher.launched == [five]
    reported = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    states = [reported[f"outputs/{path.name}"] for path in (one, two, three, four)]
    assert states[0] == "finished, all 300 steps"
    assert states[1].startswith("failed (the loss is nan); launcher.retry_failed=true")
    assert states[2] == "running, job 12_2"
    assert states[3].startswith("crash loop")
    FakeLauncher.launched.clear()
    assert run(*sweep, "launcher.retry_failed=true") == 0
    assert FakeLauncher.launched == [two, four, five]


@pytest.mark.parametrize(
    ("then", "launches"), [(JobInfo("12", "requeued"), 1), (JobInfo("12", "cancelled"), 2), (None, 2)]
)
@pytest.mark.slow
def test_a_command_waits_for_an_ending_job(
    run: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    then: JobInfo | None,
    launches: int,
) -> None:
    """The job may be requeued: then there must not be a second one."""
    run("seed=4")
    (path,) = run_dirs()
    FakeLauncher.queued[path] = JobInfo("12", "ending")

    def pause(seconds: float) -> None:
        FakeLauncher.queued.clear()
        FakeLauncher.queued.update({path: then} if then else {})

    monkeypatch.setattr(clock, "sleep", pause)
    assert run("seed=4") == 0
    assert len(FakeLauncher.launched) == launches
    assert "job 12 is ending" in capsys.readouterr().err


@pytest.mark.slow
def test_run_queued_by_another_launcher_is_not_started(
    run: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose queue cannot be queried is not started either."""
    monkeypatch.setattr(submitted_jobs, "SHIPPED", ("fake_launcher:QueueLauncher",))
    run("train.steps=10", launcher="here")
    (path,) = run_dirs()
    FakeLauncher.launched.clear()
    slurm = {"job_id": "12", "launcher": "fake_launcher.QueueLauncher"}
    RunDir(path).job.write_text(json.dumps(slurm))
    QueueLauncher.waiting = [path]
    assert run("train.steps=10", launcher="here") == ExitStatus.LOCKED
    assert "pending, job 12" in capsys.readouterr().err
    QueueLauncher.waiting = []
    assert run("train.steps=10", launcher="here") == 0
    RunDir(path).job.write_text(json.dumps({**slurm, "launcher": "nowhere.Launcher"}))
    assert run("train.steps=10", launcher="here") == ExitStatus.USAGE
    assert "remove job.json" in capsys.readouterr().err
    finish(path, 10)  # there is nothing to start, so no scheduler is asked
    assert run("train.steps=10", launcher="here") == 0
    assert FakeLauncher.launched == [path]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["here", "fake"])
def test_a_failed_run_is_restarted_by_its_own_command(run: Command, launcher: str) -> None:
    run(launcher=launcher)
    fail(run_dirs()[0])
    assert run(launcher=launcher) == 0
    assert len(FakeLauncher.launched) == 2


@pytest.mark.slow
def test_a_live_run_is_not_touched(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    same = ("train.steps=10", "scheduler=constant")
    run(*same, launcher="here")
    (path,) = run_dirs()
    before = RunDir(path).config.read_bytes()
    FakeLauncher.launched.clear()
    with Lease.acquire(RunDir(path).lease, timeout_s=5):
        assert run(*same, launcher="here") == ExitStatus.LOCKED
        assert f"process {os.getpid()}" in capsys.readouterr().err
        # A sweep skips it, and names the settings that have no effect on it.
        assert run("-m", *same, launcher="fake") == ExitStatus.USAGE
        assert "launcher._target_" in capsys.readouterr().out
        assert run("train.steps=20", "scheduler=constant", launcher="here") == ExitStatus.LOCKED
        assert "train.steps: 10 -> 20 is not taken over by a live run" in capsys.readouterr().err
    assert FakeLauncher.launched == []
    assert RunDir(path).config.read_bytes() == before


def test_nothing_starts_while_the_scheduler_is_silent(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    FakeLauncher.answers = False
    assert run() == ExitStatus.USAGE
    assert run_dirs() == []
    assert "squeue does not answer" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "seed=1,2", "launcher.dry_run=true") == 0
    assert run_dirs() == FakeLauncher.launched == []
    out = capsys.readouterr().out
    assert "would start text-seed1-" in out
    assert "text-seed2-" in out


def test_a_directory_of_runs_cannot_become_a_run(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """`status` would no longer find the runs in it."""
    run()
    assert run("run.dir=outputs", "seed=3") == ExitStatus.USAGE
    assert "set run.root=outputs" in capsys.readouterr().err
    assert not Path("outputs/config.yaml").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "checkpoints", "code.json", "logs"])
def test_a_new_run_replaces_no_records_of_others(run: Command, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("proj", name)
    path.parent.mkdir()
    path.write_text("mine") if path.suffix else path.mkdir()
    assert run("run.dir=proj") == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert f"proj has {name} but no config.yaml" in error
    assert "choose another run.dir" in error
    assert list(Path("proj").iterdir()) == [path]


def test_a_run_that_was_killed_before_it_had_a_config_begins(run: Command) -> None:
    for name in ("lease", "submission"):
        Path("proj", name).mkdir(parents=True)
    Path("proj/code.json").write_text("{}")
    assert run("run.dir=proj") == 0
    assert Path("proj/config.yaml").exists()


class TestChangesOfAnExistingRun:
    def test_a_change_of_a_fixed_setting_is_refused_by_name(
        self, run: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("run.dir=one")
        before = Path("one/config.yaml").read_bytes()
        capsys.readouterr()
        assert run("run.dir=one", "model.width=64", "seed=3") == ExitStatus.USAGE
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 2
        assert "model.width: 96 -> 64 cannot be changed" in err[0]
        assert "another run.dir" in err[0]
        assert Path("one/config.yaml").read_bytes() == before
        # Also when it is finished.
        finish(Path("one"), 300)
        assert run("run.dir=one", "seed=3") == ExitStatus.USAGE

    @pytest.mark.slow
    def test_data_changes_must_be_allowed(self, run: Command, capsys: pytest.CaptureFixture[str]) -> None:
        run("run.dir=one", "data=mixture")
        change = ("run.dir=one", "data=mixture", "sampler.weights.prose=3")
        assert run(*change) == ExitStatus.USAGE
        assert "run.allow_data_change=true" in capsys.readouterr().err
        assert run(*change, "run.allow_data_change=true") == 0
        assert load(Path("one")).sampler.weights == {"prose": 3.0}

    @pytest.mark.slow
    def test_shape_and_free_settings_may_change(self, run: Command) -> None:
        run("run.dir=one")
        assert run("run.dir=one", "train.batch_size=8", "checkpoint.every_steps=5", "data.num_workers=1") == 0
        assert load_plain(Path("one"))["train"]["batch_size"] == 8

    def test_an_option_that_was_added_later_has_its_default(self, run: Command) -> None:
        run("run.dir=one")
        path = Path("one/config.yaml")
        path.write_text(path.read_text().replace("  deterministic: false\n", ""))
        Path("one/code.json").unlink()  # which tells of the edit
        assert run("run.dir=one") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_one_error_line(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs").mkdir(mode=0o500)
    assert run() == ExitStatus.USAGE
    assert "cannot be written" in capsys.readouterr().err


def test_uncreatable_run_directory_is_one_error_line(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs").write_text("a file")
    assert run() == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert str(Path("outputs").absolute()) in line
    assert "run.root" in line


def test_a_signal_before_a_submission_starts_nothing(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Composer.jobs

    def interrupted(self: Composer, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return jobs(self, *arguments)

    monkeypatch.setattr(Composer, "jobs", interrupted)
    assert run("-m", "seed=1,2") == ExitStatus.INTERRUPTED
    assert FakeLauncher.launched == []


def test_ctrl_c_ends_the_launch_with_status_130(run: Command) -> None:
    FakeLauncher.interrupt = True
    assert run("-m", "seed=1,2") == 128 + signal.SIGINT


class TestRanks:
    """Under torchrun only rank 0 writes."""

    @pytest.mark.slow
    def test_the_other_ranks_wait_for_the_config_of_this_launch(
        self, run: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("train.steps=10", launcher="here")  # an earlier launch, whose config is stale now
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        waits = []

        def rank_0_starts(seconds: float) -> None:
            waits.append(1)
            monkeypatch.setenv("RANK", "0")
            assert run("train.steps=20", launcher="here") == 0

        monkeypatch.setattr(clock, "sleep", rank_0_starts)
        assert run("train.steps=20", launcher="here") == 0
        assert len(waits) == 1
        assert len(FakeLauncher.launched) == 3

    def test_the_other_ranks_write_nothing_and_stop_waiting(
        self, run: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(start, "RANK_TIMEOUT_S", 0.0)
        assert run(launcher="here") == ExitStatus.USAGE
        assert run_dirs() == []

    def test_the_other_ranks_of_a_finished_run_do_not_start(
        self, run: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("train.steps=10", launcher="here")
        finish(run_dirs()[0], 10)
        FakeLauncher.launched.clear()
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        assert run("train.steps=10", launcher="here") == 0
        assert FakeLauncher.launched == []

    def test_a_submission_from_torchrun_is_refused(
        self, run: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert run() == ExitStatus.USAGE
        assert capsys.readouterr().err == "error: torchrun requires launcher=local\n"

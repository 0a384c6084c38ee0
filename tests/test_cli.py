"""The command: what it starts, skips and refuses, and that nothing is written before all is checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from launch import JobInfo
from runner import __main__ as entry
from runner import command, usage
from runner.config import Composer, flatten, load, load_plain
from runner.errors import ExitStatus
from runner.lease import Lease
from runner.run_dir import RunDir
from runner.signals import STOP, STOP_SIGNALS

Run = Callable[..., int]


class FakeLauncher:
    """Records what it is given; what it says of jobs and faults is set by a test."""

    launched: ClassVar[list[Path]] = []
    queued: ClassVar[dict[Path, JobInfo]] = {}
    faults: ClassVar[list[str]] = []
    answers: ClassVar[bool] = True
    interrupt: ClassVar[bool] = False

    def __init__(self, retry_failed: bool = False, dry_run: bool = False, partition: str | None = None) -> None:
        self.retry_failed, self.dry_run, self.wait = retry_failed, dry_run, False

    def check(self, run_dirs: list[Path]) -> list[str]:
        return self.faults

    def preview(self, run_dirs: list[Path]) -> str:
        return "would start " + " ".join(path.name for path in run_dirs)

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        if not self.answers:
            raise OSError("squeue does not answer")
        return {path: job for path, job in self.queued.items() if path in run_dirs}

    def launch(self, run_dirs: list[Path], attempt: str) -> int:
        assert attempt == "runner.train:attempt"
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        for path in run_dirs:
            load(path)
        self.launched.extend(run_dirs)
        return 0


class HereLauncher(FakeLauncher):
    """One that runs in this process, like the local one."""

    in_process = True


class QueueLauncher:
    """Another one, whose queue holds a run."""

    waiting: ClassVar[list[Path]] = []

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        return {path: JobInfo("12", "pending") for path in run_dirs if path in self.waiting}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command in an empty directory with the fake launchers as launcher=fake and launcher=here."""
    for name, target in (("fake", "FakeLauncher"), ("here", "HereLauncher")):
        (tmp_path / "conf/launcher").mkdir(parents=True, exist_ok=True)
        node = f"_target_: {__name__}.{target}\nretry_failed: false\ndry_run: false\npartition: null\n"
        (tmp_path / f"conf/launcher/{name}.yaml").write_text(node)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    FakeLauncher.launched, FakeLauncher.queued, FakeLauncher.faults = [], {}, []
    FakeLauncher.answers, FakeLauncher.interrupt = True, False
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}

    def command_line(*arguments: str, launcher: str = "fake") -> int:
        full = ["runner", "--config-dir", str(tmp_path / "conf"), f"launcher={launcher}", *arguments]
        monkeypatch.setattr(sys, "argv", full)
        return entry.main()

    yield command_line
    STOP.signum = None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def run_dirs() -> list[Path]:
    return sorted(Path("outputs").absolute().iterdir()) if Path("outputs").exists() else []


def finish(path: Path, steps: int) -> None:
    RunDir(path).finished.write_text(json.dumps({"steps": steps}))


def fail(path: Path, state: str = "failed") -> None:
    RunDir(path).status.write_text(json.dumps({"state": state, "reason": "the loss is nan"}))


def test_a_run_is_frozen_and_launched(run: Run) -> None:
    assert run("data=mixture", "seed=4") == 0
    (path,) = run_dirs()
    assert FakeLauncher.launched == [path]
    assert load(path).seed == 4
    code = json.loads((path / "code.json").read_text())
    assert "data=mixture" in code["overrides"]
    assert code["packages"]["hydra-core"]
    assert list(Path.cwd().iterdir()) == [Path("outputs").absolute()]  # no .hydra, no multirun.yaml


def test_the_same_command_means_the_same_run(run: Run) -> None:
    assert run("seed=4") == run("seed=4") == 0
    assert len(run_dirs()) == 1
    assert len(FakeLauncher.launched) == 2


def test_a_finished_run_is_not_started_and_a_longer_one_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("train.steps=10")
    (path,) = run_dirs()
    finish(path, 10)
    assert run("train.steps=10") == 0
    assert run("train.steps=7") == 0
    assert "finished, all 10 steps" in capsys.readouterr().out
    assert len(FakeLauncher.launched) == 1
    assert run("train.steps=20") == 0
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
    ],
)
def test_a_mistake_writes_and_starts_nothing(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(*arguments) == ExitStatus.USAGE
    assert run_dirs() == []
    assert FakeLauncher.launched == []
    captured = capsys.readouterr().err.splitlines()
    assert captured
    assert all(line.startswith("error: ") for line in captured)


def test_a_fault_of_the_launcher_writes_and_starts_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    FakeLauncher.faults = ["launcher.partition=x: no such partition"]
    assert run("-m", "seed=1,2") == ExitStatus.USAGE
    assert run_dirs() == FakeLauncher.launched == []
    assert capsys.readouterr().err == "error: launcher.partition=x: no such partition\n"


@pytest.mark.slow
def test_a_sweep_given_again_is_safe(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert run(*sweep) == ExitStatus.FAILED
    assert FakeLauncher.launched == [five]
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    states = [said[f"outputs/{path.name}"] for path in (one, two, three, four)]
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
def test_a_job_on_its_way_out_is_waited_for(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    then: JobInfo | None,
    launches: int,
) -> None:
    """It may come back by itself: then there must not be a second one."""
    run("seed=4")
    (path,) = run_dirs()
    FakeLauncher.queued[path] = JobInfo("12", "ending")

    def pause(seconds: float) -> None:
        FakeLauncher.queued.clear()
        FakeLauncher.queued.update({path: then} if then else {})

    monkeypatch.setattr("runner.command.time.sleep", pause)
    assert run("seed=4") == 0
    assert len(FakeLauncher.launched) == launches
    assert "job 12 is on the way out of the queue" in capsys.readouterr().err


def test_a_run_that_another_launcher_has_in_its_queue_is_not_started_here(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where that queue cannot be asked, nobody can tell."""
    run("train.steps=10", launcher="here")
    (path,) = run_dirs()
    FakeLauncher.launched.clear()
    slurm = {"job_id": "12", "launcher": f"{__name__}.QueueLauncher"}
    RunDir(path).job.write_text(json.dumps(slurm))
    QueueLauncher.waiting = [path]
    assert run("train.steps=10", launcher="here") == ExitStatus.LOCKED
    assert "pending, job 12" in capsys.readouterr().err
    QueueLauncher.waiting = []
    assert run("train.steps=10", launcher="here") == 0
    RunDir(path).job.write_text(json.dumps({**slurm, "launcher": "nowhere.Launcher"}))
    assert run("train.steps=10", launcher="here") == ExitStatus.USAGE
    assert "remove job.json" in capsys.readouterr().err
    finish(path, 10)  # nothing to start, nobody to ask
    assert run("train.steps=10", launcher="here") == 0
    assert FakeLauncher.launched == [path]


def test_a_single_failed_run_here_simply_goes_on(run: Run) -> None:
    run(launcher="here")
    fail(run_dirs()[0])
    assert run(launcher="here") == 0
    assert len(FakeLauncher.launched) == 2


def test_a_live_run_is_left_as_it_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("train.steps=10", launcher="here")
    (path,) = run_dirs()
    before = RunDir(path).config.read_bytes()
    FakeLauncher.launched.clear()
    with Lease.acquire(RunDir(path).lease, timeout_s=5):
        assert run("train.steps=20", launcher="here") == ExitStatus.LOCKED
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert run("-m", "train.steps=20", launcher="fake") == 0  # a sweep leaves it alone
    assert FakeLauncher.launched == []
    assert RunDir(path).config.read_bytes() == before


def test_nobody_knows_what_is_queued(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    FakeLauncher.answers = False
    assert run() == ExitStatus.USAGE
    assert run_dirs() == []
    assert "squeue does not answer" in capsys.readouterr().err


def test_dry_run_writes_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "seed=1,2", "launcher.dry_run=true") == 0
    assert run_dirs() == FakeLauncher.launched == []
    out = capsys.readouterr().out
    assert "would start text-seed1-" in out
    assert "text-seed2-" in out


def test_a_directory_of_runs_is_no_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run of its own it would hide those in it from runner.status."""
    run()
    assert run("run.dir=outputs", "seed=3") == ExitStatus.USAGE
    assert "give run.root=outputs" in capsys.readouterr().err
    assert not Path("outputs/config.yaml").exists()


class TestChangesOfAnExistingRun:
    def test_what_is_fixed_is_refused_by_name(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        run("run.dir=one")
        before = Path("one/config.yaml").read_bytes()
        capsys.readouterr()
        assert run("run.dir=one", "model.width=64", "seed=3") == ExitStatus.USAGE
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 2
        assert "model.width: 96 -> 64 cannot be changed" in err[0]
        assert "another run.dir" in err[0]
        assert Path("one/config.yaml").read_bytes() == before
        # Not hidden by its being finished, either.
        finish(Path("one"), 300)
        assert run("run.dir=one", "seed=3") == ExitStatus.USAGE

    def test_data_changes_must_be_allowed(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        run("run.dir=one", "data=mixture")
        change = ("run.dir=one", "data=mixture", "sampler.weights.prose=3")
        assert run(*change) == ExitStatus.USAGE
        assert "run.allow_data_change=true" in capsys.readouterr().err
        assert run(*change, "run.allow_data_change=true") == 0
        assert load(Path("one")).sampler.weights == {"prose": 3.0}

    def test_shape_and_free_changes_go_through(self, run: Run) -> None:
        run("run.dir=one")
        assert run("run.dir=one", "train.batch_size=8", "checkpoint.every_steps=5", "data.num_workers=1") == 0
        assert load_plain(Path("one"))["train"]["batch_size"] == 8

    def test_an_option_that_came_later_has_its_default(self, run: Run) -> None:
        run("run.dir=one")
        path = Path("one/config.yaml")
        path.write_text(path.read_text().replace("  deterministic: false\n", ""))
        assert run("run.dir=one") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs").mkdir(mode=0o500)
    assert run() == ExitStatus.USAGE
    assert "cannot be written" in capsys.readouterr().err


def test_run_dir_that_cannot_be_made_is_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs").write_text("a file")
    assert run() == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert str(Path("outputs").absolute()) in line
    assert "run.root" in line


def test_a_signal_before_a_submission_starts_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Composer.jobs

    def interrupted(self: Composer, overrides: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return jobs(self, overrides)

    monkeypatch.setattr(Composer, "jobs", interrupted)
    assert run("-m", "seed=1,2") == ExitStatus.INTERRUPTED
    assert FakeLauncher.launched == []


def test_ctrl_c_ends_the_following_of_a_sweep(run: Run) -> None:
    FakeLauncher.interrupt = True
    assert run("-m", "seed=1,2") == 128 + signal.SIGINT


class TestRanks:
    """Under torchrun rank 0 alone writes."""

    def test_another_rank_waits_for_the_config_of_this_launch(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        run("train.steps=10", launcher="here")  # an earlier launch: its config is stale for the next one
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        waits = []

        def rank_0_comes() -> None:
            waits.append(1)
            monkeypatch.setenv("RANK", "0")
            assert run("train.steps=20", launcher="here") == 0

        monkeypatch.setattr(command, "_pause", rank_0_comes)
        assert run("train.steps=20", launcher="here") == 0
        assert len(waits) == 1
        assert len(FakeLauncher.launched) == 3

    def test_another_rank_writes_nothing_and_gives_up(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(command, "RANK_TIMEOUT_S", 0.0)
        assert run(launcher="here") == ExitStatus.USAGE
        assert run_dirs() == []

    def test_another_rank_of_a_finished_run_does_not_start_alone(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("train.steps=10", launcher="here")
        finish(run_dirs()[0], 10)
        FakeLauncher.launched.clear()
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        assert run("train.steps=10", launcher="here") == 0
        assert FakeLauncher.launched == []

    def test_a_submission_from_torchrun_is_refused(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert run() == ExitStatus.USAGE


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, *arguments]
    return subprocess.run(
        command_line, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


class TestShowing:
    """What only shows something is quick: it imports neither torch nor numpy, and it writes nothing."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["--version"],
            ["data=mixture", "--cfg", "job"],
            ["--cfg", "job", "data=mixture", "--resolve", "-p", "sampler"],
            ["--info", "defaults", "experiment=smoke"],
            ["-sc", "query=bash"],
            ["phases.late.start_step=3", "--cfg", "job"],
        ],
    )
    def test_it_works_from_any_directory_without_torch(self, tmp_path: Path, arguments: list[str]) -> None:
        program = (
            "import sys; from runner.__main__ import main; status = main(); "
            "heavy = {'torch', 'numpy', 'submitit'} & set(sys.modules); assert not heavy, heavy; sys.exit(status)"
        )
        done = python("-c", program, *arguments, cwd=tmp_path, COMP_LINE="runner data=m")
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert list(tmp_path.iterdir()) == []

    def test_help_imports_no_hydra(self, tmp_path: Path) -> None:
        done = python("-X", "importtime", "-m", "runner", "--help", cwd=tmp_path)
        assert "hydra" not in done.stderr
        assert "data=mixture sampler.temperature=0.7" in done.stdout

    def test_completion_knows_groups_and_options(self, tmp_path: Path) -> None:
        def complete(line: str) -> list[str]:
            done = python("-m", "runner", "-sc", "query=bash", cwd=tmp_path, COMP_LINE=f"runner {line}")
            return done.stdout.split()

        assert complete("data=mix") == ["data=mixture"]
        assert "train.steps=" in complete("train.st")

    def test_a_mistake_in_what_is_to_be_shown_is_one_line(self, tmp_path: Path) -> None:
        done = python("-m", "runner", "data=mixtrue", "--cfg", "job", cwd=tmp_path)
        assert done.returncode == ExitStatus.USAGE
        (line,) = done.stderr.splitlines()
        assert "did you mean 'mixture'?" in line

    def test_help_names_settings_and_groups_that_exist(self, tmp_path: Path) -> None:
        flat = flatten(Composer().compose([]).plain)
        section = usage.text().split("Settings")[1].split("Flags")[0].splitlines()[1:]
        names = [line.split()[0] for line in section if line.strip()]
        assert len(names) > 10
        assert [name for name in names if name not in flat] == []
        (tmp_path / "data").mkdir()
        (tmp_path / "data/mine.yaml").write_text("{}")
        assert "files, mine, mixture" in usage.text(usage.config_dirs(["-m", "--config-dir", str(tmp_path)]))
        assert "files, mine, mixture" in usage.text(usage.config_dirs([f"-cd={tmp_path}"]))


def test_every_option_in_conf_is_explained() -> None:
    """Each option has a comment above or beside it, at least in one of the files that have it."""
    from runner.conf_tree import conf_dir

    explained, options = {"_target_"}, {}
    for path in conf_dir().rglob("*.yaml"):
        above = ""
        for line in map(str.strip, path.read_text().splitlines()):
            key, colon, value = line.partition(":")
            if colon and value.strip() and line[0] not in "#-":
                options[key] = path.name
                if "#" in value or above.startswith("#"):
                    explained.add(key)
            above = line
    assert len(options) > 60
    assert {key: file for key, file in options.items() if key not in explained} == {}


def test_an_interrupt_in_the_interpreters_own_end_keeps_the_exit_status() -> None:
    """What is left of a module's names is deleted when handlers are gone already."""
    program = """
import os, signal, sys
from runner.signals import STOP
STOP.install()
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
late = Late()
sys.exit(75)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "")

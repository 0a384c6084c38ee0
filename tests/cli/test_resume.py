"""`runner resume RUN...`: frozen configs decide, with the checks and the launching of the first command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_launcher import Command, FakeLauncher, finish, run_dirs
from runs import PACED, ROOT, TINY, Run, assert_same_run

from runner.config.frozen import load, load_plain
from runner.errors import ExitStatus
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock
from runner.system.signals import STOP
from runner.training.attempt import attempt

pytestmark = pytest.mark.slow  # every test composes configs several times


@pytest.fixture
def started(run: Command) -> Path:
    """Make a run of 10 steps that was started here."""
    assert run("train.steps=10", launcher="here") == 0
    FakeLauncher.launched.clear()
    (path,) = run_dirs()
    return path


@pytest.fixture
def sweep(run: Command) -> list[Path]:
    """Make three runs that were submitted."""
    assert run("-m", "seed=1,2,3", "train.steps=10") == 0
    FakeLauncher.launched.clear()
    return run_dirs()


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def test_a_run_is_resumed_from_its_frozen_config(started: Path, command: Command) -> None:
    before = load_plain(started)
    assert command("resume", str(started.relative_to(Path.cwd()))) == 0
    assert FakeLauncher.launched == [started]
    assert load_plain(started) == before
    overrides = json.loads(RunDir(started).code.read_text())["overrides"]
    assert overrides == ["launcher=here", "train.steps=10"]  # those of the first command


def test_a_finished_run_is_reported(started: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    finish(started, 10)
    assert command("resume", str(started)) == 0
    assert "finished, all 10 steps" in capsys.readouterr().out
    assert FakeLauncher.launched == []


def test_a_live_run_is_not_touched(started: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with Lease.acquire(RunDir(started).lease, timeout_s=5):
        assert command("resume", str(started), "train.steps=20") == ExitStatus.LOCKED
    assert "is in use" in errors(capsys)[0]
    assert load(started).train.steps == 10


def test_resume_refuses_other_directories(started: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert command("resume", "empty", str(started), "nowhere", "outputs") == ExitStatus.USAGE
    empty, nowhere, outputs = errors(capsys)
    assert empty.startswith("empty is not a run directory, which has a config.yaml")
    assert nowhere.startswith("nowhere: no such directory")
    assert f"it holds runs, such as outputs/{started.name}" in outputs
    assert command("resume") == command("resume", "train.steps=20") == ExitStatus.USAGE
    assert all("pass a run directory" in line for line in errors(capsys))
    assert FakeLauncher.launched == []


class TestChanges:
    def test_settings_that_may_change_do(self, started: Path, command: Command) -> None:
        again = ("resume", str(started), "train.steps=20", "+logger.mine=null", "eval.every_steps=5")
        assert command(*again) == command(*again) == 0
        config = load(started)
        assert (config.train.steps, config.eval.every_steps) == (20, 5)
        assert FakeLauncher.launched == [started, started]
        overrides = json.loads(RunDir(started).code.read_text())["overrides"]
        assert overrides == ["launcher=here", "train.steps=10", *again[2:]]

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("model.width=64", "model.width: 96 -> 64 cannot be changed"),
            ("sampler.shuffle=false", "add run.allow_data_change=true"),
            ("train.stps=20", "did you mean 'steps'?"),
            ("train.steps=many", "train.steps=many must be a whole number"),
            ("train.steps=0", "train.steps=0 must be"),
            ("run.dir=elsewhere", "run.dir=elsewhere"),
            ("~train.clip_norm", "cannot be deleted"),
        ],
    )
    def test_fixed_settings_are_refused_by_name(
        self, started: Path, command: Command, capsys: pytest.CaptureFixture[str], override: str, words: str
    ) -> None:
        before = RunDir(started).config.read_bytes()
        assert command("resume", str(started), override) == ExitStatus.USAGE
        (line,) = errors(capsys)
        assert words in line
        assert RunDir(started).config.read_bytes() == before
        assert FakeLauncher.launched == []

    def test_data_changes_when_that_is_allowed(self, started: Path, command: Command) -> None:
        assert command("resume", str(started), "sampler.shuffle=false", "run.allow_data_change=true") == 0
        assert not load(started).sampler.shuffle

    def test_another_launcher_replaces_the_frozen_one(self, sweep: list[Path], command: Command, conf: Path) -> None:
        assert command("resume", str(sweep[0]), "--config-dir", str(conf), "launcher=here") == 0
        assert load(sweep[0]).launcher["_target_"] == "fake_launcher.HereLauncher"
        assert FakeLauncher.launched == sweep[:1]

    def test_a_moved_run_is_resumed_where_it_is(self, started: Path, command: Command) -> None:
        moved = started.rename(started.parent / "moved")
        assert command("resume", str(moved)) == 0
        assert FakeLauncher.launched == run_dirs() == [moved]
        assert load(moved).run.dir == str(moved)


class TestSeveral:
    def test_the_unfinished_runs_of_a_sweep_are_resumed(
        self, sweep: list[Path], command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        finish(sweep[1], 10)
        saved = RunDir(sweep[2]).checkpoint(4)
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text('{"step": 4, "sha256": ""}')
        capsys.readouterr()
        assert command("resume", *map(str, sweep), str(sweep[0])) == 0
        assert FakeLauncher.launched == [sweep[0], sweep[2]]
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if not line.startswith(" ")] == [
            f"outputs/{sweep[0].name}: starting at step 0: it was never started",
            f"outputs/{sweep[1].name}: finished, all 10 steps",
            f"outputs/{sweep[2].name}: resuming at step 4 of 10: it was never started",
        ]

    @pytest.mark.parametrize("word", ["--dry-run", "-n", "launcher.dry_run=true"])
    def test_a_dry_run_writes_nothing(
        self, sweep: list[Path], command: Command, capsys: pytest.CaptureFixture[str], word: str
    ) -> None:
        before = [RunDir(path).config.read_bytes() for path in sweep]
        assert command("resume", *map(str, sweep), word, "train.steps=20") == 0
        assert f"would start {' '.join(path.name for path in sweep)}" in capsys.readouterr().out
        assert [RunDir(path).config.read_bytes() for path in sweep] == before
        assert FakeLauncher.launched == []

    def test_they_share_a_launcher(
        self, sweep: list[Path], command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command("resume", str(sweep[0]), "launcher.partition=a") == 0
        FakeLauncher.launched.clear()
        capsys.readouterr()
        assert command("resume", *map(str, sweep)) == ExitStatus.USAGE
        (line,) = errors(capsys)
        assert "launcher.partition: a -> null differs" in line
        assert "set launcher.partition=..." in line
        assert FakeLauncher.launched == []
        assert command("resume", *map(str, sweep), "launcher.partition=b") == 0
        assert FakeLauncher.launched == sweep

    def test_an_error_that_all_have_is_reported_once(
        self, sweep: list[Path], command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command("resume", *map(str, sweep), "train.steps=0") == ExitStatus.USAGE
        assert len(errors(capsys)) == 1


def test_other_ranks_wait_until_rank_0_has_changed_the_config(
    started: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    def rank_0_starts(seconds: float) -> None:
        monkeypatch.setenv("RANK", "0")
        assert command("resume", str(started), "train.steps=20") == 0

    monkeypatch.setattr(clock, "sleep", rank_0_starts)
    assert command("resume", str(started), "train.steps=20") == 0
    assert FakeLauncher.launched == [started, started]


def test_the_other_ranks_end_when_torchrun_stops_them(
    started: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has refused to start: otherwise they would wait for its config until torchrun kills them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(clock, "sleep", lambda seconds: monkeypatch.setattr(STOP, "signum", signal.SIGTERM))
    assert command("resume", str(started), "train.steps=20") == ExitStatus.INTERRUPTED
    assert FakeLauncher.launched == []


class Resumed(Run):
    """An attempt that is made by `runner resume`."""

    def words(self) -> list[str]:
        return ["resume", str(self.path), *self.overrides]


@pytest.mark.slow
def test_a_killed_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Use only its directory, and a run of more steps; the original config file has changed since."""
    (tmp_path / "conf/experiment").mkdir(parents=True)
    mine = tmp_path / "conf/experiment/mine.yaml"
    mine.write_text((ROOT / "conf/experiment/smoke.yaml").read_text())
    overrides = [f"--config-dir={tmp_path / 'conf'}", *TINY[1:], "experiment=mine", "checkpoint.every_steps=3", PACED]
    overrides.append("scheduler=constant")  # the others follow the number of steps
    straight = Run(tmp_path / "straight", [*overrides, "train.steps=20"])
    straight.finish()
    killed = Run(tmp_path / "killed", [*overrides, "train.steps=10"])
    killed.hold_at(7)
    killed.start()
    assert killed.kill_when(Run.idles)
    killed.wait()
    mine.write_text("train:\n  steps: 3\n")
    resumed = Resumed(killed.path, ["train.steps=20"])
    resumed.finish()
    assert_same_run(straight, resumed)
    assert [attempt["cause"] for attempt in resumed.attempts()] == ["killed", "finished"]
    assert "finished, all 20 steps" in Resumed(killed.path, []).finish()


@pytest.mark.slow
def test_torchrun_resumes_a_run_with_more_ranks(tmp_path: Path) -> None:
    overrides = [*TINY, "sampler=elastic", "train.global_batch_size=8", "train.batch_size=4", "train.device=cpu"]
    resumed = Run(tmp_path / "run", [*overrides, "train.steps=4"])
    resumed.finish()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "runner", "resume", str(resumed.path), "train.steps=8"]
    done = subprocess.run(command, cwd=ROOT, env=Run.environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in resumed.records() if "loss" in record] == list(range(1, 9))
    assert resumed.status()["state"] == "finished"


def test_hand_edited_config_is_refused_with_the_command_to_use(
    started: Path, run: Command, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only part of the edit would act, since a checkpoint has the optimizer's options."""
    config = RunDir(started).config
    config.write_text(config.read_text().replace("lr: 0.001\n", "lr: 0.5\n"))
    assert command("resume", str(started), "train.steps=20") == ExitStatus.USAGE
    assert run("train.steps=10", f"run.dir={started}", launcher="here") == ExitStatus.USAGE
    assert attempt(started) == ExitStatus.USAGE
    for error in errors(capsys):
        assert "config.yaml was edited by hand" in error
        assert f"runner resume {started} key=value, or runner fork" in error
    assert FakeLauncher.launched == []

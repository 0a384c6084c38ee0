"""A run is extended on purpose, by `resume`; its first command then reports this and trains nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_launcher import Command, FakeLauncher, finish, run_dirs

from runner.config.composition import compose, identity_at
from runner.config.frozen import load, load_plain
from runner.config.identity import identity
from runner.errors import ExitStatus
from runner.rundir import provenance
from runner.rundir.paths import RunDir
from runner.training.effects import without_effect

pytestmark = pytest.mark.slow  # every test composes configs several times

FIRST = ("train.steps=20", "seed=3")


def save(path: Path, step: int) -> None:
    saved = RunDir(path).checkpoint(step)
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps({"step": step, "sha256": ""}))


@pytest.fixture
def finished(run: Command) -> Path:
    """Make a finished run of 20 steps with a cosine schedule."""
    assert run(*FIRST) == 0
    (path,) = run_dirs()
    finish(path, 20)
    save(path, 20)
    FakeLauncher.launched.clear()
    return path


def test_another_length_is_another_run(finished: Path, run: Command) -> None:
    assert run("train.steps=60", "seed=3") == 0
    assert len(run_dirs()) == 2
    assert finished not in FakeLauncher.launched
    assert run("-m", "train.steps=20,60,80", "seed=3") == 0
    assert len(run_dirs()) == 3


def test_resume_extends_a_run_and_explains_the_effects(
    finished: Path, run: Command, command: Command, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = identity(load_plain(finished))
    capsys.readouterr()
    assert command("resume", "--config-dir", str(conf), str(finished), "train.steps=2000") == 0
    shown = capsys.readouterr().out
    assert "train.steps: 20 -> 2000" in shown
    assert "from step 20 on the learning rate is that of a run of 2000 steps (0.1 -> 1 of its peak)" in shown
    assert FakeLauncher.launched == [finished]
    assert load(finished).train.steps == 2000
    (edit,) = provenance.edits(finished)
    assert (edit["step"], edit["changes"], edit["before"]) == (20, ["train.steps: 20 -> 2000"], before)
    # Up to step 20, the run is the one from before the edit.
    assert identity_at(finished, 20) == before != identity_at(finished, 21) == identity(load_plain(finished))
    FakeLauncher.launched.clear()
    assert command("resume", "--config-dir", str(conf), str(finished), "train.steps=2000") == 0
    assert len(provenance.edits(finished)) == 1


def test_the_first_command_reports_the_edit(
    finished: Path, run: Command, command: Command, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("resume", "--config-dir", str(conf), str(finished), "train.steps=2000") == 0
    FakeLauncher.launched.clear()
    text = RunDir(finished).config.read_text()
    assert run(*FIRST) == 0  # it has this command's length
    assert "was edited at step 20: train.steps: 20 -> 2000. This command trains nothing" in capsys.readouterr().out
    shutil.rmtree(RunDir(finished).checkpoints)
    save(finished, 10)
    (finished / "finished.json").unlink()
    assert run(*FIRST) == ExitStatus.USAGE
    assert "another run.dir or run.name begins this anew" in capsys.readouterr().out
    assert run("-m", "seed=3,4", "train.steps=20") == ExitStatus.USAGE  # the others start all the same
    assert [path for path in FakeLauncher.launched if path != finished] == FakeLauncher.launched != []
    assert RunDir(finished).config.read_text() == text


def test_a_command_does_not_extend_a_run_in_passing(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run.dir=x", "train.steps=20") == 0
    finish(Path("x").absolute(), 20)
    assert run("run.dir=x", "train.steps=60") == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert "train.steps: 20 -> 60 changes the result in the run" in error
    assert "resume x train.steps=60` does so on purpose, or choose another run.dir" in error
    assert run("run.dir=x", "train.steps=20", "run.threads=2") == ExitStatus.USAGE
    assert "run.threads: 1 -> 2 changes the result" in capsys.readouterr().err


@pytest.mark.parametrize("free", ["scheduler=constant", "scheduler.total_steps=30"])
def test_the_length_may_change_where_nothing_follows_it(run: Command, free: str) -> None:
    assert run(free, "train.steps=40") == run(free, "train.steps=60") == 0
    (path,) = run_dirs()
    assert load(path).train.steps == 60
    assert provenance.edits(path) == []
    assert json.loads((path / "code.json").read_text())["edits"] == []


def test_the_start_directory_of_a_run_is_compared(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here/notes.txt").write_text("text " * 500)
    (tmp_path / "there").mkdir()
    words = ["data=files", "data.sources.text.paths=notes.txt", f"run.root={tmp_path}/o"]
    assert run(*words) == 0
    assert run(*words) == 0
    assert "was started in" not in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "there")
    assert run(*words) == 0
    (path,) = (tmp_path / "o").iterdir()
    said = f"the run was started in {tmp_path / 'here'}; its paths are relative to {tmp_path / 'there'} now"
    assert said in capsys.readouterr().out
    assert load(path).data.sources["text"]["paths"] == str(tmp_path / "there/notes.txt")


def test_a_copied_project_resumes_with_its_own_data(
    run: Command, command: Command, conf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here/notes.txt").write_text("text " * 500)
    assert run("data=files", "data.sources.text.paths=notes.txt") == 0
    (path,) = run_dirs()
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    (copied,) = run_dirs()
    before = identity(load_plain(copied))
    assert command("resume", "--config-dir", str(conf), str(copied)) == 0
    assert load(copied).data.sources["text"]["paths"] == str(tmp_path / "copy/notes.txt")
    assert identity(load_plain(copied)) == before
    # A run that was moved without its data still reads those.
    shutil.copytree(path, tmp_path / "elsewhere" / path.name)
    assert command("resume", "--config-dir", str(conf), str(tmp_path / "elsewhere" / path.name)) == 0
    moved = load(tmp_path / "elsewhere" / path.name)
    assert moved.data.sources["text"]["paths"] == str(tmp_path / "here/notes.txt")


def test_a_callback_that_changes_weights_is_in_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clipping.py").write_text(
        "class Look:\n    def __init__(self, every):\n        pass\n\nclass Clip(Look):\n    changes_training = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = identity(compose([]).plain)
    look = compose(["+callbacks.a={_target_: clipping.Look, every: 3}"])
    assert (identity(look.plain), look.config.run.changed_by) == (plain, [])
    clips = [compose([f"+callbacks.a={{_target_: clipping.Clip, every: {every}}}"]) for every in (3, 4)]
    assert clips[0].config.run.changed_by == ["a"]
    assert len({plain, *(identity(clip.plain) for clip in clips)}) == 3
    assert without_effect(clips[0].config) == []

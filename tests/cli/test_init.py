"""A project from one command: without changes it trains, resumes and passes its test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.__main__ import run as command

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_new_project_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands without a config directory, also to resume a run."""
    monkeypatch.chdir(tmp_path)
    assert command(["init", "My-Spirals"]) == 0
    project = tmp_path / "My-Spirals"
    assert not [path for path in project.rglob("*") if path.is_file() and "my_project" in path.read_text()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def python(*words: str) -> str:
        words = (sys.executable, "-m", *words)
        return subprocess.run(words, cwd=project, env=environment, check=True, capture_output=True, text=True).stdout

    assert "2 passed" in python("pytest", "-q", "-p", "no:cacheprovider")
    output = python("runner", "experiment=spirals", "train.epochs=1", "run.dir=run", "scheduler=constant")
    assert "finished: 40 steps" in output
    assert "finished: 60 steps" in python("runner", "resume", "run", "train.epochs=1.5")


def test_init_leaves_existing_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes_of_mine").write_text("mine")
    for name, words in (
        ("full", "not an empty directory"),
        ("full/notes_of_mine", "not an empty"),
        *((name, "Python package") for name in ("class", "random", "torch", "outputs", "1st")),
    ):
        assert command(["init", name]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes_of_mine"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.runner]\nconfig_dir = 'conf'\n", "experiment=mine: no such option .* searched in .*, {here}/conf/exp"),
        ("[tool.runner]\nconfig_dir = 'missing'\n", "tool.runner.config_dir='missing' is not a directory"),
        ("[tool.runner]\nconfig_dir = 3\n", "tool.runner.config_dir=3 is not a directory"),
        ("[tool.runner", "pyproject.toml in the current directory cannot be read"),
        ("[tool]\nrunner = 3\n", "experiment=mine: no such option of experiment"),
        ("tool = 3\n", "experiment=mine: no such option of experiment"),
    ],
)
def test_the_project_names_its_config_directory(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "tiny.yaml").write_text("# @package _global_\nseed: 7\n")
    assert command(["experiment=mine", "--dry-run"]) == 2
    assert re.search(words.format(here=re.escape(str(tmp_path))), capsys.readouterr().err)
    if words.startswith("experiment=mine: no such option .*"):
        assert command(["experiment=tiny", "--dry-run"]) == 0
        assert "tiny-seed7" in capsys.readouterr().out

"""code.json says with which code a run was started, and a later attempt notices other code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from runner import capsule


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of the user's, with one commit; the current directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package lies elsewhere, in no repository: what happens to this one's meanwhile does not matter."""
    package = tmp_path / "site" / "runner"
    package.mkdir(parents=True)
    (package / "capsule.py").write_text("")
    monkeypatch.setattr(capsule, "__file__", str(package / "capsule.py"))


def freeze(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    capsule.write(run / "code.json", capsule.record(), ["seed=1"])
    return run


def test_commit_diff_and_untracked_files_of_the_working_directory_are_kept(project: Path, tmp_path: Path) -> None:
    (project / "model.py").write_text("width = 2\n")
    (project / "new.py").write_text("")
    code = json.loads((freeze(tmp_path) / "code.json").read_text())
    repository = code["repositories"][str(project)]
    assert len(repository["commit"]) == 40
    assert "+width = 2" in repository["diff"]
    assert repository["untracked"] == ["new.py"]
    assert code["overrides"] == ["seed=1"]
    assert code["packages"]["torch"]


def test_nothing_has_changed(project: Path, tmp_path: Path) -> None:
    assert capsule.changed_since(freeze(tmp_path)) == []


def test_edits_and_commits_are_noticed(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = freeze(tmp_path)
    (project / "model.py").write_text("width = 3\n")
    monkeypatch.chdir(tmp_path)  # an attempt may be started elsewhere
    (line,) = capsule.changed_since(run)
    assert line == f"uncommitted changes in {project} are not what they were"
    git(project, "commit", "-qam", "second")
    (line,) = capsule.changed_since(run)
    assert line.startswith(f"commit of {project}: ")


def test_other_versions_and_another_source_are_noticed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = freeze(tmp_path)
    monkeypatch.setattr(capsule, "_version", lambda package: "0.1")
    monkeypatch.setattr(capsule, "_source_digest", lambda folder: "other")
    lines = capsule.changed_since(run)
    assert any(line.startswith("torch ") and line.endswith("-> 0.1") for line in lines)
    assert any("source of runner" in line for line in lines)


def test_it_works_without_git_and_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    run = freeze(tmp_path)
    assert json.loads((run / "code.json").read_text())["repositories"] == {}
    assert capsule.changed_since(run) == []
    assert capsule.changed_since(tmp_path / "nowhere") == []


def test_earlier_submissions_are_kept(project: Path, tmp_path: Path) -> None:
    freeze(tmp_path)
    freeze(tmp_path)
    run = freeze(tmp_path)
    earlier = json.loads((run / "code.json").read_text())["earlier"]
    assert [entry["overrides"] for entry in earlier] == [["seed=1"], ["seed=1"]]

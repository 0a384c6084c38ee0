"""code.json records the code that a run was started with, later attempts notice changes, and git runs nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runner.errors import RunDirError
from runner.rundir import provenance
from runner.rundir.paths import RunDir


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a user's repository with one commit the current directory."""
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
    """Move the package elsewhere, outside any repository: changes of this one do not matter."""
    package = tmp_path / "site" / "runner"
    package.mkdir(parents=True)
    (package / "provenance.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))


def freeze(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    provenance.write_code(run / "code.json", provenance.describe_code(), ["seed=1"])
    return run


def test_commit_diff_and_untracked_files_are_recorded(project: Path, tmp_path: Path) -> None:
    (project / "model.py").write_text("width = 2\n")
    (project / "new.py").write_text("")
    code = json.loads((freeze(tmp_path) / "code.json").read_text())
    repository = code["repositories"][str(project)]
    assert len(repository["commit"]) == 40
    assert "+width = 2" in repository["diff"]
    assert repository["untracked"] == ["new.py"]
    assert code["overrides"] == ["seed=1"]
    assert code["packages"]["torch"]


def test_the_same_code_has_no_changes(project: Path, tmp_path: Path) -> None:
    assert provenance.code_changes(freeze(tmp_path)) == []


def test_edits_and_commits_are_noticed(project: Path, tmp_path: Path) -> None:
    run = freeze(tmp_path)
    (project / "model.py").write_text("width = 3\n")
    (line,) = provenance.code_changes(run)
    assert line == f"the uncommitted changes in {project} have changed"
    git(project, "commit", "-qam", "second")
    (line,) = provenance.code_changes(run)
    assert line.startswith(f"commit of {project}: ")


def test_file_that_the_run_depends_on_is_named_with_git(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    run = tmp_path / "run"
    run.mkdir()
    code = provenance.describe_code({"model": {"_target_": "model.Net"}})
    provenance.write_code(run / "code.json", code, [])
    (project / "model.py").write_text("width = 3\n")
    assert provenance.code_changes(run) == ["model.py"]
    git(project, "commit", "-qam", "second")
    name, commit = provenance.code_changes(run)
    assert name == "model.py"
    assert commit.startswith(f"commit of {project}: ")


def test_other_versions_and_another_source_are_noticed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = freeze(tmp_path)
    monkeypatch.setattr(provenance, "_version", lambda package: "0.1")
    monkeypatch.setattr(provenance, "_source_digest", lambda *folders: "other")
    lines = provenance.code_changes(run)
    assert any(line.startswith("torch ") and line.endswith("-> 0.1") for line in lines)
    assert any("source of runner" in line for line in lines)


def test_provenance_works_without_git_or_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    run = freeze(tmp_path)
    assert json.loads((run / "code.json").read_text())["repositories"] == {}
    assert provenance.code_changes(run) == []
    assert provenance.code_changes(tmp_path / "nowhere") == []


def test_earlier_submissions_are_kept(project: Path, tmp_path: Path) -> None:
    freeze(tmp_path)
    freeze(tmp_path)
    run = freeze(tmp_path)
    earlier = json.loads((run / "code.json").read_text())["earlier"]
    assert [entry["overrides"] for entry in earlier] == [["seed=1"], ["seed=1"]]


def test_run_directory_does_not_choose_the_repository(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only repositories of the current directory and the package count: git may run what a repository configures."""
    run = freeze(tmp_path)
    git(project, "commit", "-qm", "second", "--allow-empty")
    monkeypatch.chdir(tmp_path)
    assert provenance.code_changes(run) == []
    monkeypatch.chdir(project)
    assert len(provenance.code_changes(run)) == 1


def test_git_runs_no_program_that_the_repository_configures(project: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran-$(basename $0)\ncat\n")
    program.chmod(0o755)
    (project / ".gitattributes").write_text("*.py filter=mine diff=mine\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "attributes")
    hooks = project / ".git" / "own-hooks"
    hooks.mkdir()
    (hooks / "post-index-change").symlink_to(program)
    for key in ("core.fsmonitor", "diff.external", "diff.mine.command", "diff.mine.textconv", "filter.mine.clean"):
        git(project, "config", key, str(program))
    git(project, "config", "filter.mine.process", str(program))
    git(project, "config", "filter.mine.required", "true")
    git(project, "config", "core.hooksPath", str(hooks))
    (project / "model.py").write_text("width = 2\n")
    code = provenance.describe_code()
    assert "+width = 2" in code["repositories"][str(project)]["diff"]
    assert list(tmp_path.glob("ran-*")) == []
    for key, value in {
        "core.pager": f"{program} pager",
        "core.sshCommand": str(program),
        "core.gitProxy": str(program),
        "include.path": str(tmp_path / "included"),
    }.items():
        git(project, "config", key, value)
    (tmp_path / "included").write_text(f'[filter "other"]\n\tclean = {program}\n')
    (project / ".gitattributes").write_text("*.py filter=other\n")
    assert provenance.describe_code()["repositories"][str(project)]["commit"]
    assert list(tmp_path.glob("ran-*")) == []
    git(project, "config", "filter.a=b.clean", str(program))  # cannot be disabled on the command line
    assert provenance.describe_code()["repositories"] == {}
    assert list(tmp_path.glob("ran-*")) == []


def test_the_commit_is_recorded_with_a_git_without_scopes(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git before 2.26, such as Ubuntu 20.04's, does not know `git config --show-scope`."""
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    old = tmp_path / "bin" / "git"
    old.write_text(f'#!/bin/sh\ncase "$*" in *--show-scope*) exit 129;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    assert provenance.describe_code()["repositories"][str(project)]["commit"]


@pytest.mark.parametrize("separate", [False, True])
def test_git_runs_no_filter_that_a_working_tree_configures(
    separate: bool, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(0o755)
    (project / ".gitattributes").write_text("*.py filter=mine\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "attributes")
    other = tmp_path / "other"
    git(project, "worktree", "add", "-q", str(other))
    if separate:
        git(project, "config", "extensions.worktreeConfig", "yes")
    git(other, "config", *(["--worktree"] if separate else []), "filter.mine.clean", str(program))
    (other / "model.py").write_text("width = 2\n")
    monkeypatch.chdir(other)
    assert "+width = 2" in provenance.describe_code()["repositories"][str(other)]["diff"]
    assert not (tmp_path / "ran").exists()


def test_git_fetches_nothing_from_a_remote_program(project: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program}",
        "remote.origin.fetch": "+refs/heads/*:refs/remotes/origin/*",
        "protocol.ext.allow": "always",
    }.items():
        git(project, "config", key, value)
    shown = subprocess.run(["git", "-C", project, "rev-parse", "HEAD:model.py"], capture_output=True, check=True)
    blob = shown.stdout.decode().strip()
    (project / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    (project / "model.py").write_text("width = 2\n")
    assert provenance.describe_code()["repositories"][str(project)]["diff"] == ""
    assert not (tmp_path / "ran").exists()


def test_gits_variables_do_not_lead_elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-qm", "its own", "--allow-empty")
    here = provenance.describe_code()["repositories"][str(project)]["commit"]
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(program))
    monkeypatch.setenv("GIT_PAGER", str(program))
    (project / "model.py").write_text("width = 2\n")
    found = provenance.describe_code()["repositories"]
    assert found[str(project)]["commit"] == here
    assert "+width = 2" in found[str(project)]["diff"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["packages", "runner", "repositories", "earlier", "overrides", "targets", "modules", "directory"]
)
@pytest.mark.parametrize("value", [None, 7, "x", [7], {"x": 7}])
def test_malformed_code_record_is_only_different_code(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(
        provenance,
        "describe_code",
        lambda *_: {
            "python": "3",
            "packages": {},
            "runner": {"digest": "0", "source": "s"},
            "repositories": {"x": {"commit": "c", "diff_digest": "d"}},
            "directory": "d",
            "targets": ["model.Net"],
            "modules": {"model.py": "0"},
        },
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "code.json").write_text(json.dumps({**provenance.describe_code(), name: value}))
    provenance.code_changes(run)
    provenance.write_code(run / "code.json", provenance.describe_code(), ["seed=1"])
    assert json.loads((run / "code.json").read_text())["overrides"] == ["seed=1"]


def test_hand_edited_config_is_refused_but_not_a_killed_commands(tmp_path: Path) -> None:
    """A resume would follow only part of the edit, because an optimizer's state holds its options."""
    run = RunDir(freeze(tmp_path))
    provenance.check_config(RunDir(tmp_path / "elsewhere"))  # code.json is not a condition
    provenance.write_code(run.code, {}, [], config="lr: 0.1\n")
    run.config.write_text("lr: 0.1\n")
    for text in ("lr: 0.2\n", "lr: 0.3\n"):
        provenance.write_code(run.code, {}, [], config=text)
        provenance.check_config(run)  # both commands are killed right here, before they write config.yaml
    run.config.write_text("lr: 0.3\n")
    provenance.check_config(run)
    run.config.write_text("lr: 0.2\n")
    with pytest.raises(RunDirError, match=r"edited by hand.*undo the edit.*runner resume"):
        provenance.check_config(run)

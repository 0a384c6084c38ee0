"""Resuming a run directory runs the classes named in its config, unless another user could have named them."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest
from here import trained

from runner.errors import RunDirError
from runner.rundir import trust
from runner.rundir.paths import RunDir
from runner.system import accounts, files, processes
from runner.training.attempt import attempt

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.path.mkdir(mode=0o755)
    made.config.write_text("seed: 0\n")
    made.config.chmod(0o644)
    return made


@pytest.fixture
def private_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this user a group of the user's name with the expected members."""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, [])))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("me", "x", uid, 0, "", "/", "/bin/sh")))


@pytest.fixture
def shared_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("team", "x", gid, ["me", "you"])))


def refusal(run: RunDir) -> str:
    with pytest.raises(RunDirError) as error:
        trust.check_trusted(run)
    return str(error.value)


def test_a_run_of_this_user_is_resumed(run: RunDir) -> None:
    trust.check_trusted(run)
    trust.check_trusted(RunDir(run.path / "not there yet"))


@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_world_writable_runs_are_refused(run: RunDir, name: str) -> None:
    path = run.path / name
    path.chmod(path.stat().st_mode | 0o002)
    message = refusal(run)
    assert str(path) in message
    assert "mode " in message
    assert f"chmod go-w {path}" in message
    assert trust.VARIABLE in message
    path.chmod(path.stat().st_mode & ~0o002)
    trust.check_trusted(run)


def test_a_sticky_bit_does_not_make_it_better(run: RunDir) -> None:
    run.path.chmod(0o1777)
    assert "everybody" in refusal(run)


@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_a_shared_group_that_may_write_is_refused(run: RunDir, name: str, shared_group: None) -> None:
    path = run.path / name
    path.chmod(path.stat().st_mode | 0o020)
    assert f"chmod g-w {path}" in refusal(run)


def test_a_group_of_this_user_alone_may_write(
    run: RunDir, private_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a umask of 002, which many distributions set for such groups."""
    run.path.chmod(0o2775)
    run.config.chmod(0o664)
    trust.check_trusted(run)
    monkeypatch.setattr(files, "has_access_list", lambda path: True)  # then others have these permissions, too
    assert "its group" in refusal(run)


def test_a_group_without_a_name_is_private_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> object:
        raise KeyError(number)

    monkeypatch.setattr(grp, "getgrgid", unknown)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert accounts.is_private_group(os.geteuid())
    assert not accounts.is_private_group(os.geteuid() + 1)
    assert accounts.user_name(7) == "7"


@needs_root
@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_files_of_another_user_are_refused(run: RunDir, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.path / name
    os.chown(path, SOMEBODY, SOMEBODY)
    message = refusal(run)
    assert f"{path} belongs to another user (owner {SOMEBODY}" in message
    os.chown(path, 0, 0)
    monkeypatch.setattr(processes, "effective_user_id", lambda: SOMEBODY)  # every user may resume root's files
    trust.check_trusted(run)


@needs_root
@pytest.mark.parametrize("target", ["run", "nowhere"])
def test_a_link_that_another_user_has_planted_is_refused(run: RunDir, target: str) -> None:
    link = RunDir(run.path.with_name("link"))
    link.path.symlink_to(target)
    if target == "run":
        trust.check_trusted(link)  # this user's own
    os.chown(link.path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    assert f"{link.path} is a link that belongs to another user (owner {SOMEBODY})" in refusal(link)


@needs_root
def test_a_planted_link_into_a_trusted_directory_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    link = RunDir(run.path.with_name("link"))
    link.path.symlink_to("run")
    os.chown(link.path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    monkeypatch.setenv(trust.VARIABLE, str(run.path))
    refusal(link)
    monkeypatch.setenv(trust.VARIABLE, str(run.path.parent))
    trust.check_trusted(link)


@pytest.mark.parametrize(
    ("named", "trusted"),
    [("{run}", True), ("{parent}", True), ("/nowhere:{parent}", True), ("{run}x", False), ("", False)],
)
def test_the_user_may_name_directories_to_trust(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, named: str, trusted: bool
) -> None:
    run.path.chmod(0o777)
    monkeypatch.setenv(trust.VARIABLE, named.format(run=run.path, parent=run.path.parent))
    if trusted:
        trust.check_trusted(run)
        run.attempts.symlink_to("/etc/passwd")
        assert "symbolic link" in refusal(run)  # it cannot be a record of the run, whoever is trusted
    else:
        refusal(run)


def test_the_config_itself_cannot_vouch_for_itself(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """The attempt of a requeued job checks before it reads; no class is imported."""
    run.config.write_text("run:\n  trust: true\nlauncher:\n  _target_: os.abort\n")
    run.config.chmod(0o666)
    assert attempt(run.path) == 2
    assert "can be written by" in capsys.readouterr().err


def test_nothing_in_a_run_is_writable_by_others(tmp_path: Path) -> None:
    """Above all `lease/`: the highest number there decides which process trains."""
    before = os.umask(0)
    try:
        made = trained(tmp_path / "run", "logger=default", "train.steps=2", "train.profile=1:1")
    finally:
        os.umask(before)
    found = {str(path.relative_to(made)): path.stat().st_mode for path in made.rglob("*")}
    assert {"lease", "submission", "checkpoints", "tensorboard"} <= found.keys()
    assert [name for name, mode in found.items() if mode & 0o022] == []


def test_nothing_created_is_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.make_dirs(tmp_path / "root" / "run", files.OWNED)
        files.write_json(tmp_path / "root" / "run" / "record.json", {})
        files.open_append(tmp_path / "root" / "run" / "log").close()
        with files.owned():
            (tmp_path / "pickle").touch()
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "root").rglob("*")}
    assert modes == {"run": 0o755, "record.json": 0o644, "log": 0o644}
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o777  # a directory in which others may have runs
    assert (tmp_path / "pickle").stat().st_mode & 0o777 == 0o644

"""`runner mv`, `rm`, `archive`, `pin`: safe against live runs, kills, full disks and typing errors."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import forked
import pytest
from checkpoints import train
from disk import Tree, tree_of
from fake_launcher import Command, FakeLauncher, finish, run_dirs
from faults import failing, intercepted, killed
from runs import PACED, ROOT, TINY, Run, assert_same_run

from runner.__main__ import run as runner
from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files.directory import Directory
from runner.cli.runs import archive as archive_command
from runner.cli.runs import rm as rm_command
from runner.cli.start import plan, start
from runner.errors import ExitStatus
from runner.rundir import custody, evaluations, lease, provenance
from runner.rundir.custody import Custody
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import files, processes

LEASES = ("lease", "submission")
SOME_CHANGES = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the first test leaves a copy of its run, because composing is slow."""
    return tmp_path_factory.mktemp("template")


@pytest.fixture
def made(run: Command, template: Path) -> Path:
    """Make a run of 10 steps that was started here, with checkpoints of steps 1 to 3."""
    for ready in template.iterdir():
        return Path(shutil.copytree(ready, Path("outputs").absolute() / ready.name))
    assert run("train.steps=10", launcher="here") == 0
    FakeLauncher.launched.clear()
    (path,) = run_dirs()
    train(path / "checkpoints", 3, keep_last=10)
    shutil.copytree(path, template / path.name)
    return path


def contents(path: Path) -> Tree:
    """Return the contents of a run without its leases, which belong to processes."""
    return {name: data for name, data in tree_of(path).items() if name.partition("/")[0] not in LEASES}


def error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one error line that was printed."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# ---- mv


class TestMove:
    @pytest.mark.slow
    def test_a_renamed_run_is_found_by_its_command(self, made: Path, command: Command, run: Command) -> None:
        """The hash in the name stays."""
        before = contents(made)
        digest = made.name.rpartition("-")[2]
        assert command("mv", str(made), "outputs/a good one") == 0
        target = made.with_name(f"a good one-{digest}")
        assert run_dirs() == [target]
        assert contents(target) == before
        assert run("train.steps=10", launcher="here") == 0
        assert FakeLauncher.launched == run_dirs() == [target]

    @pytest.mark.slow
    def test_a_run_in_another_directory_is_resumed_from_there(
        self, made: Path, command: Command, run: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command("mv", str(made), "store/best runs/") == 0
        target = Path("store/best runs").absolute() / made.name
        hint = capsys.readouterr().out.splitlines()[-1]
        there = f"'store/best runs/{made.name}', or its command with run.root='store/best runs'"
        assert hint == f"resume it: python -m runner resume {there}"
        assert command("resume", str(target)) == 0
        assert run("train.steps=10", "run.root='store/best runs'", launcher="here") == 0
        assert FakeLauncher.launched == [target, target]

    def test_run_its_command_does_not_find_resumes_by_path(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The name has no hash: `run.dir` set it."""
        made = made.rename(made.with_name("plain"))
        for target in ("outputs/other", "store/other"):
            assert command("mv", str(made), target) == 0
            assert capsys.readouterr().out.splitlines()[-1] == f"resume it: python -m runner resume {target}"
            made = Path(target)

    def test_into_an_existing_directory(self, made: Path, command: Command) -> None:
        Path("store").mkdir()
        assert command("mv", str(made) + "/", "store") == 0
        assert (Path("store") / made.name / "config.yaml").is_file()

    def test_a_name_with_a_newline_is_shown_on_one_line(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command("mv", str(made), "outputs/two\nlines") == 0
        assert len(capsys.readouterr().out.splitlines()) == 1
        assert "two\nlines" in run_dirs()[0].name

    @pytest.mark.parametrize("how", ["same", "another", "file"])
    def test_mv_does_not_replace_an_existing_target(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], how: str
    ) -> None:
        digest = made.name.rpartition("-")[2]
        target = {"same": made, "another": made.with_name(f"b-{digest}"), "file": made.with_name(f"c-{digest}")}[how]
        (Path("store") / made.name).mkdir(parents=True)
        if how == "file":
            target.write_text("precious")
        before = contents(made)
        asked = "store" if how == "another" else str(target)
        assert command("mv", str(made), asked) == ExitStatus.USAGE
        assert "exists: choose another name" in error(capsys) or how == "same"
        assert contents(made) == before
        assert how != "file" or target.read_text() == "precious"

    def test_neither_into_itself_nor_into_another_run(
        self, made: Path, command: Command, run: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command("mv", str(made), str(made / "inside" / "x")) == ExitStatus.USAGE
        assert "is inside of" in error(capsys)
        assert run("train.steps=10", "seed=2", launcher="here") == 0
        capsys.readouterr()
        (other,) = [path for path in run_dirs() if path != made]
        assert command("mv", str(made), str(other)) == ExitStatus.USAGE
        assert f"is in the run outputs/{other.name}: choose a place outside of runs" in error(capsys)
        assert not (made / "inside").exists()
        assert sorted(run_dirs()) == sorted([made, other])

    def test_to_another_file_system(self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
        before = contents(made)
        with intercepted(refusing("replace", "rename", code=errno.EXDEV, of=made)):
            assert command("mv", str(made), "far away/x") == ExitStatus.USAGE
        assert f"is on another file system: pack the run with `python -m runner archive outputs/{made.name}" in error(
            capsys
        )
        assert contents(made) == before
        assert command("mv", str(made), "far away/x") == 0

    def test_a_directory_that_cannot_be_written(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with intercepted(refusing("replace", "rename", code=errno.EACCES, of=made)):
            assert command("mv", str(made), "elsewhere") == ExitStatus.FAILED
        assert "cannot be moved to" in error(capsys)
        assert made.is_dir()

    @SOME_CHANGES
    def test_killed_before_a_change(self, made: Path, tmp_path: Path, quick: None, stride: int) -> None:
        """The run is complete at one of the two places. If it is at the first, a rerun moves it."""
        from runner.cli.runs.mv import main

        before = contents(made)
        count = changes(made, tmp_path, lambda source, target: main([str(source), str(target)]))
        for number in range(0, count, stride):
            source, target = scene(made, tmp_path, number)
            kill_at(number, lambda source=source, target=target: main([str(source), str(target)]))  # type: ignore[misc]
            assert source.exists() != target.exists(), number
            assert contents(source if source.exists() else target) == before, number
            if source.exists():
                assert main([str(source), str(target)]) == 0
                assert contents(target) == before


def refusing(*calls: str, code: int, of: Path) -> faults.Break:
    """Let these calls fail with this errno for this path."""

    def act(_: int, name: str, call: Callable[[], object], args: tuple[object, ...]) -> object:
        if name in calls and str(args[0]) == str(of):
            raise OSError(code, os.strerror(code), str(of))
        return call()

    return act


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each change to the file system repeatable, without waits for a disk or a heartbeat."""
    monkeypatch.setattr(custody, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(lease, "MAX_INTERVAL_S", 0.02)
    monkeypatch.setattr(faults, "CALLS", (*faults.CALLS, "link"))
    monkeypatch.setattr(Lease, "_beat", lambda lease: None)
    monkeypatch.setattr(files, "open_new", Unbuffered)
    monkeypatch.setattr(files, "fsync_fd", lambda fd: None)


class Unbuffered(io.FileIO):
    """A new file whose every write is a change to the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")

    def write(self, data: object) -> int:
        return files.write_fd(self.fileno(), data)  # type: ignore[arg-type]


def refused(code: int) -> Callable[..., object]:
    """Return a call that fails with this errno."""

    def call(*arguments: object) -> object:
        raise OSError(code, os.strerror(code))

    return call


def scene(made: Path, folder: Path, number: object) -> tuple[Path, Path]:
    """Copy the run into a directory of its own, next to a target."""
    parent = folder / f"scene{number}"
    shutil.copytree(made, parent / "a-11111111")
    return parent / "a-11111111", parent / "b-11111111"


def changes(made: Path, folder: Path, command: Callable[[Path, Path], int]) -> int:
    """Return the number of changes to the file system that a command makes, given a run and a target."""
    source, target = scene(made, folder, "-count")
    with intercepted() as trace:
        assert command(source, target) == 0
    return trace.count


def kill_at(number: int, action: Callable[[], object]) -> None:
    """Run a command in a process that is killed before this change."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            with intercepted(killed(number)):
                action()
        os._exit(0)
    os.waitpid(child, 0)


# ---- rm


class TestRemove:
    def test_a_run_is_removed_with_all_that_is_in_it(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command("rm", str(made), str(made), "--yes") == 0
        assert run_dirs() == []
        assert capsys.readouterr().out.splitlines()[-1] == f"removed outputs/{made.name}"

    def test_rm_asks_and_a_script_has_to_be_explicit(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert command("rm", str(made)) == ExitStatus.USAGE
        assert "add --yes where nobody can be asked" in error(capsys)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        asked: list[str] = []

        def answered(text: str) -> str:
            asked.append(text)
            return ("", "n", "yess")[len(asked) - 1]

        monkeypatch.setattr("builtins.input", answered)
        for _ in range(3):
            assert command("rm", str(made)) == 0
            assert "nothing was removed" in capsys.readouterr().out
        assert made.is_dir()
        assert asked[0].startswith(f"remove outputs/{made.name} (")
        monkeypatch.setattr("builtins.input", lambda text: "y")
        assert command("rm", str(made)) == 0
        assert run_dirs() == []

    def test_a_dry_run_changes_nothing(self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
        before = tree_of(made)
        assert command("rm", "--dry-run", str(made)) == command("rm", "-n", str(made), "--yes") == 0
        assert f"would remove outputs/{made.name} (" in capsys.readouterr().out
        assert tree_of(made) == before

    def test_if_one_cannot_be_removed_none_is(
        self, made: Path, command: Command, run: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Every problem is listed before anything is removed and before any question is asked."""
        assert run("train.steps=10", "seed=2", launcher="here") == 0
        capsys.readouterr()
        pinned, other = sorted(run_dirs(), key=lambda path: path != made)
        assert command("pin", str(pinned), "--step", "2") == 0
        capsys.readouterr()
        assert command("rm", str(other), str(pinned), "outputs", "nowhere", "--yes") == ExitStatus.USAGE
        lines = capsys.readouterr().err.splitlines()
        assert [words in line for words, line in zip(("pinned checkpoints (2)", "not a", "not a"), lines, strict=True)]
        assert all(line.endswith("nothing was removed") for line in lines)
        assert other.is_dir()
        assert command("rm", str(other), str(pinned), "--yes", "--force") == 0
        assert run_dirs() == []

    def test_a_typing_error_removes_no_config_and_no_outputs(self, made: Path, command: Command) -> None:
        (conf := Path("conf").absolute()).mkdir()
        (conf / "config.yaml").write_text("seed: 1")
        for path in (conf, made.parent, made / "checkpoints", Path("/"), Path.cwd()):
            assert command("rm", str(path), "--yes") == ExitStatus.USAGE
        assert made.is_dir()
        assert (conf / "config.yaml").is_file()

    @pytest.mark.parametrize("words", [("rm", "--yes"), ("mv", "elsewhere")])
    def test_run_with_an_unsynced_new_name_is_where_it_is_reported(
        self,
        made: Path,
        command: Command,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        words: tuple[str, ...],
    ) -> None:
        """The run has another name by then, which no command finds."""
        sync, before, word, rest = files.fsync_dir, contents(made), words[0], words[1:]

        def refuse(directory: Path) -> None:
            if not made.exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))
            sync(directory)

        monkeypatch.setattr(files, "fsync_dir", refuse)
        assert command(word, str(made), *rest) == ExitStatus.FAILED
        assert "Input/output error" in error(capsys)
        assert run_dirs() == [made]
        assert contents(made) == before

    def test_leftovers_that_cannot_be_listed_are_no_success(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        really = files.list_dir

        def list_dir(path: Path) -> list[str]:
            if sys._getframe(1).f_code.co_name == "leftovers":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return really(path)

        monkeypatch.setattr(files, "list_dir", list_dir)
        assert command("rm", str(made), "--yes") == ExitStatus.FAILED
        assert "Input/output error" in error(capsys)
        assert made.is_dir()

    def test_a_run_with_a_possibly_unrecorded_job_stays(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """For example, its command was killed after sbatch had accepted the job."""
        RunDir(made).submitting("0" * 32).write_text(json.dumps({"task": None, "user": "0", "written": 1.0}))
        for word, *rest in (("rm", "--yes"), ("mv", "elsewhere"), ("archive", "x.tar")):
            assert command(word, str(made), *rest) == ExitStatus.LOCKED
            assert "rerun its command, which finds out" in error(capsys)
        assert made.is_dir()
        job = {"job_id": "8", "launcher": "launch.local.LocalLauncher", "submission": "0" * 32}
        RunDir(made).job.write_text(json.dumps(job))  # it was, and only the note was left
        assert command("rm", str(made), "--yes") == 0

    def test_run_with_an_ended_unrecorded_job_can_be_removed(self, made: Path, command: Command) -> None:
        """Its command would find a finished run and stop there. A file of the user's is no obstacle."""
        run = RunDir(made)
        run.submitting("0" * 32).write_text(json.dumps({"task": None, "user": "0", "written": 1.0}))
        known = {"job_id": "8", "launcher": "launch.local.LocalLauncher", "submission": "0" * 32}
        run.status.write_text(json.dumps({"state": "finished", **known}))
        run.evaluations.mkdir(exist_ok=True)
        (run.evaluations / f"{evaluations.PREFIX}notes").write_text("")
        assert command("rm", str(made), "--yes") == 0

    @SOME_CHANGES
    def test_killed_before_a_change(self, made: Path, tmp_path: Path, quick: None, stride: int) -> None:
        """The name leads to the complete run or to nothing; a rerun then leaves no files."""
        from runner.cli.runs.rm import main

        before, states = contents(made), set()
        for number in range(0, changes(made, tmp_path, lambda source, _: main([str(source), "--yes"])), stride):
            source, _ = scene(made, tmp_path, number)
            kill_at(number, lambda source=source: main([str(source), "--yes"]))  # type: ignore[misc]
            assert not source.exists() or contents(source) == before, number
            states.add(source.exists())
            if list(source.parent.iterdir()):
                assert main([str(source), "--yes"]) == 0
            assert list(source.parent.iterdir()) == [], number
        assert states == {True, False}

    def test_leftover_is_deleted_only_after_its_name_is_durable(
        self, made: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The command was killed after it renamed the run: a power loss would undo that, but not deletions."""
        done: list[str] = []
        sync, remove = files.fsync_dir, files.remove_tree

        def synced(directory: Path) -> None:
            done.extend(["synced"] * (Path(directory) == made.parent))
            sync(directory)

        def removed(path: Path) -> None:
            done.append("removed")
            remove(path)

        made.rename(made.with_name(f".{made.name}.removed-1-1-{processes.tag()}"))
        monkeypatch.setattr(files, "fsync_dir", synced)
        monkeypatch.setattr(files, "remove_tree", removed)
        assert command("rm", str(made), "--yes") == 0
        assert done == ["synced", "removed"]
        assert run_dirs() == []

    def test_a_refused_removal_is_completed_later(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(files, "remove_tree", refused(errno.EACCES))
            assert command("rm", str(made), "--yes") == ExitStatus.FAILED
        assert "the rest of the run is there; rerun the command" in error(capsys)
        assert command("rm", str(made), "--yes") == 0
        assert run_dirs() == []


# ---- archive


def unpacked(file: Path, folder: Path) -> Path:
    """Unpack the run from an archive with `tar`, as a user would."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xf", file, "-C", folder], check=True)
    (path,) = folder.iterdir()
    return path


class TestArchive:
    @pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz"])
    def test_an_unpacked_archive_equals_the_run(
        self, made: Path, command: Command, tmp_path: Path, suffix: str
    ) -> None:
        """Compare empty directories, links, strange names, modes and pins, but no leases."""
        (made / "tensorboard").mkdir()
        (made / "wandb").mkdir()
        (made / "wandb" / "run\n1 ü").write_text("log")
        (made / "wandb" / "latest").symlink_to("run\n1 ü")
        assert command("pin", str(made), "--step", "2") == 0
        before = contents(made)
        assert command("archive", str(made), f"my runs{suffix}") == 0
        assert contents(made) == before
        there = unpacked(Path(f"my runs{suffix}"), tmp_path / "there")
        assert there.name == made.name
        assert contents(there) == tree_of(there) == before
        assert (there / "wandb" / "latest").is_symlink()
        assert there.stat().st_mode == made.stat().st_mode
        assert command("resume", str(there)) == 0
        assert FakeLauncher.launched == [there]

    def test_some_checkpoints(self, made: Path, command: Command, tmp_path: Path) -> None:
        assert command("pin", str(made), "--step", "1") == 0
        for which, kept in (("last", [1, 3]), ("none", [1]), ("all", [1, 2, 3])):
            assert command("archive", str(made), f"{which}.tar", "--checkpoints", which) == 0
            assert RunDir(unpacked(Path(f"{which}.tar"), tmp_path / which)).checkpoint_steps() == kept
        assert command("archive", str(made), "best.tar", "--checkpoints", "best") == ExitStatus.USAGE
        assert not Path("best.tar").exists()

    def test_pinned_checkpoint_moved_aside_by_a_kill_is_packed(
        self, made: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert command("pin", str(made), "--step", "1") == 0
        path = RunDir(made).checkpoint(1)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_dir, "is_pinned", refused(errno.EINTR))  # killed before it saw the pin
            with pytest.raises(OSError, match="Interrupted"):
                Directory(path.parent).delete(path.name)
        assert not path.exists()
        assert command("archive", str(made), "x.tar", "--checkpoints", "last") == 0
        assert RunDir(unpacked(Path("x.tar"), Path("there"))).checkpoint_steps() == [1, 3]

    def test_a_file_that_has_its_name_is_not_looked_at_again(
        self, made: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An error in that look would report a failed command."""
        stat = files.stat

        def look(path: Any, **options: Any) -> Any:
            return refused(errno.EIO)() if Path(path).name == "x.tar" else stat(path, **options)

        monkeypatch.setattr(files, "stat", look)
        assert command("archive", str(made), "x.tar") == 0

    def test_a_temporary_file_that_stays_hides_nothing(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remove = files.remove

        def refuse(path: Path) -> None:
            return refused(errno.EIO)() if ".x.tar.tmp-" in str(path) else remove(path)  # type: ignore[return-value]

        monkeypatch.setattr(files, "remove", refuse)
        assert command("archive", str(made), "x.tar") == 0
        assert "cannot be removed (Input/output error)" in capsys.readouterr().err

    def test_an_archive_is_verified_before_it_gets_its_name(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = contents(made)
        real = archive_command._content
        with monkeypatch.context() as patch:  # a disk that returns other bytes than were written
            patch.setattr(archive_command, "_content", lambda tar, entry: real(tar, entry)[::-1])
            assert command("archive", str(made), "x.tar") == ExitStatus.FAILED
        assert "what was written reads back differently" in error(capsys)
        assert contents(made) == before
        assert not list(Path().glob("*.tar")) + list(Path().glob(".*.tmp-*"))
        assert command("archive", str(made), "x.tar") == 0
        assert contents(unpacked(Path("x.tar"), Path("there"))) == before

    @pytest.mark.parametrize(
        ("file", "words"),
        [
            ("x.zip", "the file name must end in .tar, .tar.gz, .tar.xz"),
            ("there.tar", "exists: choose another name"),
            ("outputs/{run}/x.tar", "is in the run"),
            ("nowhere/x.tar", "No such file or directory"),
        ],
    )
    def test_a_file_that_cannot_be_made(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], file: str, words: str
    ) -> None:
        """A file inside the run would be removed with it."""
        Path("there.tar").write_text("precious")
        assert command("archive", str(made), file.format(run=made.name)) in (1, 2)
        assert words in error(capsys)
        assert made.is_dir()
        assert Path("there.tar").read_text() == "precious"

    def test_a_full_disk_at_any_write(self, made: Path, tmp_path: Path, quick: None) -> None:
        """No file is left, and the run is unchanged."""
        from runner.errors import UserError

        before = contents(made)
        target = tmp_path / "x.tar"
        assert archive_command.main([str(made), str(tmp_path / "first.tar")]) == 0  # the leases have directories now
        with intercepted() as trace:
            assert archive_command.main([str(made), str(target)]) == 0
        target.unlink()
        mine = [number for number, (name, path, _) in enumerate(trace.calls) if ".x.tar" in path and name != "unlink"]
        assert len(mine) > 20
        for number in [*mine[:: len(mine) // 8], *mine[-3:]]:
            with intercepted(failing(number, errno.ENOSPC)), pytest.raises(UserError, match="No space"):
                archive_command.main([str(made), str(target)])
            assert contents(made) == before, trace.calls[number]
            assert list(tmp_path.glob(".x.tar*")) == [], trace.calls[number]
            target.unlink(missing_ok=True)  # if the directory could not be synced: then it is complete

    @pytest.mark.slow
    def test_killed_before_each_change(self, made: Path, tmp_path: Path, quick: None) -> None:
        """The archive is atomic and the run unchanged; if there is no archive, a rerun makes it."""
        before = contents(made)
        source, _ = scene(made, tmp_path, "-count")
        with intercepted() as trace:
            assert archive_command.main([str(source), str(source.parent / "x.tar")]) == 0
        for number in range(trace.count):
            source, _ = scene(made, tmp_path, number)
            file = source.parent / "x.tar"
            words = [str(source), str(file)]
            kill_at(number, lambda words=words: archive_command.main(words))  # type: ignore[misc]
            assert contents(source) == before, number
            if not file.exists():
                assert archive_command.main(words) == 0
                assert sorted(path.name for path in source.parent.iterdir()) == [source.name, "x.tar"]
            assert contents(unpacked(file, source.parent / "there")) == before, number
            shutil.rmtree(source.parent)

    def test_two_at_once_do_not_replace_each_others_file(
        self, made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = archive_command._pack

        def pack(*arguments: object) -> dict[str, str]:
            content = real(*arguments)  # type: ignore[arg-type]
            Path("x.tar").write_text("of another command")
            return content

        monkeypatch.setattr(archive_command, "_pack", pack)
        for links in (True, False):
            Path("x.tar").unlink(missing_ok=True)
            with monkeypatch.context() as patch:
                if not links:
                    patch.setattr(files, "link", refused(errno.EPERM))
                assert command("archive", str(made), "x.tar") == ExitStatus.USAGE
            assert "x.tar exists" in error(capsys)
            assert Path("x.tar").read_text() == "of another command"
            assert made.is_dir()


# ---- pin


def test_pins_are_set_listed_and_removed(made: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    finish(made, 3)
    for words, answer in (
        ([], "none"),
        (["--step", "1"], "1"),
        (["--step", "last"], "1, 3"),
        (["--remove", "--step", "3"], "1"),
        (["--remove", "--step", "99"], "1"),
    ):
        assert command("pin", str(made), *words) == 0
        assert capsys.readouterr().out == f"pinned: {answer}\n"
    assert command("pin", str(made), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"pinned": [1]}
    assert command("checkpoints", str(made), "--prune") == 0
    assert RunDir(made).checkpoint_steps() == [1, 3]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--step", "9"], "there is no checkpoint of step 9 in .*; available: 1, 2, 3"),
        (["--step", "best"], "judged by a metric"),
        (["--step", "two"], "there is no checkpoint of step two"),
        (["--remove"], "--remove needs --step N, one of none"),
    ],
)
def test_a_pin_of_a_missing_checkpoint_is_refused(
    made: Path, command: Command, capsys: pytest.CaptureFixture[str], words: list[str], answer: str
) -> None:

    assert command("pin", str(made), *words) == ExitStatus.USAGE
    assert re.search(answer, error(capsys))
    assert not list((made / "checkpoints").glob("*.pinned"))


def test_directory_that_is_no_run_is_not_judged(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "profile").write_text("")  # a run has a directory of that name
    assert command("pin", str(tmp_path)) == ExitStatus.USAGE
    assert error(capsys) == f"{tmp_path} has no checkpoints: pass a directory such as outputs/NAME"


# ---- against others who are at the run


COMMANDS = [["mv", "{run}", "elsewhere"], ["rm", "{run}", "--yes"], ["archive", "{run}", "x.tar"]]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_live_run_is_left_alone(
    made: Path, command: Command, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    before = contents(made)
    with Lease.acquire(RunDir(made).lease):
        assert command(*(word.format(run=made) for word in words)) == ExitStatus.LOCKED
    line = error(capsys)
    assert "is in use by process" in line
    assert "; wait for it, or stop it" in line  # another run.dir is no way out
    assert "run.dir" not in line
    assert contents(made) == before
    assert not Path("elsewhere").exists()
    assert not Path("x.tar").exists()
    assert command(*(word.format(run=made) for word in words)) == 0


@pytest.mark.parametrize(
    "words", [*COMMANDS, ["resume", "{run}"], ["checkpoints", "{run}", "--prune"]], ids=lambda words: words[0]
)
def test_a_read_only_disk_is_one_line_with_the_path(
    made: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    """The remedy is one that this command can follow: another run.dir would be another run."""
    really = files.open_fd

    def open_fd(path: Any, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really(path, flags, *mode)

    for name in ("make_dir", "unlink", "rename", "set_times"):
        monkeypatch.setattr(files, name, refused(errno.EROFS))
    monkeypatch.setattr(files, "open_fd", open_fd)
    assert command(*(word.format(run=made) for word in words)) == ExitStatus.USAGE
    line = error(capsys)
    assert str(made) in line
    assert "make the run directory writable" in line
    assert "run.dir" not in line


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_superseded_housekeeper_changes_nothing(
    made: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    """The machine was suspended for a while, and another process has resumed the run."""
    before, taken = contents(made), list[int]()

    def held(run: RunDir, *leases: Lease) -> Custody:
        number, _ = lease.read_holder(run.lease) or (0, {})
        taken.append(number + 1)
        (run.lease / f"{number + 1:08d}.json").write_text('{"host": "elsewhere", "pid": 7}')
        return Custody(run, *leases)

    monkeypatch.setattr(custody, "Custody", held)
    assert command(*(word.format(run=made) for word in words)) == ExitStatus.SUPERSEDED
    assert taken
    assert "is now held by process 7 on elsewhere" in error(capsys)
    assert contents(made) == before
    left = {path.name for folder in (Path.cwd(), made.parent) for path in folder.iterdir()}
    assert not {name for name in left if name in ("elsewhere", "x.tar") or ".removed-" in name or ".tmp-" in name}


def suspended_before_renaming(made: Path, directory: str, patch: pytest.MonkeyPatch, *, then_killed: bool) -> None:
    """Suspend a rename after the last look at the leases: other processes take the run over and train it."""
    real = files.rename

    def rename(source: Path, target: Path) -> None:
        if source == made:
            number, _ = lease.read_holder(made / directory) or (0, {})
            (made / directory / f"{number + 1:08d}.json").write_text('{"host": "elsewhere", "pid": 7}')
            (made / "new").write_text("of the successor")
        real(source, target)
        if source == made and then_killed:
            raise KeyboardInterrupt

    patch.setattr(files, "rename", rename)


@pytest.mark.parametrize("words", COMMANDS[:2], ids=lambda words: words[0])
@pytest.mark.parametrize("directory", ["lease", "submission"])
def test_run_taken_over_right_before_the_rename_is_restored(
    made: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    directory: str,
) -> None:
    before = contents(made)
    suspended_before_renaming(made, directory, monkeypatch, then_killed=False)
    assert command(*(word.format(run=made) for word in words)) == ExitStatus.SUPERSEDED
    assert "was taken over by process 7 on elsewhere before it was renamed: nothing was changed" in error(capsys)
    assert contents(made) == {**before, "new": b"of the successor"}
    assert [path for path in made.parent.iterdir() if ".removed-" in path.name] == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_run_taken_by_a_killed_removal_is_kept(
    made: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_taken: bool,
) -> None:
    with monkeypatch.context() as patch:
        suspended_before_renaming(made, "lease", patch, then_killed=True)
        with pytest.raises(KeyboardInterrupt):
            rm_command.main([str(made), "--yes"])
    (aside,) = made.parent.iterdir()
    if is_taken:
        shutil.copytree(aside, made, ignore=shutil.ignore_patterns(*LEASES))
    assert command("rm", str(made), "--yes") == ExitStatus.SUPERSEDED
    line = error(capsys)
    assert "was taken over by process 7 on elsewhere" in line
    assert (f"it is {aside} now" in line) == is_taken
    assert contents(aside if is_taken else made)["new"] == b"of the successor"


def test_an_archive_gets_no_name_once_the_run_was_taken_over(
    made: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine was suspended after all other looks: the new holder has changed the packed files."""
    real = archive_command._pack

    def pack(*arguments: Any) -> Any:
        found, holder = real(*arguments), lease.read_holder(RunDir(made).lease)
        assert holder is not None
        (RunDir(made).lease / f"{holder[0] + 1:08d}.json").write_text('{"host": "elsewhere", "pid": 7}')
        return found

    monkeypatch.setattr(archive_command, "_pack", pack)
    assert command("archive", str(made), "x.tar") == ExitStatus.SUPERSEDED
    assert "is now held by process 7 on elsewhere" in error(capsys)
    assert [path.name for path in Path.cwd().iterdir() if "x.tar" in path.name] == []


@pytest.mark.parametrize("sweep", [False, True])
def test_run_moved_during_a_start_is_not_begun_anew(
    made: Path,
    run: Command,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sweep: bool,
) -> None:
    """The command has looked at the run already, and finds nothing there when it acquires the lease."""
    before, real = contents(made), plan.plan_runs
    moves = iter([True])

    def plan_runs(*arguments: object, **options: object) -> object:
        planned = real(*arguments, **options)  # type: ignore[arg-type]
        if next(moves, False):
            assert files.rename(made, made.with_name("elsewhere-00000000")) is None
        return planned

    monkeypatch.setattr(start, "plan_runs", plan_runs)
    words = ["-m", "seed=0,1"] if sweep else []
    assert run("train.steps=10", *words, launcher="fake" if sweep else "here") == ExitStatus.USAGE
    assert "was moved or removed meanwhile: rerun the command" in error(capsys)
    assert FakeLauncher.launched == []
    assert not made.exists()
    assert contents(made.with_name("elsewhere-00000000")) == before


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.slow
def test_suspended_command_makes_nothing_where_a_run_was_moved(
    made: Path, run: Command, command: Command, monkeypatch: pytest.MonkeyPatch, sweep: bool
) -> None:
    """Suspend the command longer than others wait for its heartbeat, just before it writes the config."""
    real = provenance.describe_code

    def moved() -> dict[str, object]:
        if made.exists():
            files.rename(made, made.with_name("elsewhere-00000000"))
        return real()

    monkeypatch.setattr(provenance, "describe_code", moved)
    words = ["-m", "seed=0,1"] if sweep else []
    assert run("train.steps=10", *words, launcher="fake" if sweep else "here") == ExitStatus.SUPERSEDED
    assert FakeLauncher.launched == []
    assert not made.exists()


def test_run_moved_before_resume_looks_is_not_begun_anew(
    made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config is known by then. With it, a new run would begin at step 0 in the old place."""
    before, real, elsewhere = contents(made), plan.plan_runs, made.with_name("elsewhere-00000000")

    def plan_runs(*arguments: object, **options: object) -> object:
        if made.exists():
            files.rename(made, elsewhere)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(start, "plan_runs", plan_runs)
    assert command("resume", str(made)) == ExitStatus.USAGE
    assert error(capsys).endswith("was moved or removed meanwhile")
    assert FakeLauncher.launched == []
    assert not made.exists()
    assert contents(elsewhere) == before


def test_command_during_a_move_starts_nothing(
    made: Path, run: Command, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, statuses = Custody.move, []

    def move(held: Custody, target: Path) -> None:
        statuses.append(run("train.steps=10", launcher="here"))
        real(held, target)

    monkeypatch.setattr(Custody, "move", move)
    assert command("mv", str(made), "elsewhere") == 0
    assert statuses == [ExitStatus.LOCKED]
    assert FakeLauncher.launched == []
    assert not made.exists()


@pytest.mark.slow
def test_killed_run_continues_from_an_archive_under_a_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping is refused while it trains. Killed, archived, removed, unpacked, moved, resumed: the same run."""
    monkeypatch.chdir(ROOT)
    words = [*TINY, PACED, "train.steps=8", "checkpoint.every_steps=2", "eval.every_steps=4"]
    plain, first = Run(tmp_path / "plain", words), Run(tmp_path / "first-11111111", words)
    log = tmp_path / "log"
    forked.finish(forked.attempt_of([*words, f"run.dir={plain.path}"], log, 1), log)

    environment = {**first.hold(5), "HELD_S": "600"}
    process = forked.fork([*words, f"run.dir={first.path}"], log, **environment)
    while not first.idles() or RunDir(first.path).newest_step() < 4:
        assert os.waitpid(process, os.WNOHANG) == (0, 0), log.read_text()
        time.sleep(0.01)
    before = {name: data for name, data in contents(first.path).items() if name != "status.json"}
    for each in COMMANDS:
        assert runner([word.format(run=first.path) for word in each]) == ExitStatus.LOCKED
    assert {name: data for name, data in contents(first.path).items() if name != "status.json"} == before
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)

    archive = tmp_path / "packed.tar.gz"
    assert runner(["archive", str(first.path), str(archive)]) == 0
    assert runner(["rm", str(first.path), "--yes"]) == 0
    there = unpacked(archive, tmp_path / "other")
    assert runner(["mv", str(there), str(tmp_path / "renamed")]) == 0
    renamed = Run(tmp_path / "renamed-11111111", words)
    assert renamed.path.is_dir()
    assert len(renamed.lines()) < len(plain.lines())
    forked.finish([forked.fork(["resume", str(renamed.path)], log)], log)
    assert_same_run(renamed, plain)


def test_a_refused_first_look_at_a_run_is_one_line(
    made: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Print no traceback."""

    def broken(path: object, **_: object) -> object:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(files, "stat", broken)
    assert command("mv", str(made), "b") == ExitStatus.FAILED
    assert "Input/output error" in error(capsys)

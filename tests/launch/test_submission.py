"""A job that Slurm has accepted is never lost: one job per run remains, whatever ends the command."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import command, conf
from fake_launcher import Command
from fake_slurm import FakeSlurm, runs, slurm

from launch import scheduler, submission
from launch.slurm import SlurmLauncher
from runner.errors import ExitStatus, SupersededError
from runner.rundir.paths import RunDir
from runner.system import files, processes

__all__ = ["command", "conf", "runs", "slurm"]

SCRIPTS = {
    # Puts the tasks of a job into the queue, and then runs the action of the test.
    "sbatch": """\
job=$(( $(cat {folder}/last 2>/dev/null || echo 11) + 1 ))
echo $job > {folder}/last
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
for task in $(seq 0 "${{last:-0}}"); do echo "$job${{last:+_$task}}|PENDING|$1" >> {folder}/queue; done
if [ -f {folder}/then ]; then . {folder}/then; fi
echo Submitted batch job $job
""",
    "squeue": "if [ -e {folder}/silent ]; then echo Unable to contact slurm controller >&2; exit 1; fi\n"
    'if [ "$1" = --user={user} ]; then cat {folder}/queue; fi\n',
    "scancel": 'for job in "$@"; do sed -i "/^$job[_|]/d" {folder}/queue; done\n',
}
LOST = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


class Queue:
    """A fake Slurm that remembers the jobs it has accepted."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self.slurm = slurm
        (slurm.folder / "queue").touch()
        for name, script in SCRIPTS.items():
            text = script.format(folder=slurm.folder, user=os.getuid())
            (slurm.folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {slurm.folder}/calls\n{text}')

    def jobs(self) -> list[str]:
        return [line.partition("|")[0] for line in (self.slurm.folder / "queue").read_text().splitlines()]

    def then(self, what: str) -> None:
        """Set the action of sbatch after Slurm has accepted the job."""
        (self.slurm.folder / "then").write_text(f"{what}\n")

    def calls(self, *names: str) -> list[str]:
        return [name for line in self.slurm.calls() if (name := line.split()[0]) in names]


@pytest.fixture
def queue(slurm: FakeSlurm) -> Queue:
    return Queue(slurm)


def launch(runs: Sequence[Path]) -> int:
    return SlurmLauncher().launch(list(runs), "somewhere:attempt")


def recorded(runs: Sequence[Path]) -> list[str]:
    return [json.loads((run / "job.json").read_text())["job_id"] for run in runs]


def notes(runs: Sequence[Path]) -> list[bool]:
    return [bool(RunDir(run).submitting_names()) for run in runs]


def killed_at_job_json(monkeypatch: pytest.MonkeyPatch, which: int) -> Callable[[], None]:
    """End the command at its job.json number `which`. Return a function that undoes this."""
    write, count = files.write_json, 0

    def writes(path: Path, value: Any, **options: Any) -> None:
        nonlocal count
        count += path.name == "job.json"
        if path.name == "job.json" and count == which:
            raise KeyboardInterrupt
        write(path, value, **options)

    monkeypatch.setattr(files, "write_json", writes)
    return lambda: monkeypatch.setattr(files, "write_json", write)


@pytest.mark.parametrize("count", [1, 3])
def test_unrecorded_job_is_cancelled_before_another_submission(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    again = killed_at_job_json(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        launch(runs[:count])
    assert "a job may have been submitted" in capsys.readouterr().err
    assert len(queue.jobs()) == count
    again()
    assert launch(runs[:count]) == 0
    assert queue.jobs() == recorded(runs[:count]) == (["13"] if count == 1 else ["13_0", "13_1", "13_2"])
    assert queue.calls("sbatch", "scancel") == ["sbatch", "scancel", "sbatch"]
    assert "could not record it: cancelled" in capsys.readouterr().err
    assert not any(notes(runs))


def test_only_unrecorded_tasks_of_an_array_are_cancelled(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command may name some of the runs, in another order."""
    again = killed_at_job_json(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        launch(runs)
    again()
    assert launch([runs[2]]) == 0
    assert queue.jobs() == recorded(runs) == ["12_0", "12_1", "13"]
    assert notes(runs) == [True, True, False]
    (queue.slurm.folder / "queue").write_text("")  # they are over
    assert launch(runs[:2]) == 0
    assert queue.jobs() == recorded(runs[:2]) == ["14_0", "14_1"]
    assert not any(notes(runs))


def test_a_recorded_job_is_not_cancelled(queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was killed before it removed the note."""
    monkeypatch.setattr(files, "remove", lambda path: None)
    assert launch(runs[:1]) == 0
    assert notes(runs[:1]) == [True]
    assert launch(runs[:1]) == 0
    assert not queue.calls("scancel")


def test_nothing_is_submitted_while_slurm_is_silent(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = killed_at_job_json(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        launch(runs[:1])
    again()
    capsys.readouterr()
    (queue.slurm.folder / "silent").touch()
    assert launch(runs[:1]) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: nothing was submitted: an earlier submission may have left a job")
    assert "Unable to contact slurm controller" in error
    assert queue.calls("sbatch") == ["sbatch"]
    (queue.slurm.folder / "silent").unlink()
    assert launch(runs[:1]) == 0
    assert queue.jobs() == recorded(runs[:1])


@pytest.mark.parametrize(
    "then", [LOST, "kill -9 $$", LOST.replace("Socket timed out on send/recv operation", "Zero Bytes")]
)
@pytest.mark.parametrize("accepted", [True, False])
def test_a_lost_answer_is_not_a_refusal(
    queue: Queue, runs: list[Path], capsys: pytest.CaptureFixture[str], then: str, accepted: bool
) -> None:
    """The controller may have accepted the job, or may accept it in a moment."""
    queue.then(then if accepted else f": > {queue.slurm.folder}/queue; {then}")
    assert launch(runs) == ExitStatus.INTERRUPTED
    error = capsys.readouterr().err
    assert error.startswith("error: it is not known whether a job was submitted: ")
    assert error.endswith("; rerun the command, which finds out\n")
    assert all(notes(runs))
    queue.then("")
    assert launch(runs) == 0
    assert queue.jobs() == recorded(runs) == ["13_0", "13_1", "13_2"]
    assert not any(notes(runs))


@pytest.mark.parametrize("then", ["rm -f $(dirname $1)/*-0.json", "echo hello; exit 0"])
def test_a_job_that_cannot_be_recorded_is_cancelled_at_once(queue: Queue, runs: list[Path], then: str) -> None:
    """The disk refuses to rename its files, or the answer of sbatch is unreadable."""
    queue.then(then)
    assert launch(runs[:1]) == ExitStatus.USAGE
    assert queue.calls("sbatch", "scancel") == ["sbatch", "scancel"]
    assert queue.jobs() == []
    assert not any(notes(runs))


def test_unrecorded_uncancelled_job_is_known_to_the_next_command(
    queue: Queue, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (runs[0] / "job.json").mkdir()
    scancel = queue.slurm.folder / "scancel"
    text = scancel.read_text()
    scancel.write_text("#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n")
    assert launch(runs[:1]) == ExitStatus.INTERRUPTED
    assert "job 12 is not recorded" in capsys.readouterr().err
    scancel.write_text(text)
    (runs[0] / "job.json").rmdir()
    assert launch(runs[:1]) == 0
    assert queue.jobs() == recorded(runs[:1]) == ["13"]


def test_a_full_disk_is_found_before_anything_is_submitted(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_json

    def full(path: Path, value: Any, **options: Any) -> None:
        if path.parent == runs[2] and path.name.startswith("submitting-"):
            raise OSError(28, "No space left on device", str(path))
        write(path, value, **options)

    monkeypatch.setattr(files, "write_json", full)
    assert launch(runs) == ExitStatus.USAGE
    assert not queue.calls("sbatch", "squeue")
    assert not any(list(run.iterdir()) for run in runs)


def test_a_job_of_another_user_is_named_and_nothing_is_submitted(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both users share the directory, and Slurm lets no other user cancel the job."""
    again = killed_at_job_json(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        launch(runs[:1])
    again()
    monkeypatch.setattr(processes, "user_id", lambda: os.getuid() + 1)
    assert launch(runs[:1]) == ExitStatus.USAGE
    assert f"job 12 is of user {os.getuid()}, who has to cancel it" in capsys.readouterr().err
    assert queue.calls("sbatch", "scancel") == ["sbatch"]
    (queue.slurm.folder / "queue").write_text("")
    assert launch(runs[:1]) == 0


def test_superseded_command_spares_its_successors_job(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor has submitted it and is about to record it."""
    killed_at_job_json(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        launch(runs[:1])

    def superseded() -> None:
        raise SupersededError("somebody else")

    with pytest.raises(SupersededError):
        SlurmLauncher().launch(runs[:1], "somewhere:attempt", [files.Guard("submission-00000001", superseded)])
    assert queue.jobs() == ["12"]
    assert notes(runs[:1]) == [True]


@pytest.mark.parametrize("refused", [True, False])
def test_a_superseded_command_leaves_the_note_of_its_successor(queue: Queue, runs: list[Path], refused: bool) -> None:
    """The successor began to submit the run while sbatch worked for this one."""
    other = RunDir(runs[0]).submitting("f" * 32)
    queue.then(f"echo '{{}}' > {other}" + ("; echo Invalid qos >&2; exit 1" if refused else ""))
    assert launch(runs[:1]) == (ExitStatus.USAGE if refused else 0)
    assert RunDir(runs[0]).submitting_names() == ["f" * 32]


@pytest.mark.parametrize("killed", [True, False])
def test_only_the_recorded_of_two_jobs_trains(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A command was suspended between its note and sbatch, and killed before it found itself superseded."""
    begin, names = submission.begin, []

    def begins(noted: Sequence[RunDir], name: str) -> None:
        begin(noted, name)
        names.append(name)
        if len(names) == 1:
            assert launch(runs[:1]) == 0  # while this one is suspended

    def superseded() -> None:
        if len(names) == 2:
            raise KeyboardInterrupt if killed else SupersededError("the other one")

    monkeypatch.setattr(submission, "begin", begins)
    with pytest.raises((KeyboardInterrupt, SupersededError)):
        SlurmLauncher().launch(runs[:1], "somewhere:attempt", [files.Guard("submission-00000001", superseded)])
    assert len(names) == 2
    assert queue.jobs() == (["12", "13"] if killed else ["12"])
    assert recorded(runs[:1]) == ["12"]
    assert [submission.is_named(RunDir(runs[0]), name) for name in names] == [False, True]


def test_a_job_not_recorded_yet_belongs_to_the_run(queue: Queue, runs: list[Path]) -> None:
    run = RunDir(runs[0])
    assert submission.is_named(run, "a" * 32)  # job.json was removed by hand
    run.job.write_text(json.dumps({"job_id": "12"}))
    assert submission.is_named(run, "a" * 32)  # of an older version
    run.job.write_text(json.dumps({"job_id": "12", "submission": "b" * 32}))
    assert not submission.is_named(run, "a" * 32)
    submission.begin([run], "a" * 32)
    assert submission.is_named(run, "a" * 32)  # as after a lost answer of sbatch
    submission.end([run], "a" * 32)
    run.attempt.write_text(json.dumps({"attempt": 1, "submission": "a" * 32}))
    assert submission.is_named(run, "a" * 32)
    by_hand, after = {"attempt": 2, "submission": None}, {"attempt": 3, "submission": "b" * 32}
    for attempts, is_named in (([], True), ([by_hand], True), ([by_hand, after], False)):
        lines = [{"attempt": 1, "submission": "a" * 32}, *attempts]
        run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
        run.attempt.write_text(json.dumps(lines[-1]))
        assert submission.is_named(run, "a" * 32) == is_named


def test_unrecorded_job_with_a_reused_id_is_cancelled(
    queue: Queue, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm had lost its state, and assigned the ids again."""
    again = killed_at_job_json(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        launch(runs[:1])
    again()
    (runs[0] / "job.json").write_text(json.dumps({"job_id": "12", "submission": "0" * 32}))
    assert launch(runs[:1]) == 0
    assert queue.jobs() == recorded(runs[:1]) == ["13"]
    assert queue.calls("sbatch", "scancel") == ["sbatch", "scancel", "sbatch"]


def test_refusing_disk_leaves_the_work_to_the_next_command(queue: Queue, runs: list[Path]) -> None:
    """Neither the files of the job can be renamed, nor Slurm be asked, nor the next command read the note."""
    queue.then(f"rm -f $(dirname $1)/*-0.json; touch {queue.slurm.folder}/silent")
    assert launch(runs[:1]) == ExitStatus.INTERRUPTED
    queue.then("")
    (queue.slurm.folder / "silent").unlink()
    (note,) = (RunDir(runs[0]).submitting(name) for name in RunDir(runs[0]).submitting_names())
    kept = note.rename(note.with_name("kept"))
    note.mkdir()
    assert launch(runs[:1]) == ExitStatus.USAGE
    note.rmdir()
    kept.rename(note)
    assert launch(runs[:1]) == 0
    assert queue.jobs() == recorded(runs[:1]) == ["13"]


MALFORMED = [{}, {"user": "root"}, {"user": 0}, {"user": "0", "task": "1"}, []]


@pytest.mark.parametrize("note", MALFORMED)
def test_an_impossible_submission_note_is_ignored(queue: Queue, runs: list[Path], note: Any) -> None:
    RunDir(runs[0]).submitting("0" * 32).write_text(json.dumps(note))
    assert launch(runs[:1]) == 0
    assert not queue.calls("squeue")
    assert not any(notes(runs))


def test_only_jobs_that_are_not_over_are_live(slurm: FakeSlurm) -> None:
    states = ["PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD", "COMPLETED", "CANCELLED", "FAILED"]
    rows = [f"{index}|{state}|/a|b/{state}.sh" for index, state in enumerate(states, start=10)]
    slurm.prints("squeue", "\n".join([*rows, "", "x|RUNNING|/c"]))
    assert list(scheduler.live_scripts("7").items()) == [
        (str(index), f"/a|b/{state}.sh") for index, state in enumerate(states[:4], start=10)
    ]
    assert slurm.calls("squeue --user=7 ")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["lost answer", "killed"])
def test_directory_of_a_run_with_a_possible_job_is_kept(
    command: Command, queue: Queue, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The job of the new run may already be running."""
    arguments = ("launcher=slurm", "launcher.check_folder=false", "experiment=smoke", "run.dir=a")
    if end == "killed":
        again = killed_at_job_json(monkeypatch, 1)
        assert command(*arguments) == 128 + signal.SIGINT
        again()
    else:
        queue.then(LOST)
        assert command(*arguments) == ExitStatus.INTERRUPTED
        queue.then("")
    assert notes([Path("a")]) == [True]
    assert command(*arguments) == ExitStatus.FINISHED
    assert queue.jobs() == recorded([Path("a")]) == ["13"]

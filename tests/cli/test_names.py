"""Names of run directories show the differences of a sweep, the hash alone finds a run, and each line explains why."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from disk import tree_of
from fake_launcher import Command, FakeLauncher, fail, finish, run_dirs

from runner.cli.start.plan import plan_run
from runner.config.composition import Composed, Composer, compose
from runner.contracts import JobInfo
from runner.errors import UserError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def names(composer: Composer, *words: str) -> list[str]:
    """Return the names of the runs of a sweep, without their hashes."""
    return [job.run_dir.name.rpartition("-")[0] for job in composer.jobs(["experiment=smoke", *words])]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("optimizer.lr=1e-3,0.003", ["lr0.001", "lr0.003"]),  # the first is the default
        ("train.clip_norm=null,1.0", ["clip_normnull", "clip_norm1.0"]),
        ("optimizer.betas=[0.9,0.95],[0.8,0.9]", ["betas_0.9_0.95", "betas_0.8_0.9"]),
        ("scheduler=cosine,constant", ["cosine", "constant"]),
        ("data=text,mixture", ["text", "mixture"]),
        ("+model.note='a/b c','ünï','../..'", ["notea_b_c", "noteünï", "note.._"]),
        ("init_from=/far/a-1.safetensors,/far/a-2.safetensors", ["froma-1", "froma-2"]),
    ],
    ids=lambda value: value.partition("=")[0] if isinstance(value, str) else "",
)
def test_names_of_a_sweep_show_differences_and_defaults(composer: Composer, words: str, parts: list[str]) -> None:
    own = ["model=own", "model._target_=builtins.dict"] if "model.note" in words else []
    found = names(composer, *own, words)
    assert all(part in name for part, name in zip(parts, found, strict=True))
    assert all("/" not in name and not name.startswith(".") for name in found)


def test_many_settings_leave_room_for_typed_values(composer: Composer) -> None:
    given = ["optimizer.weight_decay=0.5", "model.width=64", "model.layers=2", "data.sequence_length=64"]
    given += ["train.batch_size=4", "model.heads=2", "train.clip_norm=0.25", "train.ema_decay=0.99,0.9"]
    first, second = names(composer, *given)
    assert "ema_decay0.99" in first
    assert "ema_decay0.9-" in second
    assert len(os.fsencode(first)) < 200


def test_two_spellings_of_a_value_are_one_run(composer: Composer) -> None:
    one, two = (composer.compose(["experiment=smoke", f"optimizer.lr={text}"]) for text in ("1e-4", "0.0001"))
    assert one.run_dir == two.run_dir
    with pytest.raises(UserError, match="two jobs of the sweep are the same run"):
        composer.jobs(["experiment=smoke", "optimizer.lr=1e-4,0.0001"])


@pytest.mark.slow
def test_single_run_is_the_one_of_the_sweep(run: Command, command: Command, conf: Path) -> None:
    """Name it by the sweep, rename it, move `outputs`: its hash finds it, and no other run is mistaken for it."""
    assert run("-m", "seed=1,2", "optimizer.lr=1e-3") == 0
    first, second = run_dirs()
    assert "lr0.001" in first.name
    FakeLauncher.launched.clear()
    assert run("seed=1") == 0
    assert FakeLauncher.launched == [first]
    renamed = first.rename(first.with_name(f"my best {first.name[-9:]}"))
    assert run("seed=1", "optimizer.lr=0.001") == 0
    assert FakeLauncher.launched[-1] == renamed
    shutil.move("outputs", "moved")
    moved = Path("moved").absolute()
    assert run("-m", "seed=1,2", "run.root=moved") == 0
    assert FakeLauncher.launched[-2:] == [moved / renamed.name, moved / second.name]
    assert not Path("outputs").exists()


def test_other_entries_with_the_hash_are_not_the_run(composer: Composer, tmp_path: Path) -> None:
    """Try a file, a directory without a config, and a directory that is being removed."""
    words = ["experiment=smoke", f"run.root={tmp_path}"]
    digest = composer.compose(words).run_dir.name.rpartition("-")[2]
    (tmp_path / f"a-{digest}").write_text("")
    (tmp_path / f"b-{digest}").mkdir()
    (tmp_path / f".c-{digest}").mkdir()
    (tmp_path / f".c-{digest}" / "config.yaml").write_text("")
    assert Composer().compose(words).run_dir.name == f"smoke-seed0-{digest}"


# ---- why


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Composed:
    """Make a run of 10 steps."""
    folder = tmp_path_factory.mktemp("outputs")
    return compose(["train.steps=10", f"run.dir={folder / 'a'}", "logger=none"])


@pytest.fixture
def planned(job: Composed) -> RunDir:
    """Return its directory, as its first command made it."""
    shutil.rmtree(job.run_dir, ignore_errors=True)
    run = RunDir(job.run_dir)
    run.path.mkdir(mode=0o755)
    run.config.write_text(job.text)
    run.code.write_text("{}")
    return run


def ended(run: RunDir, cause: str, step: int, saved: int = 0, reason: str = "", state: str = "requeued") -> None:
    """Write the records of an attempt that ended at `step`."""
    line = {"attempt": 1, "cause": cause, "start_step": 0, "end_step": step, "checkpoint_step": saved}
    run.attempts.write_text(json.dumps(line) + "\n")
    run.status.write_text(json.dumps({"attempt": 1, "state": state, "cause": cause, "reason": reason or None}))
    records(run, step, saved)


def records(run: RunDir, step: int, saved: int) -> None:
    run.metrics.write_text("".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(1, step + 1)))
    if saved:
        run.checkpoint(saved).mkdir(parents=True)
        (run.checkpoint(saved) / "manifest.json").write_text(json.dumps({"step": saved, "sha256": ""}))


def why(job: Composed, queued: JobInfo | None = None, retry_failed: bool = False) -> tuple[str, str]:
    found = plan_run(job, queued, retry_failed)
    assert "\n" not in found.summary
    return found.state, found.summary


def test_why_a_new_run_is_started(job: Composed) -> None:
    shutil.rmtree(job.run_dir, ignore_errors=True)
    assert why(job) == ("new", "new: there is no run with these settings yet")


@pytest.mark.parametrize("cause", ["preempted", "time limit", "node failure", "interrupted", "killed"])
def test_why_an_unfinished_run_is_resumed(job: Composed, planned: RunDir, cause: str) -> None:
    ended(planned, cause, 7, 4)
    assert why(job) == (
        "unfinished",
        f"resuming at step 4 of 10: attempt 1 ended at step 7 ({cause}), 3 of its steps were not saved",
    )


def test_why_a_run_that_never_began_is_started(job: Composed, planned: RunDir) -> None:
    assert why(job) == ("unfinished", "starting at step 0: it was never started")
    planned.job.write_text('{"job_id": "1"}')
    assert why(job) == ("unfinished", "starting at step 0: it left the queue")


def test_a_killed_attempt_that_recorded_no_end_counts(job: Composed, planned: RunDir) -> None:
    ended(planned, "preempted", 4, 4)
    planned.status.write_text(json.dumps({"attempt": 2, "state": "running", "step": 6}))
    records_after = RunDir(planned.path)
    records_after.metrics.write_text("".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(1, 7)))
    assert why(job)[1] == "resuming at step 4 of 10: attempt 2 ended at step 6 (killed), 2 of its steps were not saved"


def test_a_first_attempt_that_was_killed_counts(job: Composed, planned: RunDir) -> None:
    """No record has its end, but it was started."""
    planned.job.write_text('{"job_id": "1"}')
    planned.status.write_text(json.dumps({"attempt": 1, "state": "running", "step": 6}))
    records(planned, 6, 4)
    assert why(job)[1] == "resuming at step 4 of 10: attempt 1 ended at step 6 (killed), 2 of its steps were not saved"


def test_why_a_run_is_left_alone(job: Composed, planned: RunDir) -> None:
    finish(planned.path, 10)
    assert why(job) == ("finished", "finished, all 10 steps")
    planned.finished.unlink()
    assert why(job, JobInfo("12", "pending")) == ("live", "pending, job 12")
    with Lease.acquire(planned.lease):
        state, summary = why(job)
        assert state == "live"
        assert summary.startswith(f"running, process {os.getpid()} on ")


@pytest.mark.parametrize("state", ["failed", "crash loop"])
def test_why_a_failed_run_is_not_started(job: Composed, planned: RunDir, state: str) -> None:
    """When it is started, the reason is shown."""
    ended(planned, "failed", 7, 4, "the loss is nan", state)
    assert why(job) == ("failed", f"{state} (the loss is nan); launcher.retry_failed=true restarts it")
    assert why(job, retry_failed=True)[1].startswith(
        "resuming at step 4 of 10: attempt 1 ended at step 7 (failed: the loss is nan)"
    )


def test_a_reason_of_several_lines_is_one(job: Composed, planned: RunDir) -> None:
    ended(planned, "crash", 7, 4, "ValueError: one\ntwo", "failed")
    assert "(ValueError: one two)" in why(job)[1]
    assert "(crash: ValueError: one two)" in why(job, retry_failed=True)[1]


@pytest.mark.parametrize(("words", "end"), [(150, "word)"), (10_000, " …)")])
def test_a_reason_is_shown_whole_or_marked_as_cut(job: Composed, planned: RunDir, words: int, end: str) -> None:
    ended(planned, "failed", 7, 4, " ".join(["word"] * words), "failed")
    assert end + "; launcher.retry_failed=true restarts it" in why(job)[1]


def test_a_longer_run_continues_a_finished_one(job: Composed, planned: RunDir) -> None:
    ended(planned, "finished", 6, 6, state="finished")
    planned.finished.write_text('{"steps": 6}')
    assert why(job)[1] == "resuming at step 6 of 10: it had finished at step 6, and is longer now"


# ---- dry run


def digest(folder: Path) -> str:
    """Return a digest of everything in a folder: names, contents, times."""
    sha = hashlib.sha256()
    for name, data in sorted(tree_of(folder).items()):
        sha.update(f"{name} {(folder / name).lstat().st_mtime_ns}".encode() + (data or b""))
    return sha.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "launcher"), [(["seed=1"], "here"), (["-m", "seed=1,2,3,4"], "fake")], ids=["single", "sweep"]
)
def test_a_dry_run_prints_its_plan_and_changes_no_byte(
    run: Command, capsys: pytest.CaptureFixture[str], words: list[str], launcher: str
) -> None:
    """Use a new directory, and directories with new, unfinished and finished runs."""
    before = digest(Path.cwd())
    assert run(*words, "-n", "train.steps=10", launcher=launcher) == 0
    assert "new: there is no run with these settings yet" in capsys.readouterr().out
    assert run(*words, "--dry-run", "train.steps=10", launcher=launcher) == 0
    assert digest(Path.cwd()) == before
    capsys.readouterr()
    assert run("-m", "seed=1,2,3", "train.steps=10", launcher=launcher) == 0
    first, second, _ = run_dirs()
    ended(RunDir(first), "preempted", 7, 4)
    finish(second, 10)
    FakeLauncher.launched.clear()
    capsys.readouterr()
    before = digest(Path.cwd())
    assert run(*words, "-n", "train.steps=10", launcher=launcher) == 0
    assert digest(Path.cwd()) == before
    dry = [line for line in capsys.readouterr().out.splitlines() if line.startswith("outputs/")]
    assert f"outputs/{first.name}: resuming at step 4 of 10: attempt 1 ended at step 7 (preempted)" in dry[0]
    assert len(dry) == len(words[-1].split(","))
    assert FakeLauncher.launched == []
    if len(dry) > 1:  # the lines of the command itself
        assert run(*words, "train.steps=10", launcher=launcher) == 0
        real = [line for line in capsys.readouterr().out.splitlines() if line.startswith("outputs/")]
        assert real == dry
        assert [path.name for path in FakeLauncher.launched] == [
            line.partition(": ")[0].removeprefix("outputs/") for line in dry if "finished, all" not in line
        ]


@pytest.mark.slow
def test_a_dry_run_of_failed_runs_names_the_remedy(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "seed=1,2") == 0
    fail(run_dirs()[0])
    before = digest(Path.cwd())
    capsys.readouterr()
    assert run("-m", "seed=1,2", "-n") == 1  # like the command: one of its runs has failed
    assert "failed (the loss is nan); launcher.retry_failed=true restarts it" in capsys.readouterr().out
    assert digest(Path.cwd()) == before

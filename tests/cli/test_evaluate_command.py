"""`runner evaluate`: one-line errors, complete JSON, and one submission per evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import here
import pytest
import yaml
from cli_fixtures import UNCHANGED, write_launchers
from fake_launcher import EvaluationLauncher, FakeLauncher

from runner.contracts import JobInfo
from runner.errors import UserError
from runner.rundir.custody import custody
from runner.rundir.evaluations import Request
from runner.rundir.paths import RunDir


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return here.trained(tmp_path_factory.mktemp("evaluate") / "run")


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a config directory with launcher=fake."""
    directory = tmp_path_factory.mktemp("fake") / "conf"
    write_launchers(directory, fake=EvaluationLauncher)
    UNCHANGED.add(directory)
    return directory


@pytest.fixture
def run(template: Path, conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a finished run named `run` in the current directory, next to `conf`."""
    (tmp_path / "conf").symlink_to(conf)
    FakeLauncher.reset()
    monkeypatch.setattr(EvaluationLauncher, "launched", [])
    monkeypatch.setattr(EvaluationLauncher, "queued", {})
    monkeypatch.setattr(EvaluationLauncher, "errors", [])
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(template, tmp_path / "run"))


def evaluate(*words: object) -> int:
    return here.command("evaluate", "--config-dir", "conf", *words)


MISTAKES = [
    ([], "pass one run directory"),
    (["run", "run"], "pass one run directory"),
    (["nowhere"], "nowhere is not a run directory, which has a config.yaml"),
    (["run", "--step", "3"], "there is no checkpoint of step 3 in"),
    (["run", "--step", "newest"], "--step newest: must be a step, best, last or all"),
    (["run", "train.steps=9"], "train.steps=9 is not of an evaluation: set eval or data.eval_sources"),
    (["run", "evaluation.batches=9"], "is not of an evaluation"),
    (["run", "eval.batchs=9"], "eval.batchs"),
    (["run", "eval.batches=-1"], "eval.batches=-1"),
    (["run", "data.eval_sources.mine={_target_: a.B}"], "+data.eval_sources.NAME adds one"),
    (["run", "eval.metrics.f1._target_=nowhere.F1"], "nowhere"),
    (["run", "~data.eval_sources.code"], "~data.eval_sources.code: a value of an existing run cannot be deleted"),
    (["run", "--submit"], "--submit: the launcher of this run runs it on this machine; add launcher=slurm"),
    (["run", "--stop"], "--stop"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_changes_nothing(run: Path, capsys: Any, words: list[str], message: str) -> None:
    before = here.contents(run)
    assert evaluate(*words) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert message in line
    assert captured.out == ""
    assert here.contents(run) == before


def test_json_is_a_list_of_the_records(run: Path, capsys: Any) -> None:
    assert evaluate("run", "--step", "4", "--json") == 0
    captured = capsys.readouterr()
    (record,) = json.loads(captured.out)
    assert record["step"] == 4
    assert record["eval_loss"] > 0
    assert captured.err == ""
    assert evaluate("run", "--step", "all", "--json", "eval.batches=1") == 0
    records = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in records] == [2, 4, 6]
    assert {tuple(each["overrides"]) for each in records} == {("eval.batches=1",)}


def test_a_run_without_checkpoints(run: Path, capsys: Any) -> None:
    shutil.rmtree(run / "checkpoints")
    for step in ("all", "last"):
        assert evaluate("run", "--step", step) == 2
        assert "has no checkpoint" in capsys.readouterr().err


def test_a_moved_run_and_a_result_whose_checkpoint_is_gone(run: Path, capsys: Any) -> None:
    moved = run.rename(run.with_name("moved"))
    assert evaluate("moved", "--step", "2") == 0
    shutil.rmtree(moved / "checkpoints" / "step_00000002")
    assert evaluate("moved", "--step", "2") == 0
    assert "0 evaluated now, 1 before; results in moved/evaluations" in capsys.readouterr().out


SUBMIT = ["run", "--step", "all", "launcher=fake"]


def test_an_evaluation_is_submitted_once_with_its_options(run: Path, capsys: Any) -> None:
    words = [*SUBMIT, "eval.batches=1", "launcher.partition=low"]
    assert evaluate(*words) == 0
    (directory,) = EvaluationLauncher.launched
    assert directory.parent == run / "evaluations"
    request = Request.read(directory)
    assert (request.step, request.overrides) == ("all", ("eval.batches=1",))
    assert request.config["eval"]["batches"] == 1
    EvaluationLauncher.queued[directory] = JobInfo("12", "pending")
    assert evaluate(*words) == 0
    assert "job 12 is pending: 0 checkpoints are evaluated" in capsys.readouterr().out
    assert len(EvaluationLauncher.launched) == 1
    assert evaluate("run", "--step", "2", "launcher=fake") == 0  # another request
    assert len(set(EvaluationLauncher.launched)) == 2


def test_the_runs_own_launcher_on_request(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["launcher"] = {"_target_": "fake_launcher.EvaluationLauncher", "retry_failed": False, "dry_run": False}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate("run", "--step", "all", "--submit") == 0
    assert len(EvaluationLauncher.launched) == 1
    assert evaluate("run", "--step", "4") == 0  # without it: here
    assert len(EvaluationLauncher.launched) == 1


def test_nothing_is_submitted_where_there_is_nothing_to_do(run: Path, capsys: Any) -> None:
    assert evaluate("run", "--step", "all") == 0
    assert evaluate("run", "--step", "all", "launcher=fake") == 0
    assert "nothing to do: 3 checkpoints are evaluated" in capsys.readouterr().out
    assert evaluate("run", "--step", "all", "eval.batches=1", "launcher=fake", "launcher.dry_run=true") == 0
    assert "would start evaluate-all-" in capsys.readouterr().out
    assert EvaluationLauncher.launched == []
    assert not list((run / "evaluations").glob("evaluate-*"))


def test_a_refused_submission_is_one_line(run: Path, capsys: Any) -> None:
    EvaluationLauncher.errors.append("launcher.partition=x: no such partition")
    assert evaluate(*SUBMIT) == 2
    assert capsys.readouterr().err == "error: launcher.partition=x: no such partition\n"
    EvaluationLauncher.errors.clear()
    EvaluationLauncher.answers = False
    try:
        assert evaluate(*SUBMIT) == 2
    finally:
        EvaluationLauncher.answers = True
    assert "was not submitted (squeue does not answer)" in capsys.readouterr().err


def test_a_run_with_an_evaluation_in_the_queue_is_not_moved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluate(*SUBMIT) == 0
    (directory,) = EvaluationLauncher.launched
    (directory / "job.json").write_text(json.dumps({"job_id": "12", "launcher": "launch.local.LocalLauncher"}))
    monkeypatch.setattr("launch.local.LocalLauncher.jobs", lambda self, paths: {directory: JobInfo("12", "pending")})
    with (
        pytest.raises(UserError, match=r"has job 12 in the queue \(pending\): cancel that first"),
        custody(RunDir(run)),
    ):
        pass

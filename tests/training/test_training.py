"""Edge cases of training: non-finite losses, signals at awkward moments, changes between attempts."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import PACED, ROOT, TINY, Run, assert_same_run

# Many attempts in sequence: a busy machine may take long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = [*TINY, "train.steps=20", "eval.every_steps=10", "checkpoint.every_steps=5"]


def steps(run: Run) -> list[int]:
    return [record["step"] for record in run.records() if "loss" in record]


def nan(call: int) -> list[str]:
    return [*SHORT, "train.loss._target_=custom.nan_at", f"+train.loss.call={call}"]


def test_non_finite_loss_stops_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", nan(13))
    run.start()
    status, output = run.wait()
    assert status == 1, output
    assert "Traceback" not in output
    assert "step 13 is nan" in output
    assert "step 10 is kept" in output
    assert steps(run)[-1] == 12
    assert run.status()["state"] == "failed"
    assert run.attempts()[-1]["cause"] == "failed"
    run.finish()  # the loss is wrong at its 13th call only: from step 10 on there are just 10
    assert steps(run) == list(range(1, 21))


def test_a_non_finite_step_is_skipped_on_request(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*nan(13), "train.on_nonfinite=skip"])
    run.finish()
    skipped = [record["step"] for record in run.records() if record.get("skipped")]
    assert skipped == [13]
    assert steps(run) == list(range(1, 21))
    after = [record["loss"] for record in run.records() if record["step"] > 13 and "loss" in record]
    assert all(math.isfinite(loss) for loss in after)


def test_a_signal_during_the_imports_loses_nothing(tmp_path: Path) -> None:
    """Handlers are installed before torch is imported: the attempt exits with status 75 before its first step."""
    run = Run(tmp_path / "run", [*SHORT, PACED])
    for delay in (0.25, 0.5, 0.8):
        run.hold_at(0)  # if the imports take less than that, it waits in its first step
        run.start()
        time.sleep(delay)
        run.send(signal.SIGTERM)
        run.release()
        status, output = run.wait()
        assert status in (75, -signal.SIGTERM), output  # the latter: before Python ran the first line of the runner
        assert "Traceback" not in output
    run.finish()
    assert steps(run) == list(range(1, 21))


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path: Path) -> None:
    """Drop the evaluation and save the state; the resumed run evaluates once."""
    overrides = [*SHORT, PACED, "eval.batches=20"]
    run = Run(tmp_path / "run", overrides)
    run.hold_at(1, HELD_IN="evaluation", HELD_S="1000")
    run.start()
    assert run.kill_when(Run.idles, signal.SIGTERM)  # in the second of its batches
    run.release()
    status, output = run.wait()
    assert status == 75, output
    assert steps(run)[-1] == 10
    assert not any("eval_loss" in record for record in run.records()), "it waited for the whole evaluation"
    run.finish()
    whole = Run(tmp_path / "whole", overrides)
    whole.finish()
    assert_same_run(run, whole)


def test_a_second_interrupt_exits_at_once(tmp_path: Path) -> None:
    """The evaluation in progress would take very long."""
    run = Run(tmp_path / "run", [*SHORT, PACED])
    run.hold_at(0, HELD_IN="evaluation", HELD_S="1000")
    run.start()
    assert run.wait_until(Run.idles)
    status, output = run.send_until_the_end(signal.SIGINT)
    assert status == 130, output
    assert "second Ctrl-C" in output
    run.finish()
    assert steps(run) == list(range(1, 21))


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """keep_best uses the evaluation at the step of the save."""
    run = Run(tmp_path / "run", [*SHORT, "checkpoint.keep_last=1", "checkpoint.keep_best=1", "optimizer.lr=1e-3"])
    run.finish()
    evaluations = {r["step"]: r["eval_loss"] for r in run.records() if "eval_loss" in r}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert f"step_{best:08d}" in [path.name for path in run.checkpoints()]


def test_resume_keeps_the_first_attempts_thread_count(tmp_path: Path) -> None:
    """Another number of threads would add in another order."""
    overrides = [entry for entry in SHORT if not entry.startswith("run.threads")] + ["scheduler.total_steps=20"]
    first = Run(tmp_path / "run", [*overrides, "train.steps=10"], {"OMP_NUM_THREADS": "2"})
    first.finish()
    second = Run(first.path, overrides, {"OMP_NUM_THREADS": "1"})
    second.finish()
    whole = Run(tmp_path / "whole", overrides, {"OMP_NUM_THREADS": "2"})
    whole.finish()
    ours, theirs = ([r["loss"] for r in run.records() if "loss" in r] for run in (second, whole))
    assert ours == theirs


def test_a_source_removed_and_one_added_during_a_run(tmp_path: Path) -> None:
    """Use the elastic sampler, with consent: the others continue at their keys, the new one begins at 0."""
    mixture = [*SHORT, "data=mixture", "sampler=elastic", "eval.every_steps=0"]
    run = Run(tmp_path / "run", [*mixture, "train.steps=10"])
    run.finish()
    before = run.records()[-1]["sources"]
    prose = "{_target_: runner.data.text.PythonText, source: prose, split: eval, sequence_length: 16}"
    edited = [*mixture, "~data.sources.encodings", f"+data.sources.more={prose}"]
    changed = Run(run.path, edited)
    changed.start()
    status, output = changed.wait()
    assert status == 2, output
    assert "encodings" in output
    changed.overrides.append("run.allow_data_change=true")
    changed.finish()
    after = changed.records()[-1]["sources"]
    assert after["more"]["samples"] > 0
    assert after["code"]["samples"] > before["code"]["samples"]
    total = sum(source["samples"] for source in after.values())
    assert total + (before["encodings"]["samples"] if "encodings" not in after else 0) == 20 * 4


def test_code_changed_since_the_submission_is_reported(tmp_path: Path) -> None:
    """Compare an attempt's code with that of the submission."""
    run = Run(tmp_path / "run", [*SHORT, "train.steps=5", "eval.every_steps=5"])
    run.finish()
    config, code = run.path / "config.yaml", run.path / "code.json"
    config.write_text(config.read_text().replace("steps: 5", "steps: 9"))
    edited = json.loads(code.read_text())
    edited["runner"]["digest"] = "0" * 16
    edited["packages"]["torch"] = "1.0"
    del edited["configs"]  # which tells of the edit above
    code.write_text(json.dumps(edited))
    command = [sys.executable, "-m", "runner.training.attempt", str(run.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch 1.0 ->" in done.stderr
    assert len(run.attempts()[-1]["code_changed"]) >= 2
    assert "code_changed" not in run.attempts()[0]


def test_edited_file_is_named_by_the_next_command_and_job(tmp_path: Path) -> None:
    """Compare by content, without git, the files named by `_target_` and their imports."""
    helper, run = tmp_path / "helper.py", Run(tmp_path / "run", [])
    helper.write_text("SLOPE = 0.0\n")
    (tmp_path / "model.py").write_text(
        "from runner.models.gpt import GPT\nfrom helper import SLOPE\n\nclass Net(GPT):\n    slope = SLOPE\n"
    )
    words = [*SHORT, "model._target_=model.Net", "eval.every_steps=0", f"run.dir={run.path}"]

    def called(*command: str) -> tuple[str, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-m", *command)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    called("runner", *words, "train.steps=2")
    helper.write_text("SLOPE = 0.1\n")
    output, _ = called("runner", *words, "train.steps=4")
    assert "the code has changed since this run last started: helper.py\n" in output
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4\n", "steps: 6\n"))
    code = run.path / "code.json"
    code.write_text(json.dumps({**json.loads(code.read_text()), "configs": None}))  # which tells of the edit
    helper.write_text("SLOPE = 0.2\n")
    _, errors = called("runner.training.attempt", str(run.path))
    assert "warning: the code changed since the submission: helper.py\n" in errors
    assert [attempt.get("code_changed") for attempt in run.attempts()] == [None, ["helper.py"], ["helper.py"]]


def test_removed_checkpoints_are_reported_before_a_start_at_0(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*SHORT, "train.steps=5", "eval.every_steps=5"])
    run.finish()
    shutil.rmtree(run.path / "checkpoints")
    longer = Run(run.path, [*SHORT, "train.steps=8", "eval.every_steps=5"])
    assert "the checkpoint of step 5 is gone" in longer.finish()
    assert steps(longer) == list(range(1, 9))


def test_an_adaptive_cadence_reports_its_choice(tmp_path: Path) -> None:
    bounds = ["checkpoint.min_interval_s=0.01", "checkpoint.max_interval_s=0.02", "checkpoint.every_steps=null"]
    run = Run(tmp_path / "run", [*SHORT, "checkpoint=adaptive", *bounds, "train.steps=200"])
    output = run.finish()
    assert "Young/Daly optimum" in output
    assert "saving every" in run.status()["cadence"]
    assert any("save" in json.loads(line) for line in (run.path / "timings.jsonl").read_text().splitlines())


def test_save_in_flight_is_completed_when_training_fails(tmp_path: Path) -> None:
    """Otherwise each attempt would be recorded without its checkpoint, and three would count as a crash loop."""
    fault = tmp_path / "fault"
    fault.write_text("fail")
    overrides = [*TINY, PACED, "+train.loss.fail_at=6", "train.steps=20", "checkpoint.every_steps=5"]
    run = Run(tmp_path / "run", [*overrides, "eval.every_steps=0"])
    run.env = {**run.hold(100), "FAIL_FILE": str(fault), "FSYNC_SLEEP_S": "0.3"}
    run.start()
    status, output = run.wait()
    assert status == 1, output
    (attempt,) = run.attempts()
    assert (attempt["cause"], attempt["end_step"], attempt["checkpoint_step"]) == ("crash", 5, 5)
    assert [path.name for path in run.checkpoints()] == ["step_00000005"]


def test_run_with_more_steps_than_asked_finishes_with_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*TINY, "train.steps=6", "eval.every_steps=0"])
    run.finish()
    (run.path / "finished.json").unlink()
    shorter = Run(run.path, [*TINY, "train.steps=2", "eval.every_steps=0"])
    assert "finished: 6 steps" in shorter.finish()
    assert json.loads((run.path / "finished.json").read_text()) == {"steps": 6}
    assert steps(run) == list(range(1, 7))

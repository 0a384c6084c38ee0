"""`runner show`: every setting, and the model of a run; a dry run shows it as well."""

from __future__ import annotations

import json
from pathlib import Path

import here
import pytest
from composing import compose
from torch import nn

from runner import __main__ as entry
from runner.cli.start.start import start
from runner.config.settings import settings
from runner.errors import ExitStatus


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert entry.run(["show", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_settings_of_a_part_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    heading, *rows = shown(capsys, "--settings", "eval")
    assert heading.split("  ")[0] == "setting"
    assert [row.split()[0] for row in rows] == [each.key for each in settings("eval")]
    assert "1 to 2**40" in next(row for row in rows if row.startswith("eval.batches "))
    assert len(shown(capsys, "--settings")) == len(settings()) + 1


def test_a_narrow_terminal_gets_paragraphs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.cli.base.console.PIPED_WIDTH", 100)
    assert shown(capsys, "--settings", "checkpoint.keep_last") == [
        "checkpoint.keep_last=3  (whole number, 1 to 2**40; may change later: yes)",
        "    How many of the newest checkpoints to keep.",
    ]


def test_the_settings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = json.loads("\n".join(shown(capsys, "--settings", "eval.at_end", "--json")))
    assert (row["key"], row["type"], row["default"], row["later"]) == ("eval.at_end", "true or false", "true", "yes")


def test_an_unknown_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["show", "--settings", "train.stps"]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean 'train.steps'?" in line


class Fussy(nn.Module):
    """A model that looks at its weights when it is created."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.largest = float(self.layer.weight.max())


def frozen(path: Path, *words: str) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(compose([*words, f"run.dir={path}"]).text)
    return path


def test_the_model_of_a_run_is_a_table_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = frozen(tmp_path / "run", *here.SHORT, "train.global_batch_size=8")
    heading, *rows, line = shown(capsys, str(run), "--model")
    assert heading.split() == ["module", "parameters", "trainable", "weights"]
    assert [row.split()[0] for row in rows] == ["tokens", "positions", "blocks", "norm", "total"]
    assert line.startswith("model: 7.7k parameters (100 % trainable), ")
    assert line.endswith("; 8 samples (128 tokens) per step")
    (text,) = shown(capsys, str(run), "--model", "--json")
    assert sum(part["parameters"] for part in json.loads(text)["parts"]) == int(rows[-1].split()[1].replace(",", ""))


def test_a_model_that_needs_memory_is_created_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = frozen(tmp_path / "run", *here.OWN_MODEL, "model=own", "model._target_=test_show.Fussy")
    assert entry.run(["show", str(run), "--model"]) == 0
    out, err = capsys.readouterr()
    assert "created without its memory" in err
    assert out.splitlines()[1].split()[:3] == ["layer", "6", "6"]


def test_a_dry_run_shows_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show each model of a sweep once. A model that needs memory is not created."""
    monkeypatch.chdir(tmp_path)
    assert start([*here.SHORT, "-m", "-n", "model.layers=1,2", "seed=1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("model: ")] == ["7.7k", "10.9k"]
    assert start([*here.OWN_MODEL, "-n", "model=own", "model._target_=test_show.Fussy"]) == 0
    assert "the model is not shown: it cannot be created without its memory" in capsys.readouterr().out


def test_attempts_are_listed_with_the_steps_that_were_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    ended = {"attempt": 1, "cause": "killed", "ranks": 2, "start_step": 0, "end_step": 44, "checkpoint_step": 40}
    ended |= {"steps_lost": 4, "host": "n1", "job_id": "7", "started": 1e300}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(ended) + "\n")
    (tmp_path / "attempt.json").write_text(json.dumps({"attempt": 2, "start_step": 40, "ranks": 1, "started": 1.7e9}))
    heading, first, second = shown(capsys, str(tmp_path), "--attempts")
    assert heading.split()[-3:] == ["saved", "repeated", "cause"]
    assert first.split() == ["1", "n1", "7", "2", "1", "44", "40", "4", "killed"]
    assert second.split()[0] == "2"
    assert second.split()[-6:] == ["1", "41", "has", "no", "end", "yet"]
    (as_json,) = shown(capsys, str(tmp_path), "--attempts", "--json")
    assert [attempt["attempt"] for attempt in json.loads(as_json)] == [1, 2]


@pytest.mark.parametrize("words", [[], ["outputs/x"], ["--model"], ["x", "--settings"], ["x", "--model", "--attempts"]])
def test_missing_choice_of_show_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["show", *words]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "pass a run and --model" in line
    assert "--settings [PREFIX]" in line

"""`runner.load` returns a run's model and changes neither run nor process; its export in others' formats."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import here
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import runner
from runner.errors import CheckpointError, RunDirError, UserError

HUGGING_FACE = [
    "model=own",
    "model._target_=transformers.GPT2LMHeadModel",
    "+model.config._target_=transformers.GPT2Config",
    *("+model.config.vocab_size=256", "+model.config.n_positions=32", "+model.config.n_embd=16"),
    *("+model.config.n_layer=1", "+model.config.n_head=2"),
    "task=own",
    "task._target_=huggable.next_token",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with averaged weights and checkpoints of steps 2, 4 and 6, of which 2 is the best."""
    path = tmp_path_factory.mktemp("load") / "run"
    best = "checkpoint.best.mode=max"  # a loss that falls is highest at first
    return here.trained(path, "train.ema_decay=0.5", "model.dropout=0.1", best)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a GPT-2, whose output layer shares its weight with its embedding."""
    return here.trained(tmp_path_factory.mktemp("load") / "hugging_face", *HUGGING_FACE)


def recorded(run: Path, step: int) -> float:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(next(each["eval_loss"] for each in records if each["step"] == step and "eval_loss" in each))


def test_load_returns_the_weights_that_the_run_evaluates(run: Path, tmp_path: Path) -> None:
    loaded = runner.load(run)
    assert loaded.step == 6
    assert loaded.averaged
    assert loaded.config.train.ema_decay == 0.5
    assert not any(module.training for module in loaded.model.modules())
    assert here.command("checkpoints", run, "--export", tmp_path / "w.safetensors") == 0
    exported = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in loaded.model.state_dict().items())
    raw = runner.load(run, raw=True)
    assert not raw.averaged
    assert not torch.equal(raw.model.get_parameter("tokens.weight"), loaded.model.get_parameter("tokens.weight"))


def test_a_step_the_best_and_the_last(run: Path) -> None:
    losses = {step: recorded(run, step) for step in (2, 4, 6)}
    best = max(losses, key=lambda step: losses[step])
    assert [runner.load(run, step).step for step in (4, "4", "last", None, "best")] == [4, 4, 6, 6, best]
    assert runner.load(str(run), step=2).step == 2


def test_the_run_and_this_process_are_as_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook draws the same numbers whether it loaded a model or not."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        assert options.get("weights_only"), "a pickle would be run"
        return original(*arguments, **options)

    original = torch.load
    monkeypatch.setattr(torch, "load", refuse)
    files = here.contents(run)
    flags = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.is_grad_enabled()
    handlers = list(logging.getLogger().handlers), list(logging.getLogger("runner").handlers)
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    runner.load(run)
    assert random.getstate() == states[0]
    assert str(np.random.get_state(legacy=False)) == str(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert flags == (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.is_grad_enabled())
    assert handlers == (list(logging.getLogger().handlers), list(logging.getLogger("runner").handlers))
    assert here.contents(run) == files


def test_a_moved_run_and_one_that_may_only_be_read(run: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "elsewhere"))
    for path in [*moved.rglob("*"), moved]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        weights = runner.load(moved).model.state_dict()
    finally:
        for path in [moved, *moved.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in runner.load(run).model.state_dict().items())


def test_other_devices_are_an_argument(run: Path) -> None:
    assert next(runner.load(run, device=torch.device("meta")).model.parameters()).device.type == "meta"
    with pytest.raises(UserError, match=r"^device=gpu: the model cannot be put there \(.*\)$"):
        runner.load(run, device="gpu")


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_nothing_in_the_directory_is_executed(run: Path, tmp_path: Path) -> None:
    """Pickles beside a checkpoint are not opened, and those in it are refused."""
    mark, copy = tmp_path / "executed", Path(shutil.copytree(run, tmp_path / "copy"))
    attack = pickle.dumps(Malicious(mark))
    for name in ("model.pt", "state.pkl", "checkpoints/model.pt", "checkpoints/step_00000006/model.pt"):
        (copy / name).write_bytes(attack)
    assert runner.load(copy).step == 6
    for name in ("train_state.pt", "tensors.json", "rank_00000.safetensors"):
        (copy / "checkpoints" / "step_00000006" / name).write_bytes(attack)
        with pytest.raises(CheckpointError, match="corrupt"):
            runner.load(copy, step=6)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": "nowhere"}, r"^nowhere is not a run directory, which has a config.yaml: pass a directory such as"),
        ({"step": 3}, r"^there is no checkpoint of step 3 in .*; available: 2, 4, 6; or last, best$"),
        ({"step": "newest"}, r"^there is no checkpoint of step newest in .*; available: 2, 4, 6; or last, best$"),
    ],
)
def test_mistakes_are_one_line(run: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        runner.load(**{"run": run, **arguments})
    assert "\n" not in str(error.value)


def test_damaged_checkpoint_strange_config_and_lost_class(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    file = copy / "checkpoints" / "step_00000006" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"step_00000006 is corrupt: rank_00000.safetensors"):
        runner.load(copy, step=6)
    with caplog.at_level(logging.WARNING):
        assert runner.load(copy).step == 4  # the newest that is valid, as a resume would take
    assert "step_00000006 is corrupt (rank_00000.safetensors has" in caplog.text
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("runner.models.gpt.GPT", "runner.models.gpt.Gone"))
    with pytest.raises(UserError, match=r"model._target_=runner.models.gpt.Gone"):
        runner.load(copy)
    (copy / "config.yaml").write_text(text.replace("width: 16", "width: 32"))
    with pytest.raises(CheckpointError, match=r"is of another model: 'tokens.weight' was \(256, 16\) and is"):
        runner.load(copy)
    (copy / "config.yaml").write_text("{")
    with pytest.raises(RunDirError, match=r"is truncated or was edited by hand"):
        runner.load(copy)


def test_hugging_face_model_is_exported_as_its_library_reads(hugging_face: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = runner.load(hugging_face)
    assert here.command("checkpoints", hugging_face, "--export", tmp_path / "folder", "--step", "4") == 0
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "folder").iterdir()}
    tokens = torch.arange(16)[None]
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    read.eval()
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, runner.load(hugging_face, 4).model(tokens).logits)
        assert not torch.equal(read(tokens).logits, loaded.model(tokens).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_mistakes_of_an_export_leave_nothing(
    run: Path, hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    for words, message in (
        ((run, "--export", tmp_path / "folder"), "GPT has no save_pretrained"),
        ((run, "--export", tmp_path / "w.bin"), "must end in .safetensors"),
        ((hugging_face, "--export", tmp_path / "there"), "exists: choose another folder"),
        ((hugging_face, "--export", "/proc/folder"), "cannot be written"),
        ((hugging_face / "checkpoints", "--export", tmp_path / "folder", "--step", "5"), "there is no checkpoint of"),
    ):
        assert here.command("checkpoints", *words) != 0
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["there"]

"""A warm start: another run's weights, or a file's, and nothing else; the same ones after a kill."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import here
import pytest
import safetensors.torch
import torch
from composing import compose
from runs import PACED, Run, assert_same_run
from safetensors.torch import save_file
from test_load import HUGGING_FACE, Malicious
from torch import nn

import runner
from runner.checkpoint.files import manifest
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.tensors.reader import tensors
from runner.config.schema import InitConfig
from runner.errors import UserError
from runner.rundir.paths import RunDir
from runner.training.model.warm_start import Source, fill_model, open_source

Say = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with checkpoints of steps 2, 4 and 6, of which 2 is the best."""
    path = tmp_path_factory.mktemp("warm") / "source"
    return here.trained(path, "checkpoint.keep_best=1", "checkpoint.best.mode=max")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    path = RunDir(run).checkpoint(step)
    return dict(tensors(Folder(path), manifest.read(Folder(path)), "model."))


def init(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "init.json").read_text()))


def begins_with(run: Path, expected: dict[str, torch.Tensor], *but: str) -> bool:
    """Return whether a run with learning rate 0 still has these weights."""
    found = weights(run, RunDir(run).newest_step())
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name not in but)


STILL = ["optimizer.lr=0", "train.steps=1", "eval.every_steps=1"]  # the last checkpoint has the initial weights


@pytest.mark.parametrize(
    ("at", "step"),
    [("", 6), ("@best", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("@4", 4), ("@last", 6)))],
)
def test_the_weights_are_those_of_the_checkpoint(source: Path, tmp_path: Path, capsys: Say, at: str, step: int) -> None:
    run = here.trained(tmp_path / "run", f"init_from={source}{at}", *STILL, "seed=5")
    assert begins_with(run, weights(source, step))
    assert init(run)["step"] == step
    assert f"initial weights from {source} at step {step}:\n  loaded 16 tensors\n" in capsys.readouterr().out


def test_only_weights_are_taken(source: Path, tmp_path: Path) -> None:
    """Optimizer, schedule, data order and step begin anew, as after an initialization with these weights."""
    words = ["seed=5", "eval.every_steps=0", "checkpoint.every_steps=null"]
    run, cold = here.trained(tmp_path / "run", f"init_from={source}", *words), here.trained(tmp_path / "cold", *words)
    records = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
        for path in (run, cold)
    ]
    for warm, drawn in zip(*records, strict=True):
        assert warm["loss"] != drawn["loss"]
        assert {**warm, "loss": 0, "grad_norm": 0} == {**drawn, "loss": 0, "grad_norm": 0}


@pytest.mark.slow
def test_average_of_a_run_is_loaded_and_averaged_from(source: Path, tmp_path: Path) -> None:
    first = here.trained(tmp_path / "first", f"init_from={source}", "train.ema_decay=0.9")
    path = RunDir(first).checkpoint(6)
    average = dict(tensors(Folder(path), manifest.read(Folder(path)), "ema."))
    run = here.trained(tmp_path / "run", f"init_from={first}", "train.ema_decay=0.5", *STILL)
    assert begins_with(run, average)
    assert all(torch.equal(average[name], tensor) for name, tensor in runner.load(run).model.state_dict().items())


def test_a_file_a_part_and_a_frozen_part(source: Path, tmp_path: Path, capsys: Say) -> None:
    file = tmp_path / "w.safetensors"
    assert here.command("checkpoints", source, "--export", file) == 0
    assert begins_with(here.trained(tmp_path / "all", f"init_from={file}", *STILL), weights(source, 6))
    part = ["init_from.match=['blocks.*','tokens.weight']", "seed=7"]
    freeze = "optimizer.groups=[{match: 'blocks.*', freeze: true}]"
    run = here.trained(tmp_path / "part", f"init_from={file}", *part, freeze)
    found, expected = weights(run, 6), weights(source, 6)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name.startswith("blocks."))
    assert not torch.equal(found["positions.weight"], expected["positions.weight"])
    table = init(run)
    assert set(table["left_out"]) == {name for name in expected if not name.startswith(("blocks.", "tokens."))}
    assert set(table["left_out"].values()) == {"not in init_from.match"}
    assert table["initial"] == {}
    assert "left out positions.weight: not in init_from.match" in capsys.readouterr().out


@pytest.mark.slow
def test_hugging_face_model_with_tied_weights_loads(tmp_path: Path) -> None:
    """The library's files have a weight with two names once."""
    first = here.trained(tmp_path / "first", *HUGGING_FACE)
    assert here.command("checkpoints", first, "--export", tmp_path / "folder") == 0
    file = tmp_path / "folder" / "model.safetensors"
    run = here.trained(tmp_path / "run", *HUGGING_FACE, f"init_from={file}", "seed=8", *STILL)
    assert begins_with(run, weights(first, 6))
    assert set(init(run)["loaded"]) == set(weights(first, 6))


def model(**shapes: tuple[int, ...]) -> nn.Module:
    made = nn.Module()
    for name, shape in shapes.items():
        made.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return made


def given(**shapes: tuple[int, ...]) -> Source:
    return Source("there", "", None, {name: torch.arange(1.0, 7.0).reshape(shape) for name, shape in shapes.items()})


def test_the_table_reports_the_fate_of_each_weight() -> None:
    module = model(same=(6,), bent=(2, 3), other=(5,), missing=(4,))
    there = given(same=(6,), bent=(6,), other=(6,), extra=(6,))
    there.weights["same"].data = there.weights["same"].double()
    table = fill_model(module, there, InitConfig(strict=False))
    assert table.loaded == ["same"]
    assert table.converted == {"same": ("torch.float64", "torch.float32")}
    assert table.reshaped == {"bent": ([6], [2, 3])}
    assert table.left_out == {"extra": "not in the model"}
    assert table.initial == {
        "other": "it has shape [6] in there, and [5] in the model",
        "missing": "not in there",
    }
    assert module.get_parameter("bent").tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not module.get_parameter("other").any()
    assert table.lines()[:3] == [
        "loaded 1 tensors",
        "converted same: torch.float64 -> torch.float32",
        "reshaped bent: [6] -> [2, 3]",
    ]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (model(a=(6,), b=(1,)), InitConfig(), r"1 weights of there do not fit \(b: not in there\): choose those"),
        (
            model(a=(5,)),
            InitConfig(),
            r"no weight of there fits .*a: it has shape \[6\] in there, and \[5\] in the mod",
        ),
        (model(a=(2, 3)), InitConfig(), r"a: it has shape \[6\] in there, and \[2, 3\] in the model"),
        (model(c=(6,)), InitConfig(strict=False), r"no weight of there fits the model \(c: not in there; a: not in th"),
        (model(a=(6,)), InitConfig(match=["x.*"]), r"init_from.match=\['x.\*'\] matches nothing in there; it has a$"),
        (model(), InitConfig(), r"no weight of there fits the model \(a: not in the model\)$"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(module: nn.Module, options: InitConfig, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        fill_model(module, given(a=(6,)), options)
    assert "\n" not in str(error.value)


def attempted(path: Path, *words: object) -> int:
    return here.command(*here.SHORT, f"run.dir={path}", *words)


def damage(run: Path) -> None:
    file = RunDir(run).checkpoint(6) / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


MISTAKES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no run": (lambda _: None, "nowhere", "is neither a run nor a .safetensors file: pass a run directory"),
    "a removed run": (lambda _: None, "nowhere@4", "if it was removed, runner resume continues the runs that began"),
    "a step of a file": (lambda _: None, "w.safetensors@4", "a .safetensors file has no steps: leave @4 out"),
    "nothing": (lambda _: None, "", "init_from is empty"),
    "no step": (lambda _: None, "copy@3", "there is no checkpoint of step 3"),
    "no such word": (lambda _: None, "copy@newest", "what follows @ must be a step, best or last"),
    "damaged": (damage, "copy@6", "is corrupt: rank_00000.safetensors"),
    "no checkpoint": (lambda copy: shutil.rmtree(copy / "checkpoints"), "copy", "has no checkpoint"),
    "no file": (lambda _: None, "w.safetensors", "cannot be read (No such file or directory)"),
    "a pipe": (lambda copy: os.mkfifo(copy.parent / "w.safetensors"), "w.safetensors", "cannot be read (not a regular"),
    "a pickle": (
        lambda copy: (copy.parent / "w.safetensors").write_bytes(pickle.dumps(Malicious(copy / "executed"))),
        "w.safetensors",
        "is not a safetensors file",
    ),
    "torch's file": (lambda copy: (copy.parent / "w.pt").write_bytes(b""), "w.pt", "is neither a run nor"),
    "an empty file": (
        lambda copy: (copy.parent / "w.safetensors").write_bytes(b""),
        "w.safetensors",
        "is not a safetensors file",
    ),
    "a folder": (
        lambda copy: save_file({"a": torch.zeros(1)}, copy / "checkpoints" / "model.safetensors"),
        "copy/checkpoints",
        "checkpoints/model.safetensors",
    ),
    "another model": (
        lambda copy: save_file({"tokens.weight": torch.zeros(3)}, copy.parent / "w.safetensors"),
        "w.safetensors",
        "has shape [3] in",
    ),
}


FIRST = {"a removed run", "no step", "damaged", "a pickle", "another model"}


@pytest.mark.parametrize(
    "mistake", [each if each in FIRST else pytest.param(each, marks=pytest.mark.slow) for each in MISTAKES]
)
def test_a_mistake_is_one_line_and_leaves_no_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Say, mistake: str
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, words, message = MISTAKES[mistake]
    copy = here.trained(tmp_path / "copy", "train.steps=2") if mistake == "no best" else tmp_path / "copy"
    if mistake != "no best":
        shutil.copytree(source, copy)
    prepare(copy)
    capsys.readouterr()
    assert attempted(tmp_path / "run", f"init_from={words}") != 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: init_from")
    assert message in line
    assert not (copy / "executed").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_same_command_is_the_same_run_wherever_the_source_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs").mkdir()
    shutil.copytree(source, tmp_path / "outputs" / "source")
    monkeypatch.chdir(tmp_path)
    words = ["run.root=outputs"]

    def identity(given: str, *more: str) -> str:
        return compose([*words, f"init_from={given}", *more]).run_dir.name.rpartition("-")[2]

    first = identity("outputs/source@4")
    same = [f"{tmp_path}/outputs/source@4", "outputs/../outputs/source/@4", "outputs/source@004"]
    assert {identity(each) for each in same} == {first}
    others = ["outputs/source", "outputs/source@6", "outputs/source@best"]
    assert (
        len({first, *(identity(each) for each in others), identity("outputs/source@4", "init_from.strict=false")}) == 5
    )
    assert compose([*words, "init_from=null"]).run_dir == (cold := compose(words).run_dir)
    assert cold.name.rpartition("-")[2] != first
    (tmp_path / "outputs").rename(tmp_path / "moved")
    assert identity("moved/source@4") == first
    file = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    assert identity("w.safetensors") == identity(str(file)) == identity("moved/../w.safetensors") != first


@pytest.mark.slow
def test_a_run_moved_with_its_source_finds_the_source(source: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    shutil.copytree(source, tmp_path / "outputs" / "source")
    run = here.trained(tmp_path / "outputs" / "run", f"init_from={tmp_path}/outputs/source@4", *STILL)
    shutil.rmtree(run / "checkpoints")  # killed before its first checkpoint
    (run / "finished.json").unlink()
    (tmp_path / "outputs").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "run"
    assert here.command("resume", moved) == 0
    assert begins_with(moved, weights(source, 4))


@pytest.mark.slow
def test_another_source_is_another_run(source: Path, tmp_path: Path, capsys: Say) -> None:
    run = here.trained(tmp_path / "run", f"init_from={source}@4", *STILL)
    capsys.readouterr()
    assert here.command("resume", run, f"init_from={source}@2", "train.steps=2") == 2
    assert "init_from.at: 4 -> 2 cannot be changed in the run" in capsys.readouterr().err


def test_a_file_replaced_before_the_start_is_refused(tmp_path: Path, source: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    options = InitConfig(path=str(file))
    record = open_source(options, RunDir(tmp_path), {}).record()
    assert open_source(options, RunDir(tmp_path), record).record() == record
    save_file({"a": torch.ones(1)}, file)
    with pytest.raises(UserError, match=r"w.safetensors is not what this run began with .*SHA-256.*: put that back"):
        open_source(options, RunDir(tmp_path), record)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest would be that of other weights."""
    file, load = tmp_path / "w.safetensors", safetensors.torch.load_file
    save_file({"a": torch.zeros(1)}, file)

    def load_another(path: Path) -> dict[str, torch.Tensor]:
        save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
        (tmp_path / "other.safetensors").rename(path)
        return load(path)

    monkeypatch.setattr(safetensors.torch, "load_file", load_another)
    with pytest.raises(UserError, match=r"w.safetensors was replaced while it was read: rerun"):
        open_source(InitConfig(path=str(file)), RunDir(tmp_path), {})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_killed_before_its_checkpoint_has_the_same_weights(source: Path, tmp_path: Path) -> None:
    """The source has trained further, and its best checkpoint is another one."""
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    words = [*here.SHORT, f"init_from={copy}@best", PACED, "seed=5", "checkpoint.every_steps=100"]
    whole = Run(tmp_path / "whole", words)
    whole.finish()
    run = Run(tmp_path / "run", words)
    run.hold_at(3)
    run.start()
    assert run.kill_when(Run.idles)
    run.wait()
    assert not run.checkpoints()
    here.trained(copy, "train.steps=10", "checkpoint.keep_best=1", "checkpoint.best.mode=min", "checkpoint.keep_last=9")
    expected = init(run.path)
    output = run.finish()
    assert f"initial weights from {copy} at step 2:" in output
    assert init(run.path) == expected
    assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks_all_begin_with_the_same_weights(source: Path, tmp_path: Path, strategy: str) -> None:
    words = [*here.SHORT, f"init_from={source}@4", f"strategy={strategy}", "train.ema_decay=0.5", *STILL, "seed=5"]
    run = Run(tmp_path / "run", words, ranks=2)
    output = run.finish()
    assert output.count("initial weights from") == 1
    assert begins_with(run.path, weights(source, 4))


@pytest.mark.slow
def test_two_optimizers_and_a_model_of_the_users(tmp_path: Path) -> None:
    words = [
        *("model=own", "model._target_=custom.Normed", "+model.vocab_size=256", "+model.width=8"),
        "optimizers.tokens={_target_: torch.optim.SGD, lr: 0.1, match: ['tokens.*']}",
        "optimizers.rest={_target_: torch.optim.Adam, lr: 0.1, match: ['norm.*', 'head.*']}",
    ]
    first = here.trained(tmp_path / "first", *words)
    still = ["optimizers.tokens.lr=0", "optimizers.rest.lr=0", *STILL[1:]]
    run = here.trained(tmp_path / "run", *words, *still, f"init_from={first}@4", "seed=9")
    statistics = ("model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked")
    names = [name.removeprefix("model.") for name in statistics]
    assert begins_with(run, weights(first, 4), *names, *statistics)
    assert set(init(run)["loaded"]) == set(weights(first, 4))


@pytest.mark.slow
def test_a_branch_begins_with_its_trunks_weights(source: Path, tmp_path: Path, capsys: Say) -> None:
    trunk = here.trained(tmp_path / "trunk", f"init_from={source}@4")
    capsys.readouterr()
    assert here.command("fork", trunk, "--step", "4", "optimizer.lr=0", f"run.dir={tmp_path / 'branch'}") == 0
    assert "initial weights" not in capsys.readouterr().out
    assert begins_with(tmp_path / "branch", weights(trunk, 4))

"""Config errors: one line each with the value, the allowed values and the nearest valid name."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from runner.config import frozen
from runner.config.composition import Composer
from runner.config.frozen import load
from runner.errors import UserError
from runner.system import files

HUGE = "4" * 400  # a multiple of every number of heads, beyond every float


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def config_errors(composer: Composer, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        composer.compose(overrides)
    return str(error.value).splitlines()


MISTAKES = [
    ("train.stps=3", ["train.stps=3", "did you mean 'steps'?", "batch_size"]),
    ("steps=3", ["did you mean 'train.steps'?"]),
    ("nonsense=3", ["nonsense=3", "there are", "seed"]),
    ("+train.x=1", ["+train.x=1", "no such option in train"]),
    ("phases.late.start_stp=1", ["did you mean 'start_step'?", "lr_scale"]),
    ("model.widht=3", ["did you mean 'width'?", "+model.widht=3"]),
    ("data=mixtrue", ["did you mean 'mixture'?", "files, mixture, own, shards, text"]),
    ("experiment=smok", ["did you mean 'smoke'?"]),
    ("train.steps=abc", ["train.steps=abc must be a whole number"]),
    ("train.steps=1.5", ["must be a whole number"]),
    ("train.steps=0", ["train.steps=0 must be 1 or more"]),
    ("train.grad_accum_steps=x", ["a whole number or null"]),
    ("train.clip_norm=-1", ["train.clip_norm=-1.0 must be a finite number above 0"]),
    ("optimizer.lr=${nope}", ["nope"]),
    ("sampler.temperature=nan", ["sampler.temperature=nan"]),
    ("sampler.weights.cod=1", ["no such source (did you mean 'code'?)"]),
    ("sampler.weights.code=-1", ["sampler.weights.code=-1.0"]),
    ("sampler.weights.code=0", ["at least one source needs a weight above 0"]),
    ("checkpoint.mode=asinc", ["did you mean 'async'?", "one of async, sync"]),
    ("scheduler.decay=cosin", ["did you mean 'cosine'?"]),
    ("train=3", ["train=3"]),
    ("train.device=gpu", ["auto, cpu, cuda"]),
    ("optimizer.lr=-1", ["optimizer.lr=-1 must be a finite number, 0 or more"]),
    ("optimizer.lr=abc", ["optimizer.lr=abc must be a finite number, 0 or more"]),
    ("optimizer.betas=[1,2]", ["optimizer.betas=[1, 2] must be a list of two numbers from 0 to below 1"]),
    ("model.layers=0", ["model.layers=0 must be a whole number, 1 or more"]),
    ("model.width=15", ["model.width=15 must be a multiple of model.heads="]),
    ("model.dropout=2", ["model.dropout=2 must be a number from 0 to below 1"]),
    ("model.bias=no", ["model.bias=no must be true or false"]),
    ("model.tie_weights=null", ["model.tie_weights=None must be true or false"]),
    ('run.name="a\tb"', ["run.name='a\\tb' must be printable"]),
    ("train.epochs=0", ["train.epochs=0.0 must be a finite number above 0"]),
    ("scheduler.warmup_steps=300", ["scheduler.warmup_steps=300", "below the 300 steps"]),
    ("scheduler={warmup_steps:9,total_steps:9}", ["scheduler.warmup_steps=9", "below the 9 steps"]),
    ("sampler.temperature=0.5", ["sampler.temperature=0.5 works with several sources", "data=mixture"]),
    ("model.sequence_length=64", ["data.sequence_length=128 must be 64 or less", "model.sequence_length"]),
    (f"train.clip_norm={HUGE}", [f"train.clip_norm={HUGE} must be from -1.8e+308 to 1.8e+308"]),
    (f"phases.a.lr_scale={HUGE}", [f"phases.a.lr_scale={HUGE} must be from"]),
    (f"sampler.weights.code=-{HUGE}", [f"sampler.weights.code=-{HUGE} must be from"]),
    (f"model.width={HUGE}", ["model.width=4444", "must be a whole number, 2**40 or less"]),
    ("optimizer=null", ["optimizer=null: choose an option of optimizer", "adamw, own, sgd"]),
    ("experiment=null", ["experiment=null", "leave it out for none", "smoke"]),
    ("phases=3", ["phases=3: choose an option of phases", "curriculum"]),
    (
        "train.steps.x=3",
        ["train.steps.x=3", "train.steps is one value, a whole number or null", "set train.steps="],
    ),
    ("model.width.x=3", ["model.width is one value", "set model.width="]),
    ("sampler.weights.code.x=3", ["sampler.weights.code={'x': 3} must be a finite number"]),
    ("sampler.weights=[1]", ["sampler.weights=[1] must be a dictionary"]),
    ("data.sources.text.paths=3", ["data.sources.text.paths=3", "data=files"]),
    ("scheduler.warmup=10", ["scheduler.warmup=10", "no such option in scheduler", "did you mean 'warmup_steps'?"]),
    ("scheduler=own", ["scheduler._target_ must be given"]),
    ("scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", ["needs a metric at every step"]),
    ("train.ema_decay=1", ["train.ema_decay=1.0 must be a number between 0 and 1"]),
    ("checkpoint.best.mode=lowest", ["checkpoint.best.mode=lowest must be one of min, max"]),
    ("optimizer.groups={match: a}", ["optimizer.groups={'match': 'a'} must be a list"]),
    ("optimizers.a.lr=1", ["optimizers.a has no _target_"]),
    ("optimizers.a={_target_: torch.optim.SGD, scheduler: {decay: cosin}}", ["did you mean 'cosine'?"]),
    ("optimizers.a={_target_: torch.optim.SGD, scheduler: {warmup_steps: x}}", ["must be a whole number or null"]),
    ("optimizers.a={_target_: torch.optim.SGD, lr: -1}", ["optimizers.a.lr=-1 must be a finite number"]),
    ("scheduler.decay_steps=1000", ["scheduler.decay_steps=1000", "after the warmup"]),
    ("checkpoint.max_interval_s=nan", ["checkpoint.max_interval_s=nan must be finite and 0 or more"]),
    ("run.name=../x", ["run.name=../x must stay below run.root"]),
    ("run.threads=100000", ["run.threads=100000 must be 1024 or less"]),
    ("seed=-1", ["seed=-1 must be 0 or more"]),
    ("seed=1,2", ["-m", "[a,b]"]),
    ("seed", ["cannot be parsed", "key=value"]),
    ("train.steps=[1,", ["cannot be parsed"]),
    ("=3", ["=3"]),
    ("~optimizer", ["optimizer._target_ is missing"]),
    ("data.eval_sources.code=3", ["data.eval_sources.code=3 must be a source"]),
    ("data.loader={batch_size: 3}", ["data.loader has no _target_"]),
    ("+logger.mine=3", ["logger.mine has no _target_", "null"]),
    ("+callbacks.mine=3", ["callbacks.mine has no _target_", "null"]),
    ("+callbacks.mine._target_=nowhere.Mine", ["callbacks.mine._target_=nowhere.Mine", "No module named"]),
    ("train.profile=3", ["train.profile=3 must be first:last", "20:25"]),
    ("train.profile=0:3", ["train.profile=0:3", "both 1 or more"]),
    ("train.profile=9:8", ["train.profile=9:8", "in this order"]),
    ("train.profile=9:301", ["train.profile=9:301", "300 or less, the steps of this run"]),
    ("train.on_callback_error=skip", ["train.on_callback_error", "drop, stop"]),
    ("data.sources=null", ["data.sources"]),
    ("data=shards", ["data.sources.tokens.paths must be given"]),
    ("hydra/launcher=submitit_slurm", ["hydra/launcher", "launcher=slurm"]),
    ("hydra/sweeper=optuna", ["hydra/sweeper", "-m"]),
    ("hydra.run.dir=here", ["hydra.run.dir=here", "run.dir=..."]),
    ("hydra.mode=MULTIRUN", ["hydra.mode", "no effect"]),
    ("model._target_=nowhere.Net", ["model._target_=nowhere.Net", "No module named 'nowhere'"]),
    ("optimizer._target_=torch.optim.Addam", ["no attribute 'Addam'", "did you mean 'Adam'?"]),
    ("data.sources.code._target_=runner.data.text.PythonTxt", ["data.sources.code._target_", "PythonText"]),
    ("+logger.mine._target_=runner.metrics.jsonl", ["logger.mine._target_", "it is a module"]),
    ("launcher._target_=launch.local.Nobody", ["launcher._target_", "Nobody"]),
    ("train.loss._target_=3", ["train.loss._target_=3", "dotted name"]),
    ("data=own", ["data.sources is empty", "+data.sources.NAME="]),
    ("nosuchgroup/x=1", ["nosuchgroup/x=1"]),
]


@pytest.mark.parametrize(("override", "words"), MISTAKES)
def test_each_mistake_is_one_line(composer: Composer, override: str, words: list[str]) -> None:
    lines = config_errors(composer, override)
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


LATE = [  # these settings had no effect in a run of this length, without a message
    (("train.steps=20", "scheduler.warmup_steps=20"), ["scheduler.warmup_steps=20", "below the 20 steps"]),
    (("scheduler.total_steps=10", "scheduler.warmup_steps=10"), ["warmup_steps=10", "below the 10 steps"]),
    (("train.steps=5", "checkpoint.keep_best=1"), ["checkpoint.keep_best=1", "eval.every_steps=5 or less"]),
    (("eval.every_steps=0", "checkpoint.keep_best=2"), ["checkpoint.keep_best=2", "eval.every_steps=null"]),
    (("data.eval_sources=null", "eval.every_steps=5"), ["data.eval_sources=null must be a dictionary"]),
    (("data=shards", "data.sources.tokens.paths=x", "checkpoint.keep_best=1"), ["keep_best=1", "data.eval_sources"]),
    (("train.steps=20", "train.epochs=1"), ["train.steps=20 and train.epochs=1", "set the other to null"]),
    (("+data.loader._target_=builtins.list", "train.epochs=1"), ["train.epochs=1", "train.steps=N"]),
    (("train.epochs=1", "scheduler.total_steps=5", "scheduler.warmup_steps=5"), ["warmup_steps=5"]),
    (("data=files", "data.sources.text.paths=3"), ["data.sources.text.paths=3 must be a path, or a list of paths"]),
]


@pytest.mark.parametrize(("overrides", "words"), LATE)
def test_events_beyond_the_run_are_errors_before_the_start(
    composer: Composer, overrides: tuple[str, ...], words: list[str]
) -> None:
    (line,) = config_errors(composer, *overrides)
    for word in words:
        assert word in line


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 10, 20, 99, 100, 300])
@pytest.mark.slow
def test_defaults_fit_a_run_of_any_length(composer: Composer, steps: int) -> None:
    """Evaluations are at the same steps for any length, so that a longer run has those of a shorter one."""
    for choice in ("data=mixture", "experiment=smoke", "experiment=anneal"):
        config = composer.compose([choice, f"train.steps={steps}"]).config
        assert config.evaluation_interval == (10 if choice == "experiment=smoke" else 100)
    own = ["experiment=smoke", "data=own", "+data.sources.mine._target_=builtins.list", f"train.steps={steps}"]
    assert composer.compose(own).config.evaluation_interval == 0
    assert composer.compose(["train.epochs=0.5"]).config.known_steps is None


def test_a_huge_number_in_a_users_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "big.yaml").write_text(f"# @package _global_\ntrain:\n  clip_norm: {HUGE}\n")
    (line,) = config_errors(Composer([tmp_path]), "experiment=big")
    assert line.startswith("experiment=big")
    assert "a float can hold" in line


@pytest.mark.parametrize("left", [0, 400, 1200])
def test_a_truncated_frozen_config_is_one_line(composer: Composer, tmp_path: Path, left: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(composer.compose([]).text)
    load(tmp_path)
    path.write_text(path.read_text()[:left])
    with pytest.raises(UserError, match="is truncated or was edited") as error:
        load(tmp_path)
    (line,) = str(error.value).splitlines()
    for word in (str(path), "remove it", "code.json"):
        assert word in line


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_refused_read_of_a_frozen_config_is_no_verdict_on_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause shows a job that the error may pass. No message suggests to remove an intact config."""

    def refuse(*_: object, **__: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "read_regular", refuse)
    with pytest.raises(UserError, match=f"cannot be read .{os.strerror(number)}") as error:
        frozen.load_plain(tmp_path)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == number


def test_a_class_that_exists_only_after_import_is_found(
    composer: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Include names that no statement binds. A module whose source has the name is not imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "created_on_import.py").write_text("globals()['Net'] = dict\n")
    (tmp_path / "seen_in_source.py").write_text("class Net:\n    pass\n\nraise RuntimeError\n")
    for module in ("created_on_import", "seen_in_source"):
        composer.compose(["model=own", f"model._target_={module}.Net"])
    assert "seen_in_source" not in sys.modules
    (line,) = config_errors(composer, "model._target_=seen_in_source.Other")
    assert "it cannot be imported (RuntimeError" in line


def test_an_empty_sweep_is_one_line(composer: Composer) -> None:
    with pytest.raises(UserError, match="the sweep has no jobs"):
        composer.jobs(["seed=range(1,1)"])


def test_all_mistakes_come_in_one_message(composer: Composer) -> None:
    lines = config_errors(
        composer,
        "model=gtp",
        "train.stps=1",
        "train.batch_size=0",
        "checkpoint.mode=nope",
        "eval.every_steps=1.5",
        "checkpoint.keep_last=0",
        "run.name=fine",
    )
    assert len(lines) == 6
    for word in ("model=gtp", "train.stps", "train.batch_size=0", "checkpoint.mode", "eval.every", "keep_last=0"):
        assert sum(word in line for line in lines) == 1


def test_errors_that_follow_from_a_wrong_choice_are_left_out(composer: Composer) -> None:
    lines = config_errors(composer, "data=mixtrue", "sampler.weights.prose=3", "data.sources.prose.split=train")
    assert len(lines) == 1
    assert lines[0].startswith("data=mixtrue")
    assert len(config_errors(composer, "experiment=smok", "sampler.weights.prose=3")) == 1


def test_a_choice_and_the_values_it_needs_are_checked_together(composer: Composer) -> None:
    lines = config_errors(composer, "data=shards", "data.sources.tokens.paths=x", "train.stps=1")
    assert len(lines) == 1
    assert lines[0].startswith("train.stps=1")


def test_several_sources_need_a_mixing_sampler(composer: Composer) -> None:
    (line,) = config_errors(composer, "data=mixture", "sampler=distributed")
    assert "choose sampler=mixture or sampler=elastic" in line


@pytest.mark.slow
def test_a_mistake_in_a_users_file_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "typo.yaml").write_text("# @package _global_\ntrain:\n  stps: 3\n")
    (folder / "type.yaml").write_text("# @package _global_\ntrain:\n  steps: many\n")
    (folder / "group.yaml").write_text("# @package _global_\ndefaults:\n  - override /data: mixtrue\n")
    (folder / "broken.yaml").write_text("train: [\n")
    composer = Composer([tmp_path])
    for name, words in {
        "typo": ["experiment/typo", "stps"],
        "type": ["experiment/type", "train.steps", "a whole number"],
        "group": ["experiment=group: data=mixtrue", "mixture"],
        "broken": ["experiment=broken"],
    }.items():
        (line,) = config_errors(composer, f"experiment={name}")
        for word in words:
            assert word in line


def test_missing_directory_and_missing_primary_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        Composer([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="--config-name nope"):
        Composer(config_name="nope").compose([])


def test_a_primary_config_without_the_schema_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults:\n  - config\n  - _self_\ntrain:\n  steps: 12\n")
    assert Composer([tmp_path], "own").compose([]).config.train.steps == 12
    (tmp_path / "bare.yaml").write_text("train:\n  stps: 12\n")
    with pytest.raises(UserError, match="stps"):
        Composer([tmp_path], "bare").compose([])

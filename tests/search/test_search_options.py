"""The options of a command with `search=...`: ranges, settings, length, and the errors of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from search_runs import SMOKE, checkpoint, plan

from runner.__main__ import run
from runner.cli.start.search import nearest
from runner.cli.start.slot import check_results
from runner.config.composition import Composer
from runner.config.early_stopping import Best, against_its_name
from runner.config.template import TrialComposer
from runner.errors import UserError
from runner.rundir.paths import RunDir
from runner.search.directory import turn
from runner.search.points import Space

LR = "optimizer.lr=log(1e-4,1e-2)"
ASHA = (*SMOKE, "search=asha", "search.trials=9")


@pytest.fixture(scope="module")
def composer() -> TrialComposer:
    return TrialComposer()


def dimensions(composer: TrialComposer, *overrides: str) -> dict[str, Any]:
    found = composer.search([*ASHA, *overrides])[2]
    return {each.key: each.values or (each.low, each.high, each.log, each.whole) for each in found}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("log(1e-4,1e-2)", (1e-4, 1e-2, True, False)),
        ("tag(log,interval(1e-4,1e-2))", (1e-4, 1e-2, True, False)),
        ("interval(0,1)", (0, 1, False, False)),
        ("int(interval(1,8))", (1, 8, False, True)),
        ("int(log(1,64))", (1, 64, True, True)),
        ("choice(0.1,0.2)", ("0.1", "0.2")),
        ("0.1,0.2", ("0.1", "0.2")),
        ("range(1,4)", ("1", "2", "3")),
    ],
)
def test_a_range_is_written_as_in_hydra_and_log_for_short(composer: TrialComposer, given: str, meant: Any) -> None:
    assert dimensions(composer, f"optimizer.lr={given}") == {"optimizer.lr": meant}
    assert dimensions(composer, f"search.space.optimizer.lr={given}") == {"optimizer.lr": meant}
    assert dimensions(composer, "search.space.model.width=[16,32]") == {"model.width": ("16", "32")}


def test_space_comes_from_the_experiment_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - smoke\n  - override /search: random\n"
        "search:\n  trials: 4\n  space:\n    optimizer.lr: log(1e-4,1e-2)\n    model:\n      width: [16, 32]\n"
    )
    composer = TrialComposer([tmp_path])
    assert composer.is_search(["experiment=mine"])
    found = composer.search(["experiment=mine"])[2]
    assert [each.key for each in found] == ["model.width", "optimizer.lr"]
    found = composer.search(["experiment=mine", "optimizer.lr=0.1"])[2]
    assert [each.key for each in found] == ["model.width"]
    assert not composer.is_search(["experiment=mine", "search=none"])
    alone = Composer([tmp_path]).compose(["experiment=mine", "search=none", "optimizer.lr=0.1"])  # its plain command
    assert alone.config.optimizer["lr"] == 0.1
    assert "none" not in alone.run_dir.name
    with pytest.raises(UserError, match=r"^search\.repeats=2 has no effect without a search"):
        Composer([tmp_path]).compose(["experiment=mine", "search=none", "search.repeats=2"])
    assert not composer.is_search(["experiment=smoke", "seed=1,2"])


@pytest.mark.slow
def test_a_list_of_the_space_may_hold_any_value(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = """# @package _global_
defaults:
  - smoke
  - override /search: grid
search:
  space:
    user.text: ["x, y", "it's", "a=b", "", "true", plain]
    user.value: [0.1, null, true, [1, null], {a: "b c"}]
    +user.z: [1, 2]
"""
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    composer = TrialComposer([tmp_path])
    _, fixed, found = composer.search(["experiment=mine", "user.z=7"])
    frozen = composer.freeze(fixed, found, tmp_path)
    points = list(Space(tuple(found)).grid())
    made = [composer.compose_point(frozen, point, tmp_path).plain["user"] for point in [*points[:5], *points[5::5]]]
    assert [user["value"] for user in made[:5]] == [0.1, None, True, [1, None], {"a": "b c"}]
    assert [made[0]["text"], *(user["text"] for user in made[5:])] == ["x, y", "it's", "a=b", "", "true", "plain"]
    assert {user["z"] for user in made} == {7}


def test_a_sweep_in_the_experiment_of_a_search_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - smoke\nhydra:\n  sweeper:\n    params:\n      model.width: 16,32\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"model.width=16,32 in a config file .* is a sweep, and this is a search"):
        TrialComposer([tmp_path]).search(["experiment=mine", "search=random", "search.trials=3", LR])


@pytest.mark.slow
def test_trials_have_the_names_of_their_plain_commands(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    text = "defaults:\n  - gpt_tiny\nwidth: {}\n"
    for name, width in (("aa", 16), ("bb", 32)):
        (tmp_path / "model" / f"{name}.yaml").write_text(text.format(width))
    _, fixed, found = (composer := TrialComposer([tmp_path])).search([*ASHA, "model=aa,bb"])
    frozen = composer.freeze(fixed, found, tmp_path)
    plain = Composer([tmp_path]).compose([*SMOKE, "model=bb"], tmp_path)
    trial = TrialComposer().compose_point(frozen, {"model": "bb"}, tmp_path)  # as in a slot
    assert trial.run_dir == plain.run_dir
    assert frozen["flags"] == [f"--config-dir={tmp_path}"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (("search=random", "search.trials=3"), "the search varies nothing: pass a range"),
        (("search=random", LR), "search.trials must be given"),
        (("search=asha", LR, "search.trials=0"), "search.trials=0 must be 1 to 2**20"),
        (("search=asha", LR, "search.trials=3", "search.reduction=1"), "search.reduction=1 must be 2 to 1024"),
        (
            ("search=asha", LR, "search.trials=3", "search.rungs=[3,2]"),
            "search.rungs=[3, 2] must be steps of 1 or more",
        ),
        (("search=random", LR, "search.trials=3", "search.rungs=[2,3]"), "leave all but search.rungs=[3] out"),
        (("search=grid", LR), "optimizer.lr: an interval cannot be enumerated"),
        (("search=random", "search.trials=3", "optimizer.lr=log(0,1)"), "both numbers must be above 0"),
        (
            ("search=random", "search.trials=3", "optimizer.lr=interval(2,1)"),
            "the first number must be below the second",
        ),
        (("search=grid", "optimizer.lr=0.1,0.1"), "optimizer.lr has the value 0.1 twice"),
        (("search=random", "search.trials=3", "optimizer.lrr=0.1,0.2"), "(did you mean 'lr'?)"),
        (("search=random", "search.trials=3", "model.width=16,17"), "model.width=17 must be a multiple of model.heads"),
        (("search=random", "search.trials=3", "run.root=a,b"), "run.root cannot be varied by a search"),
        (("search=random", "search.trials=3", "seed=1,2", "search.repeats=2"), "seed is varied, and so is it by"),
        (("search=asha", LR, "search.trials=3", "search.rungs=[2,30]", "train.steps=9"), "goes beyond train.steps=9"),
        (("search=asha", LR, "search.trials=3", "train.epochs=2"), "needs search.rungs"),
        (("search=random", LR, "search.trials=3", "eval.every_steps=0"), "search.metric=eval_loss needs evaluations"),
        (("search=random", LR, "search.trials=3", "fork=o/x@3"), "the trials of a search are no forks"),
        (("search=random", LR, "search.trials=3", "run.dir=o"), "each trial has a directory of its own"),
        (("search=random", "search.trials=3", "train.steps=5,6"), "train.steps cannot be varied by a search"),
        (("search=random", LR, "search.trials=3", "launcher.slots=0"), "launcher.slots=0 must be a whole number"),
        (("search=bayes", LR), "search=bayes: no such option of search"),
        (("search=grid", "eval.batches=1,2"), "two trials are the same run"),
        (("search=grid", "model.width=range(16,16)"), "the range has no values"),
        (("search=random", LR, "search.trials=3", "launcher.ranks=2"), "have one rank each, and this is 2"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    overrides: tuple[str, ...], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = () if any(text.startswith("run.root") for text in overrides) else (f"run.root={tmp_path}/o",)
    experiment = [] if "train.epochs=2" in overrides else ["train.steps=20"]
    length = [] if any(text.startswith("train.steps") for text in overrides) else experiment
    assert run(["-m", "model=gpt_tiny", "data.sequence_length=32", *length, *root, *overrides]) == 2
    found = capsys.readouterr().err
    assert error in found
    assert found.startswith("error: ")
    assert "Traceback" not in found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["search=asha"], "search=asha begins many runs: add -m, or set search=none for one run"),
        (["search.trials=3"], "search.trials=3 has no effect without a search: choose one, such as -m search=asha"),
        (["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "seed=tag(log,interval(1,2))"], "a search is -m"),
        (["-m", "seed=interval(1,2)"], "or search=random"),
        ([LR], f"{LR}: a range needs -m and a search: -m search=asha"),
        (["-m", "search=asha", "search.trials=3", "optimizer.lr=log(1e-4)"], "optimizer.lr=log(1e-4): log(...) cannot"),
        (["-m", "search=asha", "search.trials=3", "optimizer.lr=lg(1,2)"], "a range is log(1e-4,1e-2), interval("),
        (["-m", "search=asha", "search.trials=3", "optimizer=adamw,sdg"], "optimizer=sdg: no such option of optimizer"),
        (["-m", "search=asha", "search.trials=9", "optimizer.lrr=log(1e-4,1)"], "(did you mean 'lr'?)"),
    ],
)
def test_an_invalid_search_explains_how_to_write_one(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    found = capsys.readouterr().err
    assert error in found
    assert len(found.splitlines()) == 1


def test_the_last_rung_is_the_length_unless_that_is_typed() -> None:
    assert plan(LR, "search.rungs=[2,6]", "train.steps=8").first.config.train.steps == 8
    assert plan(LR, "train.steps=18").rungs == (2, 6, 18)


def test_trials_are_the_runs_of_the_same_plain_commands() -> None:
    from composing import compose

    made = plan(LR, "model.width=16,32", "search.rungs=[2,6]")
    point = [f"{key}={value}" for key, value in made.points[0].items()]
    alone = compose([*SMOKE, "train.steps=6", *point])
    assert (made.first.digest, made.first.run_dir) == (alone.digest, alone.run_dir)
    assert made.first.config.train.steps == 6  # of the experiment, 20


def test_references_follow_a_varied_setting() -> None:
    """Include an option of a group. All is composed when the search begins, so later edits of files change nothing."""
    composer, base = TrialComposer(), Path.cwd()
    options = ("optimizer=adamw,sgd", "user.dim=16,32", "model.width=${user.dim}")
    _, fixed, found = composer.search([*ASHA, *options])
    frozen = composer.freeze(fixed, found, base)
    point = {"optimizer": "sgd", "user.dim": "32"}
    plain = TrialComposer().compose_point(frozen, point, base).plain
    assert plain["model"]["width"] == 32
    assert plain["optimizer"]["_target_"].endswith("SGD")
    assert plain["optimizer"].keys() == composer.compose([*SMOKE, "optimizer=sgd"]).plain["optimizer"].keys()


@pytest.mark.slow
def test_a_new_search_names_the_one_it_is_most_like(tmp_path: Path) -> None:
    """An edited file or a typo makes another search, while the old one may not have ended."""

    def near(*overrides: str) -> str:
        return nearest(plan(LR, "search.rungs=[2,6]", f"run.root={tmp_path}", *overrides)) or ""

    begun = plan(LR, "search.rungs=[2,6]", f"run.root={tmp_path}")
    begun.search.path.mkdir()
    with turn(begun.search, begun.record) as mine:
        begun.record.write(begun.search, mine.guard)
        mine.append("settings", trials=9, rungs=[2, 6])
    name = begun.search.path.name
    assert f"{name} only in optimizer.weight_decay (0.1 → 0.3), search.metric" in near(
        "optimizer.weight_decay=0.3", "search.metric=loss"
    )
    assert near("optimizer=sgd", "seed=3", "search.seed=2") == ""


def test_probable_mistakes_in_a_search_are_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ASHA, LR, f"run.root={tmp_path}", "search.metric=eval_accuracy", "search.rungs=[2,6]", "train.steps=9"]
    assert run(["-m", "-n", *words]) == 0
    captured = capsys.readouterr()
    assert "by the lowest eval_accuracy" in captured.out
    assert "search.mode=min takes the lowest eval_accuracy as the best: set search.mode=max" in captured.err
    assert "the last rung is step 6 of 9" in captured.err
    assert (
        run(["-m", "-n", *[word for word in words if word != "train.steps=9"], "train.epochs=2", "train.steps=null"])
        == 0
    )
    assert "train.epochs=2: trials may pause before their end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "mode", "warned"),
    [
        ("eval_accuracy", Best.min, True),
        ("eval_val_f1", Best.min, True),
        ("eval_loss", Best.max, True),
        ("eval_loss", Best.min, False),
        ("eval_accuracy_loss", Best.min, False),
        ("eval_macro", Best.min, False),
        (None, None, False),
    ],
)
def test_the_name_of_a_metric_may_contradict_its_mode(metric: str | None, mode: Best | None, warned: bool) -> None:
    assert bool(list(against_its_name("early_stopping", metric, mode))) == warned


@pytest.mark.slow
def test_a_run_that_was_evaluated_otherwise_is_refused(tmp_path: Path) -> None:
    """Such results cannot be compared with those of the other trials."""
    job = plan(LR, "eval.batches=1", f"run.root={tmp_path}").first
    other = plan(LR, "eval.batches=2", f"run.root={tmp_path}").first
    assert job.run_dir == other.run_dir
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(other.text)
    check_results(job, "eval_loss")
    checkpoint(run, 3)
    with pytest.raises(UserError, match=r"was trained with other settings: eval\.batches \(2 → 1\); search"):
        check_results(job, "eval_loss")
    check_results(job, "loss")
    stops = plan(LR, "eval.batches=2", "early_stopping=default", f"run.root={tmp_path}").first
    with pytest.raises(UserError, match=r"early_stopping\.metric \(null → eval_loss\), .*search in another run.root"):
        check_results(stops, "loss")
    run.config.write_text(job.text)
    check_results(job, "eval_loss")


@pytest.mark.slow
def test_the_name_of_a_search_follows_its_identity() -> None:
    name = plan(LR).search.path.name
    assert name.startswith("smoke-asha-lr-seed0-")
    same = [plan(LR, "search.trials=12"), plan(LR, "launcher.slots=2"), plan(LR, "search.keep=2")]
    others = [plan(LR, "search.seed=1"), plan(LR, "model.width=16"), plan(LR, "search.metric=loss")]
    others += [plan(LR, "eval.batches=1"), plan(LR, "early_stopping=default")]
    assert {each.search.path.name for each in same} == {name}
    assert len({name, *(each.search.path.name for each in others)}) == 6


def test_trials_are_limited_to_the_number_of_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("model.width=16,32", "search.trials=20").trials == 2
    assert "the space has 2 points" in capsys.readouterr().out


def test_repeats_have_distinct_seeds() -> None:
    made = plan(LR, "search.repeats=2", "seed=5", search="random")
    assert made.rungs == (20,)
    again = TrialComposer().compose_point(made.record.config, made.points[0], Path.cwd(), 1)
    assert (made.first.config.seed, again.config.seed) == (5, 6)
    assert made.first.digest != again.digest


def test_an_error_of_the_composition_is_an_error_of_the_search(composer: TrialComposer) -> None:
    with pytest.raises(UserError, match="no such option"):
        composer.search([*ASHA, LR, "trian.steps=3"])

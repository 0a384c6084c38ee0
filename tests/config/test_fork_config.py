"""The config of a branch: name, identity, settings from the trunk, and training plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.composition import Composed, Composer, compose
from runner.config.fork import replaced_values, trunk_values
from runner.config.frozen import load, load_plain, to_config, trained
from runner.config.identity import differences, identity
from runner.config.schedule import PhaseSchedule
from runner.config.schema import source_weights
from runner.errors import UserError
from runner.system import files

BASE = [
    "experiment=smoke",
    "data=mixture",
    "sampler=elastic",
    "sampler.weights.code=2",
    "+phases.late={start_step: 70, weights: {prose: 3.0}, lr_scale: 0.5}",
    "train.steps=100",
]
NEW = "+data.sources.more={_target_: runner.data.text.TextFiles, paths: more.txt, sequence_length: 8}"


def frozen(job: Composed, path: Path) -> Path:
    files.make_dirs(path)
    files.write_atomic(path / "config.yaml", job.text)
    return path


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return frozen(compose(BASE), tmp_path_factory.mktemp("o") / "base-0123abcd")


def branch(trunk: Path, *overrides: str, step: int = 50) -> Composed:
    return compose([f"fork={trunk}@{step}", *overrides])


CHANGES = st.lists(
    st.sampled_from(
        [
            "sampler.temperature=3",
            "+sampler.weights.prose=5",
            "optimizer.lr=0.5",
            "optimizer.weight_decay=0.7",
            "seed=9",
            "~phases.late",
            "+phases.more={start_step: 60, lr_scale: 2.0}",
            "~data.sources.encodings",
            NEW,
            "scheduler=wsd",
            "train.clip_norm=null",
            "model.dropout=0.3",
        ]
    ),
    unique=True,
    max_size=4,
)


@pytest.mark.slow
@given(changes=CHANGES, more=CHANGES)
@settings(max_examples=10)
def test_a_branch_records_the_settings_of_its_trunk(
    trunk: Path, tmp_path_factory: pytest.TempPathFactory, changes: list[str], more: list[str]
) -> None:
    """With the trunk's values, a branch's config equals the trunk's in everything that can change the result."""
    old = load_plain(trunk)
    first = branch(trunk, *changes)
    assert [c for c in differences(old, trunk_values(first.plain)) if c.kind != "free"] == []
    path = frozen(first, tmp_path_factory.mktemp("o") / "first")
    try:
        second = branch(path, *more, step=80)
    except UserError:  # the same key added or removed twice
        return
    there = [c for c in differences(load_plain(path), trunk_values(second.plain)) if c.kind != "free"]
    assert [c for c in there if not c.key.startswith("fork.")] == []


def schedule(config: Any) -> PhaseSchedule:
    return PhaseSchedule(config.phases, source_weights(config), config.sampler.temperature)


def test_branch_follows_the_plan_of_its_trunk_until_the_fork(trunk: Path) -> None:
    made = branch(trunk, "sampler.temperature=3", "optimizer.lr=0.5", "+phases.more={start_step: 60, lr_scale: 2.0}")
    old, new, plan = load(trunk), to_config(made.plain), trained(made.plain)
    factor = 0.5 / old.optimizer["lr"]
    assert plan.optimizer == old.optimizer
    for step in range(101):
        now, then = schedule(plan).at(step), schedule(old if step < 50 else new).at(step)
        scale = then.lr_scale if step < 50 else then.lr_scale * factor
        assert (now.weights, now.temperature, now.lr_scale) == (then.weights, then.temperature, scale), step


def test_added_and_removed_sources_have_shares_only_in_time(trunk: Path) -> None:
    plan = trained(branch(trunk, NEW, "~data.sources.encodings").plain)
    assert schedule(plan).at(49).weights == {"code": 2.0, "prose": 2.0, "more": 0.0}
    assert schedule(plan).at(50).weights == {"code": 2.0, "prose": 2.0, "more": 1.0}


def test_settings_that_no_phase_changes_are_separate(trunk: Path) -> None:
    """Use `fork.was` of the training plan: optimizers are restarted, and generators reseeded, only for it."""
    assert trained(branch(trunk, "optimizer.lr=0.5").plain).fork.was == {}
    assert set(trained(branch(trunk, "optimizer.lr=0.5", "seed=3").plain).fork.was) == {"seed"}
    assert set(trained(branch(trunk, "optimizer.lr=0").plain).fork.was) == {"optimizer.lr"}  # no phase has a factor
    torch = "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}"
    assert "optimizer.lr" in trained(branch(trunk, "optimizer.lr=0.5", "~phases.late", torch).plain).fork.was


def test_a_fork_at_the_step_of_a_fork_begins_both_changes(trunk: Path, tmp_path: Path) -> None:
    first = frozen(branch(trunk, "optimizer.weight_decay=0.7", "seed=4"), tmp_path / "first")
    assert set(trained(branch(first, "train.clip_norm=2").plain).fork.was) >= {"optimizer.weight_decay", "seed"}
    later = trained(branch(first, "train.clip_norm=2", step=60).plain)
    assert set(later.fork.was) == {"train.clip_norm"}
    assert later.seed == load(trunk).seed
    assert later.fork.seed == 4


@pytest.mark.slow
def test_the_identity_has_the_trunk_and_the_step(trunk: Path, tmp_path: Path) -> None:
    one = branch(trunk, "seed=1")
    assert identity(one.plain) == identity(branch(trunk, "seed=1").plain)
    other = frozen(compose([*BASE, "seed=5"]), tmp_path / "other")
    different = [branch(trunk, "seed=1", step=51), branch(trunk, "seed=2"), branch(other, "seed=1"), compose(BASE)]
    assert len({identity(job.plain) for job in (one, *different)}) == 5
    moved = frozen(compose(BASE), tmp_path / "moved" / trunk.name)
    assert branch(moved, "seed=1").run_dir.name == one.run_dir.name
    assert one.run_dir.parent == trunk.parent
    assert one.run_dir.name == f"base-at50-seed1-{identity(one.plain)}"
    longer = frozen(compose([*BASE[:-1], "train.steps=200"]), tmp_path / "longer" / trunk.name)
    assert branch(longer, "seed=1").run_dir.name != one.run_dir.name  # the schedule follows the length


@pytest.mark.slow
def test_sweeps_name_steps_trunks_and_values(trunk: Path, tmp_path: Path) -> None:
    other = frozen(compose([*BASE, "seed=5"]), tmp_path / "other")
    jobs = Composer().jobs([f"fork={trunk}@50,{trunk}@60,{other}@50", "optimizer.lr=0.1,0.2"])
    assert len({job.run_dir for job in jobs}) == 6
    assert {job.run_dir.name[:10] for job in jobs} == {"base-at50-", "base-at60-", "other-at50"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["fork=x"], "must be RUN@STEP, such as fork=outputs/NAME@700"),
        (["fork=x@0"], "must be RUN@STEP"),
        (["fork=@5"], "must be RUN@STEP"),
        (["fork=nothing@5"], "nothing is not a run directory"),
        (["fork.step=5"], "fork.step=5 is filled in for a branch: name its trunk with fork=RUN@STEP"),
        (["fork=TRUNK@5", "fork.step=6"], "fork.step=6 is filled in for a branch: fork=RUN@STEP alone"),
        (["fork=TRUNK@5", "init_from=x"], "init_from=x has no effect on a branch"),
        (["fork=TRUNK@100"], "with train.steps=100 has no steps of its own: raise train.steps, or fork an earlier"),
        (["fork=TRUNK@5", "run.dir=TRUNK"], "is the trunk itself"),
        (["fork=TRUNK@5", "sampler.temperature=-1"], "sampler.temperature=-1.0 must be a finite number above 0"),
    ],
)
def test_refused_in_one_line(trunk: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        compose([text.replace("TRUNK", str(trunk)) for text in overrides])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_config_without_fork_is_no_branch() -> None:
    assert compose([*BASE, "fork=null"]).run_dir == compose(BASE).run_dir
    assert replaced_values({"run": {"dir": "a"}}, {"run": {"dir": "b"}}) == {}

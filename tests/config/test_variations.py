"""Sweep jobs that differ in single values equal Hydra's compositions: config, name, directory, errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from runner.config import composition
from runner.config.composition import Composed, Composer
from runner.errors import UserError

# Overrides of one key each, `|` between values that a job of the sweep may have.
GROUPS = (
    "data=text|mixture",
    "experiment=smoke|anneal",
    "model=gpt_tiny|gpt",
    "optimizer=adamw|sgd",
    "scheduler=cosine|constant",
    "sampler=elastic",
    "launcher=local|slurm",
)
VALUES = (
    "seed=0|1|7",
    "train.steps=50|200|${data.sequence_length}",
    "train.clip_norm=1|0.5|null|1e-3",
    "train.precision=float32|auto|bfloat16",
    "train.global_batch_size=32|64|null",
    "+train.batch_size=4|8|2",
    "train.compile=true|false|yes",
    "data.sequence_length=16|64",
    "data.vocab_size=256|300",
    "data.cache_dir=cache|null|/tmp/cache|${oc.env:HOME}",
    "data.sources.code.split=train|all",
    "data.sources.code.sequence_length=8|${data.vocab_size}|16",
    "+data.eval_sources.copy=${data.sources.code}",
    "+data.eval_sources.more={_target_:runner.data.text.PythonText,source:code}",
    "optimizer.lr=0.1|1e-3|1|${.weight_decay}",
    "optimizer.weight_decay=0.1|0",
    "+optimizer.momentum=0.9|0|null",
    "~scheduler.warmup_steps",
    "sampler.weights.code=1|2|0.5",
    "sampler.temperature=0.5|1|${seed}",
    "phases.late={start_step:5}|{start_step:6}",
    "phases.late.start_step=5|7",
    "eval.sets.own={sources:[code]}",
    "eval.sets.own.batches=3|5",
    "++task.smoothing=0.1|0|true",
    "callbacks.note={_target_:collections.OrderedDict,text:a}|null",
    "callbacks.note.text='a b'|''|'x=1'|\\${seed}",
    "model.layers=2|3",
    "run.name=a|'b c'|null|${seed}|run-${train.steps}",
    "run.root=out|other",
    "strategy=ddp|fsdp",
    "run.name=${strategy}|${train.precision}-${seed}",
    "logger.tensorboard=null",
    "launcher.wait=true|false",
    "run.name=${hydra:runtime.choices.data}|x",
    "run.dir=here/${hydra:job.override_dirname}|here",
    "optimizer={lr:0.5}|{lr:0.25,weight_decay:0}|{lr:0.25}",
    "+scheduler={warmup_steps:3}|{warmup_steps:4}",
    "sampler.weights={code:3}|{code:1,prose:2}|{prose:2}",
    "callbacks={note:{_target_:collections.Counter}}|{other:{_target_:collections.Counter}}",
)
WRONG = (
    "seed=-1|true|null|1.0|${train.stepps}",
    "train.steps=0|1.5|abc|???",
    "train.clip_norm=nan|abc",
    "train.precision=float8",
    "data.sources.code.sequence_length=${.split}|0",
    "sampler.weights.code=x",
    "model._target_=torch.nn.Identity|no.such.Module",
    "model.layers='4'",
    "strategy=ddp|fsdp",
    "train.stepps=1|2",
    "hydra.run.dir=x",
)


def chosen(text: str) -> st.SearchStrategy[list[str]]:
    """Draw the overrides of one key in the jobs: one, or several values."""
    key, _, alternatives = text.partition("=")
    values = alternatives.split("|")
    made = st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)
    return made.map(lambda kept: [f"{key}={value}" if value else key for value in kept])


SWEEPS = st.tuples(
    st.lists(st.sampled_from(GROUPS), max_size=2, unique=True),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=4, unique=True),
    st.sampled_from(((), (), (), *((text,) for text in WRONG))),
).flatmap(lambda found: st.tuples(*map(chosen, [text for part in found for text in part])))


def jobs_of(keys: tuple[list[str], ...]) -> list[list[str]]:
    """Return the combinations of the overrides, six at most."""
    jobs: list[list[str]] = [[]]
    for overrides in keys:
        jobs = [[*job, override] for job in jobs for override in overrides]
    return jobs[:6]


def outcome(composer: Composer, job: list[str], where: Path) -> tuple[object, ...]:
    try:
        made = composer.compose(job, where)
    except UserError as error:
        return type(error), str(error)
    return shown(made)


def shown(made: Composed) -> tuple[object, ...]:
    """Return all parts of a composition; the text distinguishes 1 from 1.0 and true."""
    return made.text, made.run_dir, made.overrides, made.config, repr(made.plain)


@settings(max_examples=10, deadline=None)
@given(keys=SWEEPS)
@pytest.mark.slow
def test_varied_is_composed(keys: tuple[list[str], ...]) -> None:
    """Compare byte for byte, errors included, under any overrides."""
    where, together = Path("/nowhere"), Composer().sweeping()
    for job in jobs_of(keys):
        assert outcome(together, job, where) == outcome(Composer(), job, where), job


@pytest.mark.slow
def test_sweep_of_values_is_composed_once_per_group_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A composition takes 0.1 s, and a sweep may have thousands of jobs."""
    composer, composed = Composer(), list[tuple[str, ...]]()
    compose = composer.tree.compose

    def counted(overrides: Sequence[str]) -> DictConfig:
        composed.append(tuple(overrides))
        return compose(overrides)

    monkeypatch.setattr(composer.tree, "compose", counted)
    jobs = composer.jobs(["optimizer=adamw,sgd", "data.sequence_length=16,32", "optimizer.lr=0.1,1", "seed=range(20)"])
    assert len(jobs) == len({job.run_dir for job in jobs}) == 160
    assert {job.config.data.sources["code"]["sequence_length"] for job in jobs} == {16, 32}
    assert len(composed) < 10


@pytest.mark.slow
def test_varied_is_composed_over_a_trunk(tmp_path: Path) -> None:
    """Vary branches of a run."""
    trunk = Composer().compose(["train.steps=50"], tmp_path)
    trunk.run_dir.mkdir(parents=True)
    (trunk.run_dir / "config.yaml").write_text(trunk.text)
    together = Composer().sweeping()
    for step in (5, 6):
        for lr in ("0.1", "1", "abc"):
            job = [f"fork={trunk.run_dir}@{step}", f"optimizer.lr={lr}", "seed=4"]
            assert outcome(together, job, tmp_path) == outcome(Composer(), job, tmp_path), job


@pytest.mark.parametrize(
    ("override", "other"),
    [
        ("optimizer.lr=0.1", "optimizer.lr=1"),
        ("sampler.weights.code=2", "sampler.weights.code=3"),
        ("+data.eval_sources.copy=${data.sources.code}", "data.sources.code.split=all"),
        ("model._target_=torch.nn.Identity", "model._target_=no.such.Class"),
        ("run.name=${strategy}-${seed}", "strategy=fsdp"),
        ("run.name=${hydra:job.override_dirname}", "seed=3"),
        ("optimizer.lr=0.1", "optimizer={lr:0.5}"),
        ("optimizer.lr=0.1", "+optimizer={lr:0.5}"),
    ],
)
@pytest.mark.slow
def test_single_values_change_values_that_follow_them(override: str, other: str) -> None:
    where, together = Path("/nowhere"), Composer().sweeping()
    changed = override.replace("0.1", "0.2")
    for job in (
        [override, "seed=1"],
        [override, "seed=2"],
        [override, other, "seed=2"],
        [changed, other, "seed=2"],
        [other, "seed=5"],
    ):
        assert outcome(together, job, where) == outcome(Composer(), job, where), job


@pytest.mark.slow
def test_dictionaries_of_one_entry_are_different_entries() -> None:
    """Each sets a single value, but not the same one."""
    where, together = Path("/nowhere"), Composer().sweeping()
    for entry in ("code:3", "prose:2", "code:1"):
        job = [f"sampler.weights={{{entry}}}", "seed=1"]
        assert outcome(together, job, where) == outcome(Composer(), job, where), job


@pytest.mark.slow
def test_the_memory_of_a_sweep_does_not_grow_with_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "KEPT_COMMON", 2)
    composer = Composer()
    phases = ",".join(f"{{start_step:{step},temperature:1}}" for step in range(1, 6))
    jobs = composer.jobs([f"phases.late={phases}", "sampler=elastic", "optimizer=adamw,sgd", "model=gpt_tiny,gpt"])
    assert [job.config.phases["late"].start_step for job in jobs] == [step for step in range(1, 6) for _ in range(4)]
    assert len(composer._common) <= 2

"""Settings without effect, and jobs with the same results, are named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.composition import Composed, Composer
from runner.config.identity import identity
from runner.config.schema import WeightsBy, source_weights
from runner.errors import UserError
from runner.training.effects import effective_digest, same_results, without_effect

EQUAL = "sampler.weights_by=equal"


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def warnings(composer: Composer, *overrides: str) -> list[str]:
    return without_effect(composer.compose(overrides).config)


SILENT = [
    "data=text",
    "data=mixture",
    "data=mixture sampler.temperature=0.7",
    "data=mixture sampler=elastic sampler.weights.prose=3",
    f"data=mixture {EQUAL}",
    f"data=mixture {EQUAL} phases=curriculum sampler.temperature=2",
    "data=mixture sampler.weights_by=sizes sampler.temperature=3",  # the sizes decide
    "experiment=smoke train.steps=5",
    "experiment=anneal",
    "experiment=mixture_curriculum",
    "checkpoint=adaptive checkpoint.min_interval_s=5",
    "scheduler=wsd scheduler.decay_steps=20",
    "data.num_workers=1 data.prefetch_factor=3",
]


@pytest.mark.parametrize("words", SILENT)
def test_settings_that_act_cause_no_warning(composer: Composer, words: str) -> None:
    assert warnings(composer, *words.split()) == []


NAMED = [
    ("sampler.weights.code=3", 'sampler.weights={"code": 3.0} has no effect: code is the only source'),
    ("sampler=elastic sampler.temperature=2", "sampler.temperature=2 has no effect: code is the only source"),
    ("sampler=elastic sampler.drop_last=false", "sampler.drop_last=false has no effect"),
    (f"data=mixture {EQUAL} sampler.temperature=2", "sampler.temperature=2 has no effect: the sources have equal"),
    (
        f"data=mixture sampler=elastic {EQUAL} phases.a.temperature=3 phases.a.start_step=9",
        "phases.a.temperature=3 has no effect: the sources have equal weights",
    ),
    ("sampler.weights_by=sizes", "sampler.weights_by=sizes has no effect: code is the only source"),
    (
        "data=mixture sampler.weights={code:1,prose:1,encodings:2} sampler.weights_by=sizes",
        "sampler.weights_by=sizes has no effect: sampler.weights names every source",
    ),
    ("data=mixture sampler.weights_by=tokens sampler.weights.code=2", "stands beside the tokens of the other sources"),
    ("phases=anneal train.steps=200", "phases.anneal.start_step=200 is never reached: the run ends after 200 steps"),
    ("scheduler=constant scheduler.total_steps=9", "scheduler.total_steps=9 has no effect with scheduler=constant"),
    ("scheduler=constant train.steps=9", "the warmup of 20 steps is longer than the run of 9"),
    ("scheduler.decay_steps=9", "scheduler.decay_steps=9 has no effect with cosine"),
    ("data.prefetch_factor=3", "data.prefetch_factor=3 has no effect without workers"),
    ("checkpoint.max_interval_s=60", "checkpoint.max_interval_s=60 has no effect without checkpoint.adaptive=true"),
    ("data=shards data.sources.tokens.paths=x eval.every_steps=5", "eval.every_steps=5 has no effect"),
    ("eval.every_steps=301 eval.at_end=false", "eval.every_steps=301 has no effect: the run ends after 300 steps"),
    ("+data.loader._target_=builtins.list sampler.exclude=[3] sampler=elastic", "data.loader makes its own batches"),
]


@pytest.mark.parametrize(("words", "said"), NAMED)
def test_a_setting_without_effect_is_named(composer: Composer, words: str, said: str) -> None:
    (line,) = warnings(composer, *words.split())
    assert said in line


def test_a_temperature_needs_a_sampler_that_has_one(composer: Composer) -> None:
    with pytest.raises(UserError, match=r"sampler\.temperature=0\.5 works with several sources"):
        composer.compose(["sampler.temperature=0.5"])


def test_weights_come_from_command_then_rule_then_data(composer: Composer) -> None:
    def weights(*overrides: str) -> dict[str, object]:
        return source_weights(composer.compose(["data=mixture", *overrides]).config)

    assert weights() == {"code": 4.0, "encodings": 1.0, "prose": 2.0}
    assert weights("sampler.weights.prose=3") == {"code": 4.0, "encodings": 1.0, "prose": 3.0}
    assert weights(EQUAL, "sampler.weights.prose=3") == {"code": 1.0, "encodings": 1.0, "prose": 3.0}
    sizes = WeightsBy.sizes
    assert weights("sampler.weights_by=sizes") == {"code": sizes, "encodings": sizes, "prose": sizes}


@pytest.mark.parametrize("removed", ["data.sources.prose=null", "~data.sources.prose"])
def test_a_source_is_removed_with_its_settings(composer: Composer, removed: str) -> None:
    job = composer.compose(["data=mixture", "sampler=elastic", "phases=curriculum", removed])
    assert list(job.config.data.sources) == ["code", "encodings"]
    assert list(source_weights(job.config)) == ["code", "encodings"]
    assert all("prose" not in phase.weights for phase in job.config.phases.values())
    with pytest.raises(UserError, match=r"sampler\.weights\.prose: no such source"):
        composer.compose(["data=mixture", "sampler.weights.prose=3", removed])


@pytest.mark.parametrize("text", ["callbacks.nte=null", "eval.metrics.nope=null"])
def test_missing_sources_cannot_be_dropped(composer: Composer, text: str) -> None:
    with pytest.raises(UserError, match="there is no such entry"):
        composer.compose([text])
    key = text.rpartition(".")[0]
    assert composer.compose([f"+{key}.x._target_=builtins.dict", text.replace("nte", "x").replace("nope", "x")])


def jobs(composer: Composer, *overrides: str) -> list[Composed]:
    return composer.jobs(overrides)


def named(found: list[Composed]) -> list[str]:
    return same_results([(" ".join(job.overrides), job.config, job.plain) for job in found])


def test_jobs_that_give_the_same_results_are_named(composer: Composer) -> None:
    (line,) = named(jobs(composer, "data=mixture", EQUAL, "sampler.temperature=0.5,2"))
    assert line.endswith("they differ only in sampler.temperature, which has no effect here")
    assert len(named(jobs(composer, "sampler.weights.code=1,2,3"))) == 2
    assert len(named(jobs(composer, "scheduler=constant", "scheduler.min_ratio=0.1,0.2"))) == 1
    assert named(jobs(composer, "data=mixture", "sampler.temperature=0.5,2", "seed=1,2")) == []
    assert named(jobs(composer, "data=mixture", "sampler.weights_by=sizes", "sampler.temperature=0.5,2")) == []
    assert named(jobs(composer, "train.steps=20,60")) == []


def test_two_jobs_that_are_one_run_are_refused_with_the_remedy(composer: Composer, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"checkpoint\.every_steps, which does not change what is trained: leave it out"
    ):
        composer.jobs(["checkpoint.every_steps=10,20"])
    with pytest.raises(UserError, match="differ only in length, and nothing depends on it: pass the longest alone"):
        composer.jobs(["scheduler=constant", "train.steps=20,60"])
    assert len(composer.jobs(["checkpoint.every_steps=10,20", "run.name=k${checkpoint.every_steps}"])) == 2
    # Names do not matter: the second experiment is a copy of the first.
    (tmp_path / "experiment").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"experiment/{name}.yaml").write_text("# @package _global_\ntrain:\n  batch_size: 3\n")
    with pytest.raises(UserError, match=r"two jobs of the sweep are the same run .* have the same settings"):
        Composer([tmp_path]).jobs(["experiment=one,two"])


def test_equal_digests_mean_equal_effects(composer: Composer) -> None:
    def digest(*overrides: str) -> str:
        job = composer.compose(overrides)
        return effective_digest(job.config, job.plain)

    base = digest()
    assert digest("data.vocab_size=256") == base
    assert digest("train.steps=300") == base
    assert digest("scheduler.warmup_steps=20") == base
    assert digest("train.grad_accum_steps=1") == base
    others = ["train.steps=301", "scheduler.warmup_steps=19", "sampler=elastic", "phases=anneal"]
    assert len({base, *(digest(other) for other in others)}) == 1 + len(others)


LENGTHS = [  # settings, and whether the length is part of the identity
    ("", True),
    ("scheduler=wsd", True),
    ("scheduler=constant", False),
    ("scheduler.total_steps=50", False),
    ("scheduler=own scheduler._target_=torch.optim.lr_scheduler.StepLR scheduler.step_size=30", False),
    ("scheduler=own scheduler._target_=torch.optim.lr_scheduler.StepLR scheduler.step_size=${train.steps}", True),
    ("optimizers={a:{_target_:torch.optim.SGD,lr:1.0,scheduler:{decay:constant}}}", False),
    ("optimizers={a:{_target_:torch.optim.SGD,lr:1.0,scheduler:{decay:linear}}}", True),
    ("optimizers={a:{_target_:torch.optim.SGD,lr:1.0}}", True),
]


@pytest.mark.parametrize(("words", "read"), LENGTHS)
def test_the_length_counts_where_something_follows_it(composer: Composer, words: str, read: bool) -> None:
    def one(length: str) -> str:
        return identity(composer.compose([*words.split(), length]).plain)

    assert (one("train.steps=40") != one("train.steps=60")) is read
    if "${" not in words:
        assert (one("train.epochs=1") != one("train.epochs=2")) is read


def test_a_path_counts_as_it_was_typed(composer: Composer, tmp_path: Path) -> None:
    """Neither its existence nor the current directory matters."""

    def job(text: str, base: Path) -> Composed:
        node = "{_target_: builtins.dict, root: " + text + ", parts: [{folder: " + text + "}]}"
        return composer.compose(["data=own", f"+data.sources.a={node}", "run.root=/o"], base=base)

    (tmp_path / "b").mkdir()
    before = job("data", tmp_path)
    (tmp_path / "data").mkdir()
    after = job("data", tmp_path)
    assert after.config.data.sources["a"]["root"] == str(tmp_path / "data")
    assert before.run_dir == after.run_dir == job("data", tmp_path / "b").run_dir
    assert before.run_dir != job("other", tmp_path).run_dir
    assert job(str(tmp_path / "data"), tmp_path).run_dir != after.run_dir  # as it was typed

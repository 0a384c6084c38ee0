"""Composition: shipped configs compose, choices combine as documented, freezing loses nothing."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from exactdata.samplers import SamplerKind
from runner.config.composition import Composer
from runner.config.frozen import load, load_plain
from runner.config.hints import expected
from runner.config.identity import differences, flatten, kind_of
from runner.config.schedule import Phase
from runner.config.schema import Config
from runner.config.search_path import conf_dir, groups
from runner.config.tree import opened
from runner.errors import UserError

TREE = groups([conf_dir()])
# What an option needs, or its purpose.
WITH = {
    "data=shards": ["data.sources.tokens.paths=shards"],
    "data=own": ["+data.sources.mine={_target_:runner.data.text.PythonText,source:code}"],
    "data=documents": ["data.sources.web.paths=corpus"],
    "data=files": ["data.sources.text.paths=notes"],
    "sampler=mixture": ["data=mixture"],
    "phases=curriculum": ["data=mixture"],
    "model=own": ["model._target_=torch.nn.Identity"],
    "optimizer=own": ["optimizer._target_=torch.optim.SGD"],
    "sampler=own": ["sampler._target_=torch.utils.data.DistributedSampler"],
    "scheduler=own": ["scheduler._target_=torch.optim.lr_scheduler.StepLR"],
    "task=own": ["task._target_=runner.models.tasks.NextToken"],
}
# Settings that scripts of other projects use by name.
STABLE = """seed run.dir run.name train.steps train.batch_size train.grad_accum_steps data.num_workers
    data.sequence_length sampler.temperature sampler.weights checkpoint.every_steps checkpoint.keep_last
    eval.every_steps""".split()


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def test_all_documented_groups_exist() -> None:
    wanted = "data sampler phases early_stopping checkpoint task model optimizer scheduler launcher".split()
    wanted += ["logger", "experiment", "search"]
    assert sorted(TREE) == sorted(wanted)


@pytest.mark.parametrize(
    "choice", [f"{group}={option}" for group, options in TREE.items() if group != "search" for option in options]
)
@pytest.mark.slow
def test_every_shipped_option_composes(composer: Composer, choice: str) -> None:
    composed = composer.compose([choice, *WITH.get(choice, [])])
    assert isinstance(composed.config, Config)
    assert composed.run_dir.is_absolute()


def test_stable_settings_exist_and_can_be_set(composer: Composer) -> None:
    flat = flatten(composer.compose([]).plain)
    assert [key for key in STABLE if key not in flat] == []
    given = ["seed=7", "train.steps=11", "train.batch_size=3", "train.grad_accum_steps=2", "data.num_workers=1"]
    given += ["data.sequence_length=16", "data=mixture", "sampler.temperature=0.5", "checkpoint.every_steps=5"]
    given += ["checkpoint.keep_last=2", "eval.every_steps=4", "run.name=named", "sampler.weights.code=2"]
    composed = composer.compose(given)
    flat = flatten(composed.plain)
    for setting in set(given) - {"data=mixture"}:
        key, value = setting.split("=")
        assert str(flat[key]).removesuffix(".0") == value
    assert composed.run_dir.name.startswith("named-")
    # Values that are interpolated from a setting follow it.
    assert composed.plain["model"]["sequence_length"] == 16
    assert composed.plain["data"]["sources"]["code"]["sequence_length"] == 16


def test_mixture_data_selects_the_mixture_sampler(composer: Composer) -> None:
    def kind(*overrides: str) -> SamplerKind:
        return composer.compose(overrides).config.sampler.kind

    assert kind() is SamplerKind.distributed
    assert kind("data=mixture") is SamplerKind.mixture
    assert kind("data=mixture", "sampler=elastic") is SamplerKind.elastic
    assert kind("sampler=elastic", "data=mixture") is SamplerKind.elastic
    assert kind("experiment=mixture_curriculum") is SamplerKind.elastic
    assert kind("experiment=mixture_curriculum", "sampler=mixture") is SamplerKind.mixture


def test_command_line_beats_experiments_beat_groups(composer: Composer) -> None:
    assert composer.compose([]).config.train.steps != 20
    assert composer.compose(["experiment=smoke"]).config.train.steps == 20
    assert composer.compose(["experiment=smoke", "train.steps=5"]).config.train.steps == 5
    assert composer.compose(["train.steps=5", "experiment=smoke"]).config.train.steps == 5


def test_dictionaries_merge_and_lists_replace(composer: Composer) -> None:
    merged = composer.compose(["experiment=mixture_curriculum", "sampler.weights.prose=9"]).config.sampler.weights
    assert merged == {"code": 1.0, "encodings": 0.3, "prose": 9.0}
    given = composer.compose(["experiment=mixture_curriculum", "sampler.weights={prose:9}"]).config.sampler.weights
    assert given == merged
    assert composer.compose(["optimizer.betas=[0.8,0.9]"]).plain["optimizer"]["betas"] == [0.8, 0.9]


def test_new_phases_and_weights_need_no_plus(composer: Composer) -> None:
    config = composer.compose(["phases.late.start_step=30", "phases.late.weights.code=2", "phases.late.lr_scale=0.5",
                               "sampler=elastic"]).config  # fmt: skip
    assert config.phases == {"late": Phase(start_step=30, weights={"code": 2.0}, lr_scale=0.5)}
    assert opened("sampler.weights.a=[1]") == "++sampler.weights={a:[1]}"
    assert opened("~sampler.weights.a") == "~sampler.weights.a"
    assert opened("sampler.temperature=2") == "sampler.temperature=2"


def test_a_frozen_config_loads_as_it_was_composed(composer: Composer, tmp_path: Path) -> None:
    overrides = [
        "experiment=mixture_curriculum",
        "optimizer.eps=1e-12",
        "train.clip_norm=null",
        "launcher=slurm",
        r"launcher.setup=['export A=\${HOME}']",
        "launcher.comment='1e3'",
        "launcher.python='yes'",
    ]
    composed = composer.compose(overrides, base=tmp_path)
    (tmp_path / "config.yaml").write_text(composed.text)
    assert load(tmp_path) == composed.config
    assert load_plain(tmp_path) == composed.plain
    assert composed.plain["launcher"]["setup"] == ["export A=${HOME}"]
    assert composed.plain["checkpoint"]["mode"] == "async"


def test_frozen_config_needs_no_config_tree_or_environment(
    composer: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_TEST", "worth keeping")
    composed = composer.compose(["callbacks.mine._target_=builtins.dict", "callbacks.mine.note=${oc.env:RUNNER_TEST}"])
    (tmp_path / "config.yaml").write_text(composed.text)
    monkeypatch.delenv("RUNNER_TEST")
    assert load(tmp_path).callbacks["mine"]["note"] == "worth keeping"


def test_an_override_may_replace_an_unresolvable_value(tmp_path: Path) -> None:
    """Compose a config that reads an unset environment variable, in a sweep and alone."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\ndata: {cache_dir: '${oc.env:RUNNER_TEST_UNSET}/cache'}\n"
    )
    composer, overrides = Composer([tmp_path], "mine"), ["data.cache_dir=here", "optimizer.lr=0.5"]
    composed = composer.compose(overrides, tmp_path)
    assert composed.config.data.cache_dir == str(tmp_path / "here")
    assert composed.run_dir.name.startswith("text-lr0.5-seed0-")
    assert composer.sweeping().compose(overrides, tmp_path).run_dir == composed.run_dir
    with pytest.raises(UserError, match="RUNNER_TEST_UNSET"):
        composer.compose(["optimizer.lr=0.5"], tmp_path)


@pytest.mark.parametrize("text", ["", "seed: [", "- 1", "seed: x", "train:\n  stps: 3", "seed: -4", "\0\1"])
def test_each_error_of_a_frozen_config_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml") as error:
        load(tmp_path)
    for line in str(error.value).splitlines():
        assert str(tmp_path) in line


def test_a_missing_frozen_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        load(tmp_path)


class TestRecompose:
    """The job of an existing run: its frozen config with overrides."""

    @pytest.fixture
    def run(self, composer: Composer, tmp_path: Path) -> Path:
        composed = composer.compose(
            ["data=mixture", "sampler=elastic", "phases=curriculum", "logger=none", r"launcher.gpus=['\${x}']",
             "+data.sources.z={_target_:builtins.dict}", "+data.sources.a={_target_:builtins.dict}",
             f"run.dir={tmp_path}/run"]
        )  # fmt: skip
        composed.run_dir.mkdir()
        (composed.run_dir / "config.yaml").write_text(composed.text)
        return composed.run_dir

    def test_without_overrides_it_is_the_frozen_config(self, composer: Composer, run: Path) -> None:
        assert composer.recompose(run, []).text == (run / "config.yaml").read_text()
        assert composer.recompose(run, []).run_dir == run

    def test_overrides_apply_to_the_frozen_values(self, composer: Composer, run: Path) -> None:
        overrides = [
            "train.steps=900",
            "sampler.weights.prose=3",
            "phases.late.start_step=800",
            "+optimizer.fused=true",
        ]
        changes = differences(load_plain(run), composer.recompose(run, overrides).plain)
        assert {change.key: change.new for change in changes} == {
            "train.steps": 900, "sampler.weights.prose": 3.0, "optimizer.fused": True, "phases.late.start_step": 800,
            "phases.late.weights": {}, "phases.late.temperature": None, "phases.late.lr_scale": 1.0,
        }  # fmt: skip

    def test_choosing_an_option_replaces_the_values_of_its_group(self, composer: Composer, run: Path) -> None:
        plain = composer.recompose(run, ["launcher=slurm", "launcher.partition=gpu", "scheduler=wsd"]).plain
        assert plain["launcher"] == composer.compose(["launcher=slurm", "launcher.partition=gpu"]).plain["launcher"]
        assert (plain["scheduler"]["decay"], plain["sampler"]["kind"]) == ("wsd", "elastic")

    def test_a_moved_run_stays_where_it_is(self, composer: Composer, run: Path, tmp_path: Path) -> None:
        moved = run.rename(tmp_path / "moved")
        assert composer.recompose(moved, []).plain["run"]["dir"] == str(moved)
        with pytest.raises(UserError, match=r"run\.dir=x cannot move the run"):
            composer.recompose(moved, ["run.dir=x"])

    def test_all_errors_are_reported(self, composer: Composer, run: Path) -> None:
        with pytest.raises(UserError) as error:
            composer.recompose(run, ["launcher=slrum", "train.stps=3", "train.batch_size=0", "checkpoint.keep_last=0"])
        lines = str(error.value).splitlines()
        assert len(lines) == 4
        for words in ("launcher=slrum: no such option of launcher (did you mean 'slurm'?)", "did you mean 'steps'?"):
            assert any(words in line for line in lines)
        with pytest.raises(UserError, match="is missing"):
            composer.recompose(run.parent / "nowhere", [])


class TestShow:
    """The output of Hydra's own flags."""

    def test_config_groups_of_further_directories_are_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "mine.yaml").write_text("_target_: builtins.dict\nsize: ${data.vocab_size}\n")
        flags = ["--cfg=job", "--resolve", "--package=model"]
        assert Composer([tmp_path]).show(flags, ["model=mine", "sampler.weights.new=1"]) == 0
        assert capsys.readouterr().out == "# @package model\n_target_: builtins.dict\nsize: 256\n"
        root = logging.getLogger()
        before = root.level, list(root.handlers)
        assert Composer([tmp_path]).show(["--info=searchpath"], []) == 0
        assert str(tmp_path) in capsys.readouterr().out
        assert (root.level, list(root.handlers)) == before

    def test_a_config_that_does_not_compose_is_diagnosed(self, composer: Composer) -> None:
        for _ in range(2):  # the first call leaves no state behind
            with pytest.raises(UserError, match="did you mean 'mixture'") as error:
                composer.show(["--cfg=job"], ["data=mixtrue"])
            assert len(str(error.value).splitlines()) == 1


def test_interpolations_of_hydra_resolve(composer: Composer) -> None:
    own = ["callbacks.mine._target_=builtins.dict", "callbacks.mine.a=${hydra:runtime.choices.data}"]
    plain = composer.compose(["data=mixture", *own, "callbacks.mine.b=${hydra:job.name}"]).plain
    assert (plain["callbacks"]["mine"]["a"], plain["callbacks"]["mine"]["b"]) == ("mixture", "runner")


@pytest.mark.promise("your config file with the name of a shipped one is refused, not ignored")
def test_user_option_with_a_shipped_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    for name in ("sgd", "mine"):
        (tmp_path / "optimizer" / f"{name}.yaml").write_text("_target_: builtins.dict\nlr: 7\n")
    shutil.copy(conf_dir() / "optimizer" / "adamw.yaml", tmp_path / "optimizer")
    composer = Composer([tmp_path])
    with pytest.raises(UserError, match=r"optimizer=sgd is ambiguous: .* differs from .*/sgd\.yaml; give that file"):
        composer.compose(["optimizer=sgd"])
    assert composer.compose(["optimizer=mine"]).plain["optimizer"]["lr"] == 7
    assert composer.compose([]).plain["optimizer"]["lr"] != 7, "a copy of the shipped file is no other option"


@pytest.mark.parametrize("override", ["phases=none", "phases={}"])
def test_the_phases_of_an_experiment_are_not_removed_together(tmp_path: Path, override: str) -> None:
    (tmp_path / "experiment").mkdir()
    experiment = "# @package _global_\nphases: {late: {start_step: 5, lr_scale: 0.1}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(experiment)
    composer = Composer([tmp_path])
    with pytest.raises(UserError, match=f"{re.escape(override)} has no effect: phases has late from "):
        composer.compose(["experiment=mine", override])
    assert composer.compose(["experiment=mine", "~phases.late"]).plain["phases"] == {}
    own = [override, "phases.own.start_step=3", "phases.own.lr_scale=0.5"]
    assert list(composer.compose(own).plain["phases"]) == ["own"]


def test_relative_paths_resolve_against_the_current_directory(composer: Composer, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    plain = composer.compose(
        [
            "data=files",
            "data.sources.text.paths=[notes,/abs/x.txt]",
            "data.cache_dir=cache",
            "run.root=results",
            "+data.sources.own={_target_:builtins.dict,path:mine,root:hub/name}",
            "sampler=elastic",
        ],
        base=tmp_path,
    ).plain
    assert plain["data"]["sources"]["text"]["paths"] == [str(tmp_path / "notes"), "/abs/x.txt"]
    assert plain["data"]["eval_sources"]["text"]["paths"] == [str(tmp_path / "notes"), "/abs/x.txt"]
    assert plain["data"]["cache_dir"] == str(tmp_path / "cache")
    assert plain["data"]["sources"]["text"]["cache_dir"] == str(tmp_path / "cache")
    assert plain["run"]["root"] == str(tmp_path / "results")
    assert plain["run"]["dir"].startswith(str(tmp_path / "results"))
    # For a user's class only existing files are paths.
    own = plain["data"]["sources"]["own"]
    assert own == {"_target_": "builtins.dict", "path": str(tmp_path / "mine"), "root": "hub/name"}
    given = composer.compose(["run.dir=here/it/is"], base=tmp_path)
    assert given.run_dir == tmp_path / "here" / "it" / "is"


def test_every_key_of_the_schema_has_a_kind_and_a_type() -> None:
    """Each new option needs a decision whether an existing run may change it."""
    assert {field.name for field in fields(Config)} == set(Composer().compose([]).plain)
    kinds: dict[str, Any] = {
        "train.steps": "edit", "run.threads": "edit", "run.name": "free",
        "launcher.partition": "free", "logger": "free", "eval.batches": "free",
        "callbacks": "free", "callbacks.mine.every": "free", "train.profile": "free", "train.on_callback_error": "free",
        "data.num_workers": "free", "data.sources.code.cache_dir": "free", "train.batch_size": "shape",
        "train.global_batch_size": "shape", "sampler.weights.code": "data", "phases": "data",
        "data.sources.code.source": "data", "seed": "fixed", "model.width": "fixed", "optimizer.lr": "fixed",
    }  # fmt: skip
    assert {key: kind_of(key) for key in kinds} == kinds
    assert expected("train.grad_accum_steps") == "a whole number or null"
    assert expected("scheduler.decay") == "one of constant, linear, cosine, wsd, rex"
    assert expected("phases.x.weights.code") == "a number"
    assert expected("model.width") == ""


class TestIdentity:
    """The same run has the same directory, another run a different one."""

    @pytest.mark.parametrize(
        "free",
        [
            "launcher=slurm",
            "logger=none",
            "+callbacks.mine._target_=builtins.dict",
            "train.profile=3:4",
            "checkpoint.every_steps=7",
            "checkpoint=adaptive",
            "eval.every_steps=0",
            "data.num_workers=2",
            "data.cache_dir=elsewhere",
            "eval.at_end=false",
            "train.device=cpu",
            "seed=0",  # its default
            "sampler.weights={}",
        ],
    )
    @pytest.mark.slow
    def test_values_that_cannot_change_the_result_are_left_out(self, composer: Composer, free: str) -> None:
        assert composer.compose([free]).run_dir == composer.compose([]).run_dir

    @pytest.mark.parametrize(
        "other",
        [
            "seed=1",
            "run.threads=3",
            "train.steps=1000",
            "train.epochs=1",
            "model.width=64",
            "optimizer.lr=0.1",
            "train.batch_size=8",
            "train.grad_accum_steps=2",
            "sampler=elastic",
            "sampler.shuffle=false",
            "data=mixture",
            "scheduler.total_steps=50",
            "data.sequence_length=64",
            "sampler.weights={code: 3}",
        ],
    )
    @pytest.mark.slow
    def test_values_that_can_change_the_result_are_included(self, composer: Composer, other: str) -> None:
        assert composer.compose([other]).run_dir != composer.compose([]).run_dir

    def test_the_split_of_a_fixed_global_batch_is_left_out(self, composer: Composer) -> None:
        whole = "train.global_batch_size=32"
        first = composer.compose([whole, "train.batch_size=16"])
        assert composer.compose([whole, "train.batch_size=8", "train.grad_accum_steps=4"]).run_dir == first.run_dir
        assert composer.compose(["train.global_batch_size=64"]).run_dir != first.run_dir

    def test_identity_ignores_directory_and_order_of_overrides(self, composer: Composer, tmp_path: Path) -> None:
        one = composer.compose(["data=mixture", "seed=3", "sampler.weights.prose=2", "sampler.weights.code=4"])
        two = composer.compose(
            ["sampler.weights.code=4.0", "sampler.weights.prose=2", "seed=3", "data=mixture"], base=tmp_path
        )
        assert one.run_dir.name == two.run_dir.name
        assert two.run_dir.parent == tmp_path / "outputs"

    def test_the_order_of_sources_is_included(self, composer: Composer) -> None:
        def with_sources(*names: str) -> Path:
            nodes = [f"+data.sources.{name}={{_target_:builtins.dict,name:{name}}}" for name in names]
            return composer.compose(["sampler=elastic", *nodes]).run_dir

        assert with_sources("a", "b") != with_sources("b", "a")

    def test_names_are_readable(self, composer: Composer) -> None:
        name = composer.compose(["data=mixture", "sampler.temperature=0.7", "model.width=64", "seed=5"]).run_dir.name
        assert name.rpartition("-")[0] == "mixture-width64-temperature0.7-seed5"
        assert composer.compose(["experiment=smoke"]).run_dir.name.startswith("smoke-seed0-")
        options = [f"+model.option_number_{i}=a_rather_long_value" for i in range(30)]
        long = composer.compose(["model=own", "model._target_=builtins.dict", *options]).run_dir.name
        assert 120 < len(long) < 200


def test_differences_name_key_values_and_kind(composer: Composer) -> None:
    old = composer.compose(["phases=anneal"]).plain
    new = composer.compose(["model.width=64", "train.steps=7", "train.batch_size=8", "sampler.weights.code=2"]).plain
    found = {change.key: change for change in differences(old, new)}
    assert (found["model.width"].old, found["model.width"].new, found["model.width"].kind) == (96, 64, "fixed")
    assert found["train.steps"].kind == "edit"
    assert found["train.batch_size"].kind == "shape"
    assert found["sampler.weights.code"].kind == found["phases.anneal.lr_scale"].kind == "data"
    assert "sampler.weights" not in found
    assert "phases" not in found
    assert str(found["model.width"]) == "model.width: 96 -> 64"
    assert differences(old, old) == []


class TestSweep:
    def test_all_combinations_with_the_last_key_varying_fastest(self, composer: Composer) -> None:
        jobs = composer.expand(["seed=1,2", "data=mixture", "sampler.temperature=range(1,3)"])
        assert jobs == [[f"seed={s}", "data=mixture", f"sampler.temperature={t}"] for s in (1, 2) for t in (1, 2)]

    def test_groups_globs_and_new_keys(self, composer: Composer) -> None:
        assert composer.expand(["scheduler=glob(c*)"]) == [["scheduler=constant"], ["scheduler=cosine"]]
        assert composer.expand(["+model.x=1,2"]) == [["+model.x=1"], ["+model.x=2"]]
        assert [job.config.sampler.weights for job in composer.jobs(["sampler.weights.code=1,2"])] == [
            {"code": 1.0},
            {"code": 2.0},
        ]

    @pytest.mark.slow
    def test_errors_of_all_jobs_come_in_one_message_each_once(self, composer: Composer) -> None:
        with pytest.raises(UserError) as error:
            composer.jobs(["seed=1,2,-3", "train.steps=0", "sampler.temperature=1,-1"])
        lines = str(error.value).splitlines()
        assert len(lines) == 3
        assert lines[0].startswith("job 1 (seed=1 ")
        assert "train.steps=0" in lines[0]
        assert "job 5" in next(line for line in lines if "seed=-3 must" in line)

    @pytest.mark.slow
    def test_two_jobs_that_are_the_same_run_are_an_error(self, composer: Composer) -> None:
        with pytest.raises(UserError, match=r"\(seed=1 .*\) and \(seed=1 .*\)"):
            composer.jobs(["seed=1,1", "data=mixture"])
        with pytest.raises(UserError, match="the same run"):
            composer.jobs(["seed=1,2", "run.dir=one"])

    def test_run_dirs_may_follow_the_values(self, composer: Composer, tmp_path: Path) -> None:
        jobs = composer.jobs(["seed=1,2", f"run.dir={tmp_path}/${{seed}}"])
        assert [job.run_dir for job in jobs] == [tmp_path / "1", tmp_path / "2"]

    @pytest.mark.slow
    def test_sweep_in_a_config(self, tmp_path: Path) -> None:
        folder = tmp_path / "experiment"
        folder.mkdir()
        text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 4,5\ntrain:\n  steps: 9\n"
        (folder / "many.yaml").write_text(text)
        jobs = Composer([tmp_path]).jobs(["experiment=many"])
        assert [job.config.seed for job in jobs] == [4, 5]
        assert Composer([tmp_path]).jobs(["experiment=many", "seed=6"])[0].config.seed == 6

"""Hydra's own settings in config files: sweep parameters count; settings without effect are errors."""

from __future__ import annotations

from pathlib import Path

import cli_fixtures
import pytest
from hydra.core.config_store import ConfigStore

from runner.config.composition import Composer
from runner.errors import UserError

SWEPT = {
    "a": "hydra: {sweeper: {params: {seed: '1,2'}}}",
    "b": "hydra: {sweeper: {params: {optimizer.lr: '0.1,0.2', seed: 3}}}",
    "plain": "train: {steps: 9}",
    "wrong": "train: {stps: 9}",
}


SETTINGS = [
    ("run: {dir: here}", "hydra.run.dir=here", "run.dir=..."),
    ("sweep: {dir: there}", "hydra.sweep.dir=there", "run.root=..."),
    ("sweep: {subdir: x}", "hydra.sweep.subdir=x", "run.root=..."),
    ("job: {chdir: true}", "hydra.job.chdir=true", "run.dir=..."),
    ("job: {env_set: {A: b}}", "hydra.job.env_set.A=b", "launcher.setup"),
    ("mode: MULTIRUN", "hydra.mode=MULTIRUN", "-m"),
    ("sweeper: {max_batch_size: 3}", "hydra.sweeper.max_batch_size=3", "-m"),
    ("sweeper: {direction: minimize}", "hydra.sweeper.direction", "-m seed=1,2"),
    ("launcher: {n_jobs: 3}", "hydra.launcher.n_jobs", "launcher=slurm"),
    ("callbacks: {x: {_target_: my.Callback}}", "hydra.callbacks.x._target_=my.Callback", "callbacks.NAME._target_"),
]
NO_MISTAKE = "{job: {name: x, chdir: null}, verbose: false, help: {app_name: x}, sweeper: {params: {}}}"
INTERVAL = "hydra: {sweeper: {params: {optimizer.lr: 'interval(0.1, 1)'}}}"
PLUGINS = {
    "optuna": f"defaults:\n  - override /hydra/sweeper: optuna\n{INTERVAL}",
    "my_optuna": f"defaults:\n  - override /hydra/sweeper: my_optuna\n{INTERVAL}",
    "submitit_slurm": "defaults:\n  - override /hydra/launcher: submitit_slurm",
    "my_slurm": "defaults:\n  - override /hydra/launcher: my_slurm",
}
"""Those called my_... are as if they were installed."""
EXPERIMENTS = {
    **SWEPT,
    **PLUGINS,
    **{f"setting{number}": f"hydra: {{{text}}}" for number, (text, _, _) in enumerate(SETTINGS)},
    "fine": f"hydra: {NO_MISTAKE}",
    "interval": INTERVAL,
}


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a config directory with the `EXPERIMENTS` and a primary config."""
    conf = tmp_path_factory.mktemp("own") / "conf"
    (conf / "experiment").mkdir(parents=True)
    for name, text in EXPERIMENTS.items():
        (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    (conf / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {run: {dir: here}, job: {chdir: true}}\n")
    node = {"_target_": "plugin.X", "direction": "minimize", "params": None}
    for group, name in (("sweeper", "my_optuna"), ("launcher", "my_slurm")):
        ConfigStore.instance().store(group=f"hydra/{group}", name=name, node=node, provider="a plugin")
    cli_fixtures.UNCHANGED.add(conf)
    return conf


def errors(conf: Path, *overrides: str, sweep: bool = False) -> list[str]:
    composer = Composer([conf])
    with pytest.raises(UserError) as error:
        composer.jobs(overrides) if sweep else composer.compose(overrides)
    return str(error.value).splitlines()


def test_each_experiment_of_a_sweep_brings_its_own_parameters(conf: Path) -> None:
    expand = Composer([conf]).expand
    lr = [["optimizer.lr=0.1"], ["optimizer.lr=0.2"]]
    of_a = [["seed=1", "experiment=a"], ["seed=2", "experiment=a"]]
    assert expand(["experiment=a,b"]) == [*of_a, *([*each, "seed=3", "experiment=b"] for each in lr)]
    assert expand(["experiment=plain,a"]) == [["experiment=plain"], *of_a]
    assert expand(["experiment=plain,wrong"]) == [["experiment=plain"], ["experiment=wrong"]]


def test_command_line_beats_parameters_of_experiments(conf: Path) -> None:
    jobs = Composer([conf]).expand(["experiment=a,b", "seed=7"])
    assert jobs == [
        ["seed=7", "experiment=a"],
        ["optimizer.lr=0.1", "seed=7", "experiment=b"],
        ["optimizer.lr=0.2", "seed=7", "experiment=b"],
    ]


def test_a_sweep_over_options_without_parameters_keeps_its_order(conf: Path) -> None:
    jobs = Composer([conf]).expand(["seed=1,2", "data=text,mixture"])
    assert jobs == [[f"seed={seed}", f"data={data}"] for seed in (1, 2) for data in ("text", "mixture")]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_setting_of_hydras_without_effect_is_one_line(conf: Path, number: int) -> None:
    _, setting, remedy = SETTINGS[number]
    for sweep in (False, True):
        (line,) = errors(conf, f"experiment=setting{number}", sweep=sweep)
        assert setting in line
        assert remedy in line
        assert "no effect here" in line


def test_primary_config_is_checked_with_all_other_errors(conf: Path) -> None:
    with pytest.raises(UserError) as error:
        Composer([conf], "mine").compose(["trin.steps=3"])
    assert [line.partition(" ")[0] for line in str(error.value).splitlines()] == [
        "trin.steps=3:",
        "hydra.run.dir=here",
        "hydra.job.chdir=true",
    ]


def test_ineffective_hydra_settings_in_a_command_are_errors(conf: Path) -> None:
    for setting in ("hydra.job.chdir=true", "hydra.job.env_set.A=b", "hydra.callbacks.x=null"):
        (line,) = errors(conf, setting)
        assert line.startswith(f"{setting} has no effect here: ")


def test_hydra_settings_with_default_values_are_no_errors(conf: Path) -> None:
    assert Composer([conf]).compose(["experiment=fine"]).config.seed == 0


@pytest.mark.parametrize("name", PLUGINS)
def test_hydra_plugin_of_an_experiment_is_one_line(conf: Path, name: str) -> None:
    """Name a plugin that is installed, and one that is not."""
    of_sweeps = [f"hydra/sweeper={name}", "sweepers are not used", "comma-separated", "range(...)", "choice(...)"]
    of_launchers = [f"hydra/launcher={name}", "launchers are not used", "launcher=slurm"]
    for sweep in (False, True):
        (line,) = errors(conf, f"experiment={name}", sweep=sweep)
        for word in of_sweeps if "optuna" in name else of_launchers:
            assert word in line


def test_an_interval_in_an_experiment_names_the_parameter(conf: Path) -> None:
    (line,) = errors(conf, "experiment=interval", sweep=True)
    assert line.startswith("optimizer.lr=interval(0.1, 1): an interval cannot be enumerated")

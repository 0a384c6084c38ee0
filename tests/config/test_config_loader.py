"""How often the config tree is read and merged, for any number of jobs and errors in a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from runner.config.composition import Composer
from runner.errors import UserError

pytestmark = pytest.mark.usefixtures("config_files_read_anew")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the reads of each config file."""
    counts, load = Counter[str](), OmegaConf.load

    def counted(file: Any) -> Any:
        counts[str(getattr(file, "name", file))] += 1
        return load(file)

    monkeypatch.setattr(OmegaConf, "load", counted)
    return counts


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list with an entry for each merge of config files."""
    made, merge = list[Any](), ConfigLoaderImpl._compose_config_from_defaults_list

    def counted(loader: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        made.append(defaults)
        return merge(loader, defaults, repo)

    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", counted)
    return made


def own_tree(where: Path, primary: str = "defaults: [config, _self_]\n") -> Path:
    """Make a directory with a primary config, mine.yaml, and an option model=mine."""
    (where / "model").mkdir(parents=True)
    (where / "mine.yaml").write_text(primary)
    (where / "model" / "mine.yaml").write_text("_target_: builtins.dict\nsize: 1\n")
    return where


def test_file_edited_while_composing_changes_no_job(tmp_path: Path) -> None:
    tree = own_tree(tmp_path)

    def edited(jobs: Collection[list[str]]) -> Iterator[list[str]]:
        for job in jobs:
            yield job
            (tree / "model" / "mine.yaml").write_text("_target_: builtins.dict\nsize: 2\n")
            (tree / "mine.yaml").unlink(missing_ok=True)

    jobs = Composer([tree], "mine").jobs(["model=mine", "optimizer=adamw,sgd"], edited)
    assert [job.plain["model"]["size"] for job in jobs] == [1, 1]
    assert [job.plain["optimizer"]["_target_"].rpartition(".")[2] for job in jobs] == ["AdamW", "SGD"]
    assert Composer([tree]).compose(["model=mine"]).plain["model"]["size"] == 2


@pytest.mark.slow
def test_a_sweep_reads_each_file_once(tmp_path: Path, reads: Counter[str]) -> None:
    """Include a sweep whose primary config adds a directory."""
    own = own_tree(tmp_path / "own", f"defaults: [config, _self_]\nhydra: {{searchpath: [{tmp_path}/more]}}\n")
    more = own_tree(tmp_path / "more") / "model" / "other.yaml"
    more.write_text("_target_: builtins.dict\nsize: 3\n")
    sweep = ["experiment=smoke,anneal", "model=gpt,mine,other", "seed=1,2", "train.clip_norm=0.5,1"]
    jobs = Composer([own], "mine").jobs(sweep)
    assert len({job.run_dir for job in jobs}) == 24
    assert reads[str(more)] == reads[str(own / "mine.yaml")] == reads[str(own / "model/mine.yaml")] == 1
    assert len(reads) > 20
    assert set(reads.values()) == {1}


@pytest.mark.parametrize(
    ("overrides", "merged", "lines"),
    [
        (["experiment=smoke"], 2, 0),
        (["data=mixture", "seed=3", "train.steps=9"], 2, 0),
        (["train.stpes=3"], 2, 1),
        (["experiment=smoke", "seed=3", "train.stpes=3", "train.batch_size=x", "optimizer.lr=-1", "run.name=x"], 2, 3),
        (["optimizer.lr=${nope}", "seed=x"], 3, 2),
        (["experiment=smok"], 1, 1),
        (["optimizer=sgd", "experiment=smok", "train.stpes=3", "launcher=slrum"], 2, 2),
    ],
)
def test_more_errors_do_not_merge_files_more_often(
    merges: list[Any], overrides: list[str], merged: int, lines: int
) -> None:
    """Files are merged again only for the run's name, without its settings, or to find errors among them."""
    found = ""
    try:
        Composer().compose(overrides)
    except UserError as error:
        found = str(error)
    assert (len(merges), len(found.splitlines())) == (merged, lines), found


@pytest.mark.slow
def test_compositions_do_not_affect_each_other() -> None:
    """No change to one config appears in the next one, which equals the result of a new composer."""
    composer = Composer()
    changed = [
        "train.steps=7",
        "+logger.extra={_target_: builtins.dict, a: 1}",
        "~optimizer.betas",
        "eval.sets.x.batches=3",
        "+logger.mine=null",
    ]
    for job in (["experiment=smoke"], ["experiment=smoke", *changed], ["experiment=smoke"]):
        assert composer.compose(job).text == Composer().compose(job).text
    assert "extra" not in composer.compose(["experiment=smoke"]).text

"""Sources named in a command: each begins with `data.source`, which is not part of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.config.composition import Composed, Composer
from runner.config.frozen import load_plain
from runner.config.template import TrialComposer
from runner.errors import UserError

OPTION = """
defaults: [override /sampler@_global_.sampler: elastic]
sources: {}
eval_sources: {}
source:
  _target_: rows_of_documents.Rows
  paths: ???
  packing: best_fit
  tokenizer: bytes
  sequence_length: ${data.sequence_length}
sequence_length: 32
"""
EXPERIMENT = """# @package _global_
defaults: [override /data: rows]
data: {sources: {book: {paths: b, packing: none}}}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("conf")
    for name, text in {"data/rows": OPTION, "experiment/mine": EXPERIMENT}.items():
        path = directory / f"{name}.yaml"
        path.parent.mkdir()
        path.write_text(text)
    return directory


@pytest.fixture(scope="module")
def composer(tree: Path) -> Composer:
    return Composer([tree])


def source(paths: Any, **values: Any) -> dict[str, Any]:
    usual = {"packing": "best_fit", "tokenizer": "bytes", "sequence_length": 32}
    return {"_target_": "rows_of_documents.Rows", "paths": paths, **usual, **values}


def sources(composed: Composed) -> dict[str, Any]:
    return dict(composed.plain["data"]["sources"])


def test_new_sources_need_no_plus_and_get_common_settings(composer: Composer, tmp_path: Path) -> None:
    composed = composer.compose(
        [
            "data=rows",
            "data.sources.web={paths:a,text:body}",
            "data.sources.code.paths=[x,y]",
            "data.sources.code.packing=stream",
            "data.source.tokenizer=tok.json",
            "data.sequence_length=64",
            "data.eval_sources.web=${data.sources.web}",
            "+data.sources.own={_target_:builtins.dict,a:3}",
        ],
        base=tmp_path,
    )
    web = source("a", text="body", tokenizer="tok.json", sequence_length=64)
    code = source(["x", "y"], packing="stream", tokenizer="tok.json", sequence_length=64)
    assert sources(composed) == {"web": web, "code": code, "own": {"_target_": "builtins.dict", "a": 3}}
    assert composed.plain["data"]["eval_sources"] == {"web": web}


def test_run_has_whole_sources_however_they_are_written(composer: Composer, tmp_path: Path) -> None:
    short = composer.compose(["data=rows", "data.sources.web.paths=a"], base=tmp_path)
    written = source("a", sequence_length="${data.sequence_length}")
    text = ",".join(f"{name}:{value}" for name, value in written.items())
    long = composer.compose(
        ["data=own", "sampler=elastic", "data.sequence_length=32", f"+data.sources.web={{{text}}}"], base=tmp_path
    )
    assert "source" not in short.plain["data"]
    assert short.digest == long.digest
    assert short.run_dir.name == f"rows-pathsa-seed0-{short.digest}"  # without what all sources have
    (tmp_path / "config.yaml").write_text(short.text)
    again = composer.recompose(tmp_path, ["data.sources.web.packing=stream"])
    assert sources(again) == {"web": source("a", packing="stream")}
    assert load_plain(tmp_path) == short.plain


def test_sources_of_an_experiment_are_completed_set_and_removed(composer: Composer) -> None:
    given = ["experiment=mine", "data.sources.web.paths=a"]
    both = {"book": source("b", packing="none"), "web": source("a")}
    assert sources(composer.compose(given)) == both
    assert sources(composer.compose([*given, "data.sources.book.paths=c"]))["book"]["paths"] == "c"
    for removal in ("~data.sources.book", "data.sources.book=null"):
        assert sources(composer.compose([*given, removal])) == {"web": both["web"]}


VARIED = ["data=rows", "data.sources.web.paths=a", "data.sources.web.packing=best_fit,stream"]
WANTED = [{"web": source("a")}, {"web": source("a", packing="stream")}]


def test_a_sweep_varies_a_named_source(tree: Path) -> None:
    assert list(map(sources, Composer([tree]).jobs(VARIED))) == WANTED


def test_a_search_varies_a_named_source(tree: Path, tmp_path: Path) -> None:
    trials = TrialComposer([tree])
    _, fixed, dimensions = trials.search([*VARIED, "search=grid"])
    frozen = trials.freeze(fixed, dimensions, tmp_path)
    points = [{"data.sources.web.packing": value} for value in ("best_fit", "stream")]
    assert [sources(trials.compose_point(frozen, point, tmp_path)) for point in points] == WANTED


def test_hydras_own_listing_shows_whole_sources(composer: Composer, capsys: pytest.CaptureFixture[str]) -> None:
    assert composer.show(["--cfg=job", "--package=data"], ["data=rows", "data.sources.web.paths=a"]) == 0
    shown = capsys.readouterr().out
    assert "  web:\n    _target_: rows_of_documents.Rows\n    paths: a\n" in shown
    assert "sequence_length: ${data.sequence_length}" in shown
    assert "source:" not in shown


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=rows", "data.sources.web.paths=a", "data.sources.web.txet=b"], "data.sources.web.txet=b: .*'text'"),
        (["data=rows", "data.sources.web.paths=a", "data.source.pakcing=b"], "data.source.pakcing=b: .*'packing'"),
        (["data=rows", "data.sources.web.paths=a", "data.sources.wbe=null"], "data.sources.wbe=null: .*'web'"),
        (["data=rows", "data.sources.web.text=a"], "data.sources.web.paths must be given"),
        (["data=rows", "data.sources.paths=a"], "or write data.sources.NAME.paths=a"),
        (["data=rows"], "data.sources is empty: .*data.sources.NAME.paths="),
        (["data=text", "data.sources.cod.split=eval"], "data.sources.cod.split=eval: no such option .*'code'"),
    ],
)
def test_mistake_in_a_named_source_gets_the_nearest_name(composer: Composer, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        composer.compose(overrides)


def test_tokenizer_is_a_path_only_where_it_exists(composer: Composer, tmp_path: Path) -> None:
    given = ["data=rows", "data.sources.web.paths=a", "data.sources.web.tokenizer=tok"]
    word = composer.compose(given, base=tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "bytes").mkdir()
    path = composer.compose(given, base=tmp_path)
    assert sources(word)["web"]["tokenizer"] == "tok"
    assert sources(path)["web"]["tokenizer"] == str(tmp_path / "tok")
    assert word.digest == path.digest
    assert sources(composer.compose(given[:2], base=tmp_path))["web"]["tokenizer"] == "bytes"

"""Errors of `exactdata` name settings in the runner, and arguments everywhere else."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from composing import compose

import exactdata.elastic
import runner.data
from exactdata import SamplerStateError
from runner.config.identity import identity
from runner.data.messages import _WORDS, words_of_config
from runner.errors import UserError


def test_each_argument_is_in_a_message_of_exactdata() -> None:
    """A setting is still named after a message is changed."""
    source = "".join(path.read_text() for path in Path(exactdata.elastic.__file__).parent.rglob("*.py"))
    joined = " ".join(line.strip().strip('"').strip() for line in source.replace('f"', '"').splitlines())
    assert [words for words in _WORDS if words not in joined] == []


def test_only_messages_of_exactdata_are_changed() -> None:
    message = "the data order differs: pass allow_data_change=True to go on"
    changed = r"^the data order differs: set run\.allow_data_change=true to go on$"
    with pytest.raises(SamplerStateError, match=changed), words_of_config():
        raise SamplerStateError(message)
    with pytest.raises(UserError, match="pass allow_data_change=True"), words_of_config():
        raise UserError(message)


def test_both_names_of_a_target_are_one_run(tmp_path: Path) -> None:
    words = ["data=shards", f"data.sources.tokens.paths={tmp_path}", "data.vocab_size=100"]
    old, new = (
        compose([*words, f"data.sources.tokens._target_={package}.shards.TokenShards"]).plain
        for package in ("runner.data", "exactdata")
    )
    assert identity(old) == identity(new)
    assert old["data"]["sources"] == new["data"]["sources"]


def test_both_names_of_a_module_are_one_module() -> None:
    renamed = import_module("runner.data.order.weights")
    assert runner.data.ElasticSampler is exactdata.ElasticSampler
    assert renamed is import_module("exactdata.order.weights")
    assert renamed.__spec__ is not None
    assert renamed.__spec__.name == "exactdata.order.weights"
    with pytest.raises(ModuleNotFoundError, match=r"runner\.data\.nothing"):
        import_module("runner.data.nothing")
    with pytest.raises(AttributeError, match=r"'runner\.data' has no attribute 'nothing'"):
        _ = runner.data.nothing

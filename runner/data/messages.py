"""Translate the messages of `exactdata`, which name arguments, into the settings of a config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from exactdata import errors

_WORDS = {
    "pass allow_data_change=True": "set run.allow_data_change=true",
    "set vocab_size": "set data.vocab_size",
    "set collate_fn": "set data.collate._target_",
    "ElasticSampler resumes": "sampler=elastic resumes",
    "DistributedSampler shuffles": "sampler=distributed shuffles",
    "use ElasticSampler": "use sampler=elastic",
}


@contextmanager
def words_of_config() -> Iterator[None]:
    """Make errors of `exactdata` raised in the block name settings instead of arguments."""
    try:
        yield
    except errors.UserError as error:
        if type(error) is not errors.UserError and type(error).__module__.startswith("exactdata."):
            text = str(error)
            for argument, setting in _WORDS.items():
                text = text.replace(argument, setting)
            error.args = (text,)
        raise

"""The runner's entries in the train state: a missing entry is an error, never a default."""

from __future__ import annotations

from dataclasses import fields

import pytest
from resume import through_a_file

from exactdata.order.batch_shape import BatchShape
from exactdata.order.ledger import DataLedger
from runner.errors import CheckpointError
from runner.training.data.consumption import ElasticConsumption
from runner.training.records.run_state import RunState

STATE = RunState(
    order={"ledger": {"digest": "0" * 32}},
    evaluated=True,
    threads=2,
    batch_shapes=(BatchShape(0, 4, 8), BatchShape(30, 3, 8, grad_accum_steps=2)),
    data_plan={"weights": {"code": 1.0}, "temperature": 0.7},
    samples_seen=1120,
    callbacks={"samples": {"drawn": 3}},
    dropped_callbacks={"other": "0" * 16},
)


def test_run_state_is_restored_from_a_train_state() -> None:
    assert RunState.from_extra(through_a_file({"step": 40, **STATE.to_extra()})) == STATE


@pytest.mark.parametrize("name", [each.name for each in fields(RunState)])
def test_a_missing_entry_is_an_error_that_names_it(name: str) -> None:
    extra = STATE.to_extra()
    del extra[name]
    with pytest.raises(CheckpointError, match=f"the train state has no '{name}'"):
        RunState.from_extra(extra)


def test_a_batch_shape_with_unknown_fields_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="batch_shapes"):
        RunState.from_extra({**STATE.to_extra(), "batch_shapes": [{"step": 0, "ranks": 2}]})


def test_an_order_without_its_ledger_is_an_error_that_names_it() -> None:
    consumption = ElasticConsumption(None, None, DataLedger(["code"], [10]), tokens_per_sample={"code": 16})
    with pytest.raises(CheckpointError, match="'ledger'"):
        consumption.load_state_dict({})

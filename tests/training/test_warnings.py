"""Warnings of any module are shown, and recorded in the status, during an attempt."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.training.job import LocalJob
from runner.training.records.warnings import LOGGERS, WarningHandler

MESSAGE = "step 5 could not be saved: 100% full"


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarningHandler]:
    # Printing a config in this process lets Hydra add a handler to the root logger, on a stream that is closed by now.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = AttemptLog.begin(RunDir(tmp_path), LocalJob().identity(), 10, lambda record: "killed")
    handler = WarningHandler(log)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    yield handler
    handler.remove()


def recorded(path: Path) -> list[str]:
    return list(json.loads(RunDir(path).status.read_text())["warnings"])


def test_a_warning_is_printed_and_recorded(
    handler: WarningHandler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("runner.checkpoint.manager").warning(MESSAGE)
    logging.getLogger("runner.checkpoint.manager").info("saved")
    logging.getLogger("other").warning("not ours")
    assert recorded(tmp_path) == [MESSAGE]
    assert capsys.readouterr().err == f"warning: {MESSAGE}\n"


def test_a_warning_in_a_loader_worker_does_not_touch_the_status(
    handler: WarningHandler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler._pid += 1  # the handler was installed in the parent process
    logging.getLogger("exactdata.loading.workers").warning(MESSAGE)
    assert recorded(tmp_path) == []
    assert MESSAGE in capsys.readouterr().err

"""Any single refused write causes no traceback and no loss, and rerunning the command finishes the run."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from tiny_attempts import STEPS, attempt, contents, tiny_attempts

from runner.errors import ExitStatus
from runner.system.files import read_lines
from runner.training import attempt as training_attempt


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with tiny_attempts() as patch:
        patch.setattr(training_attempt, "_print_traceback", lambda error: pytest.fail(f"a traceback: {error!r}"))
        yield


def make(path: Path) -> Path:
    path.mkdir()
    return path


def problems(path: Path, expected: dict[str, bytes]) -> list[str]:
    """Return differences of a run that should have finished like another one."""
    found = contents(path)
    wrong = [name for name in ("metrics.jsonl", "finished.json", "order.json") if found.get(name) != expected[name]]
    wrong += [name for name in found if ".tmp-" in name]
    wrong += [name for name in expected if name.startswith("checkpoints/") and name not in found]
    lines = list(read_lines(path / "attempts.jsonl"))
    if [line["attempt"] for line in lines] != list(range(1, len(lines) + 1)) or lines[-1]["cause"] != "finished":
        wrong.append(f"attempts {[(line['attempt'], line['cause']) for line in lines]}")
    if json.loads(found["attempt.json"]) != {} or json.loads(found["status.json"])["state"] != "finished":
        wrong.append("the status")
    return wrong


CODES = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS)


@pytest.mark.parametrize(
    ("code", "stride"), [(errno.ENOSPC, 7), *(pytest.param(code, 1, marks=pytest.mark.slow) for code in CODES)]
)
def test_a_single_refused_change_loses_nothing(
    code: int, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fail each file-changing call of an attempt once; a rerun then finishes the run."""
    with faults.intercepted() as trace:
        assert attempt(make(tmp_path / "whole")) == ExitStatus.FINISHED
    expected = contents(tmp_path / "whole")
    failures: dict[str, Any] = {}
    ends: list[int] = []
    for at, call in list(enumerate(trace.calls))[::stride]:
        path = make(tmp_path / str(at))
        capsys.readouterr()
        with faults.intercepted(faults.failing(at, code)):
            ends.append(attempt(path))
        printed = capsys.readouterr().err
        if ends[-1] not in (ExitStatus.FINISHED, ExitStatus.FAILED, ExitStatus.USAGE):
            failures[f"{at} {call}"] = f"exit status {ends[-1]}"
        elif ends[-1] and printed.count("error:") != 1:
            failures[f"{at} {call}"] = printed
        if ends[-1]:
            assert attempt(path, restart_count=1) == ExitStatus.FINISHED, capsys.readouterr().err
        if wrong := problems(path, expected):
            failures[f"{at} {call}"] = wrong
    assert not failures, failures
    # A transient error ends an attempt only while it acquires the lease, and in the last save.
    assert ends.count(0) > 0.6 * len(ends)


def test_the_steps_of_the_tests_save_and_delete(tmp_path: Path) -> None:
    """Check that an attempt saves twice and deletes once."""
    path = make(tmp_path / "run")
    assert attempt(path) == ExitStatus.FINISHED
    assert [line["step"] for line in read_lines(path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == [f"step_{STEPS:08d}"]

"""The script of the README, killed and restarted, and its queries of the checkpoint, with real output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import exactdata
from exactdata.inspection import main

README = Path(exactdata.__file__).parent / "README.md"


def blocks(kind: str) -> list[str]:
    if not README.exists():
        pytest.skip("an installed package has no README.md beside it")
    return re.findall(rf"```{kind}\n(.*?)```", README.read_text(), re.DOTALL)


def trained(script: Path, until: int | None = None) -> list[str]:
    """Return the lines that the script prints. With `until`, kill it as soon as it has printed that many."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=script.parent, env=environment
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if len(lines) == until:
                process.kill()
        assert process.wait() == (0 if until is None else -9)
    return lines


@pytest.mark.promise("the README of exactdata: killed in step 14 and continued, every step as without the kill")
def test_the_script_continues_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("python")
    assert len([line for line in source.splitlines() if line and not line.startswith(("import", "from"))]) <= 20
    script = tmp_path / "train.py"
    script.write_text(source)
    first = trained(script, until=14)
    step = len(first) // 10 * 10  # step of the last checkpoint; the kill may come a few steps later
    assert main(["inspect", str(tmp_path / "last.pt"), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["position"] == 8 * step
    rest = trained(script)
    (tmp_path / "last.pt").unlink()
    whole = trained(script)
    assert first == whole[: len(first)]
    assert first[:step] + rest == whole
    run, asked = blocks("text")
    shown = [line for line in run.splitlines(keepends=True) if re.match(r"\d+ \[", line)]
    assert set(shown) <= set(whole)
    assert len(shown) > 5
    assert "position 80: samples read by all ranks" in asked


def test_wrong_questions_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = exactdata.TrainerLoader({"code": [1, 2, 3], "prose": [4]}, global_batch_size=2, num_replicas=1)
    next(iter(loader))
    (tmp_path / "place.json").write_text(json.dumps({"nested": [loader.state_dict()]}))
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "script.py").write_text("import os")
    for words, message in (
        (["place.json", "--sample", "cod:1"], "unknown source (did you mean 'code'?); the sources are code, prose"),
        (["place.json", "--sample", "code:3"], "expected an index from 0 to 2, as in code:0"),
        (["place.json", "--next", "0"], "--next 0: expected 1 to 1,048,576 positions"),
        (["place.json", "--positions", "5"], "--positions 5: expected"),
        (["none.json"], "no state of an elastic order in it: pass a file in which TrainerLoader.state_dict() was"),
        (["script.py"], "neither JSON nor a file of plain values and tensors"),
        (["gone.json"], "No such file"),
        (["."], "is a folder: pass the file in it"),
    ):
        assert main(["inspect", str(tmp_path / words[0]), *words[1:]]) == 2
        captured = capsys.readouterr()
        assert message in captured.err, words
        assert captured.err.count("\n") == 1
    assert main(["inspect", str(tmp_path / "place.json"), "--positions", "0-1", "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out)
    indices = [row["index"] + 3 * (row["source"] == "prose") for row in rows]
    assert indices == loader.elastic_sampler.indices_at(np.arange(2)).tolist()

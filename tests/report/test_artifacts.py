"""Check that the report lists a run's images and texts, embeds as many as fit, and counts the rest."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
from reported import losses, write_run

import runner
from runner.cli.look.report import results
from runner.metrics.media import file_name, png
from runner.report.media import MAX_FILE_BYTES, embedded
from runner.rundir.artifacts import artifacts
from runner.rundir.paths import RunDir

IMAGE = png(np.zeros((4, 4, 3), np.uint8))


def run_with(root: Path, contents: dict[str, bytes]) -> Path:
    run = write_run(root / "outputs" / "x", losses([2.0, 1.0]))
    for name, content in contents.items():
        path = run / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return run


def test_logged_artifacts_are_listed_by_name_and_step(tmp_path: Path) -> None:
    """Use the logged names. Leave out foreign files and links."""
    names = [file_name("a/b c", 20, "png"), file_name("a/b c", 3, "png"), file_name("said-1", 123456789, "txt")]
    run = run_with(tmp_path, dict.fromkeys([*names, "notes.txt", "x-00000001.jpg"], IMAGE))
    (run / "artifacts" / "link-00000001.txt").symlink_to("/etc/hostname")
    found = artifacts(RunDir(run))
    assert [(one.name, one.step, one.is_image) for one in found] == [
        ("a/b c", 3, True),
        ("a/b c", 20, True),
        ("said-1", 123456789, False),
    ]
    assert found[0].read() == IMAGE
    assert artifacts(RunDir(tmp_path)) == []


def test_python_api_has_the_data_of_the_report(tmp_path: Path) -> None:
    run = runner.Run(run_with(tmp_path, {"said-00000002.txt": "é".encode()}))
    (said,) = run.artifacts()
    assert (said.name, said.step, said.text()) == ("said", 2, "é")
    assert list(run.timings()["step_s"]) == [0.5, 0.5]
    (run.path / "code.json").write_text('{"repositories": {"/code": {"commit": "abc", "diff_digest": "d"}}}')
    assert run.code == {"runner": None, "commit of /code": "abc", "uncommitted changes in /code": "d"}
    assert run.environment == {"python": None, "platform": None, "node": None, "ranks": None}


def test_as_many_as_fit_are_embedded_and_the_rest_is_counted(tmp_path: Path) -> None:
    """Embed the last step of each name first, then the first step, then steps between.

    Leave out files that are not PNG.
    """
    texts = {f"said-{step:08d}.txt": b"x" * 100 for step in range(1, 10)}
    images = {f"drawn-{step:08d}.png": IMAGE for step in (1, 2)}
    run_with(
        tmp_path, {**texts, **images, "odd-00000001.png": b"<svg>", "big-00000001.txt": b"x" * (MAX_FILE_BYTES + 1)}
    )
    runs = results([tmp_path / "outputs"])
    (everything,), note = embedded(runs)
    assert {name: [step for step, *_ in found] for name, found in everything.items()} == {
        "drawn": [1, 2],
        "said": list(range(1, 10)),
    }
    assert base64.b64decode(everything["drawn"][0][2]) == IMAGE
    assert note.startswith("2 of 13 images and texts are left out: this page holds 3 MB")
    (some,), note = embedded(runs, most=2 * len(base64.b64encode(IMAGE)) + 390)
    assert [step for step, *_ in some["said"]] == [1, 5, 9]
    assert [step for step, *_ in some["drawn"]] == [1, 2]
    assert note.startswith("8 of 13 ")

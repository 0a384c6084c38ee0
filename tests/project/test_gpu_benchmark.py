"""Check that `make gpu` is ready for a few minutes on a GPU: its parts work, and it names missing ones."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import Future
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import here
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import results
from benchmarks.__main__ import main
from benchmarks.gpu import command
from benchmarks.gpu.report import Report
from benchmarks.results import table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test empty tables."""
    monkeypatch.setattr(results, "RECORDED", {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sped"], "no part sped; there are exactness, speed, saving, ranks, start"),
        (["--minutes", "0"], "--minutes 0 must be more than 0"),
        (["--keep", "none.json"], "not a file that this command has written (FileNotFoundError"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpu", *words])
    assert said in capsys.readouterr().err


def test_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.missing() == []
    monkeypatch.setattr(command, "NEEDED", ["torch", "hydra_of_lerna", "json"])
    monkeypatch.setattr(command, "DISTRIBUTIONS", {"hydra_of_lerna": "hydra-of-lerna"})
    with pytest.raises(SystemExit):
        main(["gpu"])
    assert "not installed: hydra-of-lerna: pip install hydra-of-lerna; without a network" in capsys.readouterr().err


def test_the_folder_of_wheels_is_complete() -> None:
    """Include indirect requirements, except torch and numpy, which every machine with a GPU has."""
    lines = (ROOT / "benchmarks/gpu/wheels.txt").read_text().splitlines()
    listed = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    needed = {canonicalize_name(command.DISTRIBUTIONS.get(name, name)) for name in command.NEEDED}
    open_ends = needed | listed
    for name in listed:
        for text in requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_ends.add(canonicalize_name(requirement.name))
    assert open_ends - listed == {"torch", "numpy"}


@pytest.mark.usefixtures("recorded")
def test_failed_step_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the file is complete after each step, because a process may be stopped at any time."""
    report = Report(tmp_path / "part.json", "a GPU")
    found = table("gpu-a", "what")
    report.step("divides", lambda: found.add("row", "ratio", 1 / 0))
    report.step("is elsewhere", lambda: found.add("row", "ratio", 3.0), unless="there is no other")
    report.step("works", lambda: found.add("row", "ratio", 2.0, at_most=1))
    whole = Report(tmp_path / "whole.json")
    whole.add("the part", report.file, "its process ended with status 1")
    whole.add("another", tmp_path / "never-written.json", "stopped after 3 s")
    assert (
        results.RECORDED["gpu-a"].markdown()
        == "| what | ratio | goal |\n| --- | --- | --- |\n| row | 2.00 **missed** | at most 1 |\n"
    )
    assert list(whole.summary()) == [
        "missed: gpu-a: row, ratio: 2.00 (at most 1)",
        "not run: is elsewhere: there is no other",
        "FAILED: divides: ZeroDivisionError: division by zero",
        "FAILED: the part: its process ended with status 1",
        "FAILED: another: stopped after 3 s",
    ]
    assert "divides: FAILED: ZeroDivisionError" in capsys.readouterr().err
    assert json.loads(report.file.read_text())["gpu"] == "a GPU"


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    assert command.ended("start", tmp_path / "start.json", 0.05) == "stopped after 0 s, which were left of --minutes"


@pytest.mark.usefixtures("recorded")
def test_parts_without_time_left_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "gpu.json"
    assert main(["gpu", "saving", "--minutes", "0.1", "--out", str(out)]) == 0
    reason = json.loads(out.read_text())["not_run"]["saving"]
    assert re.fullmatch(r"it needs 30 s, and \d s were left of --minutes", reason)
    assert f"not run: saving: {reason}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_the_figures(signum: int, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks", "gpu", "saving", "ranks", "--minutes", "50", "--out", str(out)]
    words += ["--folder", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  stall of a save: "):
                process.send_signal(signum)
    assert process.returncode == 1
    assert "Traceback" not in "".join(lines)
    found = json.loads(out.read_text())
    assert set(found["tables"]) >= {"gpu-copies", "gpu-stall"}
    assert found["failed"] == {"saving": "interrupted"}
    assert found["not_run"] == {**NO_STREAMS, "ranks": "interrupted"}
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_figures_of_a_gpu_are_kept_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    results.PAGE.write_text("<!-- figures: gpu-a -->\n\nNot measured.\n\n<!-- end of figures -->\n")
    file, entry = tmp_path / "gpu.json", {"date": "2026-11-27", "machine": "one H100", "heading": "what"}
    content: dict[str, Any] = {"gpu": "", "tables": {"gpu-a": {**entry, "figures": []}}}
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        main(["gpu", "--keep", str(file)])
    assert "its figures were taken without a GPU" in capsys.readouterr().err
    content["gpu"] = "one H100"
    content["tables"]["gpu-a"]["figures"] = [{"row": "stall", "column": "time", "value": 2.0, "unit": "ms"}]
    file.write_text(json.dumps(content))
    assert main(["gpu", "--keep", str(file)]) == 0
    assert "| stall | 2 ms |\n\n2026-11-27: one H100.\n" in results.PAGE.read_text()
    assert set(results.kept()) == {"gpu-a"}


def test_every_table_has_its_place_in_the_docs() -> None:
    places = set(re.findall(r"<!-- figures: (gpu-\S+) -->", (ROOT / "docs/project/benchmarks.md").read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "benchmarks/gpu").glob("*.py"))
    assert places == set(re.findall(r'table\(\s*"(gpu-[a-z-]+)"', sources))


@pytest.mark.slow
def test_save_with_wrong_content_is_detected(tmp_path: Path) -> None:
    from benchmarks.gpu.saving import Training

    training = Training(tmp_path / "checkpoints", rows=1)
    training.step()
    expected = {name: tensor.detach().clone() for name, tensor in training.tensors.items()}
    training.save()
    training.step()
    training.wait()
    assert training.differing(expected) == 0
    now = {name: tensor.detach().clone() for name, tensor in training.tensors.items()}
    assert training.differing(now) > len(now) / 2


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_differing_runs_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import exactness
    from benchmarks.gpu.runs import Run

    monkeypatch.setattr(exactness, "STEPS", 6)
    one, two = (
        Run(here.trained(tmp_path / f"seed-{seed}", f"seed={seed}", "optimizer.lr=1e-4"), []) for seed in (1, 2)
    )
    jobs = {"a case": Future[exactness.Judgement]()}
    jobs["a case"].set_result(exactness.judged([], one, two))
    found = table("gpu-exactness", "what")
    with pytest.raises(RuntimeError, match="not the same after a kill: step 1, loss"):
        exactness.add(exactness.Case("a case", []), jobs, found)
    exactness.add(exactness.Case("a case", [], exact=False), jobs, found)
    values = {figure.column: figure.value for figure in found.figures}
    assert values["that differ"] == values["steps"] == 9  # with three evaluations
    assert 1e5 < values["distance of the weights / their norm"] < 2e6  # about sqrt(2) for weights drawn independently
    assert [path.name for path in tmp_path.iterdir()] == []


NO_STREAMS = {"the control of it": "a CPU has no streams"}
PARTS = {
    "exactness": ({"gpu-exactness"}, {}),
    "speed": ({"gpu-speed", "gpu-invariant", "gpu-data-wait"}, {}),
    "saving": ({"gpu-copies", "gpu-stall", "gpu-memory"}, NO_STREAMS),
    "ranks": ({"gpu-ranks"}, {}),
    "start": ({"gpu-start"}, {}),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this is for machines without a GPU: run make gpu")
@pytest.mark.parametrize("part", PARTS)
def test_every_part_works_on_a_cpu_with_small_sizes(part: str, tmp_path: Path) -> None:
    """Find mistakes here, so that they cost no GPU time."""
    out = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks", "gpu", part, "--minutes", "50", "--out", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    tables, not_run = PARTS[part]
    assert set(found["tables"]) == tables
    assert found["not_run"] == not_run
    figures = [figure for each in found["tables"].values() for figure in each["figures"]]
    assert all(figure["value"] == 0 for figure in figures if figure.get("at_most") == 0)
    if part == "exactness":
        rows = {figure["row"] for figure in figures}
        assert len(rows) == 10  # with two ranks, which every CPU supports
        assert sum(figure["value"] == 0 for figure in figures) == 2 * len(rows)  # deterministic or not

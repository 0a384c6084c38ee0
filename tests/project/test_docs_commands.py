"""The commands of every page, given in order in a directory of its own: they run, and do what the page says."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_pages
import here
import pytest
from docs_pages import PAGES, ROOT
from fake_slurm import FakeSlurm, slurm

from runner.report.goodput import BUCKETS

__all__ = ["slurm"]


def shown(page: str, beginning: str) -> str:
    """Return the block of a page that begins with `beginning`."""
    return next(block.text for block in docs_pages.blocks(ROOT / "docs" / page) if block.text.startswith(beginning))


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def callbacks(folder: Path, _: str) -> None:
    run = folder / "outputs" / "watched"
    evaluations = [record for record in records(run) if "eval_loss" in record]
    assert evaluations
    for record in evaluations:
        assert 0 < record["predicted"] < 1
        assert (run / "artifacts" / f"sample-{record['step']:08d}.txt").read_text().startswith("def ")
        assert (run / "artifacts" / f"predictions-{record['step']:08d}.png").stat().st_size > 1000


def logging(folder: Path, _: str) -> None:
    (run,) = (folder / "outputs").iterdir()
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "attempt1-rank0.json"
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if name.startswith("step ")} == {f"step {number}" for number in range(10, 16)}
    for record in records(run, "timings.jsonl"):
        parts = sum(record[f"{part}_s"] for part in ("data_wait", "communication", "compute"))
        assert parts == pytest.approx(record["step_s"])
        assert 10**7 < record["memory_bytes"] < 10**11


def branch(folder: Path, printed: str) -> None:
    assert " at step 10 of 20 in " in printed
    assert " has no checkpoint of step 12: it has those of steps 5, 10, 15, 20; fork one of those\n" in printed
    names = sorted(each.name.rpartition("-")[0] for each in (folder / "outputs").iterdir() if each.name != "trunk")
    expected = ["cooldown", "trunk-at10-lr0.0001-seed0", "trunk-at10-seed1", "trunk-at10-seed2"]
    assert [name for name in names if name[:1] not in (".", "")] == expected
    assert shown("branch.md", "initial weights").replace("/home/ann", str(folder)) in printed
    assert f"initial weights from {folder}/outputs/base at step 20:\n  loaded 28 tensors" in printed


def which_run(_: Path, printed: str) -> None:
    def runs(text: str) -> list[str]:
        """Return the lines about runs without the hash, which every new setting changes."""
        return [re.sub(r"-[0-9a-f]{8}:", ":", line) for line in text.splitlines() if line.startswith("outputs/smoke")]

    expected = runs(shown("which-run.md", "$ "))
    assert len(expected) == 2
    assert runs(printed)[:2] == expected
    assert "outputs/long: resuming at step 10 of 20: it had finished at step 10, and is longer now\n" in printed


def housekeeping(folder: Path, printed: str) -> None:
    assert "pinned: 10" in printed
    assert "finished, all 20 steps" in printed
    left = sorted(path.name for path in (folder / "outputs").iterdir())
    assert left == ["baseline-1a2b3c4d", "report.html", "wide"]  # the last two are of the commands after these


def compare(folder: Path, printed: str) -> None:
    assert json.loads((folder / "runs.json").read_text()).keys() >= {"runs", "groups"}
    assert len(list(csv.DictReader((folder / "runs.csv").read_text().splitlines()))) == 4
    assert len(list(csv.DictReader((folder / "steps.csv").read_text().splitlines()))) == 4 * 40
    assert (folder / "told.txt").read_text() == "4 of 4 runs finished\n"
    for file in ("outputs/report.html", "sweep.html"):
        assert (folder / file).stat().st_size > 1000
    for line in shown("compare.md", "run ").splitlines():
        if line and line != "..." and not re.search(r"\d", line):  # the heads of the tables
            assert re.search(r"\s+".join(map(re.escape, line.split())).replace("share", r".*share"), printed), line
    where_the_hours_went(folder, printed)


def where_the_hours_went(folder: Path, printed: str) -> None:
    assert BUCKETS["useful"] in printed
    answer = re.search(r"^\{.*?^\}$", printed, re.DOTALL | re.MULTILINE)
    assert answer is not None
    found = json.loads(answer[0])
    assert list(found["goodput"]) == list(BUCKETS) == list(found["runs"][0]["goodput"])
    assert {"weeks", "attempts_without_account"} <= found.keys()
    assert {"seconds", "kept_s", "saves"} <= records(folder / "killed" / "often", "attempts.jsonl")[0].keys()


def a_warm_start_that_does_not_fit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = ("data.sequence_length=64", "init_from=base.safetensors", "run.dir=outputs/longer")
    assert here.command("experiment=smoke", *other) == 2
    assert capfd.readouterr().err.replace(f"{folder}/", "") == shown("branch.md", "error: init_from")
    assert not (folder / "outputs" / "longer").exists()


def evaluate(_: Path, printed: str) -> None:
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    expected = re.sub(
        r"\d\.\d{4}", r"\\d\\.\\d{4}", re.escape(shown("evaluate.md", "step  eval_loss")).replace(r"\.", ".")
    )
    assert re.search(expected, lines), lines
    assert '"overrides": [\n      "eval.batches=8"\n    ]' in lines


def load(folder: Path, _: str) -> None:
    assert (folder / "base.safetensors").is_file()
    names: dict[str, Any] = {}
    exec(compile(docs_pages.python(ROOT / "docs" / "python.md"), "docs/python.md", "exec"), names)
    assert names["loaded"].step in (10, 20)
    assert names["loaded"].config.model["width"] == 32


CHECKS: dict[str, Callable[[Path, str], None]] = {
    "own-steps.md": callbacks,
    "compare.md": compare,
    "logging.md": logging,
    "branch.md": branch,
    "housekeeping.md": housekeeping,
    "evaluate.md": evaluate,
    "python.md": load,
    "which-run.md": which_run,
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if docs_pages.given(page)], ids=docs_pages.named)
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Submissions are to a Slurm that is faked."""
    slurm.prints("scontrol_show_partition", "PartitionName=gpu Default=YES MaxTime=1-0 Nodes=n1\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "docs").symlink_to(ROOT / "docs")  # pages name their examples as seen from the clone
    for name, text in docs_pages.modules(page).items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [str(folder), *sys.path])
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for block in docs_pages.given(page):
        docs_pages.give(block.setup, folder)
        docs_pages.give(block.text, folder, block.status, block.extra)
    out, err = capfd.readouterr()
    if page.name in CHECKS:
        CHECKS[page.name](folder, out + err)
    if page.name == "branch.md":
        a_warm_start_that_does_not_fit(folder, capfd)

"""`runner checkpoints`: list, verify, prune, export and diff."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import Toy, manager, names
from faults import reads_intercepted
from safetensors.torch import load_file

from runner.__main__ import run as command
from runner.checkpoint.files import choice
from runner.checkpoint.files.directory import Directory
from runner.metrics.progress import size
from runner.rundir import evaluations
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock, files


def main(arguments: list[str]) -> int:
    return command(["checkpoints", *arguments])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    toy, saving = Toy(), manager(run / "checkpoints")
    for step in (1, 2, 3):
        toy.train()
        toy.save(saving, metric=1.0 / step)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def corrupt(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step_{step:08d}" / "rank_00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def test_the_list_names_the_metric_and_the_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "(best: min)" in line] == ["3"]
    assert main([str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows if row["best"]] == [3]
    assert {row["metric_name"] for row in rows} == {"eval_loss"}


@pytest.mark.promise("the best checkpoint is the best of all evaluated ones, whenever they were evaluated")
def test_a_result_that_came_after_the_save_counts_for_the_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy, saving = Toy(), manager(run / "checkpoints", keep_last=9)
    toy.train(3)
    for _ in range(3):
        toy.train()
        toy.save(saving)
    for step, others, loss in ((1, {}, 0.0), (5, {}, 0.2), (6, {"overrides": ["eval.batches=1"]}, 0.1)):
        evaluations.add(RunDir(run), {"step": step, "eval_loss": loss, "digest": "0" * 8, **others})
    assert main([str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {row["step"]: row["metric"] for row in rows} == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: None, 5: 0.2, 6: None}
    assert [row["step"] for row in rows if row["best"]] == [5]
    assert choice.choose(Directory(run / "checkpoints"), "best").manifest.metric is None, "it is the one on the disk"


def test_a_list_reads_manifests_only_and_verify_every_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt(run, 3)
    (run / "checkpoints" / "step_00000009.corrupt").mkdir()
    assert main([str(run)]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()[2:5]] == ["1", "2", "3"]
    assert "set aside: step_00000009.corrupt" in listed
    assert main([str(run), "--verify"]) == 1
    out = capsys.readouterr().out
    assert out.count("verified") == 2
    assert "corrupt: rank_00000.safetensors was changed after it was written" in out
    assert names(run / "checkpoints")[:3] == ["step_00000001", "step_00000002", "step_00000003"]


def test_json_is_complete(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run / "checkpoints"), "--json", "--verify"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in listed["checkpoints"]] == [1, 2, 3]
    assert all(row["verified"] and row["bytes"] > 0 and row["ranks"] == 1 for row in listed["checkpoints"])
    assert listed["checkpoints"][1]["metric"] == 0.5


def test_prune_keeps_the_newest_that_verifies(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt(run, 3)
    (run / "checkpoints" / "step_00000004.tmp-1-2").mkdir()
    assert main([str(run), "--prune", "--dry-run"]) == 0
    assert len(names(run / "checkpoints")) == 4
    assert main([str(run), "--prune"]) == 0
    assert names(run / "checkpoints") == ["step_00000002"]
    assert "kept step_00000002" in capsys.readouterr().out


def test_list_names_foreign_entries_and_prune_skips_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = run / "checkpoints"
    shutil.copytree(saved / "step_00000002", saved / "step_00000006")
    (saved / "step_7").mkdir()
    (saved / "step_7" / "model.pt").write_text("of another tool")
    (saved / "step_00000008.misnamed").mkdir()
    assert main([str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in listed["checkpoints"]] == [1, 2, 3]
    assert listed["not_used"] == [
        "step_00000006 (it contains step 2, so its name would have to be step_00000002)",
        "step_7 (it has no manifest of this runner)",
    ]
    assert main([str(run)]) == 0
    assert "not used: step_00000006 (it contains step 2" in " ".join(capsys.readouterr().out.split())
    assert main([str(run), "--prune"]) == 0
    assert names(saved) == ["step_00000003", "step_00000006", "step_00000008.misnamed", "step_7"]


def test_unreadable_checkpoint_hides_no_other(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "sleep", lambda _: None)
    with reads_intercepted(stays=(errno.EIO, "step_00000003/manifest.json")):
        assert main([str(run), "--json"]) == 1
        rows = json.loads(capsys.readouterr().out)["checkpoints"]
        assert main([str(run), "--prune"]) == 1
        assert main([str(run), "--export", str(run / "w.safetensors")]) == 1
    assert [row["corruption"] for row in rows] == [None] * 3
    assert [bool(row["error"]) for row in rows] == [False, False, True]
    assert "step_00000003/manifest.json cannot be read (Input/output error, EIO" in rows[2]["error"]
    assert len(names(run / "checkpoints")) == 3


def test_prune_deletes_nothing_if_none_is_valid_or_run_is_live(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Lease.acquire(run / "lease", {}, 60.0):
        assert main([str(run), "--prune"]) == 73
    for step in (1, 2, 3):
        corrupt(run, step)
    assert main([str(run), "--prune"]) == 1
    assert len(names(run / "checkpoints")) == 3
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "is in use by process" in errors[0]
    assert main([str(run), "--prune", "--keep-last", "0"]) == 2


def test_export_is_the_newest_or_a_given_step_bit_for_bit(run: Path, tmp_path: Path) -> None:
    toy = Toy(seed=1)
    manager(run / "checkpoints").load(toy.model)
    assert main([str(run), "--export", str(tmp_path / "w.safetensors")]) == 0
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == toy.model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in toy.model.state_dict().items())
    assert main([str(run), "--export", str(tmp_path / "old.safetensors"), "--step", "1"]) == 0
    assert not torch.equal(load_file(tmp_path / "old.safetensors")["0.weight"], weights["0.weight"])


def test_a_folder_is_durable_before_it_gets_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is durable before it is reported."""
    done: list[str] = []
    sync, rename = files.fsync_fd, files.rename

    def save_pretrained(folder: str) -> None:
        (Path(folder) / "inside").mkdir(parents=True)
        (Path(folder) / "inside" / "weights").write_text("weights")

    def synced(fd: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition(".tmp-")[0])
        sync(fd)

    def renamed(source: Path, target: Path) -> None:
        done.append("named")
        rename(source, target)

    model = SimpleNamespace(save_pretrained=save_pretrained)
    loaded = SimpleNamespace(model=model, step=3, averaged=False)
    monkeypatch.setattr("runner.training.load.load", lambda *arguments, **options: loaded)
    monkeypatch.setattr(files, "fsync_fd", synced)
    monkeypatch.setattr(files, "rename", renamed)
    (run / "config.yaml").touch()
    assert main([str(run), "--export", str(tmp_path / "folder")]) == 0
    assert done == [".folder", "weights", "inside", "named", tmp_path.name]
    assert names(tmp_path) == ["folder", "run"]


def test_model_unreadable_by_from_pretrained_is_not_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class creates other tensors, for example because adapters were added."""

    class Pretrained(torch.nn.Module):
        def __init__(self, config: dict[str, int]) -> None:
            super().__init__()
            self.config, self.head = config, torch.nn.Linear(config["width"], 2)

        def save_pretrained(self, folder: str) -> None:
            Path(folder).mkdir()

    model = Pretrained({"width": 3})
    loaded = SimpleNamespace(model=model, step=3, averaged=False)
    monkeypatch.setattr("runner.training.load.load", lambda *arguments, **options: loaded)
    (run / "config.yaml").touch()
    assert main([str(run), "--export", str(tmp_path / "plain")]) == 0
    model.head = torch.nn.Sequential(model.head)  # type: ignore[assignment]
    assert main([str(run), "--export", str(tmp_path / "wrapped")]) == 2
    assert "it has no head.bias and 1 more; it also has head.0.bias and 1 more" in capsys.readouterr().err
    assert names(tmp_path) == ["plain", "run"]


def test_an_export_reports_that_the_newest_was_skipped(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt(run, 3)
    assert main([str(run), "--export", str(tmp_path / "w.safetensors")]) == 0
    shown = capsys.readouterr()
    assert "of step 2 to" in shown.out
    assert "step_00000003 is corrupt" in shown.err


def test_a_list_notices_a_truncated_or_missing_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = run / "checkpoints"
    os.truncate(checkpoints / "step_00000003" / "rank_00000.safetensors", 10)
    (checkpoints / "step_00000002" / "train_state.pt").unlink()
    assert main([str(run)]) == 1
    listed = capsys.readouterr().out
    assert "corrupt: rank_00000.safetensors has 10 bytes" in listed
    assert "corrupt: train_state.pt cannot be read" in listed


def test_diff_lists_differences_and_exits_like_diff(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "checkpoints", run / "copy")
    assert main([str(run), "--diff", "2", str(run / "copy" / "step_00000002")]) == 0
    assert "are bit-identical" in capsys.readouterr().out
    assert main([str(run), "--diff", "1", "2"]) == 1
    out = capsys.readouterr().out
    assert "model.0.weight" in out
    assert "train state.step" in out
    assert "train state.seed" not in out
    paths = [str(path) for path in (run / "copy" / "step_00000002", run / "checkpoints" / "step_00000002")]
    assert main(["--diff", *paths]) == 0
    assert main(["--diff", "1", "2"]) == 2
    assert "pass the paths of two checkpoints, or RUN" in capsys.readouterr().err
    assert main([]) == 2
    assert "RUN is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--export", "w.bin"], "must end in .safetensors"),
        (["--export", "w.safetensors", "--step", "7"], "there is no checkpoint of step 7"),
        (["--diff", "1", "nine"], "available: 1, 2, 3"),
        (["--diff", "1", "/tmp"], "is not a checkpoint"),
        (["--step", "1"], "--step works with --export"),
        (["--keep-last", "2"], "--keep-last works with --prune"),
        (["--verify", "--dry-run"], "--dry-run works with --prune"),
        (["--export", "/nowhere/w.safetensors"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main([str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_directory_without_checkpoints_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("has no checkpoints") == 2


def test_listing_imports_no_torch(run: Path) -> None:
    code = (
        "import sys; from runner.cli.runs.checkpoints import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], env={**os.environ, "PYTHONPATH": root}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("count", "text"), [(None, ""), (12, "12 B"), (1234, "1.2 kB"), (5_600_000, "5.6 MB")])
def test_sizes_for_people(count: int | None, text: str) -> None:
    assert size(count) == text

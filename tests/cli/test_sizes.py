"""The doctor's report on the sizes of a run whose number of ranks may vary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import TINY
from torch import nn

from runner.cli.base.launcher import idle_ranks, rank_count_errors
from runner.cli.doctor import sizes
from runner.cli.doctor.doctor import main
from runner.cli.start.start import start
from runner.config.composition import compose
from runner.config.schema import Config
from runner.contracts import RankCounts
from runner.training.model import build
from runner.training.model.footprint import footprint

ELASTIC = [*TINY, "sampler=elastic", "train.batch_size=2", "train.global_batch_size=16", "train.steps=3600"]
COUNTS = RankCounts(range(2, 9, 2), "launcher.nodes=1-4", per_node=2)


def test_the_busiest_rank_sets_the_pace() -> None:
    """With 8 micro-batches on 6 ranks, some have two, so the step is as long as on 4."""
    rows = sizes.sizes(compose(ELASTIC).config, COUNTS, None)
    assert [(row.nodes, row.ranks, row.micro_batches, row.time) for row in rows] == [
        (1, 2, 4, 0.5),
        (2, 4, 2, 0.25),
        (3, 6, 2, 0.25),
        (4, 8, 1, 0.125),
    ]


def test_many_sizes_are_thinned_out() -> None:
    config = compose([*ELASTIC, "train.global_batch_size=2000"]).config
    rows = sizes.sizes(config, RankCounts(range(3, 1001), "launcher.ranks=3-1000"), None)
    assert [row.ranks for row in rows][:5] == [3, 4, 6, 10, 18]
    assert rows[-1].ranks == 1000
    assert len(rows) <= 16


@pytest.mark.slow
def test_memory_is_measured_on_the_real_model_and_optimizer() -> None:
    config = compose([*ELASTIC, "train.ema_decay=0.9"]).config
    found = footprint(config)
    model = build.model(config)
    optimizers = build.optimizers(config, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = []
    for name in optimizers.names:
        optimizers[name].step()
        state += [value for each in optimizers[name].state.values() for value in each.values()]
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert (found.model, found.gradients, found.average) == (held, gradients, held)
    assert found.optimizers == sum(tensor.nbytes for tensor in state)

    def memory(config: Config, ranks: int, micro_batches: int) -> int:
        held = found.per_rank(config, ranks, micro_batches)
        assert held is not None
        return held

    assert memory(config, 2, 8) - memory(config, 2, 1) == 3 * gradients
    off = compose([*ELASTIC, "train.rank_invariant=false"]).config
    assert memory(off, 2, 8) - memory(off, 1, 8) == gradients  # the buckets of DDP


class Fussy(nn.Module):
    """A model that looks at its weights when it is created."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.largest = float(self.layer.weight.max())


def test_a_model_that_needs_real_memory_leaves_the_column_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in ELASTIC if not word.startswith("model.")]
    words += ["model=own", "model._target_=test_sizes.Fussy", "launcher.ranks=1-2", f"run.root={tmp_path}"]
    assert main([*words, "--no-measure", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {row["memory"] for row in answer["sizes"]} == {None}
    assert answer["model"] is None
    (text,) = [each["text"] for each in answer["findings"] if each["level"] == "warning"]
    assert "the memory of a rank is not known: the model cannot be created without its memory" in text


def test_more_ranks_than_micro_batches_are_a_warning() -> None:
    """Some would have nothing to do, which is a waste and not an error. A step has 8 micro-batches here."""
    config, many = compose(ELASTIC).config, RankCounts(range(1, 11), "launcher.ranks=1-10")
    assert rank_count_errors(many, config) == []
    (warning,) = idle_ranks(many, config)
    assert warning.level == "warning"
    assert "a step has 8 micro-batches" in warning.text
    assert "2 of 10 ranks" in warning.text
    assert "8 ranks at most" in str(warning.remedy)
    assert idle_ranks(RankCounts(range(1, 9)), config) == []


def test_a_command_warns_of_idle_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*ELASTIC, "launcher.ranks=1-10", "launcher.dry_run=true", f"run.root={tmp_path}"]
    assert start(command) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: launcher.ranks=1-10: a step has 8 micro-batches")
    assert "8 ranks at most" in line


def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[int, str]:
    status = main([*ELASTIC, "--no-measure", f"run.root={tmp_path}", *words])
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_the_doctor_prints_a_table_of_the_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(capsys, tmp_path, "launcher.ranks=1-3")
    assert status == 0
    heading, *rows = out.splitlines()[-4:]
    assert heading.split("  ")[0] == "ranks"
    assert [row.split()[:3] for row in rows] == [["1", "8", "1.000"], ["2", "4", "0.500"], ["3", "3", "0.375"]]
    assert heading.strip().endswith("memory per rank, without activations")
    assert all("about" in row for row in rows)
    assert "memory per rank" not in doctor(capsys, tmp_path, "launcher.ranks=3")[1]


def test_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(capsys, tmp_path, "launcher.ranks=1-9", "--json")
    answer = json.loads(out)
    assert status == 0
    assert [row["ranks"] for row in answer["sizes"]] == list(range(1, 10))
    assert answer["sizes"][0].keys() == set(sizes.Size.__annotations__)
    assert any("1 of 9 ranks would have nothing to do" in finding["text"] for finding in answer["findings"])


def test_the_doctor_refuses_a_range_without_a_global_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(capsys, tmp_path, "launcher.ranks=1-2", "train.global_batch_size=null")
    assert status == 2
    (line,) = [line for line in out.splitlines() if line.startswith("error")]
    assert "set train.global_batch_size=N" in line

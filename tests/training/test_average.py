"""The average of the weights: its numbers, its place in a checkpoint, DDP and FSDP2, and its export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import Toy, manager
from ranks import on_ranks
from torch import nn

from runner.checkpoint import TrainStateManager, build_train_state, restore_train_state
from runner.cli.runs import checkpoints as command
from runner.errors import CheckpointError, UserError
from runner.system.distributed import World
from runner.training.model.average import Average
from runner.training.ranks.parallel import Computation, accumulating, place, synchronized

CPU = torch.device("cpu")


def average_of(model: nn.Module, decay: float = 0.75) -> Average:
    return Average(model, decay, "ddp", World(), CPU)


def test_average_is_the_exponential_moving_average_of_weights() -> None:
    toy = Toy()
    average = average_of(toy.model)
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        toy.train()
        average.update(toy.model)
        for name, weight in toy.model.named_parameters():
            now = weight.detach().clone()
            expected[name] = now if step == 0 else 0.75 * expected[name] + 0.25 * now
    for name, weight in average.module.named_parameters():
        torch.testing.assert_close(weight, expected[name])
    buffers = dict(toy.model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in average.module.named_buffers())
    assert not any(weight.requires_grad for weight in average.module.parameters())


def everything(toy: Toy, average: Average) -> list[torch.Tensor]:
    return [*toy.model.state_dict().values(), *average.module.state_dict().values(), average.averaged.n_averaged]


def step(toy: Toy, average: Average) -> None:
    toy.train()
    average.update(toy.model)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_resumed_average_is_bit_identical(tmp_path: Path, cut: int) -> None:
    """Include a cut before the first average, because the first update differs from the others."""
    toy, saving = Toy(), manager(tmp_path)
    average = average_of(toy.model)
    toy.train()
    for _ in range(cut):
        step(toy, average)
    assert saving.save(toy.step, toy.model, toy.optimizer, toy.state(), averaged=average.averaged, wait=True)
    resumed = Toy(seed=1)
    other = average_of(resumed.model)
    state = manager(tmp_path).load(resumed.model, resumed.optimizer, other.averaged)
    assert state is not None
    restore_train_state(state, resumed.scheduler)
    for each, its in ((toy, average), (resumed, other)):
        torch.manual_seed(3)
        for _ in range(3):
            step(each, its)
    assert all(torch.equal(a, b) for a, b in zip(everything(toy, average), everything(resumed, other), strict=True))


def test_average_must_be_in_both_checkpoint_and_run(tmp_path: Path) -> None:
    toy = Toy()
    average = average_of(toy.model)
    toy.save(manager(tmp_path / "without"))
    manager(tmp_path / "with").save(0, toy.model, toy.optimizer, toy.state(), averaged=average.averaged, wait=True)
    with pytest.raises(CheckpointError, match=r"has averaged weights, and this run has none: set train.ema_decay"):
        manager(tmp_path / "with").load(toy.model, toy.optimizer)
    with pytest.raises(CheckpointError, match=r"has no averaged weights, and this run has train.ema_decay: set it"):
        manager(tmp_path / "without").load(toy.model, toy.optimizer, average.averaged)
    assert manager(tmp_path / "with").load(toy.model) is not None  # only the weights are wanted


def test_the_average_is_exported_and_the_weights_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    toy = Toy()
    average = average_of(toy.model)
    for _ in range(3):
        step(toy, average)
    run = tmp_path / "checkpoints"
    manager(run).save(3, toy.model, toy.optimizer, toy.state(), averaged=average.averaged, wait=True)
    for flags, module in ((["--json"], average.module), (["--json", "--raw"], toy.model)):
        file = tmp_path / "weights.safetensors"
        assert command.main([str(run), "--export", str(file), *flags]) == 0
        assert json.loads(capsys.readouterr().out)["averaged"] is (module is average.module)
        weights = load_file(file)
        assert weights.keys() == module.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    with pytest.raises(UserError, match="--raw works with --export only"):
        command.main([str(run), "--raw"])


def test_a_model_that_cannot_be_copied_is_one_line() -> None:
    model = nn.Linear(2, 2)
    model.cached = model.weight * 2
    with pytest.raises(UserError, match=r"^train.ema_decay=0.75: Linear cannot be copied \(.*remove train.ema_decay$"):
        average_of(model)


def ranks(rank: int, world: int, strategy: str, directory: str, resume: bool) -> None:
    """Train 2 steps, save, and train 2 more; or load, and train only the last 2."""
    method = f"file://{directory}/rendezvous-{strategy}-{world}-{resume}"
    torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    torch.manual_seed(resume)
    net: Any = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    average = Average(net, 0.75, strategy, World(rank, world), CPU)
    model = place(net, strategy, World(rank, world), CPU)
    trained = synchronized(Computation(model, lambda model, batch: model(batch)), World(rank, world), CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saving = TrainStateManager(Path(directory) / f"checkpoints-{strategy}")
    first = 0
    if resume:
        assert saving.load(model, optimizer, average.averaged) is not None
        first = 2
    for number in range(first, 4):
        torch.manual_seed(10 * number + rank)
        trained(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        with torch.no_grad():
            average.module(torch.ones(2, 7))  # an evaluation between two updates
        if number == 1:
            state = build_train_state(2, 0)
            assert saving.save(2, model, optimizer, state, averaged=average.averaged, wait=True)
    tensors = average.averaged.module.state_dict()
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors.values()]
    if rank == 0:
        values = [value.hex() for tensor in whole for value in tensor.flatten().tolist()]
        (Path(directory) / f"{strategy}-{resume}.json").write_text(json.dumps(values))
    torch.distributed.barrier()
    del trained  # torch sometimes waits for ever if an object that it synchronizes outlives the group
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_average_on_two_ranks_resumes_bit_for_bit(tmp_path: Path, strategy: str) -> None:
    for resume in (False, True):
        on_ranks(ranks, 2, 2, strategy, str(tmp_path), resume)
    texts = [(tmp_path / f"{strategy}-{resume}.json").read_text() for resume in (False, True)]
    assert texts[0] == texts[1]


def test_a_step_runs_while_another_thread_imports_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save imports FSDP. The module exists before its names do."""
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", ModuleType("torch.distributed.fsdp"))
    with accumulating(Computation(nn.Linear(1, 1), lambda model, batch: model(batch)), last=True):
        pass

"""Saving and loading: bit for bit, atomic, in the background."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FINGERPRINT, Toy, manager, names
from runs import ROOT
from torch import nn

from runner.checkpoint import TrainStateManager, build_train_state, restore_train_state
from runner.checkpoint.background import Background
from runner.checkpoint.files import commit
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.commit import remove_tree
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.tensors.compare import compare_checkpoints, tensor_difference
from runner.checkpoint.tensors.reader import tensors
from runner.errors import CheckpointError, SupersededError, UserError


def resumed(directory: Path, **options: Any) -> Toy:
    toy = Toy(seed=99)
    state = manager(directory, **options).load(toy.model, toy.optimizer)
    assert state is not None
    toy.step, _, _ = restore_train_state(state, toy.scheduler, toy.loader)
    return toy


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, mode: str) -> None:
    toy = Toy()
    toy.train(3)
    saving = manager(tmp_path / "c", mode=mode)
    assert toy.save(saving, wait=False)
    loss = toy.train(3)
    saving.wait()
    again = resumed(tmp_path / "c")
    assert again.step == 3
    assert (again.train(3), again.digest(), again.loader.position) == (loss, toy.digest(), toy.loader.position)
    assert again.scheduler.state_dict() == toy.scheduler.state_dict()
    cost = saving.last_save
    assert cost is not None
    assert cost["step"] == 3
    assert min(cost["stall_s"], cost["write_s"]) > 0
    assert cost["bytes"] > 1000


def test_the_layout_is_as_documented_and_not_writable_by_others(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    path = tmp_path / "step_00000001"
    assert names(path) == ["manifest.json", "rank_00000.safetensors", "tensors.json", "train_state.pt"]
    assert not path.stat().st_mode & 0o022
    assert not any(file.stat().st_mode & 0o022 for file in path.iterdir())
    state = torch.load(path / "train_state.pt", weights_only=True)
    assert {"step", "tokens_seen", "rng", "scheduler", "dataloader", "version", "rng_by_rank"} <= set(state)


def test_torch_and_safetensors_read_it(tmp_path: Path) -> None:
    """Read the tensors without the runner."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    toy, other = Toy(), Toy(seed=5)
    toy.train()
    toy.save(manager(tmp_path))
    path = tmp_path / "step_00000001"
    load({"model": other.model.state_dict()}, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    tensors = load_file(path / "rank_00000.safetensors")
    assert tensors.keys() == json.loads((path / "tensors.json").read_text())["tensors"].keys()
    for name, value in toy.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name])
        assert torch.equal(value, tensors[f"model.{name}"])


class Kinds(nn.Module):
    """Buffers of every dtype, with shapes and layouts of every kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for dtype in DTYPES:
            raw = torch.randint(0, 100, (3, 5, 16), dtype=torch.uint8)
            kind = raw.bool() if dtype == torch.bool else raw.view(dtype)
            self.register_buffer(str(dtype).replace(".", "_"), kind.clone())
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("transposed", torch.randn(7, 5).t())
        self.register_buffer("strided", torch.randn(8, 6)[::2, 1:4])
        self.register_buffer("conjugate", torch.randn(4, 2, dtype=torch.complex64).conj())
        self.register_buffer("large", torch.randn(700, 1000))
        self.register_buffer("large_transposed", torch.randn(700, 1000).t())
        self.register_buffer("middle", torch.randn(90, 1000))


NAMES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 "
    "float64 complex64 complex128"
)
DTYPES = [getattr(torch, name) for name in NAMES.split()]


def test_tensors_of_every_dtype_and_layout_come_back_bit_for_bit(tmp_path: Path) -> None:
    model, other = Kinds(0), Kinds(1)
    saving = manager(tmp_path)
    assert saving.save(1, model, None, build_train_state(1, 0), wait=True), saving.last_error
    assert manager(tmp_path).load(other) is not None
    at = Folder(tmp_path / "step_00000001")
    read = dict(tensors(at, manifests.read(at), "model."))
    for name, value in model.state_dict().items():
        for found in (other.state_dict()[name], read[name]):
            assert tensor_difference(found.resolve_conj(), value.resolve_conj()) is None, name
            assert found.shape == value.shape


def test_fresh_optimizers_and_unused_parameters_are_restored(tmp_path: Path) -> None:
    """A dummy step to create the state would be counted as a step."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def make() -> tuple[Branches, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Branches()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    saving = manager(tmp_path)
    saving.save(0, model, optimizer, build_train_state(0, 0), wait=True)
    model.used(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saving.save(1, model, optimizer, build_train_state(1, 0), wait=True)
    for step in (1, 0):
        fresh, state = make()
        manager(tmp_path).load(fresh, state)
        assert len(state.state) == 2 * step
        assert all(entry["step"] == 1 for entry in state.state.values())
        if step:
            remove_tree(tmp_path / "step_00000001")


def test_groups_tied_weights_and_plain_values_are_restored(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    entry = self.state[parameter]
                    entry["calls"] = entry.get("calls", 0) + 1
                    entry["history"] = [torch.ones(2) * entry["calls"]]
            return super().step(closure)

    def make() -> tuple[Tied, Counting]:
        model = Tied()
        groups: list[dict[str, Any]] = [
            {"params": [model.a.weight], "lr": 0.5},
            {"params": [model.a.bias, model.b.bias]},
        ]
        return model, Counting(groups, 0.1)

    model, optimizer = make()
    for _ in range(2):
        model.b(model.a(torch.ones(1, 3))).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    manager(tmp_path).save(2, model, optimizer, build_train_state(2, 0), wait=True)
    fresh, state = make()
    manager(tmp_path).load(fresh, state)
    assert torch.equal(fresh.b.weight, model.a.weight)
    assert fresh.b.weight is fresh.a.weight
    assert [group["lr"] for group in state.param_groups] == [0.25, 0.1]
    entry = state.state[fresh.b.bias]
    assert entry["calls"] == 2
    assert entry["history"][0].tolist() == [2, 2]


def test_order_of_the_optimizer_state_does_not_matter(tmp_path: Path) -> None:
    """A resume on several ranks fills it in another order; the checkpoint is the same."""
    toy = Toy()
    toy.train()
    state = toy.state()
    manager(tmp_path / "one").save(1, toy.model, toy.optimizer, state, wait=True)
    kept = list(toy.optimizer.state.items())
    toy.optimizer.state.clear()
    for parameter, entries in reversed(kept):
        toy.optimizer.state[parameter] = dict(reversed(entries.items()))
    manager(tmp_path / "two").save(1, toy.model, toy.optimizer, state, wait=True)
    one, two = (Folder(tmp_path / name / "step_00000001") for name in ("one", "two"))
    assert compare_checkpoints(one, two, (manifests.read(one), manifests.read(two))).differences == []


def test_compiled_and_bare_modules_have_the_same_names(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    compiled: Any = torch.compile(toy.model, backend="eager")
    manager(tmp_path).save(1, compiled, toy.optimizer, toy.state(), wait=True)
    assert resumed(tmp_path).digest() == toy.digest()


def test_load_without_checkpoints_is_none(tmp_path: Path) -> None:
    toy = Toy()
    assert manager(tmp_path / "none").load(toy.model, toy.optimizer) is None
    assert manager(tmp_path / "none").newest() is None
    for name in ("step_3.bak", "step_x", "latest", "step_7.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    assert manager(tmp_path).load(toy.model, toy.optimizer) is None
    toy.train()
    toy.save(manager(tmp_path, keep_last=1))
    assert (tmp_path / "step_3.bak").is_dir()


def test_a_committed_step_is_never_rewritten(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "step_00000001").iterdir()}
    assert toy.save(manager(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "step_00000001").iterdir()} == before


def test_corrupt_checkpoint_of_the_saved_step_is_set_aside(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    (tmp_path / "step_00000001" / "train_state.pt").write_bytes(b"")
    assert toy.save(manager(tmp_path))
    assert names(tmp_path) == ["step_00000001", "step_00000001.corrupt"]
    assert resumed(tmp_path).digest() == toy.digest()


def test_a_renamed_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    toy = Toy()
    saving = manager(tmp_path)
    for _ in range(3):
        toy.train()
        toy.save(saving)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000099")
    newest = manager(tmp_path).newest()
    assert newest is not None
    assert newest.step == 3


def test_retention_keeps_the_last_the_multiples_and_the_best(tmp_path: Path) -> None:
    toy = Toy()
    saving = manager(tmp_path, keep_last=2, keep_every_steps=5, keep_best=2)
    losses = {3: 0.1, 4: float("nan"), 7: 0.2, 8: 0.3}
    for step in range(1, 13):
        toy.train()
        toy.save(saving, metric=losses.get(step))
    assert [int(name[5:]) for name in names(tmp_path)] == [3, 5, 7, 10, 11, 12]


@pytest.mark.parametrize(("mode", "kept"), [("min", [3, 5]), ("max", [1, 5])])
def test_best_are_the_extremes_of_the_same_metric(tmp_path: Path, mode: str, kept: list[int]) -> None:
    toy = Toy()
    earlier = manager(tmp_path, keep_last=9, best_metric="eval_loss")
    saving = manager(tmp_path, keep_last=1, keep_best=1, best_metric="eval_accuracy", best_mode=mode)
    for step, metric in enumerate([0.9, float("nan"), 0.1, 0.5, None], start=1):
        toy.train()
        toy.save(saving if step != 4 else earlier, metric=metric)
    assert [int(name[5:]) for name in names(tmp_path)] == kept


def test_leftovers_of_a_kill_are_removed_at_load(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    ours = ["step_00000002.tmp-1-77", "step_00000001.tmp-1-3-taken", "step_00000001.corrupt.tmp-12-3-swept0"]
    others = ["step_00000002.tmp-backup", "step_00000002.tmp-1-mine", "step_00000001.tmp"]
    for name in ours + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    (tmp_path / "step_00000003.tmp-1-5").symlink_to(tmp_path / others[0])  # a save makes directories
    resumed(tmp_path)
    assert names(tmp_path) == sorted(["step_00000001", "step_00000003.tmp-1-5", *others])
    assert all((tmp_path / name / "part").exists() for name in others)


def test_slow_disk_delays_the_second_save(tmp_path: Path, monkeypatch: Any) -> None:
    gate, running, most = threading.Event(), [0], [0]
    original = commit.Transaction.commit

    def slow(self: commit.Transaction, *arguments: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        gate.wait(10)
        original(self, *arguments)
        running[0] -= 1

    monkeypatch.setattr(commit.Transaction, "commit", slow)
    toy, saving = Toy(), manager(tmp_path)
    toy.train()
    toy.save(saving, wait=False)
    assert saving.last_save is not None
    assert saving.last_save["write_s"] == 0.0
    threading.Timer(0.2, gate.set).start()
    toy.train()
    toy.save(saving, wait=False)
    saving.wait()
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert most == [1]


@pytest.mark.slow
def test_a_process_that_exits_without_waiting_still_commits(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2])\n"
        "from checkpoints import Toy, manager\n"
        "toy = Toy(); toy.train(); toy.save(manager(pathlib.Path(sys.argv[1])), wait=False)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path, ROOT / "tests" / "support"], check=False)
    assert done.returncode == 0
    assert resumed(tmp_path).step == 1


def test_training_does_not_change_a_save_in_progress(tmp_path: Path, monkeypatch: Any) -> None:
    gate = threading.Event()
    original = commit.Transaction.begin

    def late(self: commit.Transaction) -> None:
        gate.wait(10)
        original(self)

    monkeypatch.setattr(commit.Transaction, "begin", late)
    toy, saving = Toy(), manager(tmp_path)
    toy.train()
    digest = toy.digest()
    toy.save(saving, wait=False)
    toy.train(3)
    gate.set()
    saving.wait()
    assert resumed(tmp_path).digest() == digest


def test_a_superseded_process_commits_nothing_and_raises(tmp_path: Path) -> None:
    fence = [True]

    def check() -> None:
        if not fence[0]:
            raise SupersededError("attempt 2 holds the lease")

    toy = Toy()
    saving = manager(tmp_path, check_fence=check, fence=1)
    toy.train()
    toy.save(saving)
    fence[0] = False
    toy.train()
    toy.save(saving, wait=False)
    with pytest.raises(SupersededError):
        saving.wait()
    with pytest.raises(SupersededError):
        toy.save(saving)
    assert names(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("when", [1, 2, 3, 4, 5])
def test_fence_is_checked_before_each_change_of_the_disk(tmp_path: Path, when: int) -> None:
    calls = [0]

    def check() -> None:
        calls[0] += 1
        if calls[0] == when:
            raise SupersededError("too late")

    toy = Toy()
    toy.train()
    with pytest.raises(SupersededError):
        toy.save(manager(tmp_path, check_fence=check))
    assert names(tmp_path) == []


def test_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    wide = Toy(width=9)
    before = wide.digest()
    with pytest.raises(CheckpointError, match=r"another model: '0.weight' was \(8, 4\) and is \(9, 4\) now") as caught:
        manager(tmp_path).load(wide.model, wide.optimizer)
    assert "\n" not in str(caught.value)
    deeper = nn.Sequential(*Toy().model, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"it lacks '4.weight'"):
        manager(tmp_path).load(deeper)
    with pytest.raises(CheckpointError, match="which the model lacks"):
        manager(tmp_path).load(Toy().model[:2])
    with pytest.raises(CheckpointError, match=r"was torch.float32 and is torch.float64 now"):
        manager(tmp_path).load(Toy().model.double())
    assert wide.digest() == before
    assert names(tmp_path) == ["step_00000001"]


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    with pytest.raises(CheckpointError, match="saved with AdamW, and this run has SGD"):
        manager(tmp_path).load(toy.model, torch.optim.SGD(toy.model.parameters(), 0.1))
    groups = [{"params": [parameter]} for parameter in toy.model.parameters()]
    with pytest.raises(CheckpointError, match="it has 1 parameter groups, and this run has 6"):
        manager(tmp_path).load(toy.model, torch.optim.AdamW(groups))
    fewer = torch.optim.AdamW(list(toy.model.parameters())[1:])
    with pytest.raises(CheckpointError, match=r"group 0 differs in '0.weight'"):
        manager(tmp_path).load(toy.model, fewer)


def test_other_fingerprint_is_refused(tmp_path: Path) -> None:
    toy = Toy()
    toy.train()
    toy.save(manager(tmp_path))
    other = {"data": {"code": 101, "tests": 5}, "seed": 7}
    with pytest.raises(CheckpointError, match=r"data.code was 100 and is 101 now, data.prose is missing now"):
        manager(tmp_path, fingerprint=other).load(toy.model, toy.optimizer)
    assert manager(tmp_path, fingerprint={"seed": 7, "later": 1}).load(toy.model, toy.optimizer)
    assert manager(tmp_path, fingerprint={"data": FINGERPRINT["data"]}).load(toy.model, toy.optimizer)


def test_an_optimizer_of_other_parameters_is_refused_at_the_save(tmp_path: Path) -> None:
    toy = Toy()
    stray = torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
    with pytest.raises(CheckpointError, match="not in the model"):
        manager(tmp_path).save(1, toy.model, stray, build_train_state(1, 0))


@pytest.mark.parametrize("state", [{"step": 1, "tokens_seen": 0}, build_train_state(2, 0)])
def test_unresumable_train_state_is_refused_at_the_save(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"the train state passed to save (has no 'rng'|is of step 2, not 1)"):
        manager(tmp_path).save(1, Toy().model, None, state)


@pytest.mark.parametrize(
    "options", [{"keep_last": 0}, {"keep_every_steps": 0}, {"keep_best": -1}, {"mode": "lazy"}, {"best_mode": "a"}]
)
def test_settings_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"checkpoint."):
        TrainStateManager(tmp_path, **options)


@pytest.mark.parametrize("options", [{"keep_last": 1}, {"keep_every_steps": 1}, {"keep_best": 0}])
def test_the_smallest_settings_are_not(tmp_path: Path, options: dict[str, Any]) -> None:
    TrainStateManager(tmp_path, **options)


FIRST_SAVE = """
import sys, threading, time
import torch
from runner.checkpoint import TrainStateManager, build_train_state

class Slow:
    threads = set()

    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch.distributed.checkpoint"):
            self.threads.add(threading.current_thread().name)
            time.sleep(0.5 if name == "torch.distributed.checkpoint" else 0.0)

sys.meta_path.insert(0, Slow())
manager = TrainStateManager(sys.argv[1])
threading.Thread(target=manager.warm_up, name="warm up").start()
while not Slow.threads:
    time.sleep(0.001)
assert manager.save(1, torch.nn.Linear(2, 2), None, build_train_state(1, 0), wait=True), manager.last_error
print(*Slow.threads)
"""


@pytest.mark.slow
def test_save_right_after_the_start_waits_for_the_import(tmp_path: Path) -> None:
    """Two threads that import parts of one package at once may see incomplete modules."""
    command = [sys.executable, "-c", FIRST_SAVE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "warm up"), done.stderr


def test_the_background_thread_survives_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the next save would wait forever."""
    background = Background()

    def broken() -> None:
        raise OSError("the terminal is gone")

    done = threading.Event()
    for action in (broken, done.set):
        background.submit(action)
        background.join()
    assert done.is_set()
    assert "the terminal is gone" in caplog.text


def test_a_large_train_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    """Tasks and callbacks keep state in it, such as a replay buffer. Only its size in the manifest is a limit."""
    model = nn.Linear(2, 1)
    kept = torch.arange(17 * 2**20, dtype=torch.float32)  # 68 MiB
    state = build_train_state(1, 0, None, None, {"task": [{"buffer": kept}]})
    assert TrainStateManager(tmp_path / "checkpoints", mode="sync").save(1, model, None, state)
    loaded = TrainStateManager(tmp_path / "checkpoints", mode="sync").load(model, None)
    assert loaded is not None
    assert torch.equal(loaded["task"][0]["buffer"], kept)

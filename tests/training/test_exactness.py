"""Choices that torch makes anew in each process change no bit. Inexact settings are reported before the first step."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from runs import PACED, TINY, Run, assert_same_run

from exactdata.order.batch_shape import BatchShape
from runner.config.schema import Config
from runner.system import processes
from runner.training.exactness import inexact, make_exact
from runner.training.records.run_state import RunState

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def state(threads: int, shape: BatchShape = BatchShape(0, 1, 4)) -> RunState:  # noqa: B008 it is frozen
    return RunState({}, False, threads, (shape,), {})


@pytest.mark.parametrize(
    ("device", "deterministic", "threads", "before", "said"),
    [
        (CPU, False, 2, None, []),
        (CPU, False, 2, 2, []),
        (CPU, False, 2, 4, ["run.threads=4"]),
        (GPU, True, 2, 2, []),
        (GPU, False, 2, None, ["train.deterministic=true"]),
        (GPU, False, 2, 4, ["train.deterministic=true", "run.threads=4"]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_inexact_settings_are_reported_with_the_remedy(
    device: torch.device, deterministic: bool, threads: int, before: int | None, said: list[str], compiled: bool
) -> None:
    config = Config()
    config.train.deterministic = deterministic
    config.train.compile = compiled
    found = inexact(config, device, state(threads), None if before is None else state(before))
    assert len(found) == len(said)
    for reason, remedy in zip(found, said, strict=True):
        assert remedy in reason


EQUAL, DEALT = BatchShape(0, 2, 8, 3), BatchShape.dealt(0, 2, 8, 6)


@pytest.mark.parametrize(
    ("shape", "before", "said"),
    [
        (DEALT, None, []),
        (DEALT, BatchShape.dealt(0, 4, 8, 6), []),
        (DEALT, BatchShape.dealt(0, 2, 4, 12), ["set train.batch_size=4"]),
        (EQUAL, DEALT, ["set train.global_batch_size=48"]),
        (DEALT, EQUAL, ["was not rank-invariant so far"]),
        (EQUAL, BatchShape(0, 4, 8, 3), ["the global batch changes from 96 to 48"]),
        (EQUAL, BatchShape(0, 3, 8, 2), []),
    ],
)
def test_another_way_to_split_a_step_is_a_warning(
    shape: BatchShape, before: BatchShape | None, said: list[str]
) -> None:
    """Warn where the split changes more than the ranks do anyway."""
    found = inexact(Config(), CPU, state(1, shape), None if before is None else state(1, before))
    assert len(found) == len(said)
    assert all(words in reason for words, reason in zip(said, found, strict=True))


def test_deterministic_gpu_training_has_its_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workspaces the first matrix product raises. A choice of the user's stays."""
    monkeypatch.setattr(processes, "environment", environment := dict[str, str]())
    config = Config()
    try:
        make_exact(config, GPU)
        assert not torch.are_deterministic_algorithms_enabled()
        assert environment == {}
        config.train.deterministic = True
        make_exact(config, GPU)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        make_exact(config, GPU)
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    finally:
        torch.use_deterministic_algorithms(False)


def mkl_cpu() -> ctypes.c_int32:
    """Return the CPU type noted by MKL's vector functions: the variable that `mkl_vml_serv_cpu_detect` reads first."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    detect = getattr(library, "mkl_vml_serv_cpu_detect", None)
    address = ctypes.cast(detect, ctypes.c_void_p).value if detect else None
    code = ctypes.string_at(address, 6) if address else b""
    if address is None or code[:2] != b"\x8b\x05":  # mov eax, [rip + offset]
        pytest.skip("this torch has no MKL, or another one")
    return ctypes.c_int32.from_address(address + len(code) + int.from_bytes(code[2:], "little", signed=True))


@pytest.mark.parametrize("tries", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_vector_kernels_are_chosen_before_a_second_thread(tries: int) -> None:
    """Otherwise about one process in thirty first computes roots right to 12 bits in a part of the tensor."""
    cpu = mkl_cpu()
    threads = torch.get_num_threads()
    values = torch.linspace(0.1, 1.0, 1 << 17)
    make_exact(Config(), CPU)
    known = cpu.value
    expected = values.sqrt()
    torch.set_num_threads(2)
    try:
        for _ in range(tries):
            cpu.value = -1  # as in a process that has not called one of them yet
            make_exact(Config(), CPU)
            assert cpu.value == known
            assert torch.equal(values.sqrt(), expected)
    finally:
        cpu.value = known
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_run_with_two_threads_is_exact_after_a_kill(tmp_path: Path) -> None:
    """The backward pass used to add from both threads in any order: two runs differed within a few steps."""
    tiny = [entry for entry in TINY if not entry.startswith(("run.threads", "data.sequence_length"))]
    common = [*tiny, PACED, "run.threads=2", "train.compile=true", "train.steps=16", "eval.every_steps=8"]
    common += ["train.batch_size=32", "checkpoint.every_steps=5"]
    whole = Run(tmp_path / "whole", common, {"OMP_NUM_THREADS": "2"})
    assert "not exact" not in whole.finish()
    run = Run(tmp_path / "run", common, {"OMP_NUM_THREADS": "2"})
    run.hold_at(9)
    run.start()
    assert run.kill_when(lambda run: len(run.lines()) >= 8)
    run.wait()
    run.finish()
    assert_same_run(run, whole)

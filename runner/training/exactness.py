"""Make a run reproducible bit for bit, as far as torch allows, and report known reasons why it may not be."""

from __future__ import annotations

from typing import Any

import torch

from runner.config.schema import Config
from runner.system import processes
from runner.system.distributed import World
from runner.training.model.build import choose_device, seed_everything
from runner.training.records.run_state import RunState


def begin_exactly(config: Config, world: World) -> torch.device:
    """Choose the device, torch's algorithms and its number of threads, and seed the generators. Return the device.

    Call this before the process computes anything with several threads or on a GPU. Also call it before creating a
    dataset or a task, because these may draw random numbers.

    Raises:
        UserError: there is no such device.
    """
    device = choose_device(config.train.device, world)
    make_exact(config, device)
    torch.set_num_threads(config.run.threads)  # the number of threads determines how sums are split
    seed_everything(config.seed)
    return device


def make_exact(config: Config, device: torch.device) -> None:
    """Choose torch's algorithms for `config`. Call this before the process uses several threads or a GPU.

    On a CPU, several threads of compiled code add to the same values, in an order that varies between runs (e.g. in the
    backward pass of an embedding). Eager operations add in a fixed order. If deterministic algorithms are enabled in
    torch, compiled code calls the eager operations and is a few percent slower.
    """
    _choose_vector_kernels()
    compiled_on_cpu = config.train.compile and device.type == "cpu"
    if not (config.train.deterministic or compiled_on_cpu):
        return
    # Without train.deterministic, torch uses operations that have no deterministic algorithm, and only warns.
    torch.use_deterministic_algorithms(True, warn_only=not config.train.deterministic)
    options: Any = torch.utils.deterministic  # not typed
    options.fill_uninitialized_memory = False  # only useful for debugging, and slow
    if device.type == "cuda":
        # cuBLAS adds in a fixed order only with fixed workspace sizes. Without them, torch raises an error.
        processes.environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _choose_vector_kernels() -> None:
    """Make MKL's vector functions (square roots, exponentials) detect the CPU in a single thread.

    MKL detects the CPU at the first call in a process. MKL 2024.2 first stores a raw code, then replaces it with the
    code that selects the kernels. A thread that reads the raw code uses kernels for a different CPU, which are accurate
    to only 12 bits. The first such call in training is usually the optimizer's square root, split over all threads.
    Without this function, one process in 30 to 100 began with a wrong update.
    """
    torch.ones(1).sqrt()  # too small to be split among threads


def inexact(config: Config, device: torch.device, now: RunState, before: RunState | None) -> list[str]:
    """Return known reasons why this run may not be reproducible bit for bit, one line each, with a remedy.

    Args:
        config: the config of the run.
        device: the device of this rank.
        now: the run state of this attempt.
        before: the run state in the resumed checkpoint, or None for a new run.
    """
    found = []
    if device.type == "cuda" and not config.train.deterministic:
        found.append(
            "this GPU adds in an order that differs from run to run, so a resumed run may differ in the last bits: "
            "set train.deterministic=true for one that is exact, and slower"
        )
    if before is None:
        return found
    shape, shape_before = now.batch_shapes[-1], before.batch_shapes[-1]
    if now.threads != before.threads:
        found.append(
            f"run.threads={now.threads} adds in another order than the {before.threads} threads that this run was "
            f"trained with, so it may differ in the last bits: set run.threads={before.threads}"
        )
    if bool(shape.micro_batches) != bool(shape_before.micro_batches):
        found.append(
            "this run was rank-invariant so far, and is not without train.global_batch_size: set "
            f"train.global_batch_size={shape_before.global_batch_size}"
            if shape_before.micro_batches
            else "this run was not rank-invariant so far and is from here on: it draws other random numbers, adds in "
            "another order; begin a new run where that matters"
        )
    if shape.micro_batches and shape_before.micro_batches and shape.batch_size != shape_before.batch_size:
        found.append(
            f"train.batch_size={shape.batch_size} makes other micro-batches than the {shape_before.batch_size} samples "
            "that this run was trained with, so it draws other random numbers and adds in another order: set "
            f"train.batch_size={shape_before.batch_size}"
        )
    if not (shape.micro_batches or shape_before.micro_batches) and (
        shape.global_batch_size != shape_before.global_batch_size
    ):
        found.append(
            f"the global batch changes from {shape_before.global_batch_size} to {shape.global_batch_size} samples, and "
            "with it every step from here on: keep ranks x train.batch_size x train.grad_accum_steps at "
            f"{shape_before.global_batch_size}"
        )
    return found

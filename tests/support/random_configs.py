"""Train random valid configs, undisturbed and with two kills, and compare the results bit for bit.

Attempts are forked from this process, which has imported torch already, so that a run takes a second. As a script:

    python tests/support/random_configs.py --count 500 --seed 0
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

STEPS = 5
SOURCES = ("code", "encodings", "prose")


@dataclass(frozen=True)
class Outcome:
    """The status and output of a forked command."""

    status: int
    output: str


def fork_run(arguments: list[str], where: Path, kill_after_calls: int | None = None) -> Outcome:
    """Run `python -m runner ARGUMENTS` in `where`, in a fork of this process.

    Args:
        arguments: the arguments of the command.
        where: the current directory of the command.
        kill_after_calls: the command sends itself SIGKILL at this file-changing call, counted from 1.
    """
    log = where / "output.txt"
    child = os.fork()
    if child == 0:
        status = 99
        try:
            _in_child(arguments, where, log, kill_after_calls)
            from runner.__main__ import run

            status = run(arguments)
        except BaseException:  # noqa: BLE001 tests look for the traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, code = os.waitpid(child, 0)
    return Outcome(os.waitstatus_to_exitcode(code), log.read_text(errors="replace"))


def _in_child(arguments: list[str], where: Path, log: Path, kill_after_calls: int | None) -> None:
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(where)
    sys.argv = ["runner", *arguments]
    if kill_after_calls is not None:
        _kill_after(kill_after_calls)


def _kill_after(calls: int) -> None:
    """Count the calls that change files, and end this process by SIGKILL at the last."""
    from runner.system import files

    left = [calls]

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("write_fd", "fsync_fd", "rename", "write_atomic", "append_line"):
        setattr(files, name, counting(getattr(files, name)))


def preload() -> None:
    """Import what every attempt needs, so that forks have it already."""
    for module in (
        "runner.config.composition",
        "runner.cli.start.start",
        "runner.cli.runs.checkpoints",
        "runner.training.session",
        "torch.distributed.checkpoint",
        "torch._inductor",  # train.deterministic makes torch import it, which takes seconds
    ):
        import_module(module)
    import torch

    torch.set_num_threads(1)


def random_overrides(rng: random.Random) -> list[str]:
    """Return the overrides of a small run of `STEPS` steps that is valid according to the documentation."""
    sampler = rng.choice(("distributed", "mixture", "elastic"))
    single = sampler == "distributed" or rng.random() < 0.3
    names = SOURCES[:1] if single else SOURCES
    overrides = [
        "experiment=smoke",
        f"data={'text' if single else 'mixture'}",
        f"sampler={sampler}",
        f"train.steps={STEPS}",
        f"seed={rng.choice((0, 1, 42, 2**31, 2**63 - 1))}",
        f"model.width={rng.choice((8, 16))}",
        f"model.layers={rng.choice((1, 2))}",
        f"model.dropout={rng.choice((0.0, 0.1, 0.5))}",
        f"data.sequence_length={rng.choice((1, 7, 16))}",
        f"run.threads={rng.choice((1, 2))}",
        f"logger={rng.choice(('none', 'none', 'none', 'default'))}",
    ]
    for part in (_batches, _optimization, _evaluation, _checkpoints, _loading):
        overrides += part(rng)
    return [*overrides, *_mixing(rng, sampler, names), *_phases(rng, sampler, names)]


def _batches(rng: random.Random) -> Iterator[str]:
    batch, accum = rng.choice((1, 2, 3, 5)), rng.choice((1, 1, 2, 3))
    yield f"train.batch_size={batch}"
    how = rng.choice(("accum", "whole", "both"))
    if how != "whole":
        yield f"train.grad_accum_steps={accum}"
    if how != "accum":
        yield f"train.global_batch_size={batch * accum}"


def _optimization(rng: random.Random) -> Iterator[str]:
    yield f"optimizer={rng.choice(('adamw', 'sgd'))}"
    yield f"optimizer.lr={rng.choice((0, 1e-4, 1e-2, 3))}"
    yield f"scheduler={rng.choice(('constant', 'cosine', 'linear', 'wsd', 'rex'))}"
    yield f"scheduler.warmup_steps={rng.choice((0, 1, 3))}"
    yield f"train.clip_norm={rng.choice(('null', 0.1, 1.0))}"
    yield f"train.precision={rng.choice(('auto', 'float32', 'bfloat16'))}"
    yield f"train.deterministic={rng.choice(('true', 'false'))}"
    yield "train.on_nonfinite=skip"
    yield f"strategy={rng.choice(('ddp', 'ddp', 'fsdp'))}"


def _evaluation(rng: random.Random) -> Iterator[str]:
    every = rng.choice((0, 1, 2, 5, "null"))
    yield f"eval.every_steps={every}"
    yield f"checkpoint.keep_best={rng.choice((0, 1)) if every in (1, 2, 5) else 0}"
    yield f"eval.batches={rng.choice((1, 2))}"
    yield f"eval.batch_size={rng.choice(('null', 1, 4))}"


def _checkpoints(rng: random.Random) -> Iterator[str]:
    yield f"checkpoint.every_steps={rng.choice((1, 2, 3, 100))}"
    yield f"checkpoint.every_minutes={rng.choice(('null', 0.001, 10))}"
    yield f"checkpoint.keep_last={rng.choice((1, 2, 10))}"
    yield f"checkpoint.keep_every_steps={rng.choice(('null', 2))}"
    yield f"checkpoint.mode={rng.choice(('async', 'sync'))}"
    yield f"checkpoint.adaptive={rng.choice(('true', 'false'))}"


def _loading(rng: random.Random) -> Iterator[str]:
    workers = rng.choice((0, 0, 0, 1, 2))
    yield f"data.num_workers={workers}"
    if workers:
        yield f"data.prefetch_factor={rng.choice((1, 2, 4))}"


def _mixing(rng: random.Random, sampler: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"sampler.shuffle={rng.choice(('true', 'false'))}"
    if sampler != "elastic":
        yield f"sampler.drop_last={rng.choice(('true', 'false'))}"
    if sampler == "distributed":
        return
    yield f"sampler.temperature={rng.choice((0.3, 0.7, 1, 5))}"
    for name in names[1:]:
        if rng.random() < 0.5:
            yield f"sampler.weights.{name}={rng.choice((0, 0.1, 1, 20))}"
    if sampler == "elastic":
        if rng.random() < 0.3:
            yield f"sampler.max_epochs.{names[-1]}={rng.choice((0, 0.001, 0.5, 2))}" if len(names) > 1 else "seed=3"
        if rng.random() < 0.4:
            first = rng.randrange(20)
            texts = [f"{first}-{first + rng.randrange(5)}", f"{names[0]}:{rng.randrange(9)}", "positions:7"]
            yield f"sampler.exclude={rng.sample(texts, rng.randint(1, 3))}".replace("'", "").replace(" ", "")


def _phases(rng: random.Random, sampler: str, names: tuple[str, ...]) -> Iterator[str]:
    for number, start in enumerate(rng.sample(range(STEPS), rng.choice((0, 0, 1, 2)))):
        phase = f"+phases.p{number}"
        yield f"{phase}.start_step={start}"
        yield f"{phase}.lr_scale={rng.choice((0, 0.1, 2))}"
        if sampler != "distributed" and rng.random() < 0.7:
            yield f"{phase}.weights.{rng.choice(names)}={rng.choice((0.5, 1, 4))}"
            if rng.random() < 0.5:
                yield f"{phase}.temperature={rng.choice((0.5, 2))}"


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def check_config(overrides: list[str], rng: random.Random) -> None:
    """Train undisturbed, then with two kills. Compare the metrics and the last checkpoint.

    Raises:
        AssertionError: they differ. The message has the command and its output.
    """
    with _directory() as where:
        for name in ("whole", "killed"):
            (where / name).mkdir()
        whole = _to_end(overrides, where / "whole")
        for _ in range(2):
            outcome = fork_run([*overrides, "run.dir=run"], where / "killed", rng.randint(1, 60))
            assert outcome.status in (0, -signal.SIGKILL), _story(overrides, outcome)
        killed = _to_end(overrides, where / "killed")
        for name in ("metrics.jsonl", "finished.json"):
            assert (whole / name).read_bytes() == (killed / name).read_bytes(), f"{name} differs: {' '.join(overrides)}"
        _check_checkpoints(overrides, where)


def _check_checkpoints(overrides: list[str], where: Path) -> None:
    newest = [max((where / name / "run/checkpoints").glob("step_????????")) for name in ("whole", "killed")]
    outcome = fork_run(["checkpoints", "--diff", *map(str, newest)], where)
    assert outcome.status == 0, _story(overrides, outcome)


def _to_end(overrides: list[str], where: Path) -> Path:
    outcome = fork_run([*overrides, "run.dir=run"], where)
    assert outcome.status == 0, _story(overrides, outcome)
    return where / "run"


def _story(overrides: list[str], outcome: Outcome) -> str:
    return f"python -m runner {' '.join(overrides)}\nended with {outcome.status}:\n{outcome.output[-3000:]}"


def main() -> int:
    """Check `--count` configs. The exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    preload()
    failed, began = 0, time.monotonic()
    for number in range(options.seed, options.seed + options.count):
        rng = random.Random(number)
        try:
            check_config(random_overrides(rng), rng)
        except AssertionError as error:
            failed += 1
            print(f"config {number}: {error}", flush=True)
        if (number + 1) % 25 == 0:
            print(f"{number + 1 - options.seed} configs, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{options.count} configs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Branches: a branch equals a run planned with its change, whatever is killed; other changes act from the fork on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from branches import STEPS, TINY, assert_same, hashes, killed, made, of_steps, records, run
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import fork_run, preload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LR = 0.001
WEIGHTS = {"code": 2.0, "encodings": 1.0, "prose": 1.0}
LATE = 7
BASE = ["sampler.weights_by=equal", "sampler.weights.code=2", "sampler.temperature=1.5", "model.dropout=0.1"]


def words(sampler: str) -> list[str]:
    late = "{start_step: 7, weights: {prose: 3.0}, lr_scale: 0.5}"
    return [*TINY, *BASE, f"sampler={sampler}", f"+phases.late={late}", f"optimizer.lr={LR}"]


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return finished trunks, by sampler, with a checkpoint of every second step."""
    preload()
    root = tmp_path_factory.mktemp("trunks")
    for sampler in ("elastic", "mixture"):
        run(root, *words(sampler), f"run.dir={sampler}")
    return {sampler: root / sampler for sampler in ("elastic", "mixture")}


@pytest.fixture
def trunk(trunks: dict[str, Path], tmp_path: Path) -> Path:
    """Copy the elastic trunk."""
    return Path(shutil.copytree(trunks["elastic"], tmp_path / "o" / "trunk"))


def phase(start: int, weights: dict[str, float], temperature: float, scale: float) -> str:
    shares = ", ".join(f"{name}: {weight}" for name, weight in weights.items())
    return f"{{start_step: {start}, weights: {{{shares}}}, temperature: {temperature}, lr_scale: {scale}}}"


@given(
    sampler=st.sampled_from(["elastic", "mixture"]),
    step=st.sampled_from([2, 4, 6, 8]),
    temperature=st.sampled_from([None, 0.5, 3.0]),
    encodings=st.sampled_from([None, 0.0, 4.0]),
    factor=st.sampled_from([None, 0.5, 4.0]),
    added=st.sampled_from([None, 8, 9]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=4)
def test_a_branch_is_the_run_that_was_planned_so(
    trunks: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    sampler: str,
    step: int,
    temperature: float | None,
    encodings: float | None,
    factor: float | None,
    added: int | None,
    seed: int,
) -> None:
    """Kill the command again and again, while it takes over the checkpoint and while it trains."""
    root, rng = tmp_path_factory.mktemp("drawn"), random.Random(seed)
    change = []
    change += [] if temperature is None else [f"sampler.temperature={temperature}"]
    change += [] if encodings is None else [f"+sampler.weights.encodings={encodings}"]
    change += [] if factor is None else [f"optimizer.lr={LR * factor}"]
    change += [] if added is None else [f"+phases.added={{start_step: {added}, lr_scale: 0.25}}"]
    base = {**WEIGHTS, **({} if encodings is None else {"encodings": encodings})}
    of_branch = {0: (base, 1.0), LATE: ({**base, "prose": 3.0}, 0.5)}
    of_branch |= {} if added is None else {added: (base, 0.25)}
    starts = [step, *(start for start in of_branch if start > step)]
    planned = []
    for start in starts:
        weights, scale = of_branch[max(each for each in of_branch if each <= start)]
        planned.append(f"+phases.p{start}={phase(start, weights, temperature or 1.5, scale * (factor or 1.0))}")
    late = [word for word in words(sampler) if step > 7 or not word.startswith("+phases.late")]
    run(root, *late, *planned, "run.dir=planned")
    fork = ["fork", str(trunks[sampler]), "--step", str(step), *change, "run.dir=branch"]
    before = hashes(trunks[sampler])
    killed(root, *fork, rng=rng)
    run(root, *fork)
    assert_same(root / "branch", root / "planned")
    assert hashes(trunks[sampler]) == before
    again = run(root, *fork)
    assert "finished" in again
    shutil.rmtree(root)


def test_the_branch_survives_its_trunk(trunk: Path, tmp_path: Path) -> None:
    """Delete the trunk after the fork: a killed attempt is resumed, and prune deletes nothing of the branch."""
    fork = ["fork", "o/trunk", "--step", "4", "sampler.temperature=3"]
    run(tmp_path, *fork, "run.dir=o/whole")
    for calls in range(20, 80, 10):  # until it is a run, with the checkpoint
        outcome = fork_run([*fork, "run.dir=o/branch"], tmp_path, calls)
        if (tmp_path / "o/branch/config.yaml").is_file():
            break
    assert outcome.status == -signal.SIGKILL
    run(trunk.parent, "checkpoints", "trunk", "--prune", "--keep-last", "1")
    shutil.rmtree(trunk)
    run(tmp_path, "resume", "o/branch")
    assert_same(tmp_path / "o/branch", tmp_path / "o/whole")
    error = run(tmp_path, *fork, "run.dir=o/branch", status=2)
    assert "trunk is not a run directory" in error


def test_a_moved_directory_of_runs_has_the_same_branches(trunk: Path, tmp_path: Path) -> None:
    run(tmp_path, "fork", "o/trunk", "--step", "4", "sampler.temperature=3")
    branch = made(trunk.parent)
    (tmp_path / "o").rename(tmp_path / "moved")
    assert "finished" in run(tmp_path, "fork", "moved/trunk", "--step", "4", "sampler.temperature=3")
    assert made(tmp_path / "moved").name == branch.name


@pytest.mark.parametrize("second", [4, 6])
def test_a_fork_of_a_fork(trunk: Path, tmp_path: Path, second: int) -> None:
    """Fork at a later step or at the same one: both changes act, and kills change nothing."""
    first = ["sampler.temperature=3", "optimizer.weight_decay=0.5", "seed=3"]
    run(tmp_path, "fork", "o/trunk", "--step", "4", *first, "run.dir=o/one")
    run(tmp_path, "fork", "o/one", "--step", str(second), "optimizer.lr=0.002", "run.dir=o/two")
    # The same changes, planned: of the first fork at its step, and of the second at its own.
    at = phase(4, WEIGHTS, 3.0, 1.0), phase(second, WEIGHTS, 3.0, 2.0), phase(7, {**WEIGHTS, "prose": 3.0}, 3.0, 1.0)
    added = [f"+phases.p{number}={text}" for number, text in enumerate(at[second == 4 :])]
    run(tmp_path, "fork", "o/trunk", "--step", "4", "~phases.late", *added, *first[1:], "run.dir=o/planned")
    assert_same(tmp_path / "o/two", tmp_path / "o/planned")
    again = ["fork", "o/one", "--step", str(second), "optimizer.lr=0.002", "run.dir=o/killed"]
    killed(tmp_path, *again, rng=random.Random(second))
    run(tmp_path, *again)
    assert_same(tmp_path / "o/two", tmp_path / "o/killed")
    shutil.rmtree(tmp_path / "o/one/checkpoints/step_00000004")
    error = run(tmp_path, "fork", "o/one", "--step", "4", "run.dir=o/three", status=2)
    assert "one has no checkpoint of step 4: it has those of steps 6, 8, 10" in error


def test_seeds_differ_and_each_repeats(trunk: Path, tmp_path: Path) -> None:
    """A seed reseeds dropout and similar draws. The order of samples stays that of the trunk."""
    for seed in (0, 1, 2):
        run(tmp_path, "fork", "o/trunk", "--step", "4", f"seed={seed}")
    seeds = {seed: made(trunk.parent, f"-seed{seed}-") for seed in (0, 1, 2)}
    assert of_steps(seeds[0], "loss") == of_steps(trunk, "loss")
    for seed in (1, 2):
        assert of_steps(seeds[seed], "digest") == of_steps(trunk, "digest")
        losses = [of_steps(each, "loss") for each in (seeds[seed], trunk, seeds[3 - seed])]
        assert [losses[0][step] == losses[1][step] for step in range(1, 11)] == [True] * 4 + [False] * 6
        assert losses[0][5] != losses[2][5]
    again = ["fork", "o/trunk", "--step", "4", "seed=1", "run.dir=o/again"]
    killed(tmp_path, *again, rng=random.Random(5))
    run(tmp_path, *again)
    assert_same(tmp_path / "o/again", seeds[1])


def test_other_settings_of_the_optimizer_keep_its_state(trunk: Path, tmp_path: Path) -> None:
    """The option acts from the next update on; step 5 is computed before it."""
    output = run(tmp_path, "fork", "o/trunk", "--step", "4", "optimizer.weight_decay=0.9")
    branch = made(trunk.parent)
    assert "without a state" not in output
    losses, before = of_steps(branch, "loss"), of_steps(trunk, "loss")
    assert [losses[step] == before[step] for step in range(1, 11)] == [True] * 5 + [False] * 5
    assert of_steps(branch, "lr") == of_steps(trunk, "lr")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (["optimizer=sgd", "optimizer.lr=0.01"], "saved with AdamW, and this run has SGD"),
        (["optimizers={a: {_target_: torch.optim.SGD, lr: 0.01, match: ['*']}}"], "saved with AdamW"),
    ],
    ids=["another class", "by name"],
)
def test_another_optimizer_begins_without_a_state(
    trunk: Path, tmp_path: Path, change: list[str], difference: str
) -> None:
    """The branch prints a warning, follows its schedule from the step of the fork on, and repeats after kills."""
    fork = ["fork", "o/trunk", "--step", "4", *change]
    output = run(tmp_path, *fork, "run.dir=o/branch")
    assert "warning: the optimizer begins without a state: it was " + difference in output
    scales = [of_steps(tmp_path / "o/branch", "lr")[step] / of_steps(trunk, "lr")[step] for step in range(1, 11)]
    assert scales == pytest.approx([1.0] * 4 + [10.0] * 6)
    killed(tmp_path, *fork, "run.dir=o/killed", rng=random.Random(3))
    run(tmp_path, *fork, "run.dir=o/killed")
    assert_same(tmp_path / "o/branch", tmp_path / "o/killed")


def test_other_optimizer_begins_again_if_its_state_is_corrupt(trunk: Path, tmp_path: Path) -> None:
    fork = ["fork", "o/trunk", "--step", "4", "optimizer=sgd", "optimizer.lr=0.01"]
    run(tmp_path, *fork, "run.dir=o/whole")
    run(tmp_path, *fork, "run.dir=o/branch")
    branch = tmp_path / "o/branch"
    for step in (8, 10):
        shutil.rmtree(branch / f"checkpoints/step_{step:08d}")
    (branch / "checkpoints/step_00000006/train_state.pt").write_bytes(b"")
    (branch / "finished.json").unlink()
    assert "warning: the optimizer begins without a state" in run(tmp_path, *fork, "run.dir=o/branch")
    shutil.rmtree(branch / "checkpoints/step_00000006.corrupt")
    assert_same(branch, tmp_path / "o/whole")


def test_a_longer_branch_and_other_workers(trunk: Path, tmp_path: Path) -> None:
    """With a schedule that does not follow the length, it equals a run of that length."""
    longer = [word for word in words("elastic") if not word.startswith("train.steps")]
    run(tmp_path, *longer, "train.steps=13", "scheduler=constant", "run.dir=o/long")
    run(tmp_path, *longer, "train.steps=10", "scheduler=constant", "run.dir=o/short")
    run(tmp_path, "fork", "o/short", "--step", "10", "train.steps=13", "run.dir=o/branch")
    assert_same(tmp_path / "o/branch", tmp_path / "o/long")
    run(tmp_path, "fork", "o/short", "--step", "10", "train.steps=13", "data.num_workers=2", "run.dir=o/workers")
    assert (tmp_path / "o/workers/metrics.jsonl").read_bytes() == (tmp_path / "o/long/metrics.jsonl").read_bytes()


def test_ranks(tmp_path: Path) -> None:
    """Compare two ranks with a run planned on two; and one rank after a trunk on two with the same samples."""
    from forked import attempt_of, finish

    preload()
    common = [
        *TINY,
        "sampler=elastic",
        "sampler.weights_by=equal",
        "train.batch_size=2",
        "train.global_batch_size=8",
        "model.dropout=0.1",
    ]
    log, here = tmp_path / "log.txt", os.getcwd()
    os.chdir(tmp_path)
    sys.stdout.flush()
    try:
        finish(attempt_of([*common, "run.dir=o/trunk"], log, 2), log)
        finish(attempt_of([*common, f"+phases.p={phase(4, WEIGHTS, 1.0, 1.0)}", "run.dir=o/planned"], log, 2), log)
        fork = ["+sampler.weights.code=2", "fork=o/trunk@4"]
        finish(attempt_of([*fork, "run.dir=o/branch"], log, 2), log)
        finish(attempt_of([*fork, "seed=4", "run.dir=o/seed"], log, 2), log)
    finally:
        os.chdir(here)
    assert_same(tmp_path / "o/branch", tmp_path / "o/planned")
    run(tmp_path, *fork, "run.dir=o/one")
    for key in ("digest", "sources"):
        assert of_steps(tmp_path / "o/one", key) == of_steps(tmp_path / "o/branch", key)
        assert of_steps(tmp_path / "o/seed", key) == of_steps(tmp_path / "o/branch", key)
    assert of_steps(tmp_path / "o/seed", "loss")[5] != of_steps(tmp_path / "o/branch", "loss")[5]


def test_streams_own_samplers_epochs_and_callbacks(tmp_path: Path) -> None:
    """Everything with a state continues in the branch: without a change it equals the trunk."""
    stream = "data.loader={_target_: custom.stream_loader, length: 500, sequence_length: 8, batch_size: 4}"
    no_mixture = [word for word in TINY if word != "data=mixture"]
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"line {number} of a short text\n" for number in range(40)))
    epochs = [word for word in no_mixture if not word.startswith(("train.steps", "eval."))]
    text = "data.sources={text: {_target_: runner.data.text.TextFiles, paths: rows.txt, sequence_length: 8}}"
    cases = {
        "stream": [*no_mixture, f"+{stream}", "data.sources={}", "data.eval_sources={}", "eval.every_steps=0"],
        "own": [*no_mixture, "data=text", "sampler._target_=orders.Shuffled"],
        "epochs": [*epochs, "data=own", f"+{text}", "train.steps=null", "train.epochs=0.7", "train.batch_size=8"],
        "callbacks": [*TINY, "sampler=elastic", "callbacks.drawing._target_=hooks.Drawing", "checkpoint.keep_best=1"],
    }
    for name, case in cases.items():
        run(tmp_path, *case, f"run.dir=o/{name}")
        fork = ["fork", f"o/{name}", "--step", "4", "train.clip_norm=1.0", f"run.dir=o/{name}-branch"]
        killed(tmp_path, *fork, rng=random.Random(name), times=1)
        run(tmp_path, *fork)
        assert_same(tmp_path / f"o/{name}", tmp_path / f"o/{name}-branch")
    assert of_steps(tmp_path / "o/callbacks-branch", "calls")[STEPS] == STEPS + 100  # an evaluation counts 100


def test_two_fork_commands_at_once_make_one_branch(trunk: Path, tmp_path: Path) -> None:
    """The same command twice at once makes one branch. Different commands do not block each other."""
    preload()
    from forked import fork

    before, log = hashes(trunk), tmp_path / "log.txt"
    command = [f"fork={trunk}@4", "run.threads=1", "sampler.temperature=3"]
    jobs = [fork([*command, *more], log) for more in ([], [], ["optimizer.lr=0.002"], ["seed=2"])]
    ended = [os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) for job in jobs]
    assert sorted(ended[:2]) in ([0, 0], [0, 73]), log.read_text()
    assert ended[2:] == [0, 0], log.read_text()
    assert len(list(trunk.parent.glob("trunk-at4-*"))) == 3
    run(tmp_path, *command, "run.dir=alone")
    (same,) = trunk.parent.glob("trunk-at4-threads1-temperature3.0-seed0-*")
    assert_same(same, tmp_path / "alone")
    assert hashes(trunk) == before


def test_the_past_of_a_live_trunk(tmp_path: Path) -> None:
    """Fork its past. A fork of its future is refused, with the remedy."""
    preload()
    from forked import fork
    from runs import Run

    held = Run(tmp_path / "o" / "trunk", [])
    case = [*TINY, "sampler=elastic", "train.loss._target_=paced.loss", f"run.dir={held.path}"]
    job = fork(case, tmp_path / "log.txt", **held.hold(7), HELD_S="600")
    while not held.idles():
        assert os.waitpid(job, os.WNOHANG)[0] == 0, (tmp_path / "log.txt").read_text()
        time.sleep(0.01)
    error = run(tmp_path, "fork", "o/trunk", "--step", "8", status=2)
    assert "o/trunk has no checkpoint of step 8: it has those of steps 2, 4, 6; " in error
    assert "it is at step 7 of 10, and saves every 2 steps and at its end: rerun this command once step 8" in error
    assert not list(held.path.parent.glob("*-at8-*"))
    run(tmp_path, "fork", "o/trunk", "--step", "4", "run.dir=o/branch", "train.steps=6")
    os.kill(job, signal.SIGKILL)
    os.waitpid(job, 0)
    held.release()
    run(tmp_path, "resume", "o/trunk")
    assert of_steps(tmp_path / "o/branch", "digest").items() <= of_steps(held.path, "digest").items()


def test_commands_show_the_trunk_of_a_branch(trunk: Path, tmp_path: Path) -> None:
    assert f"branching off {trunk} at step 4 of {STEPS}" in run(tmp_path, "fork", "o/trunk", "--step", "4", "seed=1")
    branch = made(trunk.parent)
    assert branch.name.startswith("trunk-at4-seed1-")
    assert "10/10" in run(tmp_path, "status", str(branch))
    assert run(tmp_path, "inspect", str(branch), "--step", "3") == run(tmp_path, "inspect", str(trunk), "--step", "3")
    assert '"step": 4' in run(tmp_path, "checkpoints", str(branch), "--json")
    assert "trunk@4" in run(tmp_path, "report", "o", "--json")
    assert records(branch)[:4] == records(trunk)[:4]

"""Check the parts of a drill: its plan, its comparison, its report, and its argument errors."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from exactdata.samplers import SamplerKind
from runner.__main__ import run as command
from runner.chaos import report
from runner.chaos.compare import Comparison, compare, compare_metrics
from runner.chaos.display import Display
from runner.chaos.drill import Drill
from runner.chaos.faults import KINDS, DiskFull, Fault, flip
from runner.chaos.plan import Outcome, PlannedFault, make_plan, replan
from runner.chaos.stage import TRIGGERS, BrokenError, Stage, TooLateError, UnansweredError
from runner.chaos.watch import Watch
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.files.manifest import CorruptionError, read, verify
from runner.checkpoint.files.store import step_name
from runner.checkpoint.tensors.compare import nested_differences, tensor_difference
from runner.cli.chaos.chaos_options import choose_kinds, fixed_ranks, parse, required_settings
from runner.config.schema import Config, SamplerConfig, TrainConfig
from runner.errors import UserError
from runner.rundir.paths import RunDir

LOCAL = {name: kind.triggers for name, kind in KINDS.items() if kind.on_this_machine}


# The plan


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_injected_once_if_there_are_enough_faults(seed: int) -> None:
    plan = make_plan(LOCAL, len(LOCAL) + 3, 200, seed)
    assert set(LOCAL) == {fault.kind for fault in plan}
    assert [fault.number for fault in plan] == list(range(1, len(LOCAL) + 4))


@pytest.mark.parametrize("seed", range(20))
def test_a_few_faults_are_all_of_different_kinds(seed: int) -> None:
    plan = make_plan(LOCAL, 4, 200, seed)
    assert max(Counter(fault.kind for fault in plan).values()) == 1


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert make_plan(LOCAL, 12, 100, 7) == make_plan(LOCAL, 12, 100, 7)
    assert make_plan(LOCAL, 12, 100, 7) != make_plan(LOCAL, 12, 100, 8)


@pytest.mark.parametrize("steps", [6, 20, 1000])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_faults_come_in_order_and_before_the_end(steps: int, count: int) -> None:
    at = [fault.step for fault in make_plan(LOCAL, count, steps, 0)]
    assert at == sorted(at)
    assert all(1 <= step < steps for step in at)
    assert all(fault.trigger in LOCAL[fault.kind] for fault in make_plan(LOCAL, count, steps, 0))


def test_faults_too_late_for_a_run_come_earlier_in_the_next() -> None:
    left = [fault for fault in make_plan(LOCAL, 12, 100, 0) if fault.step > 50]
    again = replan(left, 100, 0, 1)
    assert {(fault.number, fault.kind, fault.trigger) for fault in again} == {
        (fault.number, fault.kind, fault.trigger) for fault in left
    }
    assert max(fault.step for fault in replan(left, 100, 0, 3)) < max(fault.step for fault in left)


# The comparison


def lines(steps: int = 4) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        found.append({"step": step, "loss": 1 / step, "digest": f"d{step}", "samples": {"code": step, "prose": 1}})
        if step % 2 == 0:
            found.append({"step": step, "eval_loss": 0.5})
    return found


def compared(one: list[Any], two: list[Any]) -> Comparison:
    found = Comparison()
    compare_metrics(one, two, found)
    return found


def test_the_same_metrics_are_identical() -> None:
    assert compared(lines(), lines()).identical
    assert compared(lines(), lines()).records == 6
    assert compared([{"step": 1, "loss": math.nan}], [{"step": 1, "loss": math.nan}]).identical


def test_a_changed_loss_is_found_and_named() -> None:
    other = lines()
    other[3]["loss"] = math.nextafter(other[3]["loss"], 1)
    (difference,) = compared(lines(), other).differences
    assert (difference.step, difference.key) == (3, "loss")
    assert difference.reference == repr(1 / 3)
    assert difference.other == repr(math.nextafter(1 / 3, 1))


def test_a_sample_from_another_source_is_found_and_named() -> None:
    other = lines()
    other[0]["samples"] = {"code": 2, "prose": 1}
    (difference,) = compared(lines(), other).differences
    assert str(difference) == "step 1, samples.code: 1 in the reference, 2 under faults"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda records: records[:4] + records[5:], (4, "the training of step 4", "the evaluation of step 4")),
        (lambda records: records[:-1], (4, "the evaluation of step 4", "no record")),
        (lambda records: [*records, {"step": 5, "loss": 1.0}], (5, "no record", "the training of step 5")),
        (lambda records: records[:3] + records[2:], (2, "the training of step 3", "the evaluation of step 2")),
    ],
)
def test_a_missing_or_repeated_record_is_found_and_named(change: Any, expected: tuple[int, str, str]) -> None:
    (difference,) = compared(lines(), change(lines())).differences
    assert (difference.step, difference.reference, difference.other) == expected


def test_one_bit_of_a_tensor_is_found() -> None:
    one = torch.arange(12.0).reshape(3, 4)
    two = one.clone()
    two.view(torch.uint8)[1, 8] ^= 1
    described = tensor_difference(one, two)
    assert described is not None
    assert "0x1.8000000000000p+2" in described[0]
    assert "(1 of 12 values differ, by up to 4.77e-07, the first at 6)" in described[1]


def test_tensors_are_compared_by_their_bits() -> None:
    """Check that zeros of different signs differ and that a NaN equals itself."""
    assert tensor_difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert tensor_difference(torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    assert tensor_difference(torch.zeros(2), torch.zeros(3, dtype=torch.float64)) == (
        "(2,) of torch.float32",
        "(3,) of torch.float64",
    )
    assert tensor_difference(torch.zeros(0), torch.zeros(0)) is None
    assert tensor_difference(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)) is None


def test_nested_states_name_the_part_that_differs() -> None:
    one = {"rng": {"numpy": ["MT", torch.tensor([1, 2])]}, "step": 1}
    two = {"rng": {"numpy": ["MT", torch.tensor([1, 3])]}, "step": 1}
    assert [name for name, *_ in nested_differences(one, two, "state")] == ["state.rng.numpy[1]"]
    assert list(nested_differences(one, one, "state")) == []
    assert [name for name, *_ in nested_differences({"a": 1}, {"a": True}, "s")] == ["s.a"]
    assert list(nested_differences({"a": None}, {}, "s")) == [("s.a", None, "missing")]


def make_run(path: Path, change: str = "") -> RunDir:
    """Write a run directory with metrics and two checkpoints of a small model, changed in one way."""
    run = RunDir(path)
    path.mkdir(parents=True, exist_ok=True)
    run.config.write_text("seed: 0\n")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = TrainStateManager(run.checkpoints, mode="sync")
    for step in (2, 4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if change == "weight" and step == 4:
            with torch.no_grad():
                model.bias[1] += 1e-7
        if change == "rng" and step == 4:
            torch.rand(1)
        shapes = [3 if change == "shape" else 1]
        state = build_train_state(step, step * 10, extra={"evaluated": change == "evaluated", "batch_shapes": shapes})
        if change != "last checkpoint" or step == 2:
            manager.save(step, model, optimizer, state, wait=True)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    return run


def test_the_same_run_is_identical_in_every_tensor_and_generator(tmp_path: Path) -> None:
    found = compare(make_run(tmp_path / "one"), make_run(tmp_path / "two", "evaluated"))
    assert found.identical, found.differences
    assert found.checkpoints == [2, 4]
    assert found.tensors == 2 * 8  # two parameters, each with two moments and a step count


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("weight", "model.bias"),
        ("rng", "train state.rng.torch_cpu"),
        ("last checkpoint", "step of the last checkpoint"),
    ],
)
def test_changed_weight_generator_or_lost_checkpoint_is_found(tmp_path: Path, change: str, key: str) -> None:
    found = compare(make_run(tmp_path / "one"), make_run(tmp_path / "two", change))
    assert found.differences[0].key == key, found.differences


def test_rank_values_are_compared_only_at_equal_rank_counts(tmp_path: Path) -> None:
    """Allow different per-rank values. Weights and shared generators do not depend on the number of ranks."""
    one = make_run(tmp_path / "one")
    for ranks, change, key in (
        (1, "shape", "train state.batch_shapes[0]"),
        (3, "shape", None),
        (3, "rng", "train state.rng.torch_cpu"),
        (3, "weight", "model.bias"),
    ):
        two = make_run(tmp_path / f"{change}-{ranks}", change)
        for run, count in ((one, 1), (two, ranks)):
            run.attempts.write_text(json.dumps({"attempt": 1, "cause": "finished", "ranks": count}) + "\n")
        found = compare(one, two)
        assert [difference.key for difference in found.differences[:1]] == ([] if key is None else [key])
        assert found.ranks == sorted({1, ranks})


def test_a_corrupt_last_checkpoint_is_found(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    file = two.checkpoints / step_name(4) / "train_state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    (difference,) = compare(one, two).differences
    assert (difference.step, difference.key) == (4, "checkpoint")


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_byte_is_always_detected(tmp_path: Path, seed: int) -> None:
    import random

    checkpoint = make_run(tmp_path).checkpoints / step_name(4)
    verify(Folder(checkpoint), read(Folder(checkpoint)))
    assert flip(checkpoint, random.Random(seed)).startswith("byte ")
    with pytest.raises(CorruptionError):
        verify(Folder(checkpoint), read(Folder(checkpoint)))


# Watching


def test_a_run_is_observed_by_its_files_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    watch = Watch(run)
    assert (watch.step(), watch.evaluating(2), watch.saves(), watch.holder()) == (0, False, [], (0, {}))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines()[:-1]) + '{"step": 99')
    assert watch.step() == 4
    assert watch.evaluating(2)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    assert not watch.evaluating(2)
    for name in ("step_00000004.tmp-1-77", "step_00000002.tmp-deleted-1", "step_00000002"):
        (run.checkpoints / name).mkdir(parents=True)
    assert [path.name for path in watch.saves()] == ["step_00000004.tmp-1-77"]
    assert watch.renames() == []
    (run.checkpoints / "step_00000004.tmp-1-77" / "manifest.json").touch()
    assert len(watch.renames()) == 1


# The report


def result(tmp_path: Path, **changes: Any) -> report.Result:
    plan = make_plan(LOCAL, 3, 20, 0)
    outcomes = [
        Outcome(
            fault.number, fault.kind, fault.trigger, "killed-1", fault.step, 1, "as it | should\nbe", True, steps_lost=2
        )
        for fault in plan
    ]
    reference, killed = make_run(tmp_path / "reference"), make_run(tmp_path / "killed-1")
    found = report.Result(
        command="python -m runner chaos",
        config="smoke-seed0",
        settings=[],
        seed=0,
        plan=plan,
        outcomes=outcomes,
        comparisons={"killed-1": Comparison(records=6, tensors=8, values=20)},
        errors=[],
        reference=reference,
        killed=[killed],
    )
    return replace(found, **changes)


def test_good_result_reports_comparisons_and_losses(tmp_path: Path) -> None:
    good = result(tmp_path)
    assert good.good
    assert good.verdict() == [
        "bit-identical: 6 records of metrics, 8 tensors (20 values); 3 faults, 6 steps trained again"
    ]


def test_fault_not_injected_or_not_survived_fails_the_drill(tmp_path: Path) -> None:
    good = result(tmp_path)
    missing = replace(good, outcomes=good.outcomes[:2])
    assert not missing.good
    assert "1 faults were not injected" in missing.verdict()[1]
    wrong = replace(good, outcomes=[replace(good.outcomes[0], answered=False), *good.outcomes[1:]])
    assert not wrong.good
    assert "wrong" in report.rows(wrong.outcomes)[0][1]
    assert not replace(good, comparisons={}).good
    different = Comparison()
    compare_metrics(lines(), lines()[:-1], different)
    assert replace(good, comparisons={"killed-1": different}).verdict()[0] == "not identical"


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_reports_are_complete(tmp_path: Path, suffix: str) -> None:
    """Check that each kind of fault has a row, and that the curves are drawn."""
    found = result(tmp_path)
    for run in (found.reference, *found.killed):
        run.config.write_text("seed: 1\n")
    path = tmp_path / f"report{suffix}"
    report.write(found, path)
    text = path.read_text()
    assert all(outcome.kind in text for outcome in found.outcomes)
    if suffix == ".json":
        assert json.loads(text)["good"] is True
    else:
        assert found.verdict()[0] in text
        data = text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
        assert {run["name"] for run in json.loads(data)["runs"]} == {
            run.path.name for run in (found.reference, *found.killed)
        }


# Argument errors and settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "sigkil"], "no such fault (did you mean 'sigkill'?)"),
        (["--faults", ","], "names none"),
        (["--kills", "0"], "must be 1 or more"),
        (["--kills", "many"], "invalid int value"),
        (["--seed", "-1"], "must be 0 or more"),
        (["--report", "chaos.pdf"], "the name must end in one of .html, .json"),
        (["run.dir=/tmp/x"], "use --root"),
        (["smoke"], "not an override"),
        (["-m", "seed=1,2"], "--help"),
        (["--faults", "cancel"], "needs a Slurm job"),
        (["experiment=smoke", "--faults", "shape"], "set train.global_batch_size=N, sampler=elastic and strategy=ddp"),
        (["experiment=smoke", "train.steps=3"], "train.steps=3: must be 6 or more"),
        (["experiment=smok"], "smoke"),
        (["train.stepps=3"], "did you mean 'steps'?"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["chaos", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_flags_and_overrides_come_in_any_order() -> None:
    options = parse(["seed=1", "--kills", "3", "data=mixture", "--faults=flip,sigkill,flip", "--config-dir=x"])
    assert options.overrides == ("seed=1", "data=mixture")
    assert options.kinds == ("flip", "sigkill")
    assert options.flags == ("--config-dir=x",)


def test_jobs_and_processes_have_different_faults() -> None:
    assert {"disk-full", "frozen", "sigkill-rename"} <= set(choose_kinds(None, local=True))
    assert {"requeue", "cancel", "flip"} <= set(choose_kinds(None, local=False))
    with pytest.raises(UserError, match="needs a process on this machine"):
        choose_kinds(("frozen",), local=False)


def test_ranks_change_only_in_rank_invariant_runs() -> None:
    """Leave the fault out of such a run by default. If the user requests it, raise an error with the remedy."""
    invariant = Config(train=TrainConfig(global_batch_size=16), sampler=SamplerConfig(kind=SamplerKind.elastic))
    assert fixed_ranks(invariant, [1, 2, 3, 4]) is None
    assert "this machine has one GPU to use" in str(fixed_ranks(invariant, [1]))
    reason = fixed_ranks(Config(), [1, 2, 3, 4])
    assert "depends on its number of ranks: set train.global_batch_size=N" in str(reason)
    assert "shape" in choose_kinds(None, local=True)
    assert "shape" not in choose_kinds(None, local=True, fixed_ranks=reason)
    with pytest.raises(UserError, match="--faults shape: the result of this run depends"):
        choose_kinds(("shape",), local=True, fixed_ranks=reason)


def test_settings_that_must_change_are_reported() -> None:
    config = Config()
    config.train.steps, config.checkpoint.keep_last, config.checkpoint.every_steps = 300, 1, None
    overrides, notes = required_settings(config, 10)
    assert "checkpoint.every_steps=25" in overrides
    assert "checkpoint.keep_last=2" in overrides
    assert len(notes) == 2
    config.checkpoint.keep_last, config.checkpoint.every_steps = 3, 10
    assert required_settings(config, 10)[1] == []


def drill(root: Path) -> Drill:
    return Drill(root, make_target=None, display=None, steps=20, save_every=2, eval_every=0, seed=0)  # type: ignore[arg-type]


def test_interrupted_drill_continues_and_another_starts_afresh(tmp_path: Path) -> None:
    """Continue after a rerun. Start afresh after a finished drill, or with other faults or code."""
    root = tmp_path / "root"
    assert drill(root).open({"seed": 0}) is False
    make_run(root / "killed-1")
    (root / "faults.jsonl").write_text("")
    assert drill(root).open({"seed": 0}) is True
    assert drill(root).killed()
    assert drill(root).open({"seed": 1}) is False
    assert drill(root).killed() == []
    drill(root).mark_over({"seed": 1})
    make_run(root / "killed-1")
    assert drill(root).open({"seed": 1}) is False
    assert not (root / "killed-1").exists()


# Faults that come too late


class Late:
    """A target whose run has ended. The files may look as if it still ran."""

    refusals = (73,)

    def __init__(self, run: RunDir, status: int = 0) -> None:
        self.run, self.status = run, status
        self.frozen = False

    def begin(self) -> None:
        self.run.path.mkdir(parents=True, exist_ok=True)

    def ended(self) -> int | None:
        return None if self.frozen else self.status

    def owns(self, holder: Any) -> bool:
        return bool(holder)

    def freeze(self) -> bool:
        return False

    def unfreeze(self) -> None:
        self.frozen = False

    def another(self) -> Late:
        return self

    def stop(self) -> None:
        pass

    def tail(self) -> str:
        return "what it printed"


class StillExiting(Late):
    """A target that has written its completion mark while its process still exits."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self.frozen = True

    def freeze(self) -> bool:
        self.run.finished.touch()
        return True


def stage(target: Any, steps: int = 4) -> Stage:
    made = Stage(target.run, target, Display(Console(quiet=True), 1), steps, save_every=2, eval_every=0)
    target.begin()
    made.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    return made


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> PlannedFault:
    """Return a fault whose trigger is true."""
    monkeypatch.setitem(TRIGGERS, "step", lambda run, planned: True)
    return PlannedFault(1, "sigkill", "step", 1, 0.5)


def test_an_attempt_that_crashed_is_not_a_target(tmp_path: Path, always: PlannedFault) -> None:
    with pytest.raises(BrokenError, match="ended by itself with status -11"):
        stage(Late(RunDir(tmp_path / "run"), status=-11)).freeze_at(always)


def test_a_finished_run_that_is_still_exiting_is_not_a_target(tmp_path: Path, always: PlannedFault) -> None:
    with pytest.raises(TooLateError):
        stage(StillExiting(RunDir(tmp_path / "run"))).freeze_at(always)


def test_second_command_after_the_finish_is_too_late(tmp_path: Path, always: PlannedFault) -> None:
    late = stage(StillExiting(RunDir(tmp_path / "run")))
    late.run.finished.touch()
    late.owned = lambda: True  # type: ignore[method-assign]
    late.wait_for_end = lambda target=None: 0  # type: ignore[method-assign]
    with pytest.raises(TooLateError):
        KINDS["twice"].inject(late, always)


@pytest.mark.parametrize(("steps", "answer"), [(4, TooLateError), (5, UnansweredError)])
def test_run_whose_last_save_is_refused_may_fail(tmp_path: Path, steps: int, answer: Any) -> None:
    """Count a fault at the end as too late. A run that failed earlier did not survive the full disk."""
    failed = stage(Late(RunDir(tmp_path / "run"), status=1), steps)
    assert type(DiskFull.ended(failed)) is answer


class Reluctant(Fault):
    """A fault that is too late in all runs but one."""

    def __init__(self, run: str) -> None:
        self.run = run

    def inject(self, stage: Stage, planned: PlannedFault) -> str:
        if stage.run.path.name != self.run:
            raise TooLateError
        return "injected"


@pytest.mark.parametrize(("run", "injected", "runs"), [("killed-3", 1, 3), ("killed-4", 0, 3)])
def test_late_fault_is_retried_in_a_limited_number_of_runs(
    tmp_path: Path, run: str, injected: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "sigkill", Reluctant(run))
    whole = replace(
        drill(tmp_path),
        make_target=lambda path, log: Late(RunDir(path)),  # type: ignore[arg-type, return-value]
        display=Display(Console(quiet=True), 1),
    )
    whole.run_under_faults([PlannedFault(1, "sigkill", "step", 10, 0.5)])
    assert len(whole.outcomes()) == injected
    assert len(whole.killed()) == runs


def test_a_root_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="contains other files"):
        drill(tmp_path).open({})
    assert (tmp_path / "thesis.tex").exists()

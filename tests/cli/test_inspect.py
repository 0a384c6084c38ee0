"""`runner inspect` reports what the samplers do: compare its answers with the samplers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_runs import checkpoint

from exactdata.elastic import ElasticSampler
from exactdata.order.batch_shape import BatchShape, append_shape
from exactdata.order.segments import Segment
from exactdata.queries import order_queries
from exactdata.queries.order_record import OrderRecord, RecordError
from exactdata.sampler import DistributedSampler, MixtureSampler
from runner.cli.look import inspect
from runner.cli.look.resume_plan import parse_overrides, resume_plan
from runner.data import order_file
from runner.errors import UserError
from runner.rundir.paths import RunDir

SIZES = {"prose": 60, "code": 200}
TOKENS = {"code": 16}  # the other source does not say it


def elastic(**changes: Any) -> ElasticSampler:
    return ElasticSampler(
        SIZES,
        {"prose": 1, "code": 3},
        global_batch_size=8,
        num_replicas=1,
        seed=3,
        segments=[(400, {"prose": 3})],
        **changes,
    )


def record(**changes: Any) -> OrderRecord:
    """Make a record of 4 ranks x batch 2, then from step 20 on 2 ranks x batch 3 x accumulation 2."""
    return OrderRecord.of_elastic(
        elastic(**changes).state_dict(),
        SIZES,
        steps=100,
        tokens_per_sample=TOKENS,
        batch_shapes=(BatchShape(0, 4, 2), BatchShape(20, 2, 3, 2)),
    )


def seeded(kind: str) -> OrderRecord:
    segments = [Segment(0, {"prose": 1, "code": 3})]
    if kind == "mixture":
        segments.append(Segment(30, {"prose": 1, "code": 1}))
    return OrderRecord(kind, 3, SIZES, 60, (BatchShape(0, 2, 4, 2),), tuple(segments), TOKENS)


def in_run(path: Path, made: OrderRecord, step: int = 0, trained: int | None = None) -> str:
    """Write the records of a run whose newest checkpoint is of `step`, and that has trained up to `trained`."""
    path.mkdir()
    order_file.write(made, path / "order.json")
    (path / "status.json").write_text(json.dumps({"step": trained or step}))
    checkpoint(RunDir(path), step)
    return str(path)


def test_a_record_is_equal_after_writing_and_reading(tmp_path: Path) -> None:
    for made in (record(exclude=["code:7", "positions:100-119"]), seeded("mixture")):
        order_file.write(made, tmp_path / "order.json")
        assert order_file.read(tmp_path / "order.json") == made


def test_steps_and_positions_follow_the_batch_shapes() -> None:
    made = record()
    assert [made.position_at(step) for step in (0, 1, 20, 21, 100)] == [0, 8, 160, 172, 1120]
    assert [made.step_of(position) for position in (0, 7, 8, 159, 160, 171, 172)] == [1, 1, 2, 20, 21, 21, 22]
    again = append_shape(made.batch_shapes, BatchShape(10, 1, 8))
    assert again == (BatchShape(0, 4, 2), BatchShape(10, 1, 8))
    assert append_shape(again, BatchShape(30, 1, 8)) == again


@pytest.mark.parametrize("step", [1, 20, 21, 50, 51, 100])
def test_the_samples_of_a_step_are_those_that_each_rank_gets(step: int) -> None:
    made = record()
    shape = made.shape_at(step - 1)
    rows = order_queries.samples_of_step(made, step)
    assert len(rows) == shape.global_batch_size
    for rank in range(shape.world_size):
        sampler = ElasticSampler(
            SIZES,
            [1, 3],
            global_batch_size=8,
            num_replicas=shape.world_size,
            rank=rank,
            seed=3,
            segments=[(400, {"prose": 3})],
        )
        sampler._position = made.position_at(step - 1)
        expected = [i for _, i in zip(range(shape.batch_size * shape.grad_accum_steps), sampler, strict=False)]
        mine = [row for row in rows if row["rank"] == rank]
        assert [row["index"] + (60 if row["source"] == "code" else 0) for row in mine] == expected
        assert [row["micro_batch"] for row in mine] == sorted(row["micro_batch"] for row in mine)


def test_a_sample_is_found_in_the_steps_that_consume_it() -> None:
    made = record()
    rows = order_queries.times_of_sample(made, "code", 123)
    assert len(rows) >= 2
    for row in rows:
        seen = [
            r for r in order_queries.samples_of_step(made, row["step"]) if (r["source"], r["index"]) == ("code", 123)
        ]
        assert {(r["rank"], r["position"], r["epoch"]) for r in seen} >= {(row["rank"], row["position"], row["epoch"])}
    everything = [r for step in range(1, 101) for r in order_queries.samples_of_step(made, step)]
    assert sum((r["source"], r["index"]) == ("code", 123) for r in everything) == len(rows)


def test_the_totals_of_sources_match_their_steps() -> None:
    made = record()
    *parts, whole = order_queries.source_totals(made)
    assert [row["first_step"] for row in parts] == [1, 41]
    everything = [r for step in range(1, 101) for r in order_queries.samples_of_step(made, step)]
    for name, size in SIZES.items():
        count = sum(r["source"] == name for r in everything)
        assert whole["sources"][name]["samples"] == count == sum(row["sources"][name]["samples"] for row in parts)
        assert whole["sources"][name]["tokens"] == (16 * count if name in TOKENS else None)
        assert whole["sources"][name]["epochs_at_end"] == pytest.approx(count / size)


def test_all_answers_agree_on_the_exclusions() -> None:
    made, plain = record(exclude=["395-404", "390-399", "prose:3-50", "code:7"]), record()
    rows = [row for step in range(1, 101) for row in order_queries.samples_of_step(made, step)]
    steps: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows:
        steps[row["source"], row["index"]].append(row["position"])
    *_, whole = order_queries.source_totals(made)
    for name, size in SIZES.items():
        assert whole["sources"][name]["samples"] == sum(row["source"] == name for row in rows)
        last = max(row["epoch"] for row in rows if row["source"] == name)
        assert last <= whole["sources"][name]["epochs_at_end"] <= last + 1
        for index in range(0, size, 21):
            times = order_queries.times_of_sample(made, name, index)
            assert sorted(row["position"] for row in times) == sorted(steps[name, index])
    assert not steps["prose", 3]
    stood = [row for step in range(1, 101) for row in order_queries.samples_of_step(plain, step)]
    gone = {(row["source"], row["index"], row["epoch"]) for row in stood if 390 <= row["position"] < 405}
    assert not gone & {(row["source"], row["index"], row["epoch"]) for row in rows}
    again = resume_plan(made, 60, {"sampler.weights.code": 1.0})
    assert (again["repeated"], again["skipped"]) == (0, 0)


def test_a_difference_far_ahead_is_found_at_once() -> None:
    one, other = (replace(made, steps=10**9) for made in (record(), record(exclude=["9000000000-9000000003"])))
    assert order_queries.first_difference(one, other)["position"] == 9_000_000_000


@pytest.mark.parametrize("before", [[], ["positions:600-603"]])
def test_an_exclusion_changes_nothing_before_its_samples(before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs need not be compared up to an exclusion of one that is far ahead."""
    monkeypatch.setattr(order_queries, "_SCAN", 8)
    monkeypatch.setattr(order_queries, "_SCAN_LIMIT", 16)
    called = elastic(exclude=before)
    called.exclude(["positions:900-903"], position=500)
    one = record(exclude=before)
    other = replace(one, exclusions=called.order.exclusions)
    assert order_queries.first_difference(one, other)["position"] == 900


@pytest.mark.parametrize("kind", ["distributed", "mixture"])
def test_seeded_steps_and_samples_agree_with_the_samplers(kind: str) -> None:
    """Iterate step by step: epochs follow one another, and a change of weights begins a new epoch."""
    made = seeded(kind)
    common: dict[str, Any] = {"num_replicas": 2, "seed": 3}
    if kind == "distributed":
        ranks: list[Any] = [DistributedSampler(range(260), rank=rank, **common) for rank in range(2)]
    else:
        ranks = [MixtureSampler([0, 60, 260], [1, 3], rank=rank, **common) for rank in range(2)]
    epoch, streams = 0, [sampler.iter_batches(4, True) for sampler in ranks]
    seen: list[dict[str, Any]] = []
    for step in range(1, 61):
        if kind == "mixture" and step == 31:
            epoch += 1
            for sampler in ranks:
                sampler.update_weights([1, 1])
                sampler.set_epoch(epoch)
            streams = [sampler.iter_batches(4, True) for sampler in ranks]
        expected: list[tuple[int, int]] = []
        for _ in range(2):
            batches = [next(stream, None) for stream in streams]
            if batches[0] is None:
                epoch += 1
                for sampler in ranks:
                    sampler.set_epoch(epoch)
                streams = [sampler.iter_batches(4, True) for sampler in ranks]
                batches = [next(stream, None) for stream in streams]
            expected += [(rank, i) for rank in range(2) for i in np.asarray(batches[rank]).tolist()]
        rows = order_queries.samples_of_step(made, step)
        got = [(row["rank"], row["index"] + (60 if row["source"] == "code" else 0)) for row in rows]
        assert got == sorted(expected, key=lambda pair: pair[0])
        seen += [{**row, "step": step} for row in rows]
    for source, index in (("code", 17), ("prose", 5), ("code", 199)):
        times = order_queries.times_of_sample(made, source, index)
        expected_times = [(r["step"], r["rank"]) for r in seen if (r["source"], r["index"]) == (source, index)]
        assert [(row["step"], row["rank"]) for row in times] == expected_times


@pytest.mark.parametrize("kind", ["distributed", "mixture"])
@pytest.mark.parametrize(
    ("sizes", "shapes", "changed_at"),
    [
        ((7, 12), [BatchShape(0, 2, 2, 2)], [5]),  # epochs begin inside steps; new weights end one early
        ((7, 12), [BatchShape(0, 2, 2, 1), BatchShape(6, 2, 2, 3)], [7, 8]),  # accumulation changes within an epoch
        ((3, 2), [BatchShape(0, 1, 2, 5)], []),  # a step consumes several epochs
        ((20, 25), [BatchShape(0, 1, 3, 2)], [1, 12]),
    ],
)
def test_seeded_samples_are_found_in_the_steps_that_used_them(
    kind: str, sizes: tuple[int, int], shapes: list[BatchShape], changed_at: list[int]
) -> None:
    segments = [Segment(0, {"prose": 1, "code": 1})]
    if kind == "mixture":
        segments += [Segment(step, {"prose": 1, "code": 2 + i}) for i, step in enumerate(changed_at)]
    named = dict(zip(("prose", "code"), sizes, strict=True))
    made = OrderRecord(kind, 3, named, 20, tuple(shapes), tuple(segments))
    shown: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for step in range(1, 21):
        for row in order_queries.samples_of_step(made, step):
            shown[row["source"], row["index"]].append((step, row["rank"], row["epoch"]))
    for source, size in named.items():
        for index in range(size):
            found = [
                (row["step"], row["rank"], row["epoch"]) for row in order_queries.times_of_sample(made, source, index)
            ]
            assert sorted(found) == sorted(shown[source, index])


def test_diff_reports_the_first_position_that_differs() -> None:
    one = record()
    assert order_queries.first_difference(one, one)["position"] is None
    other = record(exclude=["positions:77-80"])
    found = order_queries.first_difference(one, other)
    assert found["position"] == 77
    assert found["steps"] == [10, 10]
    orders = one.elastic_sequence(), other.elastic_sequence()
    assert np.array_equal(orders[0].indices_at(np.arange(77)), orders[1].indices_at(np.arange(77)))
    assert order_queries.first_difference(one, seeded("mixture"))["reason"] == "sampler elastic and mixture"
    moved = OrderRecord.of_elastic(
        ElasticSampler(SIZES, [1, 3], global_batch_size=8, num_replicas=1, seed=4).state_dict(),
        SIZES,
        steps=9,
        batch_shapes=(BatchShape(0, 1, 8),),
    )
    assert "seed 3 and 4" in order_queries.first_difference(one, moved)["reason"]


@pytest.mark.parametrize("kind", ["distributed", "mixture", "elastic"])
def test_diff_ignores_how_segments_are_written(kind: str) -> None:
    one = seeded("mixture") if kind != "elastic" else record()
    one = replace(one, kind=kind)
    repeated = replace(one.segments[-1], start=one.segments[-1].start + 7)  # as a phase with another learning rate
    assert order_queries.first_difference(one, replace(one, segments=(*one.segments, repeated)))["position"] is None

    other = replace(repeated, weights={"prose": 9, "code": 1})
    answer = order_queries.first_difference(one, replace(one, segments=(*one.segments, other)))
    expected = other.start if kind == "elastic" else one.position_at(other.start)
    assert expected <= answer["position"] <= expected + 20
    assert answer["steps"] == [one.step_of(answer["position"])] * 2


def test_a_comparison_that_stops_early_reports_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_queries, "_SCAN", 8)
    monkeypatch.setattr(order_queries, "_SCAN_LIMIT", 16)
    found = order_queries.first_difference(record(), record(exclude=["code:17"]))
    later = next(row["position"] for row in order_queries.times_of_sample(record(), "code", 17))
    assert later > 16
    assert (found["position"], found["compared"], found["common"]) == (None, 16, 1120)


def test_resume_plans_report_losses_and_remedies() -> None:
    def plan(made: OrderRecord, step: int, *texts: str) -> dict[str, Any]:
        return resume_plan(made, step, parse_overrides(made, list(texts)))

    same = plan(record(), 10, "world_size=2", "train.batch_size=4")
    assert (same["repeated"], same["skipped"], same["accepted"], same["position"]) == (0, 0, True, 80)
    assert "every step consumes the same samples" in same["notes"][1]
    other = plan(record(), 10, "world_size=2")
    assert other["advice"] == ["train.grad_accum_steps=2 keeps the global batch at 8"]
    changed = plan(record(), 10, "sampler.weights.code=1", "sampler.temperature=2")
    assert "run.allow_data_change=true" in changed["advice"][0]
    assert "code 0.5000" in changed["notes"][-1]
    fewer = plan(seeded("distributed"), 10, "world_size=1")
    assert (fewer["accepted"], fewer["repeated"], fewer["skipped"]) == (False, 80, 0)
    more = plan(seeded("distributed"), 10, "world_size=3")
    assert (more["repeated"], more["skipped"]) == (0, 80)
    for kind in ("distributed", "mixture"):  # never more than is left of the epoch
        most = plan(seeded(kind), 10, "world_size=1000")
        assert most["skipped"] == most["epoch_samples"] - most["consumed_of_epoch"] > 0
    mixed = plan(seeded("mixture"), 5, "world_size=4")
    assert mixed["repeated"] > 0
    assert "sampler=elastic" in mixed["advice"][1]
    assert plan(seeded("mixture"), 10, "train.grad_accum_steps=4")["accepted"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["wold_size=3"], r"'wold_size' \(did you mean 'world_size'\?\)"),
        (["sampler.weights.cod=1"], r"unknown source \(did you mean 'code'\?\); the sources are"),
        (["sampler.weight=1"], "accepts"),
        (["world_size=x"], "expected a number"),
        (["world_size=0"], "from 1 to"),
        (["data.num_workers=-1"], "from 0 to"),
        ([f"world_size={10**20}"], "from 1 to"),
        (["sampler.weights.code=nan"], "a number from 0"),
        (["sampler.temperature=inf"], "finite number above 0"),
        (["sampler.weights.code=0", "sampler.weights.prose=0"], "the weights of all 2 sources are 0"),
        (["world_size=3", "train.global_batch_size=8"], "the nearest is 6 or 12"),
    ],
)
def test_invalid_overrides_are_reported(texts: list[str], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        resume_plan(record(), 10, parse_overrides(record(), texts))


def test_weights_refused_by_the_sampler_are_errors() -> None:
    for made in (record(), seeded("mixture")):
        zeros = [f"sampler.weights.{name}=0" for name in made.sizes]
        for texts in (["sampler.weights.code=nan"], ["sampler.temperature=inf"], zeros):
            with pytest.raises(RecordError, match=r"number|the weights of all"):
                resume_plan(made, 10, parse_overrides(made, texts))
    made = seeded("distributed")
    with pytest.raises(RecordError, match="has neither weights nor a temperature"):
        resume_plan(made, 10, parse_overrides(made, ["sampler.weights.code=2"]))


@pytest.mark.parametrize("start", ["Infinity", "NaN", "1e400", "-1", "null", "[]"])
def test_a_damaged_record_is_one_line(tmp_path: Path, start: str) -> None:
    path = tmp_path / "order.json"
    order_file.write(record(), path)
    text = path.read_text()
    path.write_text(re.sub(r'("start": ?)\d+', rf"\g<1>{start}", text, count=1))
    assert path.read_text() != text
    with pytest.raises(RecordError, match=r"\A.*not a record of a data order.*\Z"):
        order_file.read(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = in_run(tmp_path / "a", record(), step=50)
    other = in_run(tmp_path / "b", record(exclude=["code:3"]))
    shown = {
        "--step 21": "step 21 (consumed)",
        "--sample code:123": "code:123: ",
        "--plan": "the whole run, steps 1 to 100",
        f"--diff {other}": "the orders first differ at position",
        "--resume-plan world_size=3": "0 samples repeated, 0 skipped",
    }
    for question, text in shown.items():
        assert inspect.main([run, *question.split()]) == 0
        assert text in capsys.readouterr().out
        assert inspect.main([run, *question.split(), "--json"]) == 0
        json.loads(capsys.readouterr().out)
    for question, text in {
        "--step 0": "steps 1 to 100",
        "--sample code": "expected SOURCE:INDEX",
        "--sample cod:1": "did you mean 'code'",
        "--sample code:200": "indices 0 to 199",
    }.items():
        with pytest.raises(UserError, match=text) as error:
            inspect.main([run, *question.split()])
        assert error.value.status == 2
    with pytest.raises(UserError, match="no record of a data order"):
        inspect.main([str(tmp_path), "--plan"])
    (tmp_path / "a" / "order.json").unlink()
    (tmp_path / "a" / "order.json").mkdir()
    with pytest.raises(UserError, match=r"order\.json is a directory"):
        inspect.main([run, "--plan"])


@pytest.mark.parametrize("ranks", ["world_size=3", "launcher.ranks=3"])
def test_resume_plan_begins_at_the_newest_checkpoint(
    tmp_path: Path, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_run(tmp_path / "a", record(), step=20, trained=23)
    assert inspect.main([run, "--resume-plan", ranks, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["step"], plan["position"]) == (20, record().position_at(20))
    assert "3 ranks" in plan["after"]


def test_the_output_in_the_docs_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, weights = {"code": 9000, "tests": 2500, "prose": 1200}, {"code": 0.6, "tests": 0.1, "prose": 0.3}
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    for name, exclude in (("mix", []), ("mix-b", ["positions:5000-5199"])):
        sampler = ElasticSampler(
            sizes,
            weights,
            global_batch_size=32,
            num_replicas=2,
            rank=0,
            seed=1,
            segments=[(22400, {"prose": 0.9})],
            exclude=exclude,
        )
        in_run(
            Path("outputs") / name,
            OrderRecord.of_elastic(
                sampler.state_dict(),
                sizes,
                steps=1000,
                tokens_per_sample=dict.fromkeys(sizes, 128),
                batch_shapes=(BatchShape(0, 2, 8, 2),),
            ),
            step=600,
        )
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    shown = "".join(block for block in page.split("```") if block.startswith("\n$ "))
    examples = [each for each in shown.split("\n$ python -m runner inspect ")[1:] if each.startswith("outputs/mix ")]
    assert len(examples) == 5
    for example in examples:
        command, _, output = example.partition("\n")
        assert inspect.main(command.split()) == 0
        assert capsys.readouterr().out.startswith(output.rstrip("\n").removesuffix("..."))


QUESTIONS = [("--step", "3"), ("--sample", "code:7"), ("--plan",), ("--resume-plan",)]


def test_inspect_needs_neither_torch_nor_hydra(tmp_path: Path) -> None:
    """Only questions about epochs of seeded samplers need torch, which draws them."""
    elastic = in_run(tmp_path / "elastic", record())
    asked = [[elastic, *question] for question in QUESTIONS]
    for kind in ("distributed", "mixture"):
        run = in_run(tmp_path / kind, seeded(kind))
        asked += [[run, *question] for question in QUESTIONS if question[0] not in ("--step", "--sample")]
    code = (
        "import sys; from runner.cli.look.inspect import main; "
        f"status = any([main(question) for question in {asked!r}]); "
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'hydra', 'omegaconf')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

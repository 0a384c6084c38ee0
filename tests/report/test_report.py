"""Check `runner report`: its output is correct in every format, and argument errors are one line."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported import losses, write_run

from runner.__main__ import run as command_line
from runner.cli.look import report as cli_report
from runner.report.compare import grouped, ranked
from runner.report.runs import lower_is_better, read_run
from runner.rundir.paths import RunDir
from runner.system import clock

EVIL = "</script><img src=x onerror=alert(1)>[red]\x1b[2J\u202ex %{y} $x$ <b>&amp;"
Report = Callable[..., str]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Run the command, which must succeed, and return its output."""

    def run(*arguments: object) -> str:
        assert command_line(["report", *map(str, arguments)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def as_json(report: Report, *arguments: object) -> dict[str, Any]:
    return dict(json.loads(report(*arguments, "--json"), parse_constant=pytest.fail))


def page_data(path: Path) -> dict[str, Any]:
    """Return the data that the script of a page reads."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return dict(json.loads(found[1], parse_constant=pytest.fail))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def replace_by_fifo(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


def mistake(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return an error's only line."""
    assert command_line(["report", *map(str, arguments)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return six runs: two temperatures by three seeds, of which one has failed and one has diverged."""
    root = tmp_path / "outputs"
    for temperature in (1.0, 2.0):
        for seed in (1, 2, 3):
            last = 1.0 + temperature + seed / 7
            write_run(
                root / f"t{temperature:g}-s{seed}",
                losses([9.0, last / 2, last if (temperature, seed) != (1.0, 3) else None], loss_by_source={"a": seed}),
                state="failed" if (temperature, seed) == (2.0, 3) else "finished",
                seed=seed,
                settings={"sampler.temperature": temperature},
            )
    return root


# ---- numbers


def test_report_shows_last_best_and_step_of_best(sweep: Path, report: Report) -> None:
    runs = {run["run"]: run for run in as_json(report, sweep)["runs"]}
    assert set(runs) == {f"t{temperature}-s{seed}" for temperature in (1, 2) for seed in (1, 2, 3)}
    one = runs["t2-s1"]
    assert one["metrics"]["eval_loss"] == {"last": 3 + 1 / 7, "best": (3 + 1 / 7) / 2, "best_step": 2}
    assert one["settings"] == {"sampler.temperature": 2.0, "seed": 1}
    assert (one["state"], one["path"]) == ("finished", str(sweep / "t2-s1"))
    assert runs["t1-s3"]["metrics"]["eval_loss"]["last"] is None
    assert runs["t1-s3"]["metrics"]["eval_loss"]["best_step"] == 2
    assert runs["t2-s3"]["state"] == "failed"
    assert runs["t2-s2"]["metrics"]["loss_by_source/a"]["last"] == 2


def test_groups_are_means_over_the_runs_that_did_not_fail(sweep: Path, report: Report) -> None:
    """Check the sample standard deviation. Failed runs are counted, and a diverged run has no last value."""
    for arguments in ([], ["--by", "sampler.temperature"]):
        one, two = as_json(report, sweep, *arguments)["groups"]
        assert (one["by"], one["n"], one["failed"]) == ({"sampler.temperature": 1.0}, 3, 0)
        assert (two["by"], two["n"], two["failed"]) == ({"sampler.temperature": 2.0}, 3, 1)
        for group, base in ((one, 2.0), (two, 3.0)):
            values = [base + seed / 7 for seed in (1, 2)]
            found = group["metrics"]["eval_loss"]
            spread = {"mean": statistics.fmean(values), "std": pytest.approx(statistics.stdev(values))}
            assert found == {**spread, "runs": 2, "step": 3}
    both = as_json(report, sweep, "--by", "seed", "--by", "sampler.temperature")["groups"]
    assert [tuple(group["by"].values()) for group in both] == [(s, t) for s in (1, 2, 3) for t in (1.0, 2.0)]
    assert both[0]["metrics"]["eval_loss"]["std"] is None
    assert both[-1]["metrics"] == {}


def test_mean_is_over_finished_runs_at_one_step(tmp_path: Path, report: Report) -> None:
    """Compare runs of different lengths at the largest step for which all have a value."""
    for seed, (count, state) in enumerate([(20, "finished"), (60, "finished"), (53, "interrupted"), (5, "failed")]):
        write_run(tmp_path / f"s{seed}", losses([seed + 10.0 / step for step in range(1, count + 1)]), state, seed=seed)
    (group,) = as_json(report, tmp_path)["groups"]
    assert (group["n"], group["left_out"], group["failed"]) == (4, 2, 1)
    assert group["metrics"]["eval_loss"] == {"mean": 1.0, "std": pytest.approx(0.5**0.5), "runs": 2, "step": 20}
    printed = report(tmp_path)
    assert "1.0000 ± 0.7071 at step 20" in printed
    assert "2 of 4: 1 failed, 1 not finished" in printed
    write_run(tmp_path / "other", [{"step": 70, "eval_loss": 1.0}], seed=9)
    assert "eval_loss" not in as_json(report, tmp_path)["groups"][0]["metrics"]  # they have no step in common


def test_runs_of_equal_length_need_no_step_in_the_table(tmp_path: Path, report: Report) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"s{seed}", losses([2.0, float(seed)]), seed=seed)
    assert "1.5000 ± 0.7071\n" in "\n".join(line.rstrip() for line in report(tmp_path).split("\n"))


def test_runs_of_different_lengths_compare_at_the_shorter_end(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the page, too, where only a part of the curves is kept, with that step in any case."""
    monkeypatch.setattr(cli_report, "MAX_POINTS", 50)
    monkeypatch.setattr(cli_report, "MIN_POINTS", 50)
    for seed, count in ((1, 1237), (2, 3000)):
        values = [seed + ((step * 7919) % 1009) / 1009 for step in range(1, count + 1)]
        write_run(tmp_path / f"s{seed}", [{"step": n, "loss": v} for n, v in enumerate(values, start=1)], seed=seed)
    (group,) = as_json(report, tmp_path, "--html", tmp_path / "page.html")["groups"]
    loss = group["metrics"]["loss"]
    assert (loss["step"], loss["mean"]) == (1237, pytest.approx(1.5 + ((1237 * 7919) % 1009) / 1009))
    for run in page_data(tmp_path / "page.html")["runs"]:
        assert 1237 in np.frombuffer(base64.b64decode(run["series"]["loss"][0]), "<u4")


def test_runs_are_ranked_by_the_metric_of_the_best_checkpoints(tmp_path: Path, report: Report) -> None:
    for name, value in (("a", 0.2), ("b", 0.9), ("c", None), ("d", 0.5)):
        records = [{"step": 1, "eval_acc": value, "loss": 1 - (value or 0)}]
        judged = {"checkpoint.best.metric": "eval_acc", "checkpoint.best.mode": "max"}
        write_run(tmp_path / name, records, seed=len(name), settings=judged)
    assert [run["run"] for run in as_json(report, tmp_path)["runs"]] == ["b", "d", "a", "c"]
    assert as_json(report, tmp_path, "--metric", "loss")["runs"][0]["run"] == "b"
    assert report(tmp_path).splitlines()[1].split()[0] == "b"


def test_which_metrics_are_better_when_they_are_higher() -> None:
    for name in ("loss", "eval_loss", "eval_loss@abc/code", "perplexity", "accuracy_loss"):
        assert lower_is_better(name, {})
    for name in ("eval_accuracy", "val/acc", "f1", "test_f1@ab"):
        assert not lower_is_better(name, {})
    assert lower_is_better("score", {"score": "min"})
    assert not lower_is_better("loss", {"loss": "max"})


def test_every_format_shows_the_same_numbers(sweep: Path, report: Report, tmp_path: Path) -> None:
    table, html = tmp_path / "runs.csv", tmp_path / "page.html"
    printed = report(sweep, "--csv", table, "--html", html, "--by", "sampler.temperature")
    asked = as_json(report, sweep)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    data = page_data(html)
    assert report(sweep, "--csv") == table.read_text() == report("--csv", sweep)
    assert {row["run"] for row in rows} == {run["name"] for run in data["runs"]}
    for run, row in zip(asked["runs"], rows, strict=True):
        (shown,) = [one for one in data["runs"] if one["name"] == run["run"]]
        own = run["metrics"]["eval_loss"]
        assert shown["metrics"]["eval_loss"] == [own["last"], own["best"], own["best_step"]]
        assert float(row["eval_loss"]) == (own["last"] or pytest.approx(float("nan"), nan_ok=True))
        assert (float(row["eval_loss best"]), int(row["eval_loss best step"])) == (own["best"], own["best_step"])
        assert (row["seed"], row["state"]) == (str(run["settings"]["seed"]), run["state"])
        assert f"{own['best']:.4f}" in printed
        steps, values = (base64.b64decode(part) for part in shown["series"]["eval_loss"])
        assert np.frombuffer(steps, "<u4").tolist() == [1, 2, 3]
        assert np.frombuffer(values, "<f4")[1] == np.float32(own["best"])
    for group in asked["groups"]:
        found = group["metrics"]["eval_loss"]
        assert f"{found['mean']:.4f} ± {found['std']:.4f}" in printed


def test_csv_has_the_records_of_all_steps(tmp_path: Path, report: Report) -> None:
    """Write one row per run and step. An evaluation is in the row of its step."""
    records: list[dict[str, Any]] = [{"step": 1, "loss": 2.5, "digest": "ab", "by": {"a": 3}}]
    records.append({"step": 2, "loss": 2.0})
    write_run(tmp_path / "runs" / "x", [*records, {"step": 2, "eval_loss": 1.5}])
    report(tmp_path / "runs", "--steps-csv", tmp_path / "steps.csv")
    assert (tmp_path / "steps.csv").read_text().splitlines() == [
        "run,step,loss,by/a,digest,eval_loss",
        "x,1,2.5,3,ab,",
        "x,2,2,,,1.5",
    ]


def test_csv_repeats_unchanged_values_of_a_source(tmp_path: Path, report: Report) -> None:
    """Repeat the values of sources that a line of metrics.jsonl leaves out because they have not changed."""
    sources = [{"a": {"samples": 2}, "b": {"samples": 0}}, {"b": {"samples": 1}}]
    records = [{"step": step, "loss": 1.0, "sources": each} for step, each in enumerate(sources, 1)]
    write_run(tmp_path / "runs" / "x", records)
    report(tmp_path / "runs", "--steps-csv", tmp_path / "steps.csv")
    assert (tmp_path / "steps.csv").read_text().splitlines() == [
        "run,step,loss,sources/a/samples,sources/b/samples",
        "x,1,1,2,0",
        "x,2,1,2,1",
    ]


def test_the_largest_numbers_make_no_error(tmp_path: Path, report: Report) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"s{seed}", losses([1.7e308]), seed=seed)
    (group,) = as_json(report, tmp_path)["groups"]
    assert group["metrics"]["eval_loss"]["mean"] in (None, pytest.approx(1.7e308))
    report(tmp_path)


def test_evaluations_made_later_are_part_of_the_run(tmp_path: Path, report: Report) -> None:
    run = write_run(tmp_path / "outputs" / "x", losses([3.0, 2.0]))
    lines = [
        {"step": 2, "eval_loss": 7.0},
        {"step": 1, "settings": "ab12", "eval_loss": 5.0, "eval_loss_by_source": {"a": 6.0}},
    ]
    (run / "evaluations" / "evaluate-all-ab12").mkdir(parents=True)
    for line, name in zip([*map(json.dumps, lines), '{"step"'], ("2-cd34", "1-ab12", "3-ab12"), strict=True):
        (run / "evaluations" / f"step_0000000{name}.json").write_text(line)
    (one,) = as_json(report, tmp_path)["runs"]
    assert one["metrics"]["eval_loss"] == {"last": 2.0, "best": 2.0, "best_step": 2}  # the result of the run
    assert one["metrics"]["eval_loss@ab12"]["last"] == 5.0
    assert one["metrics"]["eval_loss_by_source@ab12/a"]["last"] == 6.0


def test_forks_are_a_tree(tmp_path: Path, report: Report) -> None:
    root = tmp_path / "outputs"
    write_run(root / "trunk", losses([3.0, 2.0, 1.0]))
    write_run(root / "low", losses([3.0, 2.0]), settings={"fork.run": str(root / "trunk"), "fork.step": 1})
    write_run(root / "lower", losses([3.0, 2.0]), settings={"fork.run": "/moved/low", "fork.step": 2})
    write_run(root / "orphan", losses([3.0]), settings={"fork.run": "/gone/removed", "fork.step": 1})
    out = report(root)
    assert "trunk\n└ low from step 1\n  └ lower from step 2\n" in out
    assert "removed\n└ orphan from step 1\n" in out
    runs = {run["run"]: run["fork"] for run in as_json(report, root)["runs"]}
    assert runs == {"trunk": None, "low": {"run": "trunk", "step": 1}, "lower": {"run": "low", "step": 2}} | {
        "orphan": {"run": "removed", "step": 1}
    }
    assert page_data(root / "report.html")["forks"][:2] == ["trunk", "└ low from step 1"]


def test_branch_is_below_its_trunk(tmp_path: Path, report: Report) -> None:
    root = tmp_path / "outputs"
    for folder in ("a", "b"):
        write_run(root / folder / "base", losses([3.0]))
    write_run(root / "low", losses([3.0]), settings={"fork.run": str(root / "b" / "base"), "fork.step": 1})
    assert "b/base\n└ low from step 1\n" in report(root)
    data = page_data(root / "report.html")
    (low,) = [run for run in data["runs"] if run["fork"]]
    assert data["runs"][low["fork"]["index"]]["name"] == "b/base"


# ---- results and columns


@pytest.mark.promise("runs are ranked only by metrics whose direction is known")
def test_metrics_without_a_known_direction_are_not_ranked(tmp_path: Path, report: Report) -> None:
    """Rank a loss, an accuracy and the config's metric. Rank other metrics only with a declared direction."""
    for number in (1, 2, 3):
        records = [
            {
                "step": step,
                "loss": 2.0,
                "eval_n_tokens": 126.9375 + number,
                "eval_top3": float(step),
                "drawn": float(step),
            }
            | {"eval_flat": 1.0, "eval_once": 5.0 if number == 3 else float(step)}
            for step in ((1, 2) if number < 3 else (1,))
        ]
        settings = {"early_stopping.metric": "eval_flat", "early_stopping.mode": "max"}
        write_run(tmp_path / f"r{number}", records, seed=number, settings=settings)
    runs = as_json(report, tmp_path)["runs"]
    for run in runs:
        bests = {name: one["best"] for name, one in run["metrics"].items()}
        assert {name for name, best in bests.items() if best is not None} == {"loss", "eval_flat", "eval_top3"}
        assert bests["eval_top3"] == run["steps"]
    asked = as_json(report, tmp_path, "--metric", "eval_n_tokens", "--mode", "max")["runs"]
    assert [run["run"] for run in asked] == ["r3", "r2", "r1"]
    assert asked[0]["metrics"]["eval_n_tokens"]["best"] == 129.9375
    printed = report(tmp_path, "--metric", "eval_once")
    assert "not ranked: whether less or more of eval_once is better is not known" in printed
    data = page_data(write_page(report, tmp_path))
    assert data["results"] == ["loss", "eval_top3", "eval_flat"]
    assert not data["lower"]["eval_flat"]


def write_page(report: Report, root: Path) -> Path:
    report(root)
    return root / "report.html"


def test_columns_are_short_settings_that_can_change_a_result(tmp_path: Path, report: Report) -> None:
    """Also require that most runs have the setting. Others can be chosen, and common values appear once."""
    for number in range(3):
        settings: dict[str, Any] = {
            "optimizer.lr": 0.1 * number,
            "train.clip_norm": None if number else 1.0,
            "data.tokenizer": f"/a/b{number}",
            "model.dims": [number],
            "init_from.digest": f"{number}1a2b3c4d5",
            "callbacks.draw.at": number,
            "model.note": "long " * 9 + str(number),
        }
        if number == 0:
            settings |= {"phases.cooldown.start_step": 7}
        write_run(tmp_path / f"r{number}", losses([3.0 + number]), settings=settings)
    data = page_data(write_page(report, tmp_path))
    assert data["main"] == ["optimizer.lr", "train.clip_norm"]
    assert {*settings, "phases.cooldown.start_step"} <= set(data["keys"])
    assert data["common"]["settings"]["sampler.temperature"] == 1.0
    assert not any("sampler.temperature" in run["settings"] for run in data["runs"])
    assert "eval_loss  best    at step  lr" in report(tmp_path)


def test_a_page_of_nine_small_runs_is_small(tmp_path: Path, report: Report) -> None:
    for number in range(9):
        write_run(tmp_path / f"r{number}", losses([3.0] * 200, loss=1.0), seed=number)
    assert write_page(report, tmp_path).stat().st_size < 2_300_000


# ---- paths of runs


def test_runs_can_be_named_in_any_way(sweep: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass paths that are relative, absolute, linked or moved, of one run or two. Each run appears once."""
    every = [run["run"] for run in as_json(report, sweep)["runs"]]
    monkeypatch.chdir(sweep.parent)
    assert [run["run"] for run in as_json(report)["runs"]] == every
    (sweep.parent / "link").symlink_to("outputs")
    assert len(as_json(report, "link", "outputs", sweep)["runs"]) == len(every)
    for one in ("outputs/t1-s1", sweep / "t1-s1", "link/t1-s1"):
        assert [run["run"] for run in as_json(report, one)["runs"]] == ["t1-s1"]
    assert sorted(run["run"] for run in as_json(report, sweep / "t1-s1", "outputs/t1-s2")["runs"]) == ["t1-s1", "t1-s2"]
    sweep.rename(sweep.parent / "moved")
    assert [run["run"] for run in as_json(report, "moved")["runs"]] == every
    monkeypatch.chdir("moved/t1-s1")
    assert [run["run"] for run in as_json(report, ".")["runs"]] == ["t1-s1"]


def test_run_removed_during_the_report_is_left_out(
    sweep: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.cli.look import report as module

    def read(run: RunDir, *arguments: Any) -> Any:
        if run.path.name == "t1-s1":
            shutil.rmtree(run.path)
        return read_run(run, *arguments)

    monkeypatch.setattr(module, "read_run", read)
    assert len(as_json(report, sweep)["runs"]) == 5


def test_foreign_and_damaged_directories_hide_no_run(sweep: Path, report: Report) -> None:
    """Show each as unreadable with the reason, or leave it out."""
    (sweep / "notes").mkdir()
    (sweep / "notes" / "metrics.jsonl").write_text("not ours")
    damages: dict[str, Callable[[Path], object]] = {
        "t1-s1": lambda run: (run / "config.yaml").write_text("a: [1, 2\n"),
        "t1-s2": lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\nnothing\n'),
        "t1-s3": lambda run: (run / "config.yaml").unlink(),
        "t2-s1": replace_by_fifo,
        "t2-s2": lambda run: (run / "config.yaml").write_text("- 1\n- 2\n"),
    }
    for name, damage in damages.items():
        damage(sweep / name)
    runs = {run["run"]: run for run in as_json(report, sweep)["runs"]}
    assert {name for name, run in runs.items() if run["state"] == "unreadable"} == set(damages)
    assert all(run["reason"] for name, run in runs.items() if name in damages)
    assert "line" in runs["t1-s2"]["reason"]
    out = report(sweep)
    assert all(f"{name}: " in out for name in damages)
    assert len(page_data(sweep / "report.html")["runs"]) == 6


def test_setting_never_shares_the_name_of_a_column(tmp_path: Path, report: Report) -> None:
    for number in (1, 2):
        settings = {"train.loss": f"loss{number}", "callbacks.slow.step": number, "optimizer.lr": number}
        write_run(tmp_path / "outputs" / f"run{number}", settings=settings)
    shown = report(tmp_path / "outputs", "--by", "train.loss")
    words = shown.splitlines()[0].split()
    assert sorted(words) == sorted("run state step lr train.loss loss best at step".split())
    assert "train.loss  runs  left out  loss" in shown
    runs = [tmp_path / "outputs" / f"run{number}" for number in (1, 2)]
    (tmp_path / "outputs" / "report.html").unlink()
    report(runs[0], str(runs[1]))  # beside the runs, not in the first
    names = page_data(tmp_path / "outputs" / "report.html")["short"]
    assert names == {"train.loss": "train.loss", "callbacks.slow.step": "slow.step", "optimizer.lr": "lr"}


def test_settings_that_json_cannot_hold(tmp_path: Path, report: Report) -> None:
    for seed, value in ((1, ".nan"), (2, "2026-01-02"), (3, "{1: [.inf, !!binary aGk=]}"), (4, "~"), (5, "9" * 400)):
        run = write_run(tmp_path / "outputs" / f"s{seed}", seed=seed)
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"odd: {value}\n")
    asked = as_json(report, tmp_path, "--by", "odd")
    assert len(asked["runs"]) == 5
    report(tmp_path, "--by", "odd")
    page_data(tmp_path / "report.html")


def test_impossible_times_of_an_attempt_are_left_out(tmp_path: Path, report: Report) -> None:
    for number, odd in enumerate((10**400, float("nan"), float("inf"), -1, 1e300, "x", None)):
        attempt = dict.fromkeys(("started", "ended", "end_step", "kept_s", "queue_s", "nodes", "ranks"), odd)
        attempt |= {"attempt": 1, "cause": "killed", "seconds": {"steps": odd, "start": 2.0}}
        write_run(tmp_path / "outputs" / f"r{number}", attempts=[attempt], seed=number)
    report(tmp_path / "outputs", "--metric", "loss")
    assert all(run["goodput"]["start"] == 2.0 for run in as_json(report, tmp_path)["runs"])
    assert page_data(tmp_path / "outputs" / "report.html")["weeks"] == {}


def test_unfinished_run_is_reported(tmp_path: Path, report: Report) -> None:
    """Read a run with half a last line, no end, and no attempt yet."""
    run = write_run(tmp_path / "outputs" / "x", losses([3.0]), state="running")
    append(run / "metrics.jsonl", '{"step": 2, "eval_lo')
    (run / "attempts.jsonl").unlink()
    (run / "timings.jsonl").unlink()
    new = write_run(tmp_path / "outputs" / "new", [], seed=2)
    for name in ("metrics.jsonl", "status.json", "attempts.jsonl", "finished.json"):
        (new / name).unlink()
    runs = {run["run"]: run for run in as_json(report, tmp_path / "outputs")["runs"]}
    assert runs["x"]["metrics"]["eval_loss"]["last"] == 3.0
    assert runs["new"]["metrics"] == {}
    assert "not started" in report(tmp_path / "outputs")


def test_malicious_names_are_text(tmp_path: Path, report: Report) -> None:
    name = EVIL.replace("/", "∕")
    for seed in (1, 2):
        records = [{"step": 1, "eval_loss": 1.0, EVIL: 2.0, "eval_loss_by_source": {EVIL: 3.0}}]
        write_run(
            tmp_path / "outputs" / f"{name}{seed}", records, seed=seed, settings={f"model.{EVIL}": f"{EVIL}{seed}"}
        )
    out = report(tmp_path / "outputs", "--csv", tmp_path / "x.csv")
    assert all(line.isprintable() for line in out.splitlines())
    assert "[red]" in out
    html = (tmp_path / "outputs" / "report.html").read_text()
    assert "onerror=alert" not in re.sub(r'<script id="data".*?</script>', "", html, flags=re.DOTALL)
    assert "<img" not in html[html.index('<script id="data"') :]
    assert page_data(tmp_path / "outputs" / "report.html")["runs"][0]["name"].startswith(name)
    as_json(report, tmp_path / "outputs", "--metric", EVIL)


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a directory"),
        (["empty"], "there are no runs in empty"),
        (["outputs", "--by", "sampler.temprature"], "did you mean 'sampler.temperature'?"),
        (["outputs", "--metric", "eval_los"], "did you mean 'eval_loss'?"),
        (["outputs", "--watch", "0"], "must be more than 0 seconds"),
        (["outputs", "--watch", "nan"], "must be more than 0 seconds"),
        (["outputs", "--watch", "1e300"], "at most a day (86400)"),
        (["outputs", "--html", ""], "argument --html: the path is empty"),
        (["outputs", "--csv", ""], "argument --csv: the path is empty"),
        ([""], "argument DIR: the path is empty"),
        (["outputs", "--notify", " "], "the command is empty"),
        (["outputs", "--watch", "soon"], "invalid float value"),
        (["outputs", "--html", "outputs"], "outputs cannot be written"),
        (["outputs", "--csv", "missing/x.csv"], "missing/x.csv cannot be written"),
        (["outputs", "--json", "--csv"], "only one of them"),
        (["outputs", "--notify", "exit 3"], "exit status 3"),
        (["outputs", "--notify", "/no/such/command"], "exit status 127"),
    ],
)
def test_mistakes_are_one_line(
    sweep: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (sweep.parent / "empty").mkdir()
    monkeypatch.chdir(sweep.parent)
    assert command_line(["report", *arguments]) in (1, 2)
    errors = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("/bin/sh")]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert message in errors[0]


# ---- watching


def test_watching_refreshes_until_ctrl_c(sweep: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        append(sweep / "t1-s1" / "metrics.jsonl", json.dumps({"step": 4, "eval_loss": 0.125}) + "\n")
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(clock, "sleep", sleep)
    out = report(sweep, "--watch", "7")
    assert slept == [7.0, 7.0]
    assert (out.count("wrote "), out.count("0.1250  4")) == (2, 1)
    found = page_data(sweep / "report.html")
    assert found["runs"]
    assert found["refresh"] is None  # no update is expected


def test_the_command_runs_once_the_sweep_has_ended(
    sweep: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do not run it while a run waits or trains, or between two runs of a local sweep."""
    from runner.cli.look import report as module

    states = [{"t1-s1": "running"}, {"t1-s1": "not started"}, {"t1-s1": "pending"}, {"t1-s1": "finished"}]
    read = module.results

    def results(*arguments: Any) -> Any:
        runs = read(*arguments)
        now = states.pop(0)
        for run in runs:
            run.state = now.get(run.name, run.state)
        return runs

    monkeypatch.setattr(module, "results", results)
    slept: list[tuple[float, float]] = []
    monkeypatch.setattr(clock, "sleep", lambda s: slept.append((s, page_data(sweep / "report.html")["refresh"])))
    command = f'echo "$RUNNER_SUMMARY, $RUNNER_FINISHED of $RUNNER_RUNS" >> {sweep}/told'
    assert command_line(["report", str(sweep), "--notify", command]) == 0
    assert slept == [(30.0, 30.0)] * 3  # the page reloads at the same interval
    assert page_data(sweep / "report.html")["refresh"] is None
    assert (sweep / "told").read_text() == "5 of 6 runs finished, 5 of 6\n"


def test_run_that_never_starts_does_not_block_the_command(
    sweep: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("status.json", "attempts.jsonl", "finished.json", "metrics.jsonl"):
        (sweep / "t1-s1" / name).unlink()
    slept: list[float] = []
    monkeypatch.setattr(clock, "sleep", slept.append)
    report(sweep, "--notify", "true", "--watch", "1")
    assert slept == [1.0, 1.0]


def test_no_runs_give_no_ranks_and_groups() -> None:
    assert ranked([], None) == []
    assert grouped([], ["seed"]) == []


def test_primary_config_of_a_user_is_not_a_run(sweep: Path, report: Report) -> None:
    (sweep / "conf").mkdir()
    (sweep / "conf" / "config.yaml").write_text("# mine\ndefaults:\n  - _self_\n")
    (sweep / "new").mkdir()
    (sweep / "new" / "config.yaml").write_text("seed: 7\n")
    names = {run["run"] for run in json.loads(report(sweep, "--json"))["runs"]}
    assert "new" in names
    assert "conf" not in names


def test_the_page_is_written_before_a_reader_closes_the_pipe(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.cli.look import report as module

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(module, "_print", closed)
    with pytest.raises(BrokenPipeError):
        module.main([str(sweep)])
    assert page_data(sweep / "report.html")["runs"]

"""Open the page in a real Chromium from a file, without a network: it draws, filters and groups without an error."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Chromium, chromium, executable
from reported import losses, write_run
from runs import ROOT, TINY, Run

from runner.__main__ import run as command_line
from runner.cli.look.report import results
from runner.metrics.media import png
from runner.report.page import page
from runner.system import files

pytestmark = pytest.mark.timeout(900)
EVIL = "<img src=x onerror=alert(1)><b>bold"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    executable()
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of two trained runs of a mixture, and a fork."""
    executable()
    root = tmp_path_factory.mktemp("trained") / "outputs"
    overrides = ["data=mixture", "train.steps=24", "eval.every_steps=6", "eval.batches=1", f"run.root={root}"]
    runner = [sys.executable, "-m", "runner"]
    environment = {**Run.environment(), "PYTHONPATH": f"{ROOT}"}

    def run(*words: str) -> None:
        subprocess.run(
            [*runner, *words], cwd=root.parent, env=environment, check=True, capture_output=True, timeout=600
        )

    run("-m", *TINY, *overrides, "optimizer.lr=0.001,0.01")
    run("fork", str(min(root.iterdir())), "--step", "20", "optimizer.lr=0.1", "run.name=fork")
    assert command_line(["report", str(root)]) == 0
    return root / "report.html"


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of sixty runs: three temperatures, four learning rates, five seeds."""
    root = tmp_path_factory.mktemp("sixty") / "outputs"
    for number in range(60):
        seed, lr, temperature = number % 5, 0.1 ** (number // 5 % 4), 1.0 + number // 20
        draw = random.Random(number)
        records: list[dict[str, Any]] = []
        for step in range(1, 201):
            loss = 5 / (1 + step / 40) + temperature / 5 + draw.random() / 9
            by_source = {"code": loss, EVIL: loss / 2}
            sources = {"code": {"samples": 3 * step}, EVIL: {"samples": step}}
            records.append({"step": step, "loss": loss, "tokens_seen": 100 * step, "sources": sources})
            if step % 20 == 0:
                records.append({"step": step, "eval_loss": loss, "eval_loss_by_source": by_source})
        name = f"{EVIL}-{number}" if number < 2 else f"width16-layers1-temperature{temperature:g}-lr{lr:g}-seed{seed}"
        settings = {"sampler.temperature": temperature, "optimizer.lr": lr, "note": EVIL if number < 9 else "none"}
        state = "failed" if number == 7 else "finished"
        write_run(root / name, records, state=state, seed=seed, settings=settings)
    assert command_line(["report", str(root)]) == 0
    return root / "report.html"


def choose(page: Chromium, control: str, value: str) -> None:
    """Set a control as a user does."""
    page.evaluate(
        f"(() => {{ const e = document.getElementById({json.dumps(control)}); e.value = {json.dumps(value)};"
        f" if (e.value !== {json.dumps(value)}) throw new Error('no such choice');"
        " e.dispatchEvent(new Event(['search', 'range'].includes(e.type) ? 'input' : 'change')); })()"
    )


def curves(page: Chromium) -> list[dict[str, Any]]:
    """Return the drawn curves: name, first and last x, number of points, whether it has a color."""
    script = """[...document.getElementById('curves').data].filter((t) => t.hoverinfo !== 'skip').map((t) => ({
        name: t.name, first: t.x[0], last: t.x[t.x.length - 1], legend: t.showlegend !== false}))"""
    return list(page.evaluate(script))


def texts(page: Chromium, selector: str) -> list[str]:
    return list(page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)"))


def is_painted(page: Chromium, plot: str) -> bool:
    """Return whether a plot has visible lines of some size."""
    script = f"[...document.querySelectorAll('#{plot} path')].some((p) => p.getBoundingClientRect().width > 50)"
    return bool(page.evaluate(f"{script} || Boolean(document.querySelector('#{plot} .gl-canvas'))"))


@pytest.mark.promise("Chromium opens the report of trained runs, without a network")
def test_two_runs_and_a_fork(browser: Chromium, trained: Path) -> None:
    page = browser
    page.open(trained)
    assert texts(page, "#summary") == ["3 runs: 3 finished"]
    assert is_painted(page, "curves")
    assert len(curves(page)) == 3
    (branch,) = [curve for curve in curves(page) if curve["name"].startswith("fork")]
    assert branch["first"] >= 18  # the step at which it left its trunk
    assert len(texts(page, "#runs tbody tr")) == 3
    assert "from step 20" in texts(page, "#forks")[0]
    assert is_painted(page, "sources")
    assert is_painted(page, "mixture")
    assert is_painted(page, "timeline")
    assert is_painted(page, "goodput")
    for x, most in (("tokens_seen", 24 * 100_000), ("hours", 1.0), ("samples_seen", 24 * 1000), ("step", 24)):
        choose(page, "x", x)
        found = curves(page)
        assert len(found) == 3
        assert all(0 < curve["last"] <= most for curve in found), (x, found)
    for metric in ("loss", "lr", "grad_norm", "eval_loss"):
        choose(page, "metric", metric)
        assert len(curves(page)) == 3
    for box, axis in (("logx", "xaxis"), ("logy", "yaxis")):
        page.evaluate(f"document.getElementById('{box}').click()")
        assert page.evaluate(f"document.getElementById('curves').layout.{axis}.type") == "log"
    assert is_painted(page, "curves")
    assert page.problems == []


@pytest.mark.slow
def test_sixty_runs(browser: Chromium, sixty: Path) -> None:
    page = browser
    page.open(sixty)
    assert len(curves(page)) == 60
    assert sum(curve["legend"] for curve in curves(page)) <= 9  # the best and the chosen run
    assert len(texts(page, "#runs tbody tr")) == 60
    assert texts(page, "#runs tr.chosen td:first-child") == ["1"]  # the best is shown first
    choose(page, "filter", "temperature=2 LR=0.01")
    assert len(curves(page)) == len(texts(page, "#runs tbody tr")) == 5
    assert texts(page, "#shown") == ["5 of 60 runs"]
    choose(page, "filter", "temperature=2.0 lr=1e-2")
    assert texts(page, "#shown") == ["5 of 60 runs"]
    choose(page, "filter", "seed=1 temperature=")  # not a number yet
    assert texts(page, "#shown") == ["12 of 60 runs"]
    choose(page, "filter", "lr=0")  # not 0.1
    assert texts(page, "#shown") == ["0 of 60 runs"]
    choose(page, "filter", "nothing like this")
    assert curves(page) == []
    choose(page, "filter", "")
    choose(page, "by", '["sampler.temperature"]')
    assert [curve["name"] for curve in curves(page)] == [
        f"temperature={number} ({runs} runs)" for number, runs in ((1, 19), (2, 20), (3, 20))
    ]
    rows = [row.split("\t") for row in texts(page, "#groups tbody tr")]
    assert [row[:3] for row in rows] == [["1", "20", "1 of 20: 1 failed"], ["2", "20", ""], ["3", "20", ""]]
    assert all("±" in row[3] for row in rows)
    by = page.evaluate(
        "[...document.getElementById('by').options].map((o) => o.value).find((v) => v.split(',').length === 3)"
    )
    choose(page, "by", by)  # all settings but the seed
    assert len(curves(page)) >= 12
    choose(page, "by", "[]")
    page.evaluate("[...document.querySelectorAll('#runs tbody tr')][30].click()")
    name = texts(page, "#runs tr.chosen td:nth-child(2)")
    assert name == texts(page, "#one option:checked")
    assert ["state", "finished"] in [row.split("\t") for row in texts(page, "#facts tr")]
    assert sum(curve["legend"] for curve in curves(page)) == 9
    page.evaluate("document.querySelector('#runs th:nth-child(2)').click()")
    ordered = [row.split("\t")[1] for row in texts(page, "#runs tbody tr")]
    assert ordered == sorted(ordered, key=str.lower) or ordered[0] < ordered[-1]
    assert page.problems == []


@pytest.mark.slow
def test_a_branch_has_no_evaluations_before_it_began(browser: Chromium, trained: Path) -> None:
    """Check that the evaluations of its trunk, made at other times, are left out."""
    browser.open(trained)
    runs = browser.evaluate("JSON.parse(document.getElementById('data').textContent).runs")
    (branch,) = [run for run in runs if run["fork"]]
    assert branch["events"]
    assert min(event["time"] for event in branch["events"]) >= branch["attempts"][0]["started"]


@pytest.mark.slow
def test_long_names_keep_the_end_in_which_they_differ(browser: Chromium, tmp_path: Path) -> None:
    """Check legend, table and bars. Also check that a last value that is not finite is not an empty cell."""
    names = [f"{'long-' * 30}{end}" for end in ("first", "second")]
    for name, last in zip(names, (1.0, math.nan), strict=True):
        attempt = {"attempt": 1, "started": 1e9, "ended": 1e9 + 9, "start_step": 0, "end_step": 2, "cause": "finished"}
        records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": last}]
        write_run(tmp_path / name, records, attempts=[attempt])
    assert command_line(["report", str(tmp_path)]) == 0
    page = browser
    page.open(tmp_path / "report.html", 700)
    shown = {"curves": [curve["name"] for curve in curves(page)], "runs": texts(page, "#runs td:nth-child(2)")}
    shown["timeline"] = page.evaluate("document.getElementById('timeline').layout.yaxis.ticktext")
    for place, labels in shown.items():
        assert [label.endswith(end) for label, end in zip(sorted(labels), ("first", "second"), strict=True)], place
        assert all(len(label) < 60 for label in labels), place
    assert "not finite" in texts(page, "#runs tbody tr")[1]
    assert page.problems == []


@pytest.mark.slow
def test_names_are_shown_as_text(browser: Chromium, sixty: Path) -> None:
    """Check tables, legends, labels and menus: no part of a name becomes an element or runs."""
    page = browser
    page.open(sixty)
    choose(page, "filter", "onerror")
    choose(page, "one", f"{EVIL}-1")
    choose(page, "beside", f"{EVIL}-0")
    assert EVIL in "".join(texts(page, "#runs tbody tr"))
    assert page.evaluate("document.querySelectorAll('main img, main b').length") == 0
    for place in ("curves-legend", "timeline", "sources-legend", "mixture-legend", "parallel", "facts"):
        shown = page.evaluate(f"document.getElementById('{place}').textContent")
        assert "<img src=x" in shown, place
    assert page.problems == []


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of nine runs with many settings, with images, texts and a fork."""
    root = tmp_path_factory.mktemp("varied") / "outputs"
    for number in range(9):
        loss = [4.0 - number / 9, 3.0 - number / 9]
        records = losses(loss, loss=loss[0], eval_n_tokens=126.9375)
        settings: dict[str, Any] = {
            "optimizer.lr": 0.1 / (number % 3 + 1),
            "data.tokenizer": f"/data/shared/tokenizers/a-long-name/of-a-version-{number}/tokenizer.json",
            "init_from.digest": f"{number}1a2b3c4d5e6f70",
            "model.dims": [number] * 30,
            "callbacks.pictures.at": number,
        }
        if number == 3:
            settings |= {"fork.run": str(root / "sweep-lr0.05-b-1a2b3c41"), "fork.step": 1}
        run = write_run(root / f"sweep-lr{settings['optimizer.lr']:.2g}-b-1a2b3c4{number}", records, settings=settings)
        timings = [{"step": step, "step_s": 0.5, "data_wait_s": 0.1, "tokens_per_s": 9e3} for step in (1, 2)]
        timings = [{**one, "memory_bytes": 2**31} for one in timings]
        (run / "timings.jsonl").write_text(
            "".join(json.dumps({**one, "memory_bytes": 2**31}) + "\n" for one in timings)
        )
        diff = {"commit": f"{number}" * 40, "diff": f"+ change {number}", "diff_digest": f"d{number}"}
        (run / "code.json").write_text(json.dumps({"repositories": {"/code": diff}}))
        (run / "artifacts" / "texts").mkdir(parents=True)
        for step in (1, 2):
            (run / "artifacts" / f"drawn-{step:08d}.png").write_bytes(png(np.full((4, 6, 3), 20 * number, np.uint8)))
            (run / "artifacts" / "texts" / f"said-{step:08d}.txt").write_text(f"{EVIL} of {number} at {step}")
    assert command_line(["report", str(root)]) == 0
    return root / "report.html"


@pytest.mark.parametrize("width", [1400, 700])
@pytest.mark.slow
def test_results_are_on_the_screen_with_many_settings(browser: Chromium, varied: Path, width: int) -> None:
    """Check that last, best and its step come before the settings, and that nothing is wider than the window."""
    page = browser
    page.open(varied, width)
    page.wait_for(f"document.documentElement.scrollWidth <= {width}")
    titles = [title.strip(" ▴▾") for title in texts(page, "#runs th")]
    assert titles[:5] == ["rank", "run", "eval_loss", "best", "at step"]
    assert titles[5:] == ["state", "step", "lr"]
    right = page.evaluate("document.querySelector('#runs th:nth-child(5)').getBoundingClientRect().right")
    assert right <= page.evaluate("document.querySelector('#runs').parentElement.getBoundingClientRect().right")
    overlap = """[...document.querySelectorAll('.legend')].some((one) => { const a = one.getBoundingClientRect(),
        plots = [...document.querySelectorAll('.plot:not(.nothing)')].map((each) => each.getBoundingClientRect());
        return a.height && plots.some((b) => a.top < b.bottom - 1 && b.top < a.bottom - 1 && b.height); })"""
    assert not page.evaluate(overlap)
    assert page.problems == []


@pytest.mark.slow
def test_a_fork_is_below_its_trunk_and_only_results_are_ranked(browser: Chromium, varied: Path) -> None:
    page = browser
    page.open(varied)
    rows = [row.split("\t")[1] for row in texts(page, "#runs tbody tr")]
    (at,) = [number for number, name in enumerate(rows) if "└" in name]
    assert (rows[at - 1].strip(), rows[at].strip(" \u00a0")) == ("sweep-lr0.05-b-1a2b3c41", "└ sweep-lr0.1-b-1a2b3c43")
    assert texts(page, "#metric optgroup:nth-child(1) option") == ["eval_loss", "loss"]
    choose(page, "metric", "eval_n_tokens")
    assert not {"rank", "best"} & {title.strip(" ▴▾") for title in texts(page, "#runs th")}
    assert page.problems == []


@pytest.mark.slow
def test_address_keeps_the_choices(browser: Chromium, varied: Path) -> None:
    """Restore columns, panels, smoothing and two runs. Ignore an address that does not fit the page."""
    page = browser
    page.open(varied)
    page.evaluate("document.querySelector('#columns input[value=\"setting data.tokenizer\"]').click()")
    page.evaluate("document.querySelector('#panels input[value=\"tokens/s\"]').click()")
    choose(page, "smooth", "0.5")
    choose(page, "one", "sweep-lr0.1-b-1a2b3c43")
    choose(page, "beside", "sweep-lr0.1-b-1a2b3c46")
    address = page.evaluate("location.hash")
    page.evaluate("location.hash = ''")
    page.wait_for("![...document.querySelectorAll('#runs th')].some((e) => e.title === 'data.tokenizer')")
    page.evaluate(f"location.hash = {json.dumps(address)}")
    page.wait_for("[...document.querySelectorAll('#runs th')].some((e) => e.title === 'data.tokenizer')")
    shown = page.evaluate("[...document.querySelectorAll('#runs tbody tr')].map((e) => e.cells[7].innerText)")
    assert all(len(value) <= 28 and value.endswith("tokenizer.json") for value in shown), shown
    assert texts(page, "#curves-panels figcaption") == ["eval_loss", "loss", "tokens/s"]
    assert len(curves(page)) == 9
    fits = "e.querySelector('.main-svg').getBoundingClientRect().width <= e.clientWidth + 1"
    assert page.evaluate(f"[...document.querySelectorAll('.panels .plot')].every((e) => {fits})")
    differing = {row.split("\t")[0]: row.split("\t")[1:] for row in texts(page, "#facts tr, #code tr")}
    assert differing["init_from.digest"] == ["31a2b3c4d5e6f70", "61a2b3c4d5e6f70"]
    assert differing["commit of /code"] == ["3" * 12, "6" * 12]
    assert "seed" not in differing
    assert page.evaluate("[...document.querySelectorAll('#diffs pre')].map((e) => e.textContent)") == [
        "+ change 3",
        "+ change 6",
    ]
    page.evaluate("location.hash = '#x=nowhere&smooth=7&columns=3&run=none&panels=[1]&by={'")
    page.wait_for("document.getElementById('smooth').value === '0'")
    assert page.problems == []


@pytest.mark.slow
def test_images_and_texts_of_runs_are_side_by_side(browser: Chromium, varied: Path) -> None:
    page = browser
    page.open(varied)
    page.wait_for("[...document.querySelectorAll('#media-runs img')].filter((e) => e.naturalWidth === 6).length === 9")
    assert page.evaluate("[...document.querySelectorAll('#media-runs img')].every((e) => e.alt.endsWith('at step 2'))")
    choose(page, "media", "texts/said")
    page.evaluate("document.getElementById('media-step').stepDown()")
    page.evaluate("document.getElementById('media-step').dispatchEvent(new Event('input'))")
    assert f"{EVIL} of 4 at 1" in texts(page, "#media-runs pre")
    assert texts(page, "#media-runs b") == []
    assert page.problems == []


@pytest.mark.slow
def test_the_keyboard_reaches_everything(browser: Chromium, varied: Path) -> None:
    """Reach every control with Tab, sort and choose a run with Enter, and check that the focus stays."""
    page = browser
    page.open(varied, 700)
    seen: set[str] = set()
    describe = "((e) => e.id || (e.closest('table') || e.closest('.legend') || e.closest('details') || e).id)"
    for _ in range(80):
        page.press("Tab")
        name = page.evaluate(f"{describe}(document.activeElement)")
        if name == "runs" and "runs" not in seen:
            page.press("Enter")  # the first title
            assert page.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "descending"
        seen.add(name)
    controls = {"metric", "x", "by", "logx", "logy", "smooth", "filter", "runs", "curves-legend", "setting", "media"}
    assert seen >= controls | {"media-step", "one", "beside"}, controls - seen
    page.evaluate("document.querySelectorAll('#runs td button')[4].focus()")
    name = page.evaluate("document.activeElement.textContent")
    page.press("Enter")
    assert texts(page, "#runs tr.chosen td button") == [name]
    assert page.evaluate("document.activeElement.textContent") == name
    assert page.problems == []


@pytest.mark.slow
def test_page_of_a_single_run(browser: Chromium, varied: Path, tmp_path: Path) -> None:
    """Check that it shows curves, images, config, code and attempts, and no comparisons."""
    run = next(iter(sorted(varied.parent.glob("sweep*"))))
    assert command_line(["report", str(run), "--html", str(tmp_path / "one.html")]) == 0
    page = browser
    for width in (1400, 700):
        page.open(tmp_path / "one.html", width)
        page.wait_for(f"document.documentElement.scrollWidth <= {width}")
        assert texts(page, "#curves-panels figcaption") == ["eval_loss", "loss", "eval_n_tokens"]
        assert texts(page, "#hardware-panels figcaption") == ["tokens/s", "memory, GiB", "data wait, %"]
        assert page.evaluate("[...document.querySelectorAll('.many')].every((e) => !e.offsetParent)")
        assert "commit of /code" in texts(page, "#code")[0]
        assert page.evaluate("document.getElementById('config').textContent").count("optimizer.lr") == 1
        assert len(texts(page, "#attempts tbody tr")) == 1
        assert page.problems == []


@pytest.mark.slow
def test_odd_runs_make_no_error(browser: Chromium, tmp_path: Path) -> None:
    """Draw runs without metrics, crashed, unreadable, with only NaN, and a branch of itself."""
    write_run(tmp_path / "none", [], state="failed")
    (write_run(tmp_path / "damaged") / "config.yaml").write_text("a: [1\n")
    write_run(tmp_path / "nan", losses([math.nan, math.nan]), seed=2, settings={"model.width": None})
    write_run(tmp_path / "self", losses([1.0]), settings={"fork.run": str(tmp_path / "self"), "fork.step": 1})
    write_run(tmp_path / "constructor-1a2b3c4d", losses([2.0]), settings={"model.width": [1, {"a": 2}]})
    for roots in (["none"], ["damaged"], ["nan"], ["none", "damaged", "nan", "self", "constructor-1a2b3c4d"]):
        page_file = tmp_path / "page.html"
        assert command_line(["report", *(str(tmp_path / root) for root in roots), "--html", str(page_file)]) == 0
        browser.open(page_file)
        for name in [*roots, ""] if len(roots) > 1 else []:
            choose(browser, "one", name) if name else choose(browser, "x", "hours")
        assert browser.problems == []


@pytest.mark.slow
def test_rewritten_page_reloads(browser: Chromium, tmp_path: Path) -> None:
    """Check that the choices on the page survive the reload."""
    path = tmp_path / "report.html"

    def write(runs: int, refresh_s: float | None) -> None:
        write_run(tmp_path / f"run{runs}", losses([3.0, 2.0], loss=1.0), settings={"optimizer.lr": 0.1 * (runs % 2)})
        files.write_atomic(path, page(results([tmp_path]), "a sweep", "eval_loss", refresh_s=refresh_s))

    write(1, None)
    write(2, None)
    browser.open(path)
    choose(browser, "metric", "loss")
    choose(browser, "by", '["optimizer.lr"]')
    choose(browser, "filter", "lr=0.1")
    write(3, 0.5)
    browser.evaluate("location.reload()")
    browser.wait_for("document.getElementById('shown') && document.getElementById('shown').innerText === '2 of 3 runs'")
    write(5, None)  # the page reloads on a timer
    browser.wait_for("document.getElementById('shown') && document.getElementById('shown').innerText === '3 of 4 runs'")
    assert browser.evaluate("document.getElementById('filter').value") == "lr=0.1"
    assert browser.evaluate("document.getElementById('metric').value") == "loss"
    assert [curve["name"] for curve in curves(browser)] == ["lr=0.1 (3 runs)"]
    assert browser.problems == []


@pytest.mark.slow
def test_zoomed_page_does_not_reload(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_run(tmp_path / "run", losses([3.0, 2.0]))
    path.write_text(page(results([tmp_path]), "a run", "eval_loss", refresh_s=1.0))
    browser.open(path)
    drawn = "document.body && document.body.dataset.drawn === 'yes'"
    browser.wait_for(f"{drawn} && Plotly.relayout('curves', {{'xaxis.range': [1, 2]}}) && (window.zoomed = true)")
    assert browser.evaluate("new Promise((done) => setTimeout(() => done(window.zoomed), 2500))")
    assert browser.problems == []


@pytest.mark.parametrize("width", [1400, 700])
@pytest.mark.slow
def test_nothing_is_wider_than_the_window(browser: Chromium, sixty: Path, trained: Path, width: int) -> None:
    """Scroll wide tables inside their own area."""
    page = browser
    for path in (trained, sixty):
        page.open(path, width)
        page.wait_for(f"document.documentElement.scrollWidth <= {width}")
        assert page.problems == []


@pytest.mark.slow
def test_a_group_of_runs_of_different_lengths(browser: Chromium, tmp_path: Path) -> None:
    """Check that mean and band are those of one step of the finished runs, as on the terminal."""
    for seed, (count, state) in enumerate([(20, "finished"), (60, "finished"), (7, "interrupted")]):
        records = losses([1.0 + seed + 1 / step for step in range(1, count + 1)])
        write_run(tmp_path / "outputs" / f"s{seed}", records, state, seed=seed)
    assert command_line(["report", str(tmp_path / "outputs"), "--by", "optimizer.lr"]) == 0
    page = browser
    page.open(tmp_path / "outputs" / "report.html")
    (row,) = [row.split("\t") for row in texts(page, "#groups tbody tr")]
    assert row[1:4] == ["3", "1 of 3: 1 not finished", "1.5500 ± 0.7071 at step 20"]
    (curve,) = curves(page)
    assert (curve["name"], curve["last"]) == ("lr=0.1 (2 runs)", 20)
    assert page.problems == []

"""Check the section of a search on the page against a short recount of the journal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium, executable
from reported import losses, write_run

from runner.__main__ import run as command_line
from runner.report.search import best_so_far, explained, importance, search_data
from runner.search.decide import best
from runner.search.journal import Journal
from runner.search.points import Dimension, Space
from runner.search.rules import Algorithm, Rules

EVIL = "<img src=x onerror=alert(1)>"
LR = Dimension("optimizer.lr", low=1e-4, high=1e-1, log=True)
KIND = Dimension("+kind", values=(EVIL, "plain"))
RULES = Rules(Algorithm.asha, Space((LR, KIND)), "eval_loss", maximize=False)
CLAIM = {"repeat": 0, "slot": 0, "fence": 1}


def a_search(trials: int = 12, repeats: int = 1) -> Journal:
    """Return a search in which lower rates are better.

    Trial 1 diverges and trial 2 fails. The last two are promoted, one of them to its end.
    """
    made = Journal(repeats)
    made.add({"entry": "settings", "trials": trials, "rungs": [2, 4, None]})

    def result(trial: int, rung: int, value: float | None) -> None:
        for repeat in range(repeats):
            given = {"rung": rung, "step": 2 * rung + 2, "value": value}
            made.add({"entry": "result", "trial": trial, "repeat": repeat, **given})

    for number in range(trials):
        values = {LR.key: str(1e-2 / (number + 1)), KIND.key: KIND.values[number % 2]}
        made.add({"entry": "start", "trial": number, "values": values, **CLAIM})
        made.add({"entry": "run", "trial": number, "repeat": 0, "run": "run-of-first"})
        if number == 2:
            made.add({"entry": "failed", "trial": 2, "repeat": 0, "how": "error", "reason": "no"})
        else:
            result(number, 0, None if number == 1 else 5 - number / 9)
    for trial, rung, value in ((trials - 1, 1, 4.5), (trials - 2, 1, 4.4), (trials - 1, 2, 4.6)):
        made.add({"entry": "promote", "trial": trial, "rung": rung, **CLAIM})
        result(trial, rung, value)
    return made


def write_search(path: Path, journal: Journal) -> None:
    """Write a search and a run next to it."""
    path.mkdir(parents=True)
    record = {"format": 1, "rules": RULES.to_json(), "config": {}, "digest": "0", "directory": "/"}
    (path / "search.json").write_text(json.dumps(record))
    (path / "journal.jsonl").write_text(journal.text())
    write_run(path.parent / f"run-of-{path.name}", losses([3.0, 2.0]))


@pytest.mark.parametrize("repeats", [1, 2])
def test_best_so_far_follows_the_journal(repeats: int) -> None:
    journal, grown = a_search(repeats=repeats), Journal(repeats)
    expected: list[tuple[int, float, int]] = []
    for entry in journal.entries:
        grown.add(entry)
        if (found := best(RULES, grown)) and (found.value, found.trial.number) != (expected or [(0, 0, -1)])[-1][1:]:
            expected.append((grown.steps_trained(), found.value, found.trial.number))
    assert [(each["steps"], each["value"], each["trial"]) for each in best_so_far(RULES, journal)] == expected
    assert expected[-1][1] == 4.6  # worse than at the rung below


def test_every_trial_counts_and_finite_results_are_drawn() -> None:
    found = search_data(RULES, a_search())
    assert (found["diverged"], found["failed"], found["steps"]) == (1, 1, 11 * 2 + 2 * 2 + 2)
    assert [line["results"] for line in found["lines"][1:3]] == [[(2, None)], []]
    assert found["lines"][-1]["results"] == [(2, 5 - 11 / 9), (4, 4.5), (6, 4.6)]
    assert [line["trial"] for line in found["lines"] if line["promoted"]] == [10, 11]
    assert [line["at"] for line in found["lines"][:2]] == [[1e-2, 0], [5e-3, 1]]
    json.dumps(found, allow_nan=False)


def test_importance_is_the_share_of_the_variance_of_ranks() -> None:
    found = importance([LR, KIND], a_search())
    assert (found["step"], found["results"]) == (2, 10)
    ranks = list(range(10, 0, -1))  # trials 0 and 3 to 11 with falling rates and results; two bins; kinds by number
    within = 2 * sum((each - 3) ** 2 for each in range(1, 6))
    assert found["shares"][0] == pytest.approx(1 - (within / 8) / (sum((each - 5.5) ** 2 for each in ranks) / 9))
    assert found["shares"][1] < 0.05
    assert importance([LR], a_search(9))["shares"] == []  # of 7 results
    assert explained([1, 2, 3], [1, 2, 3]) is None
    assert explained([1, 1, 2, 2], [5, 5, 5, 5]) == 0
    assert explained([1, 1, 2, 2], [3, 3, 5, 5]) == 1


def test_the_report_has_a_section_for_each_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "alone" / "run")
    assert command_line(["report", str(tmp_path / "alone")]) == 0
    without = (tmp_path / "alone" / "report.html").read_text()
    assert "data.searches" not in without
    assert '"searches"' not in without
    write_search(tmp_path / "outputs" / "first", a_search())
    write_search(tmp_path / "outputs" / "damaged", a_search())
    (tmp_path / "outputs" / "damaged" / "journal.jsonl").write_text('{"entry": "start"}\n')
    capsys.readouterr()
    roots = [str(tmp_path / "outputs"), str(tmp_path / "outputs" / "first")]
    assert command_line(["report", *roots]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("search first: 12 of 12 trials begun") == 1
    assert "damaged is left out" in printed.err
    html = (tmp_path / "outputs" / "report.html").read_text()
    data: dict[str, Any] = json.loads(html.partition('type="application/json">')[2].partition("</script>")[0])
    assert [each["name"] for each in data["searches"]] == ["first"]


@pytest.mark.slow
def test_the_page_draws_the_searches(tmp_path: Path) -> None:
    """Draw all plots, or only the sentences of an empty search, never wider than the window."""
    executable()
    write_search(tmp_path / "outputs" / "first", a_search())
    write_search(tmp_path / "outputs" / "second", Journal())
    assert command_line(["report", str(tmp_path / "outputs")]) == 0
    with chromium(tmp_path / "profile") as page:
        for width in (1280, 400):
            page.open(tmp_path / "outputs" / "report.html", width)
            page.wait_for(f"document.documentElement.scrollWidth <= {width}")
            drawn = page.evaluate(
                "[...document.querySelectorAll('.search')].map((e) => [e.querySelector('h2').textContent,"
                " [...e.querySelectorAll('figcaption')].length, [...e.querySelectorAll('.plot')].map((p) =>"
                " [p.data.length, p.data[0].type, (p.layout.xaxis || { title: {} }).title.text])])"
            )
            kinds = [[1, "parcoords", None], [1, "bar", "share of variance explained"]]
            kinds += [[1, "scatter", "steps trained, of all trials"], [3, "scatter", "step of the rung"]]
            assert drawn == [["Search first", 4, kinds], ["Search second", 4, []]]
            shown = page.evaluate("document.querySelector('.search').textContent")
            assert "of 12 trials, 1 diverged and 1 failed." in shown
            assert page.evaluate("document.querySelectorAll('.search img').length") == 0
            last = page.evaluate("document.querySelectorAll('.search .plot')[2].data[0].y.slice(-1)[0]")
            assert math.isclose(last, 4.6)
            assert page.problems == []

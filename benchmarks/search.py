"""Measure a decision of a search with 1,000 trials: read the journal, decide, draw the next point."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend

from benchmarks.results import table
from runner.config.template import TrialComposer
from runner.search.decide import Points, decide
from runner.search.journal import START, Journal
from runner.search.points import Dimension, Space
from runner.search.rules import Algorithm, Rules

TRIALS, TURNS, GOAL_MS = 1000, 5, 50.0
LR, WIDTH = Dimension("lr", low=1e-4, high=1e-1, log=True), Dimension("width", tuple(map(str, range(16, 4096, 16))))
LAYERS = Dimension("layers", low=1, high=32, whole=True)


def rules(algorithm: Algorithm) -> Rules:
    """Return a search over a space that `algorithm` can enumerate."""
    space = Space((WIDTH, LAYERS) if algorithm is Algorithm.grid else (LR, WIDTH))
    return Rules(algorithm, space, "eval_loss", maximize=False)


def journal_of(made: Rules) -> str:
    """Return the journal of a search in which all trials but one have ended."""
    first = Rules(Algorithm.random, made.space, "eval_loss", maximize=False) if made.algorithm.learns else made
    journal, points, random = Journal(), Points(first), Random(0)
    rungs = [100, 300, 900] if made.algorithm.pauses else [None]
    journal.add({"entry": "settings", "trials": TRIALS + 1, "rungs": rungs})
    while len(journal.trials) < TRIALS:
        decision = decide(made, journal)
        entry: dict[str, Any] = {"entry": decision.what, "trial": decision.trial, "repeat": 0, "slot": 0, "fence": 1}
        if decision.what == START:
            entry["values"] = points.point(journal, len(journal.trials))
        else:
            entry["rung"] = decision.rung
        journal.add(entry | {"time": 1795865470.068})
        number = decision.trial or 0
        journal.add({"entry": "run", "trial": number, "repeat": 0, "run": f"text-lr{number}-width64-seed0-12345678"})
        rung = journal.trials[number].rung
        journal.add({"entry": "result", "trial": number, "rung": rung, "step": 100 * 3**rung, "value": random.random()})
    return journal.text()


def milliseconds(do: Callable[[], object]) -> float:
    """Return the CPU time of a call in milliseconds."""
    before = time.process_time()
    do()
    return 1000 * (time.process_time() - before)


def decided(made: Rules, text: str) -> None:
    """Decide as a slot that has just started does."""
    journal = Journal.parse(text, 1)
    if decide(made, journal).what == START:
        Points(made).point(journal, len(journal.trials))


def optunas(path: Path, fill: bool = False) -> None:
    """Load a study from Optuna's journal file, and ask for a point; first, `fill` it."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(storage=storage, sampler=sampler, study_name="peer", load_if_exists=True)
    distributions = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
        "width": optuna.distributions.CategoricalDistribution(WIDTH.values),
    }
    for number in range(TRIALS if fill else 0):
        asked = study.ask(distributions)
        for step in (100, 300, 900)[: 1 + (number % 3 == 0) + (number % 9 == 0)]:
            asked.report(float(number), step)
        study.tell(asked, float(number))
    if not fill:
        study.ask(distributions)


def main() -> None:
    """Measure each kind of search, and the composition of a trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = table("search", f"decision with {TRIALS:,} trials")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peer.log"
        optunas(path, fill=True)
        for algorithm in Algorithm:
            made = rules(algorithm)
            text = journal_of(made)
            ours_once, peer_once = partial(decided, made, text), partial(optunas, path)
            turns = [(milliseconds(ours_once), milliseconds(peer_once)) for _ in range(TURNS + 1)]
            ours, peer = (statistics.median(column) for column in zip(*turns[1:], strict=True))
            goal = {} if algorithm.learns else {"at_most": GOAL_MS}
            found.add(algorithm.name, "ours", ours, "ms", **goal)
            found.add(algorithm.name, "Optuna, a random point", peer, "ms")
            found.add(algorithm.name, "ratio", ours / peer)
    composer = TrialComposer()
    words = ["experiment=smoke", "search=random", "search.trials=9", "optimizer.lr=log(1e-4,1e-2)"]
    _, fixed, dimensions = composer.search(words)
    frozen = composer.freeze(fixed, dimensions, Path.cwd())
    points = islice(Space(tuple(dimensions)).random(0), TURNS + 1)
    spent = [milliseconds(partial(TrialComposer().compose_point, frozen, point, Path.cwd())) for point in points]
    found.add("composition of a new trial", "ours", statistics.median(spent[1:]), "ms")


if __name__ == "__main__":
    main()

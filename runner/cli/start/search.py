"""Start or continue a search: its plan, its directory and its slots. `runner.cli.start.slot` has the work of a slot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from runner.cli.base.console import PROGRAM, counted, say, shown, tell
from runner.cli.base.launcher import common_launcher
from runner.cli.base.trials import lines_of, print_table
from runner.cli.runs.pruning import prune
from runner.cli.start.relatives import closest
from runner.config.composition import Composed
from runner.config.early_stopping import Best, against_its_name
from runner.config.identity import (
    LENGTH_KEYS,
    MAX_NAME,
    digest_of,
    flatten,
    identifying_values,
    length_readers,
    result_values,
)
from runner.config.search import SearchConfig
from runner.config.template import TrialComposer
from runner.contracts import Launcher
from runner.errors import ExitStatus, RunDirError, UserError, refuse
from runner.rundir import provenance
from runner.rundir.lease import Heart, Lease, LeaseWatcher
from runner.rundir.paths import RunDir
from runner.rundir.trust import check_trusted
from runner.search.decide import Points, decide, most_promotions
from runner.search.directory import Record, SearchDir, Turn, is_search, read_journal, turn
from runner.search.journal import DONE, RETRY, SETTINGS, Journal, Rungs
from runner.search.points import Dimension, Point, Space
from runner.search.rules import Algorithm, Rules
from runner.system import files, processes
from runner.system.signals import STOP

ATTEMPT = "runner.cli.start.slot:slot"
MOST_CHECKED = 1000
"""The maximum number of points that are composed as a check before anything starts."""
RUNGS = 3
"""The number of rungs if search.rungs is not set."""
NEWS_S = 0.5
SHOWN_POINTS = 20
SUBMISSION_WAIT_S = 120.0
SIGNALLED = 128
"""An exit status of at least this value means that a signal killed the process."""


@dataclass(frozen=True)
class Plan:
    """The search that a command describes.

    Attributes:
        first: the run of the first trial.
    """

    search: SearchDir
    record: Record
    trials: int
    rungs: Rungs
    first: Composed
    points: Sequence[Point]


def start_search(composer: TrialComposer, overrides: Sequence[str], dry_run: bool) -> int:
    """Start or continue the search that a command describes, and return the exit status.

    Raises:
        UserError: the config, the space or a search option is wrong, or does not fit the existing search.
    """
    plan = plan_search(composer, overrides)
    launcher = common_launcher([plan.first])
    dry_run = dry_run or launcher.dry_run
    if int(processes.environment.get("WORLD_SIZE", "1")) > 1:
        raise UserError("torchrun cannot start a search: start it without torchrun")
    if list((ranks := launcher.rank_counts()).counts) != [1]:
        raise UserError(f"{ranks.option}: the trials of a search have one rank each, and this is {ranks.counts[-1]}")
    search, rules = plan.search, plan.record.rules
    is_new = not files.exists(search.record)
    if not is_new:
        check_trusted(RunDir(search.path))
        _check_change(plan, Record.read(search), read_journal(search, rules.repeats))
    if launcher.in_process:
        refuse(launcher.check([search.slot(0).path]))
    say(f"{shown(search.path)}: {_summary(plan, is_new)}")
    if is_new and (line := nearest(plan)):
        say(line)
    for line in against_its_name("search", rules.metric, Best.max if rules.maximize else Best.min):
        tell(f"warning: {line}")
    if dry_run:
        _show_points(plan)
        return int(ExitStatus.FINISHED)
    files.make_dirs(search.path, files.OWNED)
    with turn(search, plan.record) as mine:
        _begin(plan, mine, launcher.retry_failed)
        journal = mine.journal
    if decide(rules, journal).what == DONE:
        return _end(plan)
    status = _start_slots(plan, launcher)
    if not launcher.in_process and status == ExitStatus.FINISHED:
        for name, command in (("trials", "search"), ("cancel", "cancel")):
            say(f"{name}: {PROGRAM} {command} {shown(search.path)}")
        return launcher.follow([slot.path for slot in search.slots()]) if launcher.wait else status
    if not launcher.in_process or status == ExitStatus.INTERRUPTED:
        return status
    ended = _end(plan)  # even if, for example, a slot was killed
    return status if ended == ExitStatus.INTERRUPTED and status else ended


# Plan the search


def plan_search(composer: TrialComposer, overrides: Sequence[str]) -> Plan:
    """Plan and check the search that a command describes. Nothing is written.

    Raises:
        UserError: the config, the space or a search option is wrong.
    """
    base = Path.cwd()
    given = [text for text in overrides if text.lstrip("+").startswith(("fork=", "run.dir="))]
    lines = {"fork": "the trials of a search are no forks", "run.dir": "each trial has a directory of its own"}
    refuse(f"{text}: {lines[text.lstrip('+').partition('=')[0]]}: leave it out" for text in given)
    options, fixed, dimensions = composer.search(overrides)
    refuse(_space_errors(options, dimensions))
    fixed, rungs = _with_length(composer, options, fixed, dimensions)
    frozen = composer.freeze(fixed, dimensions, base)
    assert options.kind is not None
    maximize, settings = options.mode.value == "max", (options.seed, options.reduction, options.repeats)
    rules = Rules(options.kind, Space(tuple(dimensions)), options.metric, maximize, *settings)
    trials = _number_of_trials(options, rules)
    points = _points(rules, min(trials, MOST_CHECKED))
    drawn = {each.key for each in dimensions if not each.values}
    refuse(composer.check_points(frozen, list(counted(points, "checking trials")), base, drawn))
    first = composer.compose_point(frozen, points[0], base)
    refuse(_metric_errors(options, first))
    shared = [_shared(rules, template["values"], rungs) for template in frozen["templates"].values()]
    digest = digest_of([first.digest, *shared])
    record = Record(rules, frozen, digest, str(base), options.keep, options.prune, first.config.run.lease_timeout_s)
    name = _name(rules, frozen, first, [_shared(rules, first.plain, rungs), *shared[1:]])
    return Plan(SearchDir(Path(first.plain["run"]["root"]) / name), record, trials, rungs, first, points)


def _space_errors(options: SearchConfig, dimensions: Sequence[Dimension]) -> Iterator[str]:
    if not dimensions:
        yield (
            "the search varies nothing: pass a range, such as 'optimizer.lr=log(1e-4,1e-2)' or "
            "'model.width=choice(64,128)'"
        )
    keys = [each.key for each in dimensions]
    for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
        yield f"{key} is given twice: leave one of the two out"
    for key in keys:
        bare = key.lstrip("+")
        if bare.startswith(("search", "run.", "launcher", "fork", "hydra")):
            yield f"{key} cannot be varied by a search: give it one value"
        if bare in LENGTH_KEYS:
            yield f"{key} cannot be varied by a search, which compares runs of one length: give it one value"
        if bare == "seed" and options.repeats > 1:
            yield "seed is varied, and so is it by search.repeats: leave one of the two out"
    if options.kind is Algorithm.grid:
        for each in dimensions:
            if not each.values and not each.whole:
                yield f"{each.key}: an interval cannot be enumerated; use search=random, or a list of values"


def _with_length(
    composer: TrialComposer, options: SearchConfig, fixed: Sequence[str], dimensions: Sequence[Dimension]
) -> tuple[list[str], Rungs]:
    """Return the overrides including the length of a run, and the steps of the rungs. A step of None is the run's end.

    Raises:
        UserError: the rungs do not fit the length.
    """
    composed = composer.compose([*fixed, *composer.first_options(dimensions)])
    plain = composed.plain
    steps, epochs, rungs = plain["train"]["steps"], plain["train"]["epochs"], options.rungs
    assert options.kind is not None
    if rungs:
        given = [key for text in fixed if (key := text.lstrip("+").partition("=")[0]) in (*LENGTH_KEYS, "search.rungs")]
        # A setting on the command line takes precedence over one in a file.
        if (steps is None and epochs is None) or given == ["search.rungs"]:
            return [*fixed, f"train.steps={rungs[-1]}", *(["train.epochs=null"] if epochs else [])], tuple(rungs)
        if steps is not None and rungs[-1] > steps:
            raise UserError(
                f"search.rungs={rungs} goes beyond train.steps={steps}, the length of a run: raise that, or leave it "
                "out, and the last rung is the length"
            )
        return [*fixed], tuple(rungs)
    if not options.kind.pauses:
        return [*fixed], (composed.config.known_steps,)
    if steps is None and epochs is not None:
        raise UserError(
            f"search={options.kind.name} with train.epochs={epochs:g} needs search.rungs, such as [100,300,900]: the "
            "steps at which trials are compared"
        )
    made = sorted({max(1, composed.config.steps // options.reduction**back) for back in range(RUNGS)})
    return [*fixed], tuple(made)


def _number_of_trials(options: SearchConfig, rules: Rules) -> int:
    size, trials = rules.space.size, options.trials
    if trials is None or trials > size:
        if trials is not None:
            say(f"the space has {size:.0f} points: that is how many trials there are, not {trials}")
        return int(size)
    return trials


def _points(rules: Rules, count: int) -> list[Point]:
    if rules.algorithm.learns:
        return list(islice(rules.space.random(rules.seed), count))
    known, journal = Points(rules), Journal(rules.repeats)
    return [known.point(journal, number) for number in range(count)]


def _metric_errors(options: SearchConfig, first: Composed) -> Iterator[str]:
    config, metric = first.config, options.metric
    if metric.startswith("eval_") and not config.evaluates:
        remedy = "set eval.every_steps=null" if config.data.eval_sources else "add data.eval_sources.NAME"
        yield f"search.metric={metric} needs evaluations, and there are none: {remedy}, or set search.metric=loss"


def _name(rules: Rules, frozen: dict[str, Any], first: Composed, shared: Sequence[dict[str, Any]]) -> str:
    """Return the directory name of a search, built from the values that identify it."""
    digest = digest_of([rules.to_json(), *shared])
    title = first.plain["run"]["name"] or next(iter(frozen["templates"].values()))["title"]
    varied = [each.key.rpartition(".")[2].lstrip("+") for each in rules.space.dimensions]
    name = "-".join([title, rules.algorithm.name, *varied])[:MAX_NAME]
    return f"{name}-seed{rules.seed}-{digest}"


def _shared(rules: Rules, values: Mapping[str, Any], rungs: Rungs) -> dict[str, Any]:
    """Return the values that all trials have in common and that affect their identities or results.

    Returns:
        The values by dotted key.
    """
    plain = json.loads(json.dumps(values, default=str))
    results = result_values(plain)
    if not rules.algorithm.pauses:
        results |= {key: plain["train"][key.partition(".")[2]] for key in LENGTH_KEYS}
    elif plain["train"]["steps"] == rungs[-1]:
        plain["train"]["steps"] = None  # excluded, because a rung may be added later
    for key in rules.space.dimensions:
        node, (*path, last) = plain, key.key.lstrip("+").split(".")
        for name in path:
            node = node.get(name, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.pop(last, None)
    varied = tuple(each.key.lstrip("+") for each in rules.space.dimensions)
    return {**{key: value for key, value in results.items() if key not in varied}, **identifying_values(plain)}


def nearest(plan: Plan) -> str | None:
    """Describe the most similar search in the same directory, because a typo would start a new search."""

    def settings(record: Record, rungs: Rungs) -> dict[str, Any]:
        template = next(iter(record.config["templates"].values()))
        rules = flatten({"search": {**record.rules.to_json(), "space": list(map(str, record.rules.space.dimensions))}})
        return {**rules, **_shared(record.rules, template["values"], rungs)}

    def others() -> Iterator[tuple[Path, dict[str, Any]]]:
        with suppress(OSError):
            beside = [SearchDir(plan.search.path.parent / name) for name in files.list_dir(plan.search.path.parent)]
            for search in filter(lambda each: is_search(each.path), beside):
                with suppress(OSError, ValueError, LookupError, TypeError, RunDirError):  # this is only a hint
                    record = Record.read(search)
                    yield search.path, settings(record, read_journal(search, record.rules.repeats).rungs)

    return closest(settings(plan.record, plan.rungs), others())


# The existing search


def _check_change(plan: Plan, before: Record, journal: Journal) -> None:
    """Raise an error if the command would change the rules of a search that has begun.

    Raises:
        UserError: the message names the settings that cannot change, with a remedy.
    """
    if not journal.entries:
        return
    old, new = journal.rungs, plan.rungs
    if plan.trials < len(journal.trials):
        raise UserError(
            f"search.trials={plan.trials}: the search has begun {len(journal.trials)} trials already: set "
            f"search.trials={len(journal.trials)} or more"
        )
    if new[: len(old)] != old:
        raise UserError(
            f"search.rungs={list(new)} replaces the rungs {list(old)} of {shown(plan.search.path)}: rungs can only be "
            "added above the last one; another search.seed or run.name begins another search"
        )
    if before.digest != plan.record.digest:
        reads = length_readers(plan.first.plain)
        if len(new) > len(old) and reads:
            raise UserError(
                f"search.rungs={list(new)}: {reads[0]} follows the length of the run, so a longer run is another one "
                f"from its first step on: set {reads[0]}.total_steps={old[-1]} or scheduler=constant in a search of "
                "its own (another run.name) if rungs are to be added later"
            )
        raise UserError(
            f"the trials of {shown(plan.search.path)} had other settings, which decide their results: repeat them, or "
            "begin another search with another run.name"
        )


def _summary(plan: Plan, is_new: bool) -> str:
    rules, rungs = plan.record.rules, [str(rung) for rung in plan.rungs if rung is not None]
    at = f", rungs at {', '.join(rungs)}" if len(rungs) > 1 else ""
    each = f" with {rules.repeats} seeds each" if rules.repeats > 1 else ""
    steps = plan.first.config.known_steps
    runs = f"{plan.trials} trials{each}" + ("" if steps is None else f" of up to {steps} steps")
    if len(rungs) > 1 and plan.trials < (least := rules.reduction ** (len(rungs) - 1)):
        tell(f"warning: of {plan.trials} trials none reaches the last rung: that takes search.trials={least} or more")
    if steps is not None and plan.rungs[-1] is not None and plan.rungs[-1] < steps:
        tell(
            f"warning: the last rung is step {plan.rungs[-1]} of {steps}: the best trials pause there; add {steps} to "
            "search.rungs to train them to their end, or leave train.steps out to make the last rung the end"
        )
    if steps is None and plan.rungs[-1] is not None:
        tell(
            f"warning: the last rung is step {plan.rungs[-1]}, and a run has train.epochs="
            f"{plan.first.config.train.epochs:g}: trials may pause before their end; add train.epochs=null to make the "
            "last rung the end"
        )
    best = "highest" if rules.maximize else "lowest"
    return f"{'new search' if is_new else 'search'}, {runs}{at}, by the {best} {rules.metric}"


def _show_points(plan: Plan) -> None:
    for number, point in enumerate(plan.points[:SHOWN_POINTS]):
        say(f"  trial {number}: {' '.join(f'{key}={value}' for key, value in point.items())}")
    if plan.trials > SHOWN_POINTS:
        say(f"  and {plan.trials - SHOWN_POINTS} more")


def _begin(plan: Plan, mine: Turn, retry: bool) -> None:
    """Write the command's plan to the directory of the search."""
    search, journal = plan.search, mine.journal
    if journal.entries:
        _check_change(plan, Record.read(search), journal)  # another command may have written a plan first
    plan.record.write(search, mine.guard)
    code = provenance.describe_code(plan.first.plain)
    provenance.write_code(RunDir(search.path).code, code, plan.record.config["overrides"], mine.guard)
    if (journal.limit, journal.rungs) != (plan.trials, plan.rungs) or not journal.entries:
        mine.append(SETTINGS, trials=plan.trials, rungs=list(plan.rungs))
    for trial in journal.trials if retry else []:
        if trial.over:
            mine.append(RETRY, trial=trial.number)


# Slots


def _start_slots(plan: Plan, launcher: Launcher) -> int:
    """Start the slots that are not running, and return the exit status."""
    search = plan.search
    journal = read_journal(search, plan.record.rules.repeats)
    work = (plan.trials - len(journal.trials) + len(journal.outstanding)) * journal.repeats
    work += most_promotions(plan.record.rules, journal)
    wanted = [search.slot(number) for number in range(max(1, min(getattr(launcher, "parallel", 1), work)))]
    for slot in wanted:
        files.make_dirs_in(search.path, slot.path)
    watcher = LeaseWatcher()
    busy = [slot for slot in wanted if watcher.is_alive(slot.lease)]
    if watcher.wait():
        busy = [slot for slot in wanted if watcher.is_alive(slot.lease)]
    queued = launcher.jobs([slot.path for slot in wanted])
    idle = [slot for slot in wanted if slot not in busy and not (slot.path in queued and queued[slot.path].live)]
    if len(idle) < len(wanted):
        say(f"{len(wanted) - len(idle)} of {len(wanted)} slots are at work already")
    if not idle:
        return int(ExitStatus.FINISHED)
    run_dirs = [slot.path for slot in idle]
    refuse(launcher.check(run_dirs))
    with ExitStack() as held:
        guards = list(_submitting(plan, idle, held))
        if launcher.in_process:
            held.close()
            guards = []
        if STOP:
            tell(f"interrupted ({STOP.name}): nothing was started")
            return int(ExitStatus.INTERRUPTED)
        STOP.uninstall()  # from now on, signals go to the slots
        if not launcher.in_process:
            return launcher.launch(run_dirs, ATTEMPT, guards)
        with _news(plan):
            return launch_here(plan, launcher, run_dirs)


def launch_here(plan: Plan, launcher: Launcher, run_dirs: list[Path]) -> int:
    """Run the slots on this machine and return the exit status.

    If the last slot was killed, start the slots again, as long as new results arrive.
    """
    while True:
        before = read_journal(plan.search, plan.record.rules.repeats)
        status = launcher.launch(run_dirs, ATTEMPT, [])
        after = read_journal(plan.search, plan.record.rules.repeats)
        killed = status < 0 or status >= SIGNALLED
        is_over = not killed or decide(plan.record.rules, after).what == DONE
        if is_over or after.steps_trained() == before.steps_trained():
            return status
        say("every slot has ended before the search: starting them again")


def _submitting(plan: Plan, slots: Sequence[RunDir], held: ExitStack) -> Iterator[files.Guard]:
    """Acquire the exclusive right to start these slots, and yield a guard for writing to each."""
    heart = held.enter_context(Heart())
    for slot in slots:
        lease = Lease.acquire(
            slot.submission,
            None,
            plan.record.lease_timeout_s,
            wait_s=SUBMISSION_WAIT_S,
            asked_to_stop=lambda: STOP,
            report=tell,
            heart=heart,
            within=slot.path,
        )
        held.enter_context(lease)
        yield lease.guard


@contextmanager
def _news(plan: Plan) -> Iterator[None]:
    """Print the decisions and results of the slots until the block ends."""
    over = threading.Event()
    seen = len(read_journal(plan.search, plan.record.rules.repeats).entries)

    def follow() -> None:
        nonlocal seen
        while True:
            last = over.wait(NEWS_S)
            try:
                journal = read_journal(plan.search, plan.record.rules.repeats)
            except (OSError, RunDirError):
                journal = Journal()
            for line in lines_of(plan.record.rules, journal, seen):
                print(line, flush=True)
            seen = max(seen, len(journal.entries))
            if last:
                return

    thread = threading.Thread(target=follow, name="news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


def _end(plan: Plan) -> int:
    """Print the table of a search and return the exit status."""
    rules = plan.record.rules
    journal = read_journal(plan.search, rules.repeats)
    over = decide(rules, journal).what == DONE
    if over:
        prune(plan.search, plan.record, journal)
    print_table(plan.search, plan.record, journal)
    say(f"again: {PROGRAM} search {shown(plan.search.path)}")
    if not over:
        tell("the search has not ended: rerun the command to continue it")
        return int(ExitStatus.INTERRUPTED)
    failed = [trial for trial in journal.trials if trial.failed is not None]
    if failed:
        tell(f"{len(failed)} of {len(journal.trials)} trials failed; launcher.retry_failed=true begins them again")
    return int(ExitStatus.FAILED if failed else ExitStatus.FINISHED)

"""What the pages say is so: their links lead somewhere, their settings and flags exist, their Python runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import docs_pages
import pytest
import yaml
from docs_pages import PAGES, ROOT, Command

from runner.cli.start.search import plan_search
from runner.config.composition import Composer
from runner.config.identity import flatten
from runner.config.schema import Config
from runner.config.template import TrialComposer
from runner.errors import ExitStatus, UserError
from runner.rundir.paths import RunDir

# Dictionaries of a user's own names.
OPEN = """
    sampler.weights sampler.max_epochs data.sources data.eval_sources phases train.loss data.loader callbacks task
    eval.metrics eval.sets optimizers scheduler
""".split()
GROUPS = "seed|run|train|eval|data|sampler|phases|checkpoint|scheduler|launcher|optimizers?|model|logger|callbacks|task"


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target in docs_pages.links(page):
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            if not linked.exists() or (anchor and anchor not in docs_pages.anchors(linked)):
                wrong.append(f"{docs_pages.named(page)} links to {target}")
    assert not wrong, "\n".join(wrong)


def test_commands_and_flags_exist() -> None:
    wrong = []
    for page in PAGES:
        for command in docs_pages.commands(page):
            found = importlib.util.find_spec(command.module)
            assert found is not None, f"{docs_pages.named(page)} runs {command.module}"
            assert found.origin is not None
            source = Path(found.origin)
            text = "".join(each.read_text() for each in source.parent.glob(f"{source.stem}*.py"))
            if command.module != "runner":  # its flags are Hydra's
                flags = [flag for flag in command.flags if f'"{flag}"' not in text and flag != "--help"]
                wrong += [f"{docs_pages.named(page)}: {command.module} has no {flag}" for flag in flags]
    assert not wrong, "\n".join(wrong)


def settings() -> set[str]:
    """Every key of the schema and of the config files, and every group of keys."""
    nodes = [dataclasses.asdict(Config())]
    for path in (ROOT / "conf").rglob("*.yaml"):
        node = yaml.safe_load(path.read_text()) or {}
        group = path.parent.relative_to(ROOT / "conf").parts
        nodes.append({group[0]: node} if group and group[0] != "experiment" else node)
    keys = {key for node in nodes for key in flatten(node)}
    return {key[: end.start()] for key in keys for end in re.finditer(r"\.|$", key)}


def test_settings_exist() -> None:
    known, wrong = settings(), []
    for page in PAGES:
        for code in docs_pages.inline_code(page):
            for key in re.findall(rf"^~?((?:{GROUPS})(?:\.\w+)+)(?:=.*)?$", code):
                is_file = key.endswith((".py", ".yaml", ".md", "._target_", ".pt", ".json", ".jsonl", "NAME"))
                if not is_file and key not in known and not key.startswith(tuple(f"{name}." for name in OPEN)):
                    wrong.append(f"{docs_pages.named(page)} names `{code}`, which no config has")
    assert not wrong, "\n".join(wrong)
    assert {"train.steps", "sampler.temperature", "launcher.gpus_per_node", "checkpoint"} <= known


def test_the_exit_statuses_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    told = {int(number) for number in re.findall(r"^\| (\d+) \| ", text, re.MULTILINE)}
    assert told == {int(status) for status in ExitStatus}


@cache
def composer(folder: Path, config_dirs: tuple[str, ...]) -> Composer:
    """One for all commands that are given in a folder."""
    return Composer([folder / each for each in config_dirs])


def errors_of(command: Command, folder: Path) -> list[str]:
    """Return the errors of composing a command's jobs."""
    words = command.words
    dirs = tuple(words[i + 1] for i, word in enumerate(words) if word == "--config-dir")
    composing, searching = composer(folder, dirs), TrialComposer([folder / each for each in dirs])
    try:
        if "-m" in words and searching.is_search(command.overrides):
            plan_search(searching, command.overrides)
        else:
            composing.jobs(command.overrides) if "-m" in words else composing.compose(command.overrides)
    except UserError as error:
        return [f"error: {line}" for line in str(error).splitlines()]
    return []


@pytest.mark.slow
def test_commands_compose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run that a page shows has valid overrides, or just the errors that the page shows with it."""
    commands = {}
    for page in PAGES:
        for name, text in docs_pages.modules(page).items():
            (tmp_path / name).write_text(text)
        for command in docs_pages.commands(page):
            prints = {"-h", "--help", "-sc", "--version"} & command.flags
            if command.module == "runner" and not prints:
                folder = command.folder or docs_pages.folder(page)
                commands[folder, command.words] = page, command
    assert len(commands) > 40
    wrong = []
    for (folder, _), (page, command) in commands.items():
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            patch.syspath_prepend(folder)  # as `python -m` has it
            errors = errors_of(command, folder)
        expected = [shown.removesuffix("...") for shown in command.errors]
        if len(errors) != len(expected) or not all(map(str.startswith, errors, expected)):
            wrong.append(f"{docs_pages.named(page)}: {command}: {errors}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/data-order.md",
        "docs/mixture.md",
        "docs/own-text.md",
        "docs/reference/data-details.md",
        "docs/loader.md",
    ],
)
def test_python_runs(page: str) -> None:
    """What these pages show in Python, as one program; other pages' needs a run."""
    exec(compile(docs_pages.python(ROOT / page), page, "exec"), {"__name__": "example"})


def test_the_python_of_logging(tmp_path: Path) -> None:
    """A logger of one's own, and the sums over the sources of a run."""
    names: dict[str, Any] = {}
    exec(compile(docs_pages.python(ROOT / "docs" / "logging.md"), "docs/logging.md", "exec"), names)
    logger = names["LastLoss"](RunDir(tmp_path), 0, print, digits=2)
    logger.write({"step": 3, "loss": 1.23456})
    logger.write({"step": 3, "eval_loss": 2.0})
    logger.close()
    assert (tmp_path / "last_loss.txt").read_text() == "3 1.23"
    first = '{"step": 1, "loss": 1.0, "sources": {"a": {"samples": 2}, "b": {"samples": 0}}}'
    second = '{"step": 2, "loss": 1.0, "sources": {"b": {"samples": 3}}}'
    (tmp_path / "metrics.jsonl").write_text(f'{first}\n{second}\n{{"step": 2, "eval_loss": 1.0}}\n')
    assert names["samples_by_source"](tmp_path) == {"a": 2, "b": 3}


@pytest.mark.parametrize("name", ["slurm", "local"])
def test_the_options_of_a_launcher_are_those_of_its_class(name: str) -> None:
    from launch.local import LocalLauncher
    from launch.slurm import SlurmLauncher

    launcher = {"slurm": SlurmLauncher, "local": LocalLauncher}[name]
    text = (ROOT / "conf" / "launcher" / f"{name}.yaml").read_text()
    shipped = yaml.safe_load(text)
    fields = {field.name for field in dataclasses.fields(launcher)} - {"command", "wait"}
    assert shipped.keys() - {"_target_", "wait"} == fields
    assert [option for option in fields if not re.search(rf"^{option}:.*#", text, re.MULTILINE)] == []  # no comment
    made = launcher(**{key: value for key, value in shipped.items() if key != "_target_"})
    assert made == launcher()  # the file says what the class does without it

"""What the pages say is so: their commands run, their settings exist, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import docs_pages
import pytest
from docs_pages import PAGES, ROOT, Command

from runner.config.composition import Composer
from runner.config.identity import flatten
from runner.errors import ExitStatus, UserError

# Pages whose commands other tests run, with what those need (a faked Slurm, prepared runs).
ELSEWHERE = {
    "slurm.md": "test_docs_slurm.py",
    "status.md": "test_docs_slurm.py",
    "logging.md": "test_docs_data.py",
    "callbacks.md": "test_docs_callbacks.py",
    "forks.md": "test_docs_forks.py",
    "report.md": "test_docs_report.py",
    "goodput.md": "test_docs_goodput.py",
    "warm-start.md": "test_docs_weights.py",
    "evaluate.md": "test_docs_weights.py",
    "load.md": "test_docs_weights.py",
    "housekeeping.md": "test_docs_housekeeping.py",
}
BASH = {page: [block for block in docs_pages.blocks(page) if block.language == "bash"] for page in PAGES}
# Dictionaries of a user's own names.
OPEN = (
    "sampler.weights",
    "sampler.max_epochs",
    "data.sources",
    "data.eval_sources",
    "phases",
    "train.loss",
    "data.loader",
    "callbacks",
    "task",
    "eval.metrics",
    "eval.sets",
    "optimizers",
    "scheduler",
)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def settings() -> frozenset[str]:
    """Every key that some choice of groups has."""
    choices: tuple[list[str], ...] = (
        [],
        ["data=mixture", "launcher=slurm", "checkpoint=adaptive"],
        ["logger=wandb"],
        ["logger=mlflow"],
    )
    return frozenset(key for overrides in choices for key in flatten(Composer().compose(overrides).plain))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in docs_pages.links(page):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{named(page)} links to {target}"
        if anchor:
            assert anchor in docs_pages.anchors(linked), f"{named(page)}: {target} has no such heading"


def test_the_index_has_every_page() -> None:
    listed = {(ROOT / "docs" / target).resolve() for target in docs_pages.links(ROOT / "docs" / "README.md")}
    assert set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "README.md"} <= listed


def composed(command: Command) -> list[str]:
    """The errors of composing a command's jobs; `--help` and the like compose nothing."""
    if {"-h", "--help", "-sc", "--version"} & command.flags:
        return []
    words = command.words
    composer = Composer([words[i + 1] for i, word in enumerate(words) if word == "--config-dir"])
    try:
        composer.jobs(command.overrides) if "-m" in words else composer.compose(command.overrides)
    except UserError as error:
        return [f"error: {line}" for line in str(error).splitlines()]
    return []


def without_runs(folder: Path, seen: Path) -> Path:
    """A directory in `seen` with the same content as `folder`, except for the runs that somebody made there."""
    made = seen / folder.name
    if not made.exists():
        made.mkdir(parents=True)
        for path in folder.iterdir():
            if path.name != "outputs":
                (made / path.name).symlink_to(path)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_compose(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run that a page shows has valid overrides, or just the errors that the page shows with it."""
    for name, text in docs_pages.modules(page).items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(docs_pages.folder(page))  # as `python -m` has it
    for command in dict.fromkeys(docs_pages.commands(page)):
        if command.module == "runner":
            if command.folder:
                monkeypatch.syspath_prepend(command.folder)
            monkeypatch.chdir(without_runs(command.folder or docs_pages.folder(page), tmp_path / "seen"))
            errors = composed(command)
            assert len(errors) == len(command.errors), f"{named(page)}: {command}: {errors}"
            for shown, raised in zip(command.errors, errors, strict=True):
                assert raised.startswith(shown.removesuffix("...")), f"{named(page)}: {raised}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_flags_exist(page: Path) -> None:
    for command in docs_pages.commands(page):
        found = importlib.util.find_spec(command.module)
        assert found is not None, f"{named(page)} runs {command.module}"
        assert found.origin is not None
        source = Path(found.origin)
        text = "".join(each.read_text() for each in source.parent.glob(f"{source.stem}*.py"))
        if command.module != "runner":  # its flags are Hydra's
            assert [flag for flag in command.flags if f'"{flag}"' not in text and flag != "--help"] == [], command


@pytest.mark.parametrize("page", PAGES, ids=named)
@pytest.mark.slow
def test_settings_exist(page: Path) -> None:
    groups = (
        "seed|run|train|eval|data|sampler|phases|checkpoint|scheduler|launcher|optimizers?|model|logger|callbacks|task"
    )
    for code in docs_pages.inline_code(page):
        for key in re.findall(rf"^[+~]?((?:{groups})(?:\.\w+)+)(?:=.*)?$", code):
            if key.endswith((".py", ".yaml", ".md", "._target_", ".pt", ".json", ".jsonl", "NAME")):
                continue
            known = key in settings() or any(other.startswith(f"{key}.") for other in settings())
            free = any(key.startswith(f"{name}.") for name in OPEN) or code.startswith("+")
            assert known or free, f"{named(page)} names `{code}`, which no config has"


def test_the_exit_statuses_are_those_of_the_code() -> None:
    text = (ROOT / "README.md").read_text()
    told = {int(number) for number in re.findall(r"^\| (\d+) \| ", text, re.MULTILINE)}
    assert told == {int(status) for status in ExitStatus}


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_pages_tested_elsewhere_are(page: str, test: str) -> None:
    assert page in (Path(__file__).parent / test).read_text()


def test_every_benchmark_is_told_of() -> None:
    from benchmarks.__main__ import NAMES

    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(NAMES)


@pytest.mark.parametrize("page", ["README.md", "docs/data-order.md"])
def test_python_runs(page: str) -> None:
    """What these pages show in Python; other pages' examples have tests of their own."""
    for block in docs_pages.blocks(ROOT / page):
        if block.language == "python" and not block.skip:
            exec(compile(block.text, page, "exec"), {})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if BASH[page] and page.name not in ELSEWHERE], ids=named)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """All of them in order, in one directory, as they stand there."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # pages name their examples as seen from the clone
    for block in BASH[page]:
        if block.skip:
            continue
        if block.setup:
            docs_pages.shell(block.setup, tmp_path)
        docs_pages.shell(block.text, tmp_path, block.status)

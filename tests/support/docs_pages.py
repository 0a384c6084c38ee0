"""What the pages say, for tests: their fenced blocks, commands and links.

A comment on the line before a block says how it is tested, so that the command that a reader sees is the
command that runs:

    <!-- test: skip, REASON -->        never run (it needs the network, or an hour)
    <!-- test: status 137 -->          the block ends with this exit status instead of 0
    <!-- test: after COMMAND -->       COMMAND is run before the block (it makes the run that the block looks at)

and `<!-- test: in FOLDER -->` anywhere in a page says that its commands are given in that folder of the clone.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"((?:^<!-- test: .*? -->\n)*)^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    number: int
    language: str
    text: str
    skip: str | None
    status: int
    setup: str

    @property
    def name(self) -> str:
        return f"{self.page.name}-{self.number}"


@dataclass(frozen=True)
class Command:
    """`python -m MODULE WORDS`, the errors that the page shows as its answer, and the folder that `cd` names before."""

    module: str
    words: tuple[str, ...]
    errors: tuple[str, ...]
    folder: Path | None = None

    @property
    def flags(self) -> set[str]:
        return {word.partition("=")[0] for word in self.words if word.startswith("-")}

    @property
    def overrides(self) -> list[str]:
        return [word for word in self.words if re.match(r"[+~]*[a-z_.]+=", word)]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for number, (marks, language, text) in enumerate(BLOCK.findall(page.read_text()), start=1):
        told = dict(re.findall(r"<!-- test: (skip|status|after)[, ]+(.*?) -->", marks))
        assert len(told) == marks.count("<!--"), f"{page.name}: cannot read {marks}"
        status = int(told.get("status", 0))
        found.append(Block(page, number, language, text, told.get("skip"), status, told.get("after", "")))
    return found


def shell(text: str, folder: Path, *statuses: int) -> subprocess.CompletedProcess[str]:
    """Give commands in `folder` as a reader would, in a shell; they must end with one of `statuses` (default: 0)."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    words = ["bash", "-eo", "pipefail", "-c", text]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    # A shell replaces itself by its last command: a signal that ended that is told apart from a status here alone.
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    assert status in (statuses or (0,)), f"{text}\n{done.stdout}{done.stderr}"
    return done


def commands(page: Path) -> Iterator[Command]:
    """Every `python -m runner…` that a page shows: fenced, indented or in backticks."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines):
        errors = itertools.takewhile(lambda following: re.match(r"\s*error: ", following), lines[number + 1 :])
        for found in re.finditer(r"(?:^|`|\$ )[^`]*?(?:python|torchrun[^`]*?) -m (runner\b[^`]*)", line):
            words = shlex.split(found[1], comments=True)
            end = next((i for i, word in enumerate(words) if word in ("|", "||", "&", "&&", ";", ">")), None)
            words = words[:end]
            if len(words) > 1 and words[1].isalpha():  # a command besides training
                words = [f"runner.cli.{words[1]}", *words[2:]]
            inside = re.search(r"cd (\S+) && ", found[0])
            where = ROOT / inside[1] if inside else None
            yield Command(words[0], tuple(words[1:]), tuple(each.strip() for each in errors), where)


def modules(page: Path) -> dict[str, str]:
    """The Python blocks of a page that begin with the name of their file, by that name."""
    texts = (block.text for block in blocks(page) if block.language == "python")
    return {found[1]: text for text in texts if (found := re.match(r"# (\w+\.py)\n", text))}


def folder(page: Path) -> Path:
    """Where the commands of a page are given: the clone, or what `<!-- test: in FOLDER -->` says."""
    found = re.search(r"<!-- test: in (\S+) -->", page.read_text())
    return ROOT / found[1] if found else ROOT


def links(page: Path) -> list[str]:
    """The targets of a page's links to other files of the project."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page can be linked to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def inline_code(page: Path) -> list[str]:
    """What stands in backticks in the running text."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)

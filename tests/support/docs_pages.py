"""What the pages say, for tests: their fenced blocks, commands and links.

A comment on the line before a block says how it is tested, so that the command that a reader sees is the
command that runs:

    <!-- test: skip, REASON -->        never run (it needs the network, or an hour)
    <!-- test: status 137 -->          the block ends with this exit status instead of 0
    <!-- test: after COMMAND -->       COMMAND is run before the block (it makes the run that the block looks at)
    <!-- test: with WORD... -->        its commands of the runner get these words, too (to shorten a run)

and `<!-- test: in FOLDER -->` anywhere in a page says that its commands are given in that folder of the clone.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import here

from runner.cli.base.commands import module

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"((?:^<!-- test: .*? -->\n)*)^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    skip: str | None
    status: int
    setup: str
    extra: str


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
    """Return the fenced blocks of a page in order."""
    found = []
    for marks, language, text in BLOCK.findall(page.read_text()):
        told = dict(re.findall(r"<!-- test: (skip|status|after|with)[, ]+(.*?) -->", marks))
        assert len(told) == marks.count("<!--"), f"{page.name}: cannot read {marks}"
        status = int(told.get("status", 0))
        setup, extra = told.get("after", ""), told.get("with", "")
        found.append(Block(language, text, told.get("skip"), status, setup, extra))
    return found


def named(page: Path) -> str:
    """How a page is called in tests."""
    return page.relative_to(ROOT).as_posix()


def python(page: Path) -> str:
    """Return the Python of a page as one program."""
    return "\n".join(block.text for block in blocks(page) if block.language == "python" and not block.skip)


def given(page: Path) -> list[Block]:
    """Return the blocks with commands that a test can run. Output is removed from console blocks."""
    found = []
    for block in blocks(page):
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
            found.append(replace(block, text="\n".join(lines)))
        elif block.language == "bash" and not block.skip:
            found.append(block)
    return found


def give(text: str, folder: Path, status: int = 0, extra: str = "") -> None:
    """Give commands in `folder`, the current directory, as a reader would; the last one must end with `status`.

    Those of the runner get the words `extra`, too, and run in this process, which has imported torch already.
    """
    lines = text.replace("\\\n", " ").splitlines()
    for line, expected in zip(lines, [*[0] * (len(lines) - 1), status], strict=False):
        words = _words_of_runner(f"{line} {extra}" if extra else line)
        # A machine that is fast enough ends before it is killed.
        statuses = {expected, 0} if expected == 128 + signal.SIGKILL else {expected}
        if words is None:
            assert _shell(line, folder) in statuses, line
        elif "--watch" in words:
            _interrupt(words, folder)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # pytest makes them errors
                assert here.command(*words) in statuses, line


def _words_of_runner(line: str) -> list[str] | None:
    """Return the arguments of a runner command. None if the line needs a shell, or is `chaos`, which kills."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    if words[:3] == ["python", "-m", "runner"]:
        words = words[2:]
    if words[:1] != ["runner"] or {"chaos", "|", "||", "&&", "&", ";", ">", "<"} & set(words):
        return None
    return [name for word in words[1:] for name in sorted(glob.glob(word)) or [word]]


def _environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}


def _shell(text: str, folder: Path) -> int:
    """Run a command line in a shell that prints to this process's output. Return its exit status."""
    words = ["bash", "-o", "pipefail", "-c", text]
    status = subprocess.run(words, cwd=folder, env=_environment(), timeout=1500, check=False).returncode
    # A shell replaces itself by its last command: a signal that ended that is told apart from a status here alone.
    return status if status >= 0 else 128 - status


def _interrupt(words: list[str], folder: Path) -> None:
    """Give what refreshes until Ctrl-C, which it gets when it has printed something."""
    command = [sys.executable, "-m", "runner", *words]
    terminal = _environment(FORCE_COLOR="1", TERM="xterm")  # where what is watched shows at once
    with subprocess.Popen(command, cwd=folder, env=terminal, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=400)
    assert process.returncode == 0


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
                words = [module(words[1]).__name__, *words[2:]]
            inside = re.search(r"cd (\S+) && ", found[0])
            where = ROOT / inside[1] if inside else None
            yield Command(words[0], tuple(words[1:]), tuple(each.strip() for each in errors), where)


def modules(page: Path) -> dict[str, str]:
    """Return the Python blocks of a page that begin with a file name, by that name."""
    texts = (block.text for block in blocks(page) if block.language == "python")
    return {found[1]: text for text in texts if (found := re.match(r"# (\w+\.py)\n", text))}


def folder(page: Path) -> Path:
    """Where the commands of a page are given: the clone, or what `<!-- test: in FOLDER -->` says."""
    found = re.search(r"<!-- test: in (\S+) -->", page.read_text())
    return ROOT / found[1] if found else ROOT


def links(page: Path) -> list[str]:
    """Return the targets of a page's links to other files of the project."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def inline_code(page: Path) -> list[str]:
    """Return the code in backticks in a page's prose."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)

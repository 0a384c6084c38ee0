"""Create a small, complete project to start with: `runner init DIR`."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.cli.base.console import PROGRAM, Parser, say, shown
from runner.errors import FileError, UserError
from runner.system import files

TEMPLATE = Path(__file__).with_name("project")
NAME = "my_project"
"""The placeholder for the project's name in the template."""
SUFFIX = ".template"
TAKEN = ("tests", "conf", "outputs")


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} init",
        description="Writes a project that trains as it is: an experiment, a dataset, a model, a task, and a test that "
        "kills a run.",
    )
    made.add_argument("directory", type=Path, metavar="DIR", help="the project's directory, new or empty")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the directory is not empty or not writable, or its name is not valid as a package name.
    """
    directory: Path = parser().parse_args(arguments).directory
    name = re.sub(r"\W", "_", directory.absolute().name).lower()
    if not name.isidentifier() or keyword.iskeyword(name) or name in TAKEN or _is_module(name):
        raise UserError(
            f"{directory}: {name!r} cannot be the name of a Python package of yours: choose another, such as {NAME}"
        )
    try:
        if files.exists(directory) and (not files.is_dir(directory) or files.list_dir(directory)):
            raise UserError(f"{directory} is not an empty directory: choose another one")
        for path, text in _written(directory, name):
            files.make_dirs(path.parent)
            files.write_atomic(path, text)
    except OSError as error:
        raise FileError(f"{error.filename or directory}: {error.strerror or error}") from error
    say(f"wrote a project in {shown(directory.absolute())}. Next:")
    for line in (
        f"cd {directory}",
        f"{PROGRAM} experiment=spirals",
        "python -m pip install pytest && python -m pytest",
    ):
        say(f"  {line}")
    return 0


def _is_module(name: str) -> bool:
    """Return whether a package with this name would hide a different one from every command in the project."""
    return name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None


def _written(directory: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the path and the content of each file of the project."""
    for folder, _, names in sorted(files.walk(TEMPLATE)):
        for file in sorted(names):
            if file.endswith(SUFFIX):
                source = Path(folder) / file
                relative = str(source.relative_to(TEMPLATE)).removesuffix(SUFFIX).replace(NAME, name)
                yield directory / relative, files.read_bytes(source).decode().replace(NAME, name)

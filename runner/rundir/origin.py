"""Make a run's modules and relative paths work wherever the run is resumed.

Imports no torch, hydra or numpy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.rundir.trust import check_trusted, is_private
from runner.system import files


def search_modules(run: RunDir, directory: str | None) -> None:
    """Append the directory in which a run was started to the module search path.

    Do nothing if other users can write to the run or to that directory, because they could run code as this user.

    Args:
        run: the run that recorded `directory`.
        directory: the directory, from the run's frozen config.
    """
    if directory is None or directory in sys.path:
        return
    try:
        check_trusted(run)
        if files.is_dir(directory) and is_private(Path(directory)):
            sys.path.append(directory)
    except (OSError, RunDirError):
        return


@contextmanager
def working_in(directory: str | None) -> Iterator[None]:
    """Change to the directory in which a run was started, if it exists, because a dataset may use relative paths."""
    before = os.getcwd()
    if directory is None or directory == before or not files.is_dir(directory):
        yield
        return
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)

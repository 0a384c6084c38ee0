"""List and read the images and texts that a run's callbacks logged. File names contain the step.

Imports no torch, hydra or numpy.
"""

from __future__ import annotations

import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.rundir.paths import RunDir
from runner.system import files

MAX_BYTES = 1 << 28
_FILE = re.compile(r"(.+)-(\d{8,18})\.(png|txt)")


@dataclass(frozen=True)
class Artifact:
    """An image or text that a callback logged.

    Attributes:
        name: the name under which it was logged, such as `samples/first`.
        step: completed steps.
        path: the file.
        size: in bytes.
    """

    name: str
    step: int
    path: Path
    size: int

    @property
    def is_image(self) -> bool:
        """Return True for an image (PNG), False for a text."""
        return self.path.suffix == ".png"

    def read(self) -> bytes:
        """Read the PNG file, or the text in UTF-8.

        Raises:
            OSError: it cannot be read.
        """
        return files.read_regular(self.path, limit=MAX_BYTES)

    def text(self) -> str:
        """Read the text.

        Raises:
            OSError: it cannot be read.
        """
        return self.read().decode(errors="replace")


def artifacts(run: RunDir) -> list[Artifact]:
    """List the images and texts of a run, ordered by name and step. Skip links."""
    found = []
    for folder, _, names in files.walk(run.artifacts):
        for name in names:
            path = Path(folder, name)
            match = _FILE.fullmatch(path.relative_to(run.artifacts).as_posix())
            with suppress(OSError):  # removed after the listing
                status = files.lstat(path)
                if match and stat.S_ISREG(status.st_mode):
                    found.append(Artifact(match[1], int(match[2]), path, status.st_size))
    return sorted(found, key=lambda one: (one.name, one.step))

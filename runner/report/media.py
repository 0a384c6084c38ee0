"""The images and texts that a page embeds: as many of all runs as fit its bound, spread over the steps."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Any

from runner.report.runs import RunResults
from runner.rundir.artifacts import Artifact

MAX_BYTES = 3_000_000
"""Of all that a page embeds together, in base64."""
MAX_FILE_BYTES = 1_000_000  # of one image or text
SIGNATURE = b"\x89PNG"

Media = dict[str, list[list[Any]]]
"""Of a run: name -> [step, whether it is an image, the PNG file in base64 or the text], in the order of the steps."""


def embedded(runs: Sequence[RunResults], most: int = MAX_BYTES) -> tuple[list[Media], str]:
    """Choose what to embed, and read it.

    Every name of every run gets its last step first, then its first, then steps between them.

    Args:
        runs: those of the page.
        most: bytes that all of it may take together.

    Returns:
        for each run what is embedded, and a sentence about what is not; empty if all is.
    """
    media: list[Media] = [{} for _ in runs]
    left_out = used = 0
    queues = [
        [(number, one) for one in _by_importance(list(of_name))]
        for number, run in enumerate(runs)
        for _, of_name in groupby(run.artifacts, key=lambda one: one.name)
    ]
    for number, one in (item for turn in zip_longest(*queues) for item in turn if item is not None):
        content = _content(one, most - used)
        if content is None:
            left_out += 1
            continue
        used += len(content)
        media[number].setdefault(one.name, []).append([one.step, one.is_image, content])
    for of_run in media:
        for listed in of_run.values():
            listed.sort(key=lambda item: item[0])
    count = sum(len(run.artifacts) for run in runs)
    note = (
        f"{left_out} of {count} images and texts are left out: this page holds {most / 1e6:g} MB of them, each of at "
        f"most {MAX_FILE_BYTES / 1e6:g} MB. All are in artifacts/ of each run."
    )
    return media, note if left_out else ""


def _by_importance(listed: list[Artifact]) -> list[Artifact]:
    """Order a list: the last one, the first one, and between them always those farthest from the ones before."""
    last = len(listed) - 1
    strides = [1 << power for power in reversed(range(len(listed).bit_length()))]
    order = [last, 0, *(last - back for stride in strides for back in range(0, len(listed), stride))]
    return [listed[index] for index in dict.fromkeys(order)]


def _content(one: Artifact, room: int) -> str | None:
    """Return the content as the page holds it; None if it is too large, is no PNG file or cannot be read."""
    needed = one.size * 4 // 3 + 4 if one.is_image else one.size
    if one.size > MAX_FILE_BYTES or needed > room:
        return None
    try:
        if not one.is_image:
            return one.text()
        image = one.read()
    except OSError:  # removed meanwhile
        return None
    return base64.b64encode(image).decode() if image.startswith(SIGNATURE) else None

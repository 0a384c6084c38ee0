"""Choose the images and texts that a page embeds, up to a limit of bytes, spread over the steps."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Any

from runner.report.runs import RunResults
from runner.rundir.artifacts import Artifact

MAX_BYTES = 3_000_000
"""The limit for everything that a page embeds, in base64."""
MAX_FILE_BYTES = 1_000_000  # of one image or text
SIGNATURE = b"\x89PNG"

Media = dict[str, list[list[Any]]]
"""For one run: name -> [step, whether it is an image, the PNG file in base64 or the text], ordered by step."""


def embedded(runs: Sequence[RunResults], most: int = MAX_BYTES) -> tuple[list[Media], str]:
    """Choose what to embed, and read it.

    For every name of every run, the last step is chosen first, then the first step, then steps between them.

    Args:
        runs: runs of the page.
        most: limit for all embedded bytes.

    Returns:
        The embedded media of each run, and a sentence about omitted media, or "" if none were omitted.
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
    """Order the artifacts of a name: the last, the first, then repeatedly those farthest from the ones before."""
    last = len(listed) - 1
    strides = [1 << power for power in reversed(range(len(listed).bit_length()))]
    order = [last, 0, *(last - back for stride in strides for back in range(0, len(listed), stride))]
    return [listed[index] for index in dict.fromkeys(order)]


def _content(one: Artifact, room: int) -> str | None:
    """Return an artifact as the page embeds it; None if it is too large, no PNG file or cannot be read."""
    needed = one.size * 4 // 3 + 4 if one.is_image else one.size
    if one.size > MAX_FILE_BYTES or needed > room:
        return None
    try:
        if not one.is_image:
            return one.text()
        image = one.read()
    except OSError:  # removed since
        return None
    return base64.b64encode(image).decode() if image.startswith(SIGNATURE) else None

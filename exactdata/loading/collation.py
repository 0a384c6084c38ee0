"""Explain why samples cannot be collated, by naming the samples, their sources and their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exactdata.errors import UserError


class CollationError(UserError, RuntimeError):
    """The samples of a batch differ in keys, shapes or types."""


def disagreement(samples: Sequence[Any], names: Sequence[str]) -> str | None:
    """Describe how the first sample differs from the next sample with a different layout. Return None if all agree.

    Args:
        samples: the samples of a batch.
        names: name of each sample, for the message.
    """
    layouts = [layout(sample) for sample in samples]
    other = next((at for at, found in enumerate(layouts) if found != layouts[0]), None)
    if other is None:
        return None
    keys = [key for key in {**layouts[0], **layouts[other]} if layouts[0].get(key) != layouts[other].get(key)]
    shown = [
        f"sample {names[at]} has {', '.join(_entry(key, layouts[at].get(key)) for key in keys[:4])}"
        for at in (0, other)
    ]
    return (
        f"the samples of a batch must agree: {', '.join(shown)}: return the same from every source, or set "
        "collate_fn to a function that pads them"
    )


def layout(sample: Any, key: str = "") -> dict[str, str]:
    """Map each path within a sample to the shape and type of the value there."""
    if isinstance(sample, Mapping):
        parts: Any = sample.items()
    elif isinstance(sample, (list, tuple)):
        parts = enumerate(sample)
    else:
        shape = getattr(sample, "shape", None)
        kind = str(getattr(sample, "dtype", type(sample).__name__)).removeprefix("torch.")
        return {key: kind if shape is None else f"{tuple(shape)} {kind}"}
    found: dict[str, str] = {}
    for name, part in parts:
        found |= layout(part, f"{key}.{name}" if key else str(name))
    return found


def _entry(key: str, found: str | None) -> str:
    return f"no {key}" if found is None else f"{key} {found}".strip()

"""The examples in docs/loader.md and docs/streaming.md do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["loader.md", "streaming.md"])
def test_examples_run(page: str) -> None:
    names = {"__name__": "example"}
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, page, "exec"), names)

"""Check the page's contrast: WCAG 2.2 AA, 4.5 to 1 for text (1.4.3) and 3 to 1 for lines and controls (1.4.11)."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

import runner.report

PAGE = Path(runner.report.__file__).parent / "page"
CSS = (PAGE / "page.css").read_text()
NAMED = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", CSS))
TEXTS = ("text", "soft", "accent", "good", "bad")
BEHIND = ("page", "panel", "chosen", "hover")


def luminance(color: str) -> float:
    """Return the relative luminance of a color, see https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_luminance_formula() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_every_color_of_a_style_has_a_name() -> None:
    """Make sure that the next test knows all colors."""
    rules = CSS[CSS.index("}") :]
    assert not re.findall(r"#[0-9a-f]{3,8}\b(?=[;\s,])|rgb|hsl", rules)
    assert set(re.findall(r"[{;] color: var\(--(\w+)\)", rules)) <= set(TEXTS)
    assert set(re.findall(r"background: var\(--(\w+)\)", rules)) <= set(BEHIND)


@pytest.mark.parametrize(("text", "behind"), list(product(TEXTS, BEHIND)))
def test_texts_can_be_read(text: str, behind: str) -> None:
    assert contrast(NAMED[text], NAMED[behind]) >= 4.5


def test_lines_and_controls_can_be_seen() -> None:
    scripts = "".join(path.read_text() for path in PAGE.glob("*.js"))
    drawn = set(re.findall(r'"(#[0-9a-f]{6})"', scripts)) - {"#eef0f3"}  # the grid carries no information
    assert len(drawn) > 15
    for color in (*drawn, NAMED["edge"], NAMED["accent"]):
        assert contrast(color, NAMED["page"]) >= 3, color

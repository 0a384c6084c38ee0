"""Text that goes to a terminal."""

from __future__ import annotations

MAX_LINE = 2000  # characters


def printable(text: str) -> str:
    """`text` on one line, with everything that is not printable escaped: no file may control the terminal.

    What is longer than MAX_LINE is cut. Every message that may quote a file, a name or a setting goes through here.
    """
    shown = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def printable_lines(text: str) -> str:
    """`text` with each of its lines made printable."""
    return "\n".join(map(printable, text.split("\n")))

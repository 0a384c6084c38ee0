"""Check the message of a commit: `commit_subject.py FILE`, as git's commit-msg hook calls it.

The subject is in the imperative, begins with a capital, has at most 72 characters and no full stop. A blank line
separates it from the body.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
# Verbs that end like a third person, a past or a participle.
VERBS = {"Bring", "Embed", "Exceed", "Feed", "Focus", "Need", "Ping", "Speed", "Proceed", "Succeed"}


def faults(message: str) -> list[str]:
    """List what is wrong with a commit message, each fault with its remedy."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = next(iter(lines), "")
    if subject.startswith(GENERATED):
        return []
    found = []
    first = subject.partition(" ")[0]
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, {LONGEST} are allowed: move the reason to the body")
    if not re.match(r"[A-Z][a-z]+\b", first):
        found.append(f"the subject begins with {first!r}: begin with a verb and a capital, such as 'Add' or 'Fix'")
    elif first not in VERBS and re.search(r"(ed|ing|[^s]s)$", first):
        found.append(f"the subject begins with {first!r}: use the imperative, 'Add' instead of 'Added'")
    if subject.endswith("."):
        found.append("the subject ends with a full stop: remove it")
    if len(lines) > 1 and lines[1].strip():
        found.append("the second line is not blank: separate the body from the subject")
    return found


def main(path: str) -> int:
    """Print the faults of the message in a file. Return the exit status."""
    found = faults(Path(path).read_text())
    for fault in found:
        print(f"commit message: {fault}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

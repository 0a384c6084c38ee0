"""Parse launcher options that are a number, or a range from which each start takes what is free: `3`, `"1-4"`.

A range of nodes or ranks lets the number of ranks change between attempts. The command checks that the run's config
allows this. It asks the launcher for its `runner.contracts.RankCounts`.
"""

from __future__ import annotations

import re
from typing import Any

from runner.errors import UserError

LARGEST = 2**20


def parse(key: str, value: Any) -> range:
    """Return the numbers that an option allows, in ascending order; one number for `3` or `"3"`.

    Args:
        key: the option, such as `launcher.nodes`.
        value: of the option in the config.

    Raises:
        UserError: the value is neither a whole number from 1 to 2**20, nor `first-last` with two of them in ascending
            order.
    """
    # YAML and Hydra parse 3 and "3" and 1-4 to an int or a string. True is an int as well.
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    found = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", text, re.ASCII)
    if found is not None:
        first, last = int(found[1]), int(found[2] or found[1])
        if 1 <= first <= last <= LARGEST:
            return range(first, last + 1)
    raise UserError(
        f"{key}={value} must be a whole number from 1 to 2**20, or a range of them such as 1-4, smaller number first"
    )

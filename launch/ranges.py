"""Parse launcher options that are a number such as `3`, or a range such as `"1-4"`.

With a range, each start takes the free nodes or GPUs within it, so the number of ranks may change between attempts. The
command gets the possible numbers from the launcher (`runner.contracts.RankCounts`) and checks that the run's config
allows them.
"""

from __future__ import annotations

import re
from typing import Any

from runner.errors import UserError

LARGEST = 2**20


def parse(key: str, value: Any) -> range:
    """Return the numbers that an option allows, in ascending order. For `3` or `"3"`, this is one number.

    Args:
        key: the option, such as `launcher.nodes`.
        value: the option's value in the config.

    Raises:
        UserError: the value is neither a whole number from 1 to 2**20, nor `first-last` with two of them in ascending
            order.
    """
    # YAML and Hydra parse 3 and "3" and 1-4 to an int or a string. In Python, True is an int too.
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    found = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", text, re.ASCII)
    if found is not None:
        first, last = int(found[1]), int(found[2] or found[1])
        if 1 <= first <= last <= LARGEST:
            return range(first, last + 1)
    raise UserError(
        f"{key}={value} must be a whole number from 1 to 2**20, or a range of them such as 1-4, smaller number first"
    )

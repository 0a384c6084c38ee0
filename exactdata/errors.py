"""Define errors that a user can fix, in one line each. Imports neither torch nor numpy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix: one line, which a command prints without a traceback.

    The message names the value, the allowed values, and the remedy.
    """

    status = 2
    """The exit status of a command that ends with it."""
    everywhere = False
    """Whether every rank of the job raises the same error, so that rank 0 alone reports it."""


class DataError(UserError, ValueError):
    """The data are missing, malformed, or do not match the arguments. The message names the source or the file."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the valid name nearest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

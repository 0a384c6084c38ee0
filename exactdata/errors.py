"""Define errors that a user can fix. Each message is one line. Imports neither torch nor numpy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix. Commands print its one-line message without a traceback.

    The message states the value, the allowed values, and the remedy.
    """

    status = 2
    """The exit status of a command that ends with this error."""
    everywhere = False
    """Whether every rank of the job raises the same error, so that only rank 0 needs to report it."""


class DataError(UserError, ValueError):
    """The data are missing, malformed, or do not match the arguments. The message names the source or the file."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the valid name nearest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

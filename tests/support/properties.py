"""Check properties with a few random examples in `make fast`, and with many in `make test-all`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

Test = Callable[..., None]


def given_in_tiers(
    *drawn: SearchStrategy[Any], few: int, many: int, **named: SearchStrategy[Any]
) -> Callable[[Test], Test]:
    """Replace Hypothesis's `given`: parametrize the test with `few` examples, and with `many` marked slow."""

    def decorate(test: Test) -> Test:
        checks = {count: settings(max_examples=count)(given(*drawn, **named)(test)) for count in (few, many)}

        def check(examples: int, **others: Any) -> None:
            checks[examples](**others)

        check.__name__, check.__doc__, check.__module__ = test.__name__, test.__doc__, test.__module__
        signature = inspect.signature(checks[few])
        number = inspect.Parameter("examples", inspect.Parameter.KEYWORD_ONLY)
        check.__signature__ = signature.replace(parameters=[*signature.parameters.values(), number])  # type: ignore[attr-defined]
        counts = [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)]
        parametrized: Test = pytest.mark.parametrize("examples", counts)(check)
        return parametrized

    return decorate

"""Several options as one decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def group_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds the options, which the help lists in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate

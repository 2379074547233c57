"""Reasoning effort, in the words that chat templates and model servers know."""

from __future__ import annotations

from typing import Any, Final

HIGHEST: Final = "high"
_ABOVE: Final = frozenset({"xhigh", "max", "ultra"})  # of some vendors' own models


def known_effort(asked: Any) -> Any:
    """Return the effort to request: for words above the highest known one, the highest."""
    return HIGHEST if isinstance(asked, str) and asked in _ABOVE else asked

"""Mistakes in options, reported in one error that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lightning_spans.errors import ConfigError
from lightning_trainer.config.other_names import translate


def refuse(problems: Mapping[str, bool]) -> None:
    """Raise the first problem that applies.

    Args:
        problems: messages with what is wrong and what to do, and whether each applies.

    Raises:
        ConfigError: one applies.
    """
    for message, wrong in problems.items():
        if wrong:
            raise ConfigError(message)


def refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Reject keys that are not options.

    Raises:
        ConfigError: names the first unknown key and the nearest known one.
    """
    for key in values:
        if key not in known:
            ours = translate(key, known)
            near = [ours] if ours else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known options: {', '.join(sorted(known))}."
            raise ConfigError(f"unknown option {key!r}. {hint}")


def explain(error: ValidationError) -> str:
    """Return what is wrong with options and what to do, one line each."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        name = str(problem["loc"][0]) if problem["loc"] else "configuration"
        if problem["type"] == "missing":
            lines.append(f"{name} is missing. Give --{name.replace('_', '-')}, or {name} = ... in the config file.")
            continue
        lines.append(f"{name} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}.")
    return "\n".join(dict.fromkeys(lines))

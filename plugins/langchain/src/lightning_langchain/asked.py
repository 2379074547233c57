"""Whose tool call is it? The agent's whose model asked for it, also where several agents share one node of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_spans.context import current_agent

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult

    from lightning_langchain.runs import Run


class Asked(NamedTuple):
    """A tool call that a model asked for."""

    call_id: str
    agent: str | None
    name: str
    arguments: Mapping[str, Any]


def remember(run: Run, response: LLMResult) -> None:
    """Keep what the answer of a model asks for."""
    messages = [getattr(generation, "message", None) for row in response.generations for generation in row]
    for call in [call for message in messages for call in getattr(message, "tool_calls", None) or ()]:
        if call_id := call.get("id"):
            run.asked[call_id] = Asked(call_id, current_agent(run.context), call["name"], call["args"])


def who_asked(run: Run, call_id: str | None, arguments: Mapping[str, Any] | None) -> Asked | None:
    """Find who asked for the tool call that a run makes; None when no model of its tree did.

    By id, or by name and arguments where the framework does not tell the id (langchain-core before 1.0).
    """
    asked = run.asked
    if call_id is None:
        same = (known for known in list(asked.values()) if (known.name, known.arguments) == (run.name, arguments))
        call_id = next((known.call_id for known in same), None)
    return asked.pop(call_id, None) if call_id is not None else None

"""Handoffs: tools that return a LangGraph `Command` with the next node, as in a swarm or with a supervisor."""

from __future__ import annotations

from typing import Any, Final

_END: Final = "__end__"


def handed_to(output: Any) -> str | None:
    """Return the agent to which a tool's output hands over; None if it is not a handoff."""
    given = output if isinstance(output, list) else [output]
    goals = [goal for part in given for goal in _goals(getattr(part, "goto", None))]
    return next((goal for goal in goals if goal != _END), None)


def _goals(goto: Any) -> list[str]:
    if goto is None or isinstance(goto, str):
        return [goto] if goto else []
    if isinstance(goto, list | tuple):
        return [goal for part in goto for goal in _goals(part)]
    node = getattr(goto, "node", None)  # a `Send`
    return [node] if isinstance(node, str) else []

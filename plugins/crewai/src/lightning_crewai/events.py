"""What CrewAI's events say of agents, tools and failures."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_crewai.works import AGENT, STEP, TASK
from lightning_openai.elsewhere import to_json
from lightning_spans import spans as names

if TYPE_CHECKING:
    from lightning_spans.recorder import OpenSpan


def agent_of(kind: str, source: Any, event: Any) -> str | None:
    """Give the name that an event itself tells; a call that carries no role is of the agent around it."""
    if kind == STEP:
        return str(event.method_name)
    if kind == TASK:
        return stripped(getattr(source.agent, "role", None))
    if kind == AGENT:
        return stripped(source.role)
    return stripped(event.agent_role)


def stripped(role: Any) -> str | None:
    """Give a role as a name: in YAML, where roles often stand, they end with a line break."""
    return str(role).strip() or None if role else None


def error_of(event: Any) -> BaseException | str | None:
    """Give what went wrong: the exception itself where it is at hand."""
    failure = getattr(event, "failure", None)  # since 1.15: the tool ran, and said that it failed
    error = getattr(event, "error", None)
    if error is None:
        return None if failure is None else str(failure.message)
    if isinstance(error, BaseException):
        return error
    raised = sys.exception()
    return raised if raised is not None and str(raised) == str(error) else str(error)


def tell_tool(span: OpenSpan, event: Any) -> None:
    """Add what is known of a tool when it is over; without a model's own tool calls, its arguments are read late."""
    span.name = event.tool_name
    span.set(**{names.TOOL_NAME: event.tool_name})
    if not isinstance(event.tool_args, str) and event.tool_args is not None:
        span.set(**{names.TOOL_ARGUMENTS: to_json(event.tool_args)})
    output = getattr(event, "output", None)
    if output is not None:
        span.set(**{names.TOOL_RESULT: output if isinstance(output, str) else to_json(output)})

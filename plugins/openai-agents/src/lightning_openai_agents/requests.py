"""Requested tool calls that are not a function's: unknown tools and handoffs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from lightning_openai_agents.models import response_of
from lightning_spans.record.instrument.tool_requests import ToolRequest, take
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan

_CALLS: Final = frozenset({"function_call", "custom_tool_call"})


def requests_of(data: Any) -> list[ToolRequest]:
    """Return the tool calls in a model's answer; empty if the SDK may not keep it."""
    return list(_requests(response_of(data) or {}))


def _requests(response: Any) -> Iterator[ToolRequest]:
    for choice in response.get("choices") or ():
        for call in choice["message"].get("tool_calls") or ():
            function = call.get("function") or {}
            yield ToolRequest(call.get("id"), function.get("name", ""), function.get("arguments", ""))
    for item in response.get("output") or ():
        if item.get("type") in _CALLS:
            yield ToolRequest(item.get("call_id"), item["name"], item.get("arguments") or item.get("input") or "")


def take_by_name(requests: list[ToolRequest], name: str) -> ToolRequest | None:
    """Take out the first request for a tool of this name. The SDK may put a group's name before it."""
    return take(requests, lambda known: name in {known.name} or name.endswith(f".{known.name}"), lambda _: False)


def tell_handoff(span: OpenSpan, agent: str | None, requests: list[ToolRequest]) -> None:
    """Record a handoff on its span, once the next agent is known.

    The SDK does not say which tool call it was: it is found by the usual name, otherwise it is the first that is not a
    function.
    """
    usual = f"transfer_to_{agent or ''}".lower().replace(" ", "_")
    request = take(requests, lambda _: True, lambda known: known.name.lower() == usual)
    name = usual if request is None else request.name
    span.name = name
    facts = {names.TOOL_NAME: name, names.HANDOFF: agent}
    if request is not None:
        facts |= {names.TOOL_CALL_ID: request.call_id, names.TOOL_ARGUMENTS: str(request.arguments)}
    span.set(**facts)

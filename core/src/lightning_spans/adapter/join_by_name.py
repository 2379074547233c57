"""The last resort of the join, without ``traceparent`` and response id: the attempt's key and the agent's name.

The key names the attempt of a call, so only spans of that attempt are candidates. Among them a call can belong to a
span of its agent that has no answer yet and the same request. If that is ambiguous, nothing is joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_spans.adapter.join import response_id
from lightning_spans.adapter.nodes import HalfCall, MissingHalf, Node
from lightning_spans.chat.body import messages_of
from lightning_spans.schema.agents import name_of
from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import JsonText, dumps
from lightning_spans.schema.spans import CHAT, REQUEST, RESPONSE_ID, Json

Asked: TypeAlias = tuple[str, bytes]  # the agent, and its messages to the model


@dataclass(slots=True)
class _Match:
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def join_by_name(chats: Iterable[Node], calls: Sequence[Call]) -> tuple[list[HalfCall], list[HalfCall]]:
    """Join calls to spans of their agent that have the same request and neither answer nor call.

    Args:
        chats: of one attempt, ordered by start.
        calls: of the same attempt that nothing else joined, likewise.

    Returns:
        The calls without a match, each with the reason, and the spare ones: a client's earlier tries.
    """
    matches: defaultdict[Asked, _Match] = defaultdict(_Match)
    lone: list[HalfCall] = []
    for call in calls:
        wanted = _asked_for(call.request)
        if call.agent is None or call.trace_id is not None or wanted is None:
            nameless = call.agent is None and call.trace_id is None
            lone.append(HalfCall(MissingHalf.UNNAMED if nameless else MissingHalf.NO_SPAN, call=call))
        else:
            matches[name_of(call.agent), wanted].calls.append(call)
    for node in chats if matches else ():
        if node.call is None and response_id(node) is None and RESPONSE_ID not in node.span.attributes:
            asked = _question_of(node)
            if asked is not None and asked in matches:
                matches[asked].nodes.append(node)
    spare: list[HalfCall] = []
    for match in matches.values():
        _settle(match, lone, spare)
    place = {call.call_id: at for at, call in enumerate(calls)}
    return sorted(lone, key=lambda half: place[half.call.call_id] if half.call else 0), spare


def _settle(match: _Match, lone: list[HalfCall], spare: list[HalfCall]) -> None:
    """Join what is unambiguous: one call for each span, or one span whose client retried until it was answered."""
    nodes, calls = match.nodes, match.calls
    answered = [call for call in calls if call.error is None]
    if not nodes:
        lone += [HalfCall(MissingHalf.NO_SPAN, call=call) for call in calls]
    elif len(nodes) == len(calls):
        for node, call in zip(nodes, calls, strict=True):
            node.call = call
    elif len(nodes) == 1 and len(answered) <= 1:
        nodes[0].call = answered[0] if answered else calls[-1]
        spare += [HalfCall(MissingHalf.SPARE, call=call) for call in calls if call is not nodes[0].call]
    else:
        lone += [HalfCall(MissingHalf.AMBIGUOUS, call=call) for call in calls]


def _question_of(node: Node) -> Asked | None:
    agent, at = node.span.agent, node.parent
    while agent is None and at is not None and at.span.operation != CHAT:
        agent, at = at.span.agent, at.parent
    text = node.span.attributes.get(REQUEST)
    wanted = _asked_for(JsonText(text)) if isinstance(text, str) else None
    return None if agent is None or wanted is None else (agent, wanted)


def _asked_for(request: Mapping[str, Json]) -> bytes | None:
    messages = messages_of(request)
    return None if messages is None else dumps(messages)


@dataclass(frozen=True, slots=True)
class Joins:
    """How many model calls have both halves.

    Attributes:
        calls: model calls, each one chat span.
        joined: those recorded by both agent and gateway.
        unjoined: number of halves by the reason why the other one is missing, including a client's earlier tries.
    """

    calls: int = 0
    joined: int = 0
    unjoined: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the counts for people, one fact per line."""
        found = [f"{self.joined} of {self.calls} model calls are joined with the gateway's records"]
        return found + [f"{count} not joined: {reason}" for reason, count in sorted(self.unjoined.items())]

"""One model call, one chat node: join the gateway's records to the agent's spans, and merge duplicates.

A call belongs to the span that its ``traceparent`` names; without one, to the span with its response id; without that
either, to the one span of its attempt and agent with the same request (`join_by_name`); otherwise it gets its own span.
Nothing is ever matched by time or by text alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from lightning_spans.adapter.nodes import HalfCall, MissingHalf, Node
from lightning_spans.adapter.tree import Key, start_of
from lightning_spans.schema import spans as names
from lightning_spans.schema.agents import name_of
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import CHAT, FRAMEWORK, RESPONSE_ID, Span

GATEWAY: Final = "gateway"  # the framework of spans made from calls


def response_id(node: Node) -> str | None:
    """Return the response id of a chat span, or that of its call."""
    found = node.span.attributes.get(RESPONSE_ID)
    if isinstance(found, str):
        return found
    return node.call.response_id if node.call is not None else None


def join_by_traceparent(nodes: Mapping[Key, Node], calls: Iterable[Call]) -> tuple[list[Call], list[HalfCall]]:
    """Join calls to the chat spans that they name.

    Returns:
        The calls that name none, in order, and the spare ones: a client's retries share one span.
    """
    rest: list[Call] = []
    named: dict[Node, list[Call]] = {}
    for call in calls:
        node = nodes.get((call.trace_id, call.span_id)) if call.trace_id and call.span_id else None
        if node is None or node.span.operation != CHAT:
            rest.append(call)
        else:
            named.setdefault(node, []).append(call)
    spare: list[HalfCall] = []
    for node, its in named.items():
        node.call = its[0] if len(its) == 1 else _answering_call(node, its)
        spare += [HalfCall(MissingHalf.SPARE, call=call) for call in its if call is not node.call]
    return rest, spare


def _answering_call(node: Node, calls: Sequence[Call]) -> Call:
    """Choose among the tries of one span: the one whose response it contains, otherwise the last answered one."""
    seen = node.span.attributes.get(RESPONSE_ID)
    for call in reversed(calls):
        if call.response_id == seen:
            return call
    return next((call for call in reversed(calls) if call.error is None), calls[-1])


def merge_doubles(order: Sequence[Node]) -> tuple[dict[Node, Node], list[HalfCall]]:
    """Merge chat spans of the same model call: the agent's, and a gateway's or another instrumentation's.

    Args:
        order: all nodes, each after its parent.

    Returns:
        The merged nodes, each with the one that remains; and the spare calls of pairs in which both had one.
    """
    into: dict[Node, Node] = {}
    spare: list[HalfCall] = []

    def merge(outer: Node, inner: Node) -> None:
        into[inner] = outer
        if outer.call is not None and inner.call is not None:
            spare.append(HalfCall(MissingHalf.SPARE, call=inner.call))
        _absorb(outer, inner)

    above = _chats_above(order)
    lone = _lone_answers(above)
    for inner, chat in above.items():
        outer = into.get(chat, chat)
        if _same_call(outer, inner, direct=inner.parent is outer, lone=inner in lone):
            merge(outer, inner)
    for outer, inner in _overlapping_pairs(
        [node for node in order if node.span.operation == CHAT and node not in into]
    ):
        merge(outer, inner)
    return into, spare


def _chats_above(order: Sequence[Node]) -> dict[Node, Node]:
    """Return the nearest chat node above each chat node that has one."""
    nearest: dict[Node, Node | None] = {}
    found: dict[Node, Node] = {}
    for node in order:
        chat = nearest[node.parent] if node.parent is not None else None
        is_chat = node.span.operation == CHAT
        if is_chat and chat is not None:
            found[node] = chat
        nearest[node] = node if is_chat else chat
    return found


def _lone_answers(above: Mapping[Node, Node]) -> set[Node]:
    """Return the chat nodes that are the only answered one directly below a chat node."""
    answered: defaultdict[Node, list[Node]] = defaultdict(list)
    for inner, outer in above.items():
        if inner.parent is outer and response_id(inner) is not None:
            answered[outer].append(inner)
    return {inner[0] for inner in answered.values() if len({response_id(node) for node in inner}) == 1}


def _same_call(outer: Node, inner: Node, *, direct: bool, lone: bool) -> bool:
    """Whether a chat span above and one below belong to the same call.

    An equal response id proves it. If one of them has none (a failure, a stream not read to its end, a source that does
    not give it), a span directly below from another instrumentation is the same call too.
    """
    ours, theirs = response_id(outer), response_id(inner)
    if ours is not None and theirs is not None:
        return ours == theirs
    return direct and _sources_differ(outer, inner) and (theirs is None or lone)


def _sources_differ(one: Node, other: Node) -> bool:
    return one.span.attributes.get(FRAMEWORK) != other.span.attributes.get(FRAMEWORK)


def _overlapping_pairs(chats: Iterable[Node]) -> list[tuple[Node, Node]]:
    """Pair chat spans of different branches or traces with the same response id, one within the time of the other.

    Time is not evidence by itself; here it separates the calls of a server that gives every answer the same id.
    """
    by_id: defaultdict[str, list[Node]] = defaultdict(list)
    for node in chats:
        name = response_id(node)
        if name is not None:
            by_id[name].append(node)
    pairs = []
    for group in by_id.values():
        outer: Node | None = None
        for node in sorted(group, key=start_of) if len(group) > 1 else ():
            ours = outer is not None and _same_source(outer, node)
            if outer is None or ours or node.span.end_ns > outer.span.end_ns or _is_above(node, outer):
                outer = node
            else:
                pairs.append((outer, node))
    return pairs


def _is_above(node: Node, other: Node) -> bool:
    at = other.parent
    while at is not None and at is not node:
        at = at.parent
    return at is node


def _same_source(one: Node, other: Node) -> bool:
    source = one.span.attributes.get(FRAMEWORK)
    return source is not None and not _sources_differ(one, other)


def _absorb(outer: Node, inner: Node) -> None:
    """Move to one node what only the other knows, and the other's children."""
    kept, other = outer.span, inner.span
    outer.span = replace(
        kept,
        agent=kept.agent or other.agent,
        rollout_id=kept.rollout_id or other.rollout_id,
        attempt_id=kept.attempt_id or other.attempt_id,
        status=other.status if kept.status == "unset" else kept.status,
        status_message=kept.status_message or other.status_message,
        attributes={**other.attributes, **kept.attributes},
    )
    outer.call = outer.call or inner.call
    outer.merged += (inner.span.span_id, *inner.merged)
    for child in inner.children:
        outer.add(child)
    inner.children = ()


def join_by_response_id(chats: Iterable[Node], calls: Iterable[Call]) -> list[Call]:
    """Join calls without a known ``traceparent`` to the chat spans with their response id, one call per span.

    Returns:
        The calls without a match.
    """
    waiting: defaultdict[str, deque[Node]] = defaultdict(deque)
    for node in chats:
        name = response_id(node) if node.call is None else None
        if name is not None:
            waiting[name].append(node)
    rest = []
    for call in calls:
        found = waiting.get(call.response_id)
        if found:
            found.popleft().call = call
        else:
            rest.append(call)
    return rest


def node_of_call(call: Call, parent: Node | None) -> Node:
    """Make the chat node of a call that has no span."""
    trace_id = parent.span.trace_id if parent is not None else call.trace_id
    seed = call.attempt_id or call.call_id
    place = {names.AGENT_PATH: call.agent} if call.agent is not None and "/" in call.agent else {}
    span = Span(
        operation=CHAT,
        name=f"{CHAT} {call.policy}",
        trace_id=trace_id or blake2b(seed.encode(), digest_size=16).hexdigest(),
        span_id=blake2b(call.call_id.encode(), digest_size=8).hexdigest(),
        parent_id=parent.span.span_id if parent is not None else call.span_id,
        start_ns=call.start_ns,
        end_ns=call.end_ns,
        status="ok" if call.error is None else "error",
        status_message=call.error or "",
        agent=None if call.agent is None else name_of(call.agent),
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
        origin=call.origin,
        attributes={FRAMEWORK: GATEWAY, names.REQUEST_MODEL: call.policy, RESPONSE_ID: call.response_id, **place},
    )
    node = Node(span, call)
    if parent is not None:
        parent.add(node)
    return node

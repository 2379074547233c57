"""From a flat list of spans to a tree, whatever is missing, in linear time and without recursion."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from lightning_spans.adapter.nodes import Node
from lightning_spans.schema.agents import name_of
from lightning_spans.schema.spans import AGENT_PATH, Span

Key: TypeAlias = tuple[str, str]  # trace_id, span_id


def start_of(node: Node) -> int:
    """Return the sort key: the node's start in Unix nanoseconds."""
    return node.span.start_ns


def make_nodes(spans: Iterable[Span]) -> dict[Key, Node]:
    """Make one node for each (trace, span), ordered by start; of spans delivered twice the first counts."""
    nodes: dict[Key, Node] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        key = (span.trace_id, span.span_id)
        if key not in nodes:
            nodes[key] = Node(span)
    return nodes


def link(nodes: Mapping[Key, Node]) -> tuple[list[Node], list[Node]]:
    """Attach every node to its parent.

    Returns:
        Every node, each after its parent; and the orphans: those whose parent is missing or is below themselves.
    """
    roots: list[Node] = []
    orphans: list[Node] = []
    for (trace_id, _), node in nodes.items():
        parent_id = node.span.parent_id
        parent = nodes.get((trace_id, parent_id)) if parent_id else None
        if parent is None or parent is node:
            roots.append(node)
            if parent is node:
                node.span = replace(node.span, parent_id=None)
            if parent_id:
                orphans.append(node)
        else:
            parent.add(node)
    order = descend(roots)
    if len(order) < len(nodes):
        order += _cut_cycles(nodes.values(), order, orphans)
    return order, orphans


def descend(roots: Iterable[Node]) -> list[Node]:
    """List nodes and all their descendants, parents first."""
    order: list[Node] = []
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        if node.children:
            stack.extend(reversed(node.children))
    return order


def _cut_cycles(nodes: Iterable[Node], reached: Iterable[Node], orphans: list[Node]) -> list[Node]:
    """Make roots of the earliest nodes of cycles, and list them with all their descendants."""
    seen = set(reached)
    found: list[Node] = []
    for node in nodes:  # ordered by start
        if node in seen:
            continue
        above: dict[Node, None] = {}  # in order of insertion
        at: Node | None = node
        while at is not None and at not in above:
            above[at] = None
            at = at.parent
        path = list(above)
        cycle = path[path.index(at) :] if at is not None else path
        first = min(cycle, key=start_of)
        if first.parent is not None:
            first.parent.children = [child for child in first.parent.children if child is not first]
            first.parent = None
        first.span = replace(first.span, parent_id=None)
        orphans.append(first)
        below = descend([first])
        seen.update(below)
        found += below
    return found


def tidy(parents: Iterable[Node], gone: Container[Node]) -> None:
    """Remove merged nodes from their parents, and sort the children by start again.

    Args:
        parents: those whose children changed.
        gone: the merged nodes.
    """
    for parent in dict.fromkeys(parents):
        parent.children = sorted((child for child in parent.children if child not in gone), key=start_of)


def complete(order: Iterable[Node], rollout_id: str | None, attempt_id: str | None) -> None:
    """Fill in what each span lacks: the agent, rollout and attempt of its nearest ancestor that has one.

    A chat span without a named ancestor takes the agent of its call.

    Args:
        order: nodes, each after its parent.
        rollout_id: of the attempt, for spans without an ancestor.
        attempt_id: likewise.
    """
    for node in order:
        span, parent = node.span, node.parent
        up = parent.span if parent is not None else None
        parent_id = span.parent_id if up is None else up.span_id
        told = node.call.agent if node.call is not None else None  # its path
        agent = span.agent or (up and up.agent) or (told and name_of(told)) or None
        rollout = span.rollout_id or (up.rollout_id if up is not None else rollout_id)
        attempt = span.attempt_id or (up.attempt_id if up is not None else attempt_id)
        if (
            agent != span.agent
            or parent_id != span.parent_id
            or attempt != span.attempt_id
            or rollout != span.rollout_id
        ):
            known = span.attributes
            if told is not None and told != agent == name_of(told) and AGENT_PATH not in known:
                known = {**known, AGENT_PATH: told}
            node.span = replace(
                span, parent_id=parent_id, agent=agent, rollout_id=rollout, attempt_id=attempt, attributes=known
            )

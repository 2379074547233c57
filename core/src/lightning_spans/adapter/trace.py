"""The trace: one attempt as a tree, in which every model call is exactly one chat node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_spans.adapter.join import join_by_response_id, join_by_traceparent, merge_doubles, node_of_call
from lightning_spans.adapter.join_by_name import Joins, join_by_name
from lightning_spans.adapter.nodes import HalfCall, MissingHalf, Node
from lightning_spans.adapter.tree import Key, complete, descend, link, make_nodes, start_of, tidy
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL, Json, Span

__all__ = ["HalfCall", "Joins", "Node", "Trace", "count_joins"]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One attempt as a tree. Iteration yields its nodes, ordered by start.

    Attributes:
        nodes: ordered by start; of equal starts the parent first.
        chats: the model calls among them; a call's index here is its turn.
        orphans: nodes at the root level whose parent is missing or is below themselves.
        rewards: of the attempt, in order of arrival.
        rollout_id: None for traces made outside a runner.
        attempt_id: None for traces made outside a runner.
        lone_calls: calls without a span, and calls without a node: a client's earlier tries.
    """

    nodes: tuple[Node, ...]
    chats: tuple[Node, ...]
    orphans: tuple[Node, ...]
    rewards: tuple[Reward, ...]
    rollout_id: str | None
    attempt_id: str | None
    lone_calls: tuple[HalfCall, ...] = ()

    @classmethod
    def build(
        cls,
        spans: Iterable[Span],
        calls: Iterable[Call] = (),
        rewards: Iterable[Reward] = (),
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> Trace:
        """Build the tree of one attempt in linear time, despite missing parents, cycles and duplicate delivery.

        Args:
            spans: of one attempt, in any order. A missing agent, rollout or attempt is taken from the ancestors.
            calls: of the same attempt.
            rewards: of the same attempt.
            rollout_id: by default that of spans, calls and rewards, if they all have the same.
            attempt_id: likewise.
        """
        its_spans, its_calls, its_rewards = list(spans), sorted(calls, key=lambda call: call.start_ns), tuple(rewards)
        nodes = make_nodes(its_spans)
        order, orphans = link(nodes)
        rest, lone = join_by_traceparent(nodes, its_calls)
        into, doubled = merge_doubles(order)
        if into:
            tidy([*into.values(), *(node.parent for node in into if node.parent is not None)], into)
            order = descend(node for node in order if node.parent is None and node not in into)
            orphans = [node for node in orphans if node not in into]
        chats = sorted(_chats(order), key=start_of)
        alone, tries = join_by_name(chats, join_by_response_id(chats, rest))
        made = [_hang(half.call, nodes, into) for half in alone if half.call is not None]
        tidy((node.parent for node in made if node.parent is not None), ())
        order += made
        orphans += [node for node in made if node.parent is None and node.span.parent_id is not None]
        lone += [*doubled, *tries]
        lone += [HalfCall(half.reason, node=node, call=node.call) for half, node in zip(alone, made, strict=True)]
        records: list[Span | Call | Reward] = [*its_spans, *its_calls, *its_rewards]
        rollout_id = rollout_id or _only(record.rollout_id for record in records)
        attempt_id = attempt_id or _only(record.attempt_id for record in records)
        complete(order, rollout_id, attempt_id)
        order.sort(key=start_of)
        orphans.sort(key=start_of)
        return cls(tuple(order), tuple(_chats(order)), tuple(orphans), its_rewards, rollout_id, attempt_id, tuple(lone))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def roots(self) -> tuple[Node, ...]:
        """Nodes without a parent, including orphans, ordered by start."""
        return tuple(node for node in self.nodes if node.parent is None)

    @property
    def tools(self) -> tuple[Node, ...]:
        """Tool calls, ordered by start."""
        return tuple(node for node in self.nodes if node.span.operation == EXECUTE_TOOL)

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that called a model, ordered by their first call."""
        return tuple(dict.fromkeys(node.span.agent for node in self.chats if node.span.agent is not None))

    @property
    def agent_paths(self) -> tuple[str, ...]:
        """Paths of these agents, ordered by their first call: names and globs are compared with them."""
        return tuple(dict.fromkeys(path for node in self.chats if (path := node.path) is not None))

    @property
    def unjoined(self) -> tuple[HalfCall, ...]:
        """Model calls with a missing half, and calls without a node, each with the reason."""
        unseen = (HalfCall(MissingHalf.NOT_SEEN, node=node) for node in self.chats if node.call is None)
        return (*unseen, *self.lone_calls)

    def to_json_lines(self) -> list[dict[str, Json]]:
        """Return the objects that ``traces --json`` prints, one per node, ordered by start.

        Keys: operation, name, agent, trace_id, span_id, parent_id (None for a root; for an orphan the id of the parent
        that is missing), rollout_id, attempt_id, start_ns, end_ns, status, attributes; status_message if there is one.
        On chat spans also call_id, response_id, prompt_token_ids, response_token_ids, logprobs, policy_version, None if
        not recorded; if the call has several choices, these are the first one's, and ``choices`` contains all.
        """
        return [node.to_json() for node in self.nodes]


def count_joins(traces: Iterable[Trace]) -> Joins:
    """Count the model calls of traces that have both halves, and the unjoined halves by reason."""
    calls = joined = 0
    unjoined: Counter[str] = Counter()
    for trace in traces:
        halves = trace.unjoined
        calls += len(trace.chats)
        joined += len(trace.chats) - sum(half.node is not None for half in halves)
        unjoined.update(half.reason for half in halves)
    return Joins(calls, joined, dict(unjoined))


def _chats(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.span.operation == CHAT]


def _hang(call: Call, nodes: dict[Key, Node], into: dict[Node, Node]) -> Node:
    parent = nodes.get((call.trace_id, call.span_id)) if call.trace_id and call.span_id else None
    while parent in into:
        parent = into[parent]
    return node_of_call(call, parent)


def _only(values: Iterable[str | None]) -> str | None:
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else None

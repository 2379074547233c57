"""Spans with OpenInference's attributes, one per line, in the form in which Phoenix lists and takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from openinference.semconv.trace import SpanAttributes

from lightning_spans.record.delivery.openinference import add_viewer_attributes
from lightning_spans.schema.agents import selects
from lightning_trainer.kits.export.chat import is_text
from lightning_trainer.kits.export.episodes import StoredEpisode
from lightning_trainer.kits.export.files import Line
from lightning_trainer.kits.export.wanted import ExportSelection, UnexportedReason

_STATUS = {"ok": "OK", "error": "ERROR"}


def spans_of(episode: StoredEpisode, wanted: ExportSelection, left_out: Counter[str]) -> Iterator[Line]:
    """Return all spans of an attempt, or count them all with the reason."""
    reason = _why_not(episode, wanted)
    if reason is not None:
        left_out[reason] += len(episode.trace)
        return
    for node in episode.trace:
        span = add_viewer_attributes(node.span)
        own = [reward for reward in episode.trace.rewards if reward.span_id in (span.span_id, *node.merged)]
        whole = [reward for reward in episode.trace.rewards if reward.span_id is None] if node.parent is None else []
        rewards = [{"source": r.source, "agent": r.agent, "value": r.value} for r in (*whole, *own)]
        attributes: dict[str, Any] = dict(span.attributes)
        line: Line = {
            "name": span.name,
            "span_kind": attributes[SpanAttributes.OPENINFERENCE_SPAN_KIND],
            "context": {"trace_id": span.trace_id, "span_id": span.span_id},
            "parent_id": span.parent_id,
            "start_time": _time(span.start_ns),
            "end_time": _time(span.end_ns),
            "status_code": _STATUS.get(span.status, "UNSET"),
            "status_message": span.status_message,
            "attributes": attributes,
            "agent": span.agent,
            "rollout_id": span.rollout_id,
            "attempt_id": span.attempt_id,
            "policy_version": node.policy_version,
            "origin": span.origin,
            "rewards": rewards,
        }
        yield _writable(line)


def _why_not(episode: StoredEpisode, wanted: ExportSelection) -> str | None:
    """Return why no span of an attempt is exported. Failed attempts are exported, too: viewers are for that."""
    names = episode.trace.agent_paths
    if wanted.agents is not None and not any(selects(wanted.agents, name) for name in names):
        return UnexportedReason.NOT_CHOSEN
    if wanted.min_reward is None:
        return None
    named = [name for name in names if wanted.agents is None or selects(wanted.agents, name)]
    earned = [episode.reward_of(name, wanted.sources) for name in named or (None,)]
    known = [reward for reward in earned if reward is not None]
    if not known:
        return UnexportedReason.NO_REWARD
    return UnexportedReason.LOW_REWARD if max(known) < wanted.min_reward else None


def _writable(line: Line) -> Line:
    """Return a line with half characters, such as of a cut emoji, as escapes, because readers of files reject them."""
    if is_text(line):
        return line
    return {name: _escape_surrogates(value) for name, value in line.items()}


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(name): _escape_surrogates(each) for name, each in value.items()}
    return [_escape_surrogates(each) for each in value] if isinstance(value, (list, tuple)) else value


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat()

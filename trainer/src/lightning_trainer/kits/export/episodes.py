"""The attempts of a store, as calls with the rewards of their agents, or with the reason to leave them out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_spans import hooks
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.agents import earns
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import ABANDONED
from lightning_spans.schema.transitions import Transition
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where, each
from lightning_spans.store.traces import each_trace
from lightning_trainer.kits.export.asked import UnreadableError
from lightning_trainer.kits.export.chat import comparison_keys, exchange
from lightning_trainer.kits.export.wanted import ExportSelection, UnexportedReason
from lightning_trainer.rl.endings import ending_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """An attempt, or a trace that belongs to none.

    Attributes:
        trace: all of it.
        attempt: the attempt's record; None if no queue contains it.
        calls: its model calls.
        task: digest of the task; None if it is unknown.
        opening: digest of the request of its first readable model call; None if there is none.
        group: group whose rollouts are compared.
        problem: why nothing of it is exported; None if it is exported.
    """

    trace: Trace
    attempt: AttemptRecord | None
    calls: tuple[Transition, ...]
    task: str | None
    opening: str | None
    group: str
    problem: str | None

    @property
    def validation(self) -> bool:
        """Whether it was run to validate: its task is held out from training."""
        return self.attempt is not None and self.attempt.rollout.mode == "val"

    @property
    def origin(self) -> str:
        """The origin of the recording: ``training``, ``live``, or a label."""
        return self.trace.nodes[0].span.origin if self.trace.nodes else ""

    @property
    def left(self) -> frozenset[str]:
        """Spans of the model calls whose answer the agent did not read to its end."""
        return frozenset(node.span.span_id for node in self.trace.chats if node.span.attributes.get(ABANDONED))

    def reward_of(self, path: str | None, sources: tuple[str, ...] | None) -> float | None:
        """Return the sum of the rewards of the agent with a path: the attempt's, its own, and those of its calls.

        Returns:
            None if there is no such reward.
        """
        callers = {span_id: node.path for node in self.trace.chats for span_id in (node.span.span_id, *node.merged)}
        earned = [
            reward.value
            for reward in self.trace.rewards
            if (sources is None or reward.source in sources) and _concerns(reward, path, callers)
        ]
        return sum(earned) if earned else None


def _concerns(reward: Reward, path: str | None, callers: Mapping[str, str | None]) -> bool:
    if reward.span_id is not None and reward.span_id in callers:
        return callers[reward.span_id] == path
    return earns(reward.agent, path)


def episodes(store: Store, wanted: ExportSelection) -> Iterator[StoredEpisode]:
    """Read every selected trace of a store, in the order of their start."""
    where = Where(origin=wanted.origin, rollout_ids=wanted.rollout_ids)
    attempts = {each_.attempt_id: each_ for each_ in each(store, AttemptRecord, where)}
    newest = _newest(attempts)
    for trace in each_trace(store, origin=wanted.origin, rollout_ids=wanted.rollout_ids):
        attempt = attempts.get(trace.attempt_id or "") or _begun_since(store, trace)
        calls = tuple(hooks.manager().hook.lightning_adapt(trace=trace) or ())
        opening = _opening(calls)
        task = None if attempt is None else digest(_identifying_fields(attempt.rollout.task, wanted.task_fields))
        yield StoredEpisode(
            trace=trace,
            attempt=attempt,
            calls=calls,
            task=task,
            opening=opening,
            group=attempt.rollout.group_id if attempt is not None else opening or trace.attempt_id or "",
            problem=_problem(attempt, trace, newest) or wanted.permits.reason_against(trace),
        )


def digest(value: Any) -> str:
    """Return a text that is the same for equal JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _begun_since(store: Store, trace: Trace) -> AttemptRecord | None:
    """Return the attempt of a trace, as still running, if it began after the attempts were read."""
    if trace.attempt_id is None:
        return None
    found = list(each(store, AttemptRecord, Where(attempt_ids=[trace.attempt_id])))
    return replace(found[0], status="running") if found else None


def _newest(attempts: Mapping[str, AttemptRecord]) -> dict[str, str]:
    """Return the attempt that counts for each rollout: the last that succeeded."""
    good = [attempt for attempt in attempts.values() if attempt.status == "succeeded"]
    return {one.rollout.rollout_id: one.attempt_id for one in sorted(good, key=lambda attempt: attempt.number)}


def _problem(attempt: AttemptRecord | None, trace: Trace, newest: Mapping[str, str]) -> str | None:
    if attempt is None:
        return None
    if attempt.status == "running":
        return UnexportedReason.NOT_ENDED
    if attempt.status != "succeeded":
        return ending_of(attempt, trace).text
    return None if newest[attempt.rollout.rollout_id] == attempt.attempt_id else UnexportedReason.OTHER_ATTEMPT


def _identifying_fields(task: Mapping[str, Any], fields: tuple[str, ...] | None) -> Mapping[str, Any]:
    """Return the fields that identify a task; the whole task if it has none of them."""
    found = {name: task[name] for name in fields or () if name in task}
    return found or task


def _opening(calls: tuple[Transition, ...]) -> str | None:
    for call in calls:
        try:
            asked = exchange(replace(call, finish_reason="stop", message={"role": "assistant", "content": "-"}))
        except UnreadableError:
            continue
        return digest([part.decode() for part in comparison_keys(asked.messages)])
    return None

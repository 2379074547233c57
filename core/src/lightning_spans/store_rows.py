"""Rows of the SQL store to records and back."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from lightning_spans.records import JsonText, dumps, loads
from lightning_spans.rewards import Reward, as_reward
from lightning_spans.spans import Json, Span
from lightning_spans.store import AttemptRecord, Call, Choice, Rollout

Row: TypeAlias = Any  # sqlalchemy.Row, whose columns are known by position only at run time
Values: TypeAlias = dict[str, Any]


def _text(value: str | None) -> str | None:
    """Make text that databases hold: a lone surrogate, as in half an emoji, and NUL become their escapes."""
    if value is None:
        return None
    if not value.isascii():
        value = value.encode("utf-8", "backslashreplace").decode()
    return value.replace("\0", "\\x00") if "\0" in value else value


def _json(value: Mapping[str, Json]) -> str:
    return dumps(value).decode() if value else "{}"


def _object(text: str) -> Any:
    return {} if text == "{}" else loads(text)


def _lazy(text: str) -> Mapping[str, Json]:
    return {} if text == "{}" else JsonText(text)


def _blob(code: str, values: Sequence[float] | None) -> bytes | None:
    if values is None:
        return None
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unblob(code: str, blob: bytes | None) -> tuple[Any, ...] | None:
    if blob is None:
        return None
    packed = array(code)
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def span_values(span: Span) -> Values:
    """Give the row of a span."""
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "operation": _text(span.operation),
        "name": _text(span.name),
        "agent": _text(span.agent),
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "origin": _text(span.origin),
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "status": span.status,
        "status_message": _text(span.status_message),
        "attributes": _json(span.attributes),
    }


def row_span(row: Row) -> Span:
    """Read a row of `spans`, its columns in the order of the table."""
    (
        _seq, trace_id, span_id, parent_id, operation, name, agent, rollout_id, attempt_id, start_ns, end_ns, status,
        status_message, attributes, origin,
    ) = row  # fmt: skip
    return Span(
        operation=operation,
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        start_ns=start_ns,
        end_ns=end_ns,
        parent_id=parent_id,
        status=status,
        status_message=status_message,
        agent=agent,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        origin=origin,
        attributes=_object(attributes),
    )


def call_values(call: Call) -> Values:
    """Give the row of a call, without its choices."""
    return {
        "call_id": call.call_id,
        "response_id": call.response_id,
        "trace_id": call.trace_id,
        "span_id": call.span_id,
        "rollout_id": call.rollout_id,
        "attempt_id": call.attempt_id,
        "agent": _text(call.agent),
        "origin": _text(call.origin),
        "policy": call.policy,
        "policy_version": call.policy_version,
        "start_ns": call.start_ns,
        "end_ns": call.end_ns,
        "error": _text(call.error),
        "prompt_token_ids": _blob("i", call.prompt_token_ids),
        "request": _json(call.request),
        "sampling": _json(call.sampling),
    }


def choice_values(call: Call) -> list[Values]:
    """Give the rows of a call's choices."""
    return [
        {
            "call_id": call.call_id,
            "position": position,
            "choice_index": choice.index,
            "token_ids": _blob("i", choice.token_ids),
            "logprobs": _blob("d", choice.logprobs),
            "finish_reason": choice.finish_reason,
            "message": _json(choice.message),
        }
        for position, choice in enumerate(call.choices)
    ]


def row_choice(row: Row) -> Choice:
    """Read a row of `choices`."""
    _call_id, _position, index, token_ids, logprobs, finish_reason, message = row
    return Choice(index, _unblob("i", token_ids), _unblob("d", logprobs), finish_reason, _lazy(message))


def row_call(row: Row, choices: Iterable[Choice]) -> Call:
    """Read a row of `calls`. Request and messages stay text until someone looks into them."""
    return Call(
        call_id=row.call_id,
        response_id=row.response_id,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        policy=row.policy,
        policy_version=row.policy_version,
        trace_id=row.trace_id,
        span_id=row.span_id,
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        agent=row.agent,
        origin=row.origin,
        prompt_token_ids=_unblob("i", row.prompt_token_ids),
        choices=tuple(choices),
        request=_lazy(row.request),
        sampling=_object(row.sampling),
        error=row.error,
    )


def reward_values(reward: Reward) -> Values:
    """Give the row of a reward.

    Raises:
        RewardError: the value is not a finite number.
    """
    return {
        "reward_id": reward.reward_id,
        "rollout_id": reward.rollout_id,
        "attempt_id": reward.attempt_id,
        "value": as_reward(reward.value),
        "agent": _text(reward.agent),
        "span_id": reward.span_id,
        "source": _text(reward.source),
    }


def row_reward(row: Row) -> Reward:
    """Read a row of `rewards`."""
    return Reward(
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        value=row.value,
        agent=row.agent,
        span_id=row.span_id,
        source=row.source,
        reward_id=row.reward_id,
    )


def rollout_values(rollout: Rollout, now_ns: int) -> Values:
    """Give the row of a rollout that enters the queue."""
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "task": _json(rollout.task),
        "mode": rollout.mode,
        "origin": _text(rollout.origin),
        "max_attempts": rollout.max_attempts,
        "timeout_s": rollout.timeout_s,
        "status": rollout.status,
        "tries": 0,
        "queued_ns": now_ns,
    }


def row_rollout(row: Row, *, status: Any = None) -> Rollout:
    """Read a row that has the columns of `rollouts`; `status` replaces the row's."""
    return Rollout(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        task=_object(row.task),
        mode=row.mode,
        origin=row.origin,
        max_attempts=row.max_attempts,
        timeout_s=row.timeout_s,
        status=status or row.status,
    )


def row_attempt(row: Row) -> AttemptRecord:
    """Read a row of `attempts` joined to its rollout, whose status is named ``rollout_status``."""
    return AttemptRecord(
        attempt_id=row.attempt_id,
        rollout=row_rollout(row, status=row.rollout_status),
        number=row.number,
        fence=row.fence,
        worker=row.worker,
        status=row.status,
        lease_until_ns=row.lease_until_ns,
        started_ns=row.started_ns,
        ended_ns=row.ended_ns,
        error=row.error,
    )

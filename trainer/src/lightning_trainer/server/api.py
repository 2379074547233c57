"""``/api``: the queue of rollouts and the records, over HTTP. FastAPI describes it at ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from lightning_spans.context import Attempt
from lightning_spans.errors import LeaseLostError, LightningError, RewardError
from lightning_spans.records import dumps, from_json, to_json
from lightning_spans.rewards import Reward
from lightning_spans.spans import Span
from lightning_spans.store import AttemptRecord, Call, End, Rollout, Store
from lightning_trainer.server import bodies as b
from lightning_trainer.server.attempts import EndedAttempts
from lightning_trainer.server.door import Door
from lightning_trainer.server.giving import given_by
from lightning_trainer.server.keys import Grant, Keys, Scope
from lightning_trainer.server.metrics import Metrics
from lightning_trainer.server.refusals import bad_request
from lightning_trainer.server.settings import Limits, Routing

Ids = Annotated[list[str] | None, Query()]
Origin = Annotated[str | None, Query()]
_RUNNING = ("queued", "running", "succeeded", "failed", "cancelled")


class Parts(Protocol):
    """What the API works with; `app.state` has these."""

    store: Store
    keys: Keys
    door: Door
    attempts: EndedAttempts
    limits: Limits
    routing: Routing
    forget: Callable[[str], None]
    metrics: Metrics


def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state
    return parts


def _needs(*scopes: Scope) -> Any:
    async def admit(request: Request) -> None:
        await _parts(request).door.admit(request.scope, *scopes)

    return Depends(admit)


def _grant(*scopes: Scope) -> Any:
    async def admit(request: Request) -> Grant:
        return await _parts(request).door.admit(request.scope, *scopes)

    return Depends(admit)


_ADMIN = [_needs("admin")]
_RUNNER = [_needs("runner", "admin")]
_ENDING = _grant("runner", "admin")
_REWARDING = _grant("evaluator", "runner", "admin")
router = APIRouter(
    prefix="/api",
    responses={code: {"model": b.ErrorBody} for code in (400, 401, 403, 409, 413, 503)},
)


def _json(**answer: Any) -> Response:
    return Response(dumps(answer), media_type="application/json")


def _records(kind: type[Any], items: Sequence[Any]) -> list[Any]:
    try:
        return [from_json(kind, item) for item in items]
    except ValueError as error:
        raise bad_request(str(error)) from None


def _rewards(grant: Grant, items: Sequence[Any], store: Store) -> list[Reward]:
    return given_by(grant, _records(Reward, items), store)


@router.post("/rollouts", dependencies=_ADMIN, response_model=b.Queued)
def enqueue(request: Request, body: b.RolloutsBody) -> Response:
    """Queue rollouts; those already there, by id, are left as they are."""
    return _json(queued=_parts(request).store.enqueue(_records(Rollout, body.rollouts)))


@router.get("/rollouts", dependencies=_ADMIN, response_model=b.RolloutsBody)
def rollouts(
    request: Request, rollout_id: Ids = None, group_id: Ids = None, status: str | None = None, origin: Origin = None
) -> Response:
    """Give rollouts in the order they were queued."""
    query = b.QueryBody(what="rollouts", rollout_ids=rollout_id, group_ids=group_id, status=status, origin=origin)
    return _read(_parts(request).store, query)


@router.post("/rollouts/cancel", dependencies=_ADMIN, response_model=b.Cancelled)
def cancel(request: Request, body: b.IdsBody) -> Response:
    """Cancel rollouts that have not ended; their running attempts lose leases and keys."""
    parts = _parts(request)
    number = parts.store.cancel(body.rollout_ids)
    for attempt in parts.store.attempts(rollout_ids=body.rollout_ids):
        if attempt.status != "running":
            parts.forget(attempt.attempt_id)
    return _json(cancelled=number)


@router.post("/claims", dependencies=_RUNNER, response_model=b.Attempts)
def claim(request: Request, body: b.ClaimBody) -> Response:
    """Start attempts; each comes with the context that its agent's process gets."""
    parts = _parts(request)
    claimed = parts.store.claim(body.worker, limit=body.limit, lease_s=body.lease_s)
    parts.attempts.started([attempt.attempt_id for attempt in claimed])
    parts.metrics.claimed(len(claimed))
    endpoint = parts.routing.endpoint or str(request.base_url).rstrip("/")
    return _json(attempts=[to_json(with_context(attempt, parts, endpoint)) for attempt in claimed])


def with_context(attempt: AttemptRecord, parts: Parts, endpoint: str) -> AttemptRecord:
    """Give an attempt with what its agent's process gets: endpoint, a key for it alone, agents and model."""
    limit_s = attempt.rollout.timeout_s
    key = parts.keys.issue(
        "attempt",
        rollout_id=attempt.rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        agent=parts.routing.unnamed,
        expires_s=parts.limits.untimed_key_s if limit_s is None else limit_s + parts.limits.key_margin_s,
    )
    context = Attempt(
        rollout_id=attempt.rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        endpoint=endpoint,
        key=key,
        agents=parts.routing.agents,
        model=parts.routing.model,
    )
    return replace(attempt, context=context)


@router.post("/heartbeats", dependencies=_RUNNER, response_model=b.Lost)
def heartbeat(request: Request, body: b.HeartbeatBody) -> Response:
    """Renew leases; give the attempts whose lease is lost."""
    parts = _parts(request)
    lost = parts.store.heartbeat(body.leases, lease_s=body.lease_s)
    parts.metrics.leases_lost(len(lost))
    for attempt_id in lost:
        parts.forget(attempt_id)
    return _json(lost=lost)


@router.post("/attempts/{attempt_id}/finish", response_model=b.Standing)
def finish(request: Request, attempt_id: str, body: b.FinishBody, grant: Annotated[Grant, _ENDING]) -> Response:
    """End an attempt, with its rewards; 409 when its lease is lost."""
    parts = _parts(request)
    rewards = _rewards(grant, body.rewards, parts.store)
    try:
        status = parts.store.finish(attempt_id, body.fence, status=body.status, rewards=rewards, error=body.error)
    except LeaseLostError:
        parts.metrics.late_result()
        raise
    parts.metrics.ended(body.status)
    parts.forget(attempt_id)
    return _json(status=status)


@router.post("/finishes", response_model=b.Answers)
def finish_all(request: Request, body: b.EndsBody, grant: Annotated[Grant, _ENDING]) -> Response:
    """End several attempts in one transaction; one answer each."""
    parts = _parts(request)
    ends = [
        End(one.attempt_id, one.fence, one.status, tuple(_rewards(grant, one.rewards, parts.store)), one.error)
        for one in body.ends
    ]
    answers = []
    for end, told in zip(ends, parts.store.finish_all(ends), strict=True):
        if isinstance(told, LightningError):
            if isinstance(told, LeaseLostError):
                parts.metrics.late_result()
            answers.append({"code": _code(told), "message": str(told)})
        else:
            parts.metrics.ended(end.status)
            parts.forget(end.attempt_id)
            answers.append({"status": told})
    return _json(answers=answers)


def _code(error: LightningError) -> str:
    if isinstance(error, LeaseLostError):
        return "lease_lost"
    return "bad_reward" if isinstance(error, RewardError) else "refused"


@router.get("/attempts", dependencies=_ADMIN, response_model=b.Attempts)
def attempts(request: Request, rollout_id: Ids = None, attempt_id: Ids = None, origin: Origin = None) -> Response:
    """Give attempts in the order of their start."""
    query = b.QueryBody(what="attempts", rollout_ids=rollout_id, attempt_ids=attempt_id, origin=origin)
    return _read(_parts(request).store, query)


@router.get("/spans", dependencies=_ADMIN, response_model=b.SpansBody)
def spans(
    request: Request, rollout_id: Ids = None, attempt_id: Ids = None, trace_id: Ids = None, origin: Origin = None
) -> Response:
    """Give spans in the order of their start."""
    query = b.QueryBody(what="spans", rollout_ids=rollout_id, attempt_ids=attempt_id, trace_ids=trace_id, origin=origin)
    return _read(_parts(request).store, query)


@router.get("/calls", dependencies=_ADMIN, response_model=b.CallsBody)
def calls(
    request: Request, rollout_id: Ids = None, attempt_id: Ids = None, trace_id: Ids = None, origin: Origin = None
) -> Response:
    """Give calls in the order of their start."""
    query = b.QueryBody(what="calls", rollout_ids=rollout_id, attempt_ids=attempt_id, trace_ids=trace_id, origin=origin)
    return _read(_parts(request).store, query)


@router.get("/rewards", dependencies=_ADMIN, response_model=b.RewardsBody)
def rewards(request: Request, rollout_id: Ids = None, attempt_id: Ids = None) -> Response:
    """Give rewards in the order of their arrival."""
    query = b.QueryBody(what="rewards", rollout_ids=rollout_id, attempt_ids=attempt_id)
    return _read(_parts(request).store, query)


@router.post("/query", dependencies=_ADMIN)
def query(request: Request, body: b.QueryBody) -> Response:
    """Read records, with lists of ids of any length; the answer's one key is what was asked for."""
    return _read(_parts(request).store, body)


@router.post("/delete", dependencies=_ADMIN, response_model=b.Deleted)
def delete(request: Request, body: b.DeleteBody) -> Response:
    """Delete rollouts that have ended, with all that belongs to them, and traces that belong to none."""
    return _json(deleted=_parts(request).store.delete(**body.model_dump()))


def _read(store: Store, query: b.QueryBody) -> Response:
    given = {name: value for name, value in query.model_dump(exclude={"what"}).items() if value is not None}
    allowed = {
        "rollouts": {"rollout_ids", "group_ids", "status", "origin"},
        "attempts": {"rollout_ids", "attempt_ids", "origin"},
        "spans": {"rollout_ids", "attempt_ids", "trace_ids", "origin"},
        "calls": {"rollout_ids", "attempt_ids", "trace_ids", "origin"},
        "rewards": {"rollout_ids", "attempt_ids"},
    }[query.what]
    if wrong := given.keys() - allowed:
        raise bad_request(f"{query.what} can't be filtered by {', '.join(sorted(wrong))}")
    if "status" in given and given["status"] not in _RUNNING:
        raise bad_request(f"status {given['status']!r}: must be one of {', '.join(_RUNNING)}")
    found: Sequence[Any] = getattr(store, query.what)(**given)
    return _json(**{query.what: [to_json(record) for record in found]})


@router.post("/spans", dependencies=_RUNNER, response_model=b.Kept)
def add_spans(request: Request, body: b.SpansBody) -> Response:
    """Keep spans; those already there are left as they are."""
    return _json(kept=_parts(request).store.add_spans(_records(Span, body.spans)))


@router.post("/calls", dependencies=_ADMIN, response_model=b.Kept)
def add_calls(request: Request, body: b.CallsBody) -> Response:
    """Keep calls; those already there are left as they are."""
    return _json(kept=_parts(request).store.add_calls(_records(Call, body.calls)))


@router.post("/rewards", response_model=b.Kept)
def add_rewards(request: Request, body: b.RewardsBody, grant: Annotated[Grant, _REWARDING]) -> Response:
    """Keep rewards, with who gave them; those already there are left as they are."""
    store = _parts(request).store
    return _json(kept=store.add_rewards(_rewards(grant, body.rewards, store)))


@router.post("/groups/consume", dependencies=_ADMIN, response_model=b.Ok)
def consume(request: Request, body: b.ConsumeBody) -> Response:
    """Mark a group as trained on; not ok when another consumer had it."""
    return _json(ok=_parts(request).store.consume_group(body.group_id, body.consumer))

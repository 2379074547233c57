"""``/api``: the store's methods over HTTP, one route each. FastAPI describes them at ``/openapi.json``.

Methods for which the server does more than the store are listed in `_MORE`; the others are passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated, Any, Final, Protocol, TypeAlias, Union

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from lightning_spans.errors import LeaseLostError, LightningError, RewardError
from lightning_spans.schema.attempts import Attempt, AttemptRecord, End
from lightning_spans.schema.json import dumps, to_json
from lightning_spans.schema.replays import ENDED
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store
from lightning_spans.store.api import API
from lightning_spans.store.protocol import LISTINGS, PAGE, Where
from lightning_trainer.gateway.api import bodies
from lightning_trainer.gateway.auth.access import Needs
from lightning_trainer.gateway.auth.ended_attempts import EndedAttempts
from lightning_trainer.gateway.auth.keys import Grant, Keys, Scope
from lightning_trainer.gateway.auth.leases import Leases
from lightning_trainer.gateway.auth.reward_source import given_by, given_now
from lightning_trainer.gateway.http.masking import mask_secrets
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.intake.route import KeyedRoute
from lightning_trainer.gateway.replay.sessions import Sessions, summary
from lightning_trainer.gateway.settings import Limits, Routing


class ApiState(Protocol):
    """The objects that the API uses; `app.state` has them."""

    store: Store
    keys: Keys
    leases: Leases
    attempts: EndedAttempts
    limits: Limits
    routing: Routing
    forget: Callable[[str], None]
    end_calls: Callable[[Mapping[str, bool]], None]
    metrics: Metrics
    began_ns: int
    replays: Sessions


@dataclass(frozen=True, slots=True)
class _PermittedRequest:
    """A permitted request: its grant, and its arguments."""

    state: ApiState
    grant: Grant
    base_url: str
    given: dict[str, Any]


_Do: TypeAlias = Callable[[_PermittedRequest], Any]
_RUNNER: Final[tuple[Scope, ...]] = ("runner", "admin")
_MAY: Final[Mapping[str, tuple[Scope, ...]]] = {
    **dict.fromkeys(("claim", "heartbeat", "finish", "finish_all"), _RUNNER),
    "add_rewards": ("evaluator", "admin"),
}
"""Whose keys may ask for a method; an admin's, where nothing is said."""


def _cancel(asked: _PermittedRequest) -> int:
    state, ids = asked.state, asked.given["rollout_ids"]
    number = state.store.cancel(ids)
    for attempt in state.store.attempts(rollout_ids=ids):
        if attempt.status != "running":
            state.forget(attempt.attempt_id)
    return number


def _claim(asked: _PermittedRequest) -> list[AttemptRecord]:
    state, given = asked.state, asked.given
    worker = state.leases.worker(asked.grant, given.pop("worker"))
    claimed = state.store.claim(worker, **given)
    state.attempts.started(claimed)
    state.leases.claimed(claimed)
    state.replays.started(claimed)
    state.metrics.claimed(len(claimed))
    endpoint = state.routing.endpoint or asked.base_url
    return [with_context(attempt, state, endpoint) for attempt in claimed]


def with_context(attempt: AttemptRecord, state: ApiState, endpoint: str) -> AttemptRecord:
    """Return an attempt with what its agent's process gets: endpoint, its own key, agents and model."""
    limit_s = attempt.rollout.timeout_s
    key = state.keys.issue(
        "attempt",
        rollout_id=attempt.rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        fence=attempt.fence,
        failures=attempt.failures,
        replay=attempt.rollout.replay is not None,
        agent=state.routing.unnamed,
        expires_s=state.limits.untimed_key_s if limit_s is None else limit_s + state.limits.key_margin_s,
    )
    context = Attempt(
        rollout_id=attempt.rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        endpoint=endpoint,
        key=key,
        agents=state.routing.agents,
        model=state.routing.model,
        prompts=state.routing.prompts.get(attempt.rollout.rollout_id, {}),
        replay=attempt.rollout.replay,
    )
    return replace(attempt, context=context)


def _heartbeat(asked: _PermittedRequest) -> list[str]:
    state, given = asked.state, asked.given
    leases = given.pop("leases")
    others = state.leases.of_others(asked.grant, [attempt_id for attempt_id, _ in leases])
    lost = state.store.heartbeat([lease for lease in leases if lease[0] not in others], **given)
    state.metrics.leases_lost(len(lost))
    for attempt_id in lost:
        state.forget(attempt_id)
    return [*lost, *sorted(others)]


def _finish(asked: _PermittedRequest) -> str:
    state, given = asked.state, asked.given
    state.leases.check(asked.grant, [given["attempt_id"]])
    rewards = given_by(asked.grant, given.pop("rewards"), state.store)
    [end] = _fairly(state, [End(**given | {"error": _mask_error(given["error"])}, rewards=rewards)])
    _end_calls(state, [end])
    try:
        status = state.store.finish(end.attempt_id, end.fence, status=end.status, rewards=end.rewards, error=end.error)
    except LeaseLostError:
        state.metrics.late_result()
        raise
    state.metrics.ended(end.status)
    state.forget(end.attempt_id)
    return status


def _finish_all(asked: _PermittedRequest) -> list[dict[str, str]]:
    state, sent = asked.state, asked.given["ends"]
    state.leases.check(asked.grant, [end.attempt_id for end in sent])
    ends: list[End] = [
        replace(end, rewards=given_by(asked.grant, end.rewards, state.store), error=_mask_error(end.error))
        for end in sent
    ]
    answers = []
    ends = _fairly(state, ends)
    _end_calls(state, ends)
    for end, told in zip(ends, state.store.finish_all(ends), strict=True):
        if isinstance(told, LightningError):
            if isinstance(told, LeaseLostError):
                state.metrics.late_result()
            answers.append({"code": _code(told), "message": str(told)})
        else:
            state.metrics.ended(end.status)
            state.forget(end.attempt_id)
            answers.append({"status": told})
    return answers


def _end_calls(state: ApiState, ends: Sequence[End]) -> None:
    """Cut the running calls of unsuccessful attempts, and wait until all that ended are recorded.

    Of a successful attempt, the calls that its program gave up are recorded before its end.
    """
    state.end_calls({end.attempt_id: end.status != "succeeded" for end in ends})


def _fairly(state: ApiState, ends: list[End]) -> list[End]:
    """Release attempts that failed because this server restarted during their calls, which was not the policy's fault.

    A replay that differs from its record has failed, whatever the program returned.
    """
    ends = [_as_replay(state, end) for end in ends]
    failed = [end.attempt_id for end in ends if end.status == "failed"]
    if not failed:
        return ends
    cut = {one.attempt_id for one in state.store.attempts(attempt_ids=failed) if one.started_ns < state.began_ns}
    told = "the server was started again while it ran; it ended with: "
    return [
        replace(end, status="released", error=f"{told}{end.error}")
        if end.attempt_id in cut and end.status == "failed"
        else end
        for end in ends
    ]


def _as_replay(state: ApiState, end: End) -> End:
    """Return the end of an attempt: a failure if it should have been a replay and was none."""
    if end.status not in ("succeeded", "failed"):
        return end
    reason = state.replays.at_end(end.attempt_id)
    if reason is None:
        return end
    told = "" if end.error is None or ENDED in end.error else f"\n{end.error}"
    return replace(end, status="failed", rewards=(), error=mask_secrets(f"{ENDED}{reason}{told}"))


def _mask_error(error: str | None) -> str | None:
    return None if error is None else mask_secrets(error)


def _code(error: LightningError) -> str:
    if isinstance(error, LeaseLostError):
        return "lease_lost"
    return "bad_reward" if isinstance(error, RewardError) else "refused"


def _add_rewards(asked: _PermittedRequest) -> int:
    store = asked.state.store
    rewards: Sequence[Reward] = given_by(asked.grant, asked.given["rewards"], store)
    return store.add_rewards(given_now(rewards, store))


_MORE: Final[Mapping[str, _Do]] = {
    "cancel": _cancel,
    "claim": _claim,
    "heartbeat": _heartbeat,
    "finish": _finish,
    "finish_all": _finish_all,
    "add_rewards": _add_rewards,
}


def _passed_on(method: str) -> _Do:
    return lambda asked: getattr(asked.state.store, method)(**asked.given)


def _page(what: str) -> _Do:
    def read(asked: _PermittedRequest) -> dict[str, Any]:
        given = asked.given
        after, limit = given.pop("after"), given.pop("limit")
        back = given.pop("newest_first", False)
        where = Where(**given)
        page = asked.state.store.page(LISTINGS[what].kind, where, after=after, limit=limit, newest_first=back)
        more = {} if page.next is None else {"next": page.next}
        return {what: [to_json(record) for record in page.records], **more}

    return read


def _answer_query(asked: _PermittedRequest) -> dict[str, Any]:
    answer: dict[str, Any] = _page(asked.given.pop("what"))(asked)
    return answer


def _replay(asked: _PermittedRequest) -> dict[str, Any]:
    return dict(summary(asked.state.store, asked.given["attempt_id"]))


def _plain(result: Any) -> Any:
    """Return a result as JSON."""
    if isinstance(result, list):
        return [_plain(one) for one in result]
    return to_json(result) if is_dataclass(result) else result


def _route(
    do: _Do, *, may: Sequence[Scope], key: str | None, **parameters: inspect.Parameter
) -> Callable[..., Response]:
    """Return a function for FastAPI, which reads from its signature what a request must contain.

    Args:
        do: what is done.
        may: which keys may request it.
        key: the response's key for the result; None: the result is the response.
        parameters: of the path and of the query, and ``body``, whose fields are arguments too.
    """

    def answer(request: Request, grant: Grant, **given: Any) -> Response:
        body = given.pop("body", None)
        if body is not None:
            given |= {name: getattr(body, name) for name in type(body).model_fields}
        result = do(_PermittedRequest(request.app.state, grant, str(request.base_url).rstrip("/"), given))
        return Response(dumps(result if key is None else {key: _plain(result)}), media_type="application/json")

    first = [_parameter("request", Request), _parameter("grant", Annotated[Grant, Depends(Needs(*may))])]
    answer.__signature__ = inspect.Signature([*first, *parameters.values()])  # type: ignore[attr-defined]
    return answer


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _make_router() -> APIRouter:
    made = APIRouter(
        prefix="/api",
        route_class=KeyedRoute,
        responses={code: {"model": bodies.ErrorBody} for code in (400, 401, 403, 409, 413, 503)},
    )
    for method, about in API.items():
        in_path = {"attempt_id": _parameter("attempt_id", str)} if "{attempt_id}" in about.path else {}
        made.add_api_route(
            about.path,
            _route(
                _MORE.get(method) or _passed_on(method),
                may=_MAY.get(method, ("admin",)),
                key=about.answer,
                **in_path,
                body=_parameter("body", bodies.request_of(method)),
            ),
            methods=["POST"],
            name=method,
            description=bodies.summary(method),
            response_model=bodies.answer_of(method),
        )
    for what in LISTINGS:
        filters = {
            name: _parameter(
                name, Annotated[kind, Query(alias=name.removesuffix("s") if name.endswith("_ids") else name)], None
            )
            for name, kind in bodies.filters_of(what).items()
        }
        pages = {"after": _parameter("after", bodies.AFTER, 0), "limit": _parameter("limit", bodies.LIMIT, PAGE)}
        made.add_api_route(
            f"/{what}",
            _route(_page(what), may=("admin",), key=None, **filters, **pages),
            methods=["GET"],
            name=what,
            description=f"Return a page of {what}, in the order of their arrival.",
            response_model=bodies.page_of(what),
        )
    made.add_api_route(
        "/query",
        _route(_answer_query, may=("admin",), key=None, body=_parameter("body", bodies.query())),
        methods=["POST"],
        name="page",
        description=bodies.summary("page"),
        response_model=Union[tuple(bodies.page_of(what) for what in LISTINGS)],  # noqa: UP007 - made of a list
    )
    made.add_api_route(
        "/attempts/{attempt_id}/replay",
        _route(_replay, may=("admin",), key=None, attempt_id=_parameter("attempt_id", str)),
        methods=["GET"],
        name="replay",
        description="Count what was answered from the record in a replay, and say why it ended before its time.",
        response_model=bodies.ReplayBody,
    )
    return made


router: Final = _make_router()

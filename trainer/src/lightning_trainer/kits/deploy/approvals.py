"""A person's approval of a candidate: a row that the server signs for the holder of an approver key.

No other key, not even an admin's, can create one, and a row that was written in another way has no valid signature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from itsdangerous import BadData
from pydantic import BaseModel

from lightning_spans.errors import ConfigError
from lightning_spans.schema.json import dumps, to_json
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.tls import trusted_certificates
from lightning_trainer.gateway.auth.access import Needs
from lightning_trainer.gateway.auth.keys import Grant, KeyRefusedError, Keys
from lightning_trainer.gateway.intake.route import KeyedRoute
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import Note, approve, is_tried, named_in

APPROVAL: Final = "approval"  # in a row's details: the signed text
NEEDS_APPROVAL: Final = "needs_approval"  # in the details of the row that names the candidate
PATH: Final = "/api/deployments/approve"
_ANSWER_S: Final = 30.0


def needs_approval(history: Sequence[Deployment]) -> bool:
    """Whether the newest candidate was named with the condition that a person approves it."""
    named = named_in(history)
    return named is not None and bool(named.details.get(NEEDS_APPROVAL))


class Approvals:
    """Signs and verifies approvals.

    Args:
        keys: the server's keys.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._signer = keys.signer("approval")

    @classmethod
    def beside(cls, key_file: Path | None) -> Approvals:
        """Create an instance from the secret next to the server's key file.

        Raises:
            ConfigError: there is no secret.
        """
        secret = None if key_file is None else key_file.with_name(f"{key_file.name}.secret")
        if secret is None or not secret.is_file():
            raise ConfigError(
                "the candidate needs a person's approval, which is verified with the server's secret. Give --store the"
                " URL of the server, or --key-file the server's own key file."
            )
        return cls(Keys.from_file(secret))

    def approve(self, history: Sequence[Deployment], agent: str, holder: Grant, reason: str) -> Deployment:
        """Return the row by which the holder of a key approves the candidate.

        Raises:
            ConfigError: the agent's candidate is not in a canary.
        """
        at_ns, person = time.time_ns(), holder.holder or "unnamed"
        approved = approve(history[-1] if history else None, agent, Note(reason or "approved", person, at_ns))
        text = self._signer.dumps([*_subject(history), person, holder.key_id, at_ns])
        return replace(approved, details={APPROVAL: str(text)})

    def check(self, history: Sequence[Deployment], promoted: str) -> None:
        """Reject the promotion of a policy that needs a person's approval and does not have it.

        Raises:
            ConfigError: no row since the candidate was named has an approval of it that this server signed, or the
                approving key is revoked.
        """
        if not needs_approval(history):
            return
        current = history[-1]
        if current.candidate == promoted and self.find(history) is not None:
            return
        raise ConfigError(
            f"not promoted: {promoted} needs a person's approval. A person with an approver's key runs: lightning-rl"
            f" deploy approve {current.agent} --store URL --key-file FILE."
        )

    def find(self, history: Sequence[Deployment]) -> Deployment | None:
        """Return the newest valid approval of the agent's candidate; None if there is none."""
        if not history or not is_tried(history[-1]):
            return None
        return next((one for one in reversed(history) if self._is_valid(one, history)), None)

    def _is_valid(self, row: Deployment, history: Sequence[Deployment]) -> bool:
        text = row.details.get(APPROVAL)
        if not isinstance(text, str):
            return False
        try:
            *subject, person, key_id, at_ns = self._signer.loads(text)
            self._keys.check_grant(Grant("approver", None, None, None, float("inf"), person, key_id=key_id))
        except (BadData, KeyRefusedError, ValueError, TypeError):
            return False
        return subject == _subject(history) and (person, at_ns) == (row.actor, row.at_ns)


def _subject(history: Sequence[Deployment]) -> list[Any]:
    """Return what is approved: this naming of the candidate, not another one with the same name."""
    named = named_in(history)
    if named is None:
        return []
    return [named.agent, named.number, named.at_ns, named.candidate, named.stable, named.checkpoint, named.base]


class _GuardedStore:
    """A store that rejects promotions without a required approval.

    Args:
        inner: the wrapped store.
        approvals: verifies approvals.
    """

    def __init__(self, inner: Store, approvals: Approvals) -> None:
        self._inner = inner
        self._approvals = approvals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_deployments(self, deployments: Sequence[Deployment]) -> int:
        """Write transitions.

        Raises:
            ConfigError: one of them makes a policy stable that needs an approval and has none; nothing is written.
        """
        histories = read_histories(self._inner)
        for one in deployments:
            history = histories.setdefault(one.agent, [])
            before = [other for other in history if other.number < one.number]
            if before and _changes_stable(before, one):
                self._approvals.check(before, one.stable)
            history.append(one)
        return self._inner.add_deployments(deployments)


def _changes_stable(before: Sequence[Deployment], following: Deployment) -> bool:
    """Whether a row makes a new policy stable; a rollback to an earlier stable policy does not."""
    returns = following.stage == "rolled_back" and following.stable in {one.stable for one in before}
    return following.stable != before[-1].stable and not returns


class ApprovalBody(BaseModel):
    """The request body of an approval.

    Attributes:
        agent: the agent whose candidate is approved.
        candidate: its name; the approval is rejected if the agent has another by now. None: any candidate.
        reason: reason for the history.
    """

    agent: str
    candidate: str | None = None
    reason: str = ""


router: Final = APIRouter(route_class=KeyedRoute)


@router.post(PATH, name="approve")
def _approve(request: Request, body: ApprovalBody, grant: Annotated[Grant, Depends(Needs("approver"))]) -> Response:
    """Approve an agent's candidate, which is in a canary, and return the row."""
    state = request.app.state
    history = read_histories(state.store).get(body.agent, [])
    made = Approvals(state.keys).approve(history, body.agent, grant, body.reason)
    if body.candidate not in (None, made.candidate):
        raise ConfigError(f"the candidate of {body.agent} is {made.candidate!r}, not {body.candidate!r}.")
    keep(state.store, made)
    return Response(dumps({"deployment": to_json(made)}), media_type="application/json")


def guard_promotions(app: Any) -> None:
    """Let a server sign approvals, and reject every promotion that needs one and has none.

    Args:
        app: result of `gateway.app.create_app`.
    """
    app.state.approvals = Approvals(app.state.keys)
    app.state.store = _GuardedStore(app.state.store, app.state.approvals)
    app.include_router(router)


def is_url(store: str) -> bool:
    """Whether a store is behind a server."""
    return store.startswith(("http://", "https://"))


def request_approval(server: str, key: str | None, agent: str, candidate: str | None, reason: str) -> dict[str, Any]:
    """Request an approval that the server signs, and return its row.

    Raises:
        ConfigError: this is not a server's URL, the server refuses, or it cannot be reached.
    """
    if not is_url(server):
        raise ConfigError(f"--store {server!r}: give the URL of the server. It signs the approval.")
    url = httpx.URL(server.rstrip("/") + PATH)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"agent": agent, "candidate": candidate, "reason": reason}
    try:
        reply = httpx.post(url, json=body, headers=headers, timeout=_ANSWER_S, verify=trusted_certificates())
        answer = reply.json()
        if reply.is_success:
            return dict(answer["deployment"])
        message = answer["error"]["message"]
    except httpx.TransportError as error:
        raise ConfigError(f"no answer from the server at {server} ({error}). Is it running?") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{server} did not answer like a lightning-rl server. Is the URL right?") from None
    raise ConfigError(f"not approved: {server} answered {reply.status_code}: {message}")

"""How the store's methods are asked for over HTTP: the client sends by this table, the server makes its routes of it.

Every body is a JSON object. A method's arguments are its keys, its result is under one key of the answer; records have
the form of `schema.json`. `page` is ``POST /api/query`` with ``{"what": "spans", "after": 0, "limit": 1000}`` and the
filters of `Where`, and answers ``{"spans": [...], "next": 4711}``, without ``next`` where there are no more. With
``"newest_first": true`` the order is the reverse.
``GET /api/spans?limit=...&after=...`` is the same for short lists of filters. Errors are ``{"error": {"message",
"type", "code"}}``; 409: the lease is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ApiMethod:
    """How a method of the store is asked for over HTTP: its arguments are the keys of the body, by name.

    Attributes:
        path: that is posted to, after ``/api``.
        answer: the key of the answer under which its result is.
        batched: the argument whose records may be sent in several requests; None: there is one request.
    """

    path: str
    answer: str
    batched: str | None = None


API: Final[Mapping[str, ApiMethod]] = {
    "add_spans": ApiMethod("/spans", "kept", "spans"),
    "add_calls": ApiMethod("/calls", "kept", "calls"),
    "add_rewards": ApiMethod("/rewards", "kept", "rewards"),
    "add_deployments": ApiMethod("/deployments", "kept", "deployments"),
    "add_assignments": ApiMethod("/assignments", "kept", "assignments"),
    "enqueue": ApiMethod("/rollouts", "queued", "rollouts"),
    "cancel": ApiMethod("/rollouts/cancel", "cancelled"),
    "claim": ApiMethod("/claims", "attempts"),
    "heartbeat": ApiMethod("/heartbeats", "lost"),
    "finish": ApiMethod("/attempts/{attempt_id}/finish", "status"),
    "finish_all": ApiMethod("/finishes", "answers"),
    "consume_group": ApiMethod("/groups/consume", "ok"),
    "delete": ApiMethod("/delete", "deleted"),
}
"""Methods by name, but for `page`."""

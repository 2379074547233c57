"""The store's methods over HTTP: one table, from which the client sends requests and the server makes its routes.

Every body is a JSON object. A method's arguments are its keys, its result is under one key of the response; records
have the form of `schema.json`. `page` is ``POST /api/query`` with ``{"what": "spans", "after": 0, "limit": 1000}`` and
the filters of `Where`, and returns ``{"spans": [...], "next": 4711}``, without ``next`` if there are no more. With
``"newest_first": true`` the order is reversed. ``GET /api/spans?limit=...&after=...`` is the same for short lists of
filters. Errors are ``{"error": {"message", "type", "code"}}``; 409: the lease is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ApiMethod:
    """A method of the store over HTTP: its arguments are the keys of the body, by name.

    Attributes:
        path: of the POST request, after ``/api``.
        answer: the key of the response under which its result is.
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

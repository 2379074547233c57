"""A tenant's key reads nothing of another tenant, on any route of the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import SHADOW, Span
from lightning_spans.store.deployments import Assignment
from lightning_spans.store.protocol import LISTINGS
from lightning_spans.terms import make_terms
from lightning_trainer.gateway.app import App
from lightning_trainer.kits.deploy.serving import deploying
from lightning_trainer.kits.deploy.transitions import Note, Policy, name_candidate
from lightning_trainer.kits.view.pages import add_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs
from support.fakes import FakeEngine, Served, served

MARK = "globex"  # in everything of the other tenant, and in no request of the first
TRACE = "b" * 32
# The routes that a tenant's key opens. A new one belongs here after the test's requests reach what it reads.
OPENED = {
    "caller": {
        "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages",
        "POST /v1/messages/count_tokens", "POST /v1/embeddings", "POST /v1/traces", "GET /v1/models",
        "GET /v1/models/NAME",
    },
    "live": {"POST /v1/traces"},
}  # fmt: skip
WITHOUT_KEY = {
    "GET /healthz", "GET /livez", "GET /readyz", "GET /metrics", "GET /openapi.json", "GET /view",
    "GET /view/", "GET /view/{name}",
}  # fmt: skip


def routes_of(app: App) -> set[str]:
    """Every route of an app, as METHOD PATH."""
    named = {f"{method} {path}" for method, path in app.hot}
    rest: list[Any] = list(app.routes)
    while rest:
        route = rest.pop()
        if (inner := getattr(route, "original_router", None)) is not None:
            rest += inner.routes
        else:
            named |= {f"{method} {route.path}" for method in route.methods - {"HEAD"}}
    described = {f"{method.upper()} {path}" for path, of in app.openapi()["paths"].items() for method in of}
    assert described <= named, "a route is described that was not enumerated"
    return named


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """A server with the viewer and deployments, whose model repeats its prompt."""
    with served(tmp_path, FakeEngine(lambda prompt: prompt)) as running:
        add_view(running.app, Views(Runs(store=str(tmp_path / "server.db"))))
        with deploying(running.app):
            yield running


def key(server: Served, scope: Any, tenant: str) -> dict[str, str]:
    token = server.keys.issue(scope, holder=f"of {tenant}", terms=make_terms(tenant=tenant))
    return {"authorization": f"Bearer {token}", "x-lightning-agent": f"{tenant}-agent"}


def fill(server: Served) -> str:
    """Records of every kind, of the tenant globex. Returns the id of a response that its program may continue."""
    store, at, terms = server.store, {"start_ns": 1, "end_ns": 2}, make_terms(tenant=MARK)
    attributes = {"lightning.request": f"{MARK} asks", **terms}
    store.add_spans(
        [
            Span(
                operation="chat",
                name=MARK,
                trace_id=TRACE,
                span_id="b" * 16,
                origin="live",
                attributes=attributes,
                **at,
            )
        ]
    )
    copy = {"agent": f"{MARK}-agent", "conversation": f"conversation:{MARK}"}
    store.add_calls(
        [
            Call(call_id=f"{MARK}-{origin}", response_id=f"{MARK}-{origin}", policy="policy", policy_version=0,
                 origin=origin, trace_id=TRACE, sampling={SHADOW: copy}, request={"prompt": MARK}, **at)
            for origin in ("live", SHADOW)
        ]
    )  # fmt: skip
    talk = {"attempt_id": f"conversation:{MARK}"}
    store.add_rewards([Reward(value=1.0, rollout_id=talk["attempt_id"], reward_id=MARK, source="users", **talk)])
    store.add_assignments([Assignment(agent=f"{MARK}-agent", policy="policy", number=1, at_ns=1, **talk)])
    note = Note(f"{MARK} asked for it", "ada")
    store.add_deployments([name_candidate(None, f"{MARK}-agent", Policy("new"), note, stable="policy")])
    said = httpx.post(
        f"{server.url}/v1/responses", headers=key(server, "caller", MARK), json={"model": "policy", "input": MARK}
    )
    assert MARK in said.text
    return str(said.json()["id"])


def test_a_tenants_key_reads_nothing_of_another_tenant_on_any_route(server: Served) -> None:
    response_id = fill(server)
    admin = {"authorization": f"Bearer {server.keys.issue('admin')}"}
    for what in ("spans", "calls", "rewards", "assignments", "deployments"):
        assert MARK in httpx.get(f"{server.url}/api/{what}", headers=admin).text, f"{what}: the test checks nothing"
    message = {"role": "user", "content": "hi"}
    body = {
        "model": "policy", "messages": [message], "input": "hi", "prompt": "hi", "max_tokens": 5,
        "trace_ids": [TRACE], "previous_response_id": response_id,
    }  # fmt: skip
    bodies = [{}, body, {"model": "policy", "input": "hi", "previous_response_id": response_id},
              *({"model": "policy", name: value} for name, value in (("prompt", "hi"), ("input", "hi"))),
              {"model": "policy", "messages": [message], "max_tokens": 5},
              *({"what": what, "trace_ids": [TRACE]} for what in LISTINGS)]  # fmt: skip
    for scope, expected in OPENED.items():
        opened = set[str]()
        headers = key(server, scope, "acme")
        for route in sorted(routes_of(server.app)):
            method, path = route.split(" ")
            url = server.url + re.sub(r"\{.*?\}", TRACE, path.replace("NAME", "policy"))
            for sent in bodies if method == "POST" else [None]:
                reply = httpx.request(method, url, headers=headers, json=sent, params={"trace_id": TRACE})
                assert MARK not in reply.text.lower(), f"{scope}: {route} answers {reply.text}"
                if reply.status_code not in (401, 403):
                    opened.add(route)
        assert opened == expected | WITHOUT_KEY


def test_a_program_continues_the_responses_of_its_own_tenant(server: Served) -> None:
    response_id = fill(server)
    url, body = f"{server.url}/v1/responses", {"model": "policy", "input": "And?", "previous_response_id": response_id}
    assert MARK in httpx.post(url, headers=key(server, "caller", MARK), json=body).text
    for other in (key(server, "caller", "acme"), {"authorization": f"Bearer {server.keys.issue('caller')}"}):
        refused = httpx.post(url, headers=other, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")

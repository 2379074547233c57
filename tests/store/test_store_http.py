"""The HTTP store keeps every promise of a store against the answers written in its module, and bears a bad network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lightning_conformance import StoreConformance
from lightning_conformance.stores.samples import a_rollout, a_span
from lightning_spans.errors import ConfigError, LeaseLostError, RefusedError, RewardError, StoreError
from lightning_spans.schema.attempts import End, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import dumps, from_json, loads, to_json
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store, http, open_store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.http import HttpStore
from lightning_spans.store.protocol import LISTINGS, Where
from lightning_spans.store.sql.store import SqlStore

URL = "http://127.0.0.1:9"


def answer(store: Store, request: httpx.Request) -> httpx.Response:
    """Answer as a server does, in the fewest words."""
    path, body = request.url.path.removeprefix("/api/"), loads(request.content)
    try:
        return httpx.Response(200, content=dumps(_result(store, path, body)))
    except LeaseLostError as error:
        return httpx.Response(409, json={"error": {"message": str(error), "type": "lease_lost", "code": None}})
    except (StoreError, ValueError) as error:
        return httpx.Response(400, json={"error": {"message": str(error), "type": "bad_request", "code": None}})


def _result(store: Store, path: str, body: dict[str, Any]) -> dict[str, Any]:
    kinds = {
        "spans": Span,
        "calls": Call,
        "rewards": Reward,
        "deployments": Deployment,
        "assignments": Assignment,
    }
    match path.split("/"):
        case ["spans" | "calls" | "rewards" | "deployments" | "assignments" as what]:
            return {"kept": getattr(store, f"add_{what}")([from_json(kinds[what], item) for item in body[what]])}
        case ["query"]:
            of_many = len(body.get("attempt_ids", ())) > 1000  # otherwise several pages, even of few records
            what, after, limit = body.pop("what"), body.pop("after"), body.pop("limit", 1000 if of_many else 2)
            back = body.pop("newest_first", False)
            page = store.page(LISTINGS[what].kind, Where(**body), after=after, limit=limit, newest_first=back)
            return {what: [to_json(record) for record in page.records], "next": page.next}
        case ["rollouts"]:
            return {"queued": store.enqueue([from_json(Rollout, item) for item in body["rollouts"]])}
        case ["rollouts", "cancel"]:
            return {"cancelled": store.cancel(body["rollout_ids"])}
        case ["claims"]:
            return {"attempts": [to_json(attempt) for attempt in store.claim(body.pop("worker"), **body)]}
        case ["heartbeats"]:
            return {"lost": store.heartbeat([tuple(lease) for lease in body["leases"]], lease_s=body["lease_s"])}
        case ["attempts", attempt_id, "finish"]:
            rewards = [from_json(Reward, item) for item in body.pop("rewards")]
            return {"status": store.finish(attempt_id, body.pop("fence"), rewards=rewards, **body)}
        case ["finishes"]:
            return {"answers": [_told(one) for one in store.finish_all([from_json(End, end) for end in body["ends"]])]}
        case ["delete"]:
            return {"deleted": store.delete(**body)}
        case ["groups", "consume"]:
            return {"ok": store.consume_group(**body)}
    raise ValueError(f"no such path: {path}")


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{tmp_path}/lightning.db")
    yield store
    store.close()


def _told(answer: Any) -> dict[str, Any]:
    codes = {LeaseLostError: "lease_lost", RewardError: "bad_reward"}
    if isinstance(answer, Exception):
        return {"code": codes.get(type(answer), "refused"), "message": str(answer)}
    return {"status": answer}


class TestHttpStore(StoreConformance):
    @pytest.fixture
    def store(self, reopen: Callable[[], Store]) -> Store:
        return reopen()

    @pytest.fixture
    def reopen(self, behind: SqlStore) -> Callable[[], Store]:
        return lambda: HttpStore(URL, transport=httpx.MockTransport(lambda request: answer(behind, request)))


class Scripted(httpx.BaseTransport):
    """Return or raises what the script says, in turn."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        event = self.script.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses asked for, instead of slept; the clock goes on by them."""
    slept: list[float] = []
    now = time.monotonic()
    # The module's own name of it: other threads sleep on.
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: now + sum(slept))
    monkeypatch.setattr(http, "time", clock)
    return slept


KEPT = httpx.Response(200, json={"kept": 1})
LOST = httpx.ReadError("connection reset")
REFUSED = httpx.ConnectError("connection refused")


def test_a_lost_answer_is_asked_for_again(pauses: list[float]) -> None:
    transport = Scripted(REFUSED, LOST, httpx.ReadTimeout("slow"), KEPT)
    store = HttpStore(URL, transport=transport)
    assert store.add_spans([a_span()]) == 1
    assert len({request.content for request in transport.requests}) == 1
    assert pauses == sorted(pauses)
    assert len(pauses) == 3


def test_a_claim_whose_answer_was_lost_is_not_repeated(pauses: list[float]) -> None:
    attempts = httpx.Response(200, json={"attempts": []})
    assert HttpStore(URL, transport=Scripted(REFUSED, attempts)).claim("worker") == []
    transport = Scripted(LOST, attempts)
    with pytest.raises(StoreError, match="connection reset"):
        HttpStore(URL, transport=transport).claim("worker")
    assert len(transport.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_busy_server_is_given_the_time_it_asks_for(pauses: list[float], status: int) -> None:
    busy = httpx.Response(status, headers={"retry-after": "2"}, json={"error": {"message": "too many spans wait"}})
    store = HttpStore(URL, transport=Scripted(busy, busy, KEPT))
    assert store.add_spans([a_span()]) == 1
    assert all(1.5 <= pause <= 2 for pause in pauses)


@pytest.mark.parametrize("failure", [REFUSED, httpx.Response(503, json={"error": {"message": "too many spans wait"}})])
def test_patience_ends_with_an_error_that_says_what_happened(pauses: list[float], failure: Any) -> None:
    store = HttpStore(URL, transport=Scripted(*[failure] * 100), patience_s=30.0)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9.*(connection refused|too many spans wait).*Is it running"):
        store.add_spans([a_span()])
    assert sum(pauses) <= 30
    assert max(pauses) <= 5


def test_refusals_are_told_in_the_servers_words() -> None:
    refused = httpx.Response(403, json={"error": {"message": "this key may not", "type": "forbidden", "code": None}})
    transport = Scripted(refused, httpx.Response(500, text="Internal Server Error"), httpx.Response(200, text="<html>"))
    store = HttpStore(URL, transport=transport)
    with pytest.raises(RefusedError, match="403: this key may not"):
        store.add_spans([a_span()])
    with pytest.raises(StoreError, match="500: Internal Server Error"):
        store.enqueue([a_rollout()])
    with pytest.raises(StoreError, match="lightning-rl server"):
        store.cancel(["a"])


def test_an_answer_that_is_no_record_is_refused() -> None:
    store = HttpStore(URL, transport=Scripted(httpx.Response(200, json={"spans": [{"name": 3}]})))
    with pytest.raises(StoreError, match=r"Span\.name"):
        store.spans()


def test_ids_of_any_text_reach_the_server_whole() -> None:
    transport = Scripted(httpx.Response(200, json={"status": "succeeded"}))
    HttpStore(URL, transport=transport).finish("a/b c?.1", 1, status="succeeded")
    assert transport.requests[0].url.raw_path == b"/api/attempts/a%2Fb%20c%3F.1/finish"


def test_the_key_is_sent_and_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Scripted(KEPT, KEPT)
    HttpStore(URL, key="given", transport=transport).add_spans([a_span()])
    monkeypatch.setenv("LIGHTNING_KEY", "from the environment")
    HttpStore(URL, transport=transport).add_spans([a_span()])
    sent = [request.headers["authorization"] for request in transport.requests]
    assert sent == ["Bearer given", "Bearer from the environment"]


def test_line_breaks_around_a_key_are_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Scripted(KEPT)
    monkeypatch.setenv("LIGHTNING_KEY", "lk-good\r\n")
    HttpStore(URL, transport=transport).add_spans([a_span()])
    assert transport.requests[0].headers["authorization"] == "Bearer lk-good"


@pytest.mark.parametrize("text", ["schlüssel-geheim", "lk-geheim\nlk-geheim"])
def test_what_can_be_no_key_is_refused_untold(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LIGHTNING_KEY", text)
    with pytest.raises(ConfigError, match="LIGHTNING_KEY contains no key") as told:
        HttpStore(URL)
    assert "geheim" not in str(told.value)


def test_certificates_that_can_not_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/at/all.pem")
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE=/nowhere/at/all\.pem"):
        HttpStore(URL)


def test_open_store_opens_a_server() -> None:
    store = open_store(f"{URL}/", key="k")
    assert isinstance(store, HttpStore)
    assert store.name == URL
    store.close()


def test_many_records_go_in_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BATCH", 2)
    transport = Scripted(*[httpx.Response(200, json={"kept": len(batch)}) for batch in ("ab", "cd", "e")])
    assert HttpStore(URL, transport=transport).add_spans([a_span() for _ in range(5)]) == 5

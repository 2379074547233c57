"""The API, its keys, and what an attempt's key must never do."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import httpx
import openai
import pytest

from lightning_conformance.stores.samples import a_span
from lightning_spans.adapter.adapt import adapt
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.json import to_json
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import open_store
from lightning_spans.store.api import API
from lightning_spans.store.protocol import LISTINGS
from lightning_spans.store.traces import traces_of
from lightning_trainer.gateway.settings import Limits, Routing
from lightning_trainer.rl.credit.assigners import identical
from support.fakes import FakeEngine, served

_JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(body_bytes=200_000)
    with served(tmp_path_factory.mktemp("api"), FakeEngine(), limits=limits) as running:
        yield running


@pytest.fixture
def admin(server):
    with _client(server, server.keys.issue("admin")) as client:
        yield client


@pytest.fixture
def runner(server):
    with _client(server, server.keys.issue("runner")) as client:
        yield client


def test_a_rollout_goes_from_the_queue_through_a_worker_to_its_reward(server, admin, runner):
    server.app.state.routing = Routing(agents=("writer", "re*"), model="policy")
    assert _enqueue(admin, "whole way") == {"queued": 1}
    (attempt,) = _claim(runner)
    context = attempt["context"]
    assert attempt["rollout"]["task"] == {"question": "whole way"}
    assert context["agents"] == ["writer", "re*"]
    assert context["model"] == "policy"
    assert context["endpoint"] == server.url
    client = openai.OpenAI(base_url=context["endpoint"] + "/v1", api_key=context["key"])
    client.chat.completions.create(model=context["model"], messages=USER)
    lease = [[attempt["attempt_id"], attempt["fence"]]]
    assert runner.post("/api/heartbeats", json={"leases": lease}).json() == {"lost": []}
    reward = to_json(Reward(rollout_id="whole way", attempt_id=attempt["attempt_id"], value=0.5, agent="writer"))
    assert _finish(runner, attempt, rewards=[reward]).json() == {"status": "succeeded"}
    (call,) = admin.get("/api/calls", params={"attempt_id": attempt["attempt_id"]}).json()["calls"]
    assert call["rollout_id"] == "whole way"
    (kept,) = admin.post("/api/query", json={"what": "rewards", "rollout_ids": ["whole way"]}).json()["rewards"]
    assert (kept["value"], kept["agent"]) == (0.5, "writer")
    (rollout,) = admin.get("/api/rollouts", params={"rollout_id": "whole way"}).json()["rollouts"]
    assert rollout["status"] == "succeeded"


def test_the_training_loop_can_change_who_is_rerouted(server, admin, runner):
    _enqueue(admin, "before")
    server.app.state.routing = Routing(agents=("a",), endpoint="http://elsewhere:1")
    (first,) = _claim(runner)
    server.app.state.routing = Routing(agents=("b",))
    _enqueue(admin, "after")
    (second,) = _claim(runner)
    assert (first["context"]["agents"], first["context"]["endpoint"]) == (["a"], "http://elsewhere:1")
    assert (second["context"]["agents"], second["context"]["endpoint"]) == (["b"], server.url)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/rewards", {"rewards": []}),  # forge a reward
        ("POST", "/v1/models", {"model": "rogue", "url": "http://rogue"}),  # register a rogue model
        ("POST", "/api/models", {"model": "rogue", "url": "http://rogue"}),
        ("POST", "/api/pause", {}),  # pause the gateway
        ("POST", "/api/attempts/OTHER/finish", {"fence": 1, "status": "succeeded", "rewards": []}),  # end another's
        ("POST", "/api/claims", {"worker": "me"}),
        ("POST", "/api/heartbeats", {"leases": []}),
        ("POST", "/api/rollouts", {"rollouts": []}),
        ("POST", "/api/rollouts/cancel", {"rollout_ids": ["OTHER"]}),
        ("POST", "/api/spans", {"spans": []}),
        ("POST", "/api/calls", {"calls": []}),
        ("POST", "/api/query", {"what": "spans"}),
        ("POST", "/api/groups/consume", {"group_id": "g", "consumer": "me"}),
        ("GET", "/api/rollouts", None),
        ("GET", "/api/attempts", None),
        ("GET", "/api/spans", None),
        ("GET", "/api/calls", None),
        ("GET", "/api/rewards", None),
    ],
)
def test_an_attempts_key_can_sample_and_send_spans_and_nothing_else(server, admin, runner, method, path, body):
    name = f"victim of {method} {path}"
    _enqueue(admin, name)
    (victim,) = _claim(runner)
    if "rewards" in (body or {}):
        forged = Reward(rollout_id=name, attempt_id=victim["attempt_id"], value=1e9)
        body = {**body, "rewards": [to_json(forged)]}
    path = path.replace("OTHER", victim["attempt_id"])
    with _client(server, server.key("attacker")) as attacker:
        reply = attacker.request(method, path, json=body)
        assert reply.status_code in {403, 404, 405}
        assert set(reply.json()["error"]) >= {"message", "type", "code"}
        assert openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("attacker")).models.list()
    (attempt,) = admin.get("/api/attempts", params={"attempt_id": victim["attempt_id"]}).json()["attempts"]
    assert attempt["status"] == "running"
    assert admin.get("/api/rewards", params={"attempt_id": victim["attempt_id"]}).json() == {"rewards": []}


@pytest.mark.parametrize("path", ["/api/rollouts", "/api/query", "/api/rollouts/cancel", "/api/groups/consume"])
def test_a_runners_key_can_not_run_the_training(runner, path):
    body = {"rollouts": [], "what": "spans", "rollout_ids": [], "group_id": "g", "consumer": "c"}
    assert runner.post(path, json=body).status_code == 403


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain;charset=UTF-8", None])
def test_json_is_read_as_such_whatever_curl_or_fetch_calls_it(server, runner, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = runner.post("/api/heartbeats", content=b'{"leases": [["gone", 1]], "lease_s": 9}', headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"lost": ["gone"]})


@pytest.mark.parametrize("key", [None, "Bearer", "Basic YWRtaW4=", "Bearer nonsense", "Bearer lk-nonsense.nonsense"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/traces", "/api/claims"])
def test_without_a_good_key_nothing_is_done(server, path, key):
    headers = {} if key is None else {"authorization": key}
    reply = httpx.post(server.url + path, json={"worker": "x"}, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"


def test_the_key_of_an_ended_attempt_stops_working_at_once(server, admin, runner):
    _enqueue(admin, "ends")
    (attempt,) = _claim(runner)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=attempt["context"]["key"], max_retries=0)
    client.chat.completions.create(model="policy", messages=USER)
    _finish(runner, attempt)
    with pytest.raises(openai.AuthenticationError, match="ended"):
        client.chat.completions.create(model="policy", messages=USER)


def test_the_key_of_a_cancelled_attempt_stops_working_at_once(server, admin, runner):
    _enqueue(admin, "is cancelled")
    (attempt,) = _claim(runner)
    assert admin.post("/api/rollouts/cancel", json={"rollout_ids": ["is cancelled"]}).json() == {"cancelled": 1}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=attempt["context"]["key"], max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="policy", messages=USER)


def test_an_attempt_that_ends_behind_the_servers_back_is_noticed(server, admin, runner, monkeypatch):
    monkeypatch.setattr(server.app.state.attempts, "_recheck_s", 0.0)
    _enqueue(admin, "ends elsewhere")
    (attempt,) = _claim(runner)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=attempt["context"]["key"], max_retries=0)
    client.chat.completions.create(model="policy", messages=USER)
    server.store.finish(attempt["attempt_id"], attempt["fence"], status="succeeded")
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="policy", messages=USER)


def test_an_attempts_key_lives_as_long_as_its_time_limit_allows(server, admin, runner):
    _enqueue(admin, "timed", timeout_s=100.0)
    (attempt,) = _claim(runner)
    left_s = server.keys.check(attempt["context"]["key"]).expires_s - time.time()
    assert 100 < left_s <= 700


def test_a_late_result_of_a_lost_lease_is_a_conflict(admin, runner):
    _enqueue(admin, "late")
    (attempt,) = _claim(runner)
    reply = _finish(runner, {**attempt, "fence": attempt["fence"] - 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "lease_lost")


@pytest.mark.parametrize("together", [False, True])
def test_an_attempt_that_failed_over_a_restart_of_the_server_is_given_back(
    server, admin, runner, monkeypatch, together
):
    name = f"failed over a restart {together}"
    _enqueue(admin, name, max_attempts=1)
    for over_a_restart, rollout_status in ((True, "queued"), (False, "failed")):
        (attempt,) = _claim(runner)
        if over_a_restart:
            server.app.state.began_ns = time.time_ns()  # a restarted server's
        body = {"fence": attempt["fence"], "status": "failed", "rewards": [], "error": "ConnectionError"}
        if together:
            body = {"ends": [body | {"attempt_id": attempt["attempt_id"]}]}
            assert runner.post("/api/finishes", json=body).json()["answers"] == [{"status": rollout_status}]
        else:
            reply = runner.post(f"/api/attempts/{attempt['attempt_id']}/finish", json=body)
            assert reply.json() == {"status": rollout_status}
    first, second = server.store.attempts(rollout_ids=[name])
    assert (first.status, second.status) == ("released", "failed")
    assert first.error.startswith("the server was started again while it ran")


def test_a_reward_posted_while_the_attempt_runs_is_for_the_calls_that_had_ended(server, admin, runner):
    """Other languages give rewards on the way over HTTP: the server writes down when."""
    _enqueue(admin, "on the way")
    (attempt,) = _claim(runner)
    ids = {"rollout_id": "on the way", "attempt_id": attempt["attempt_id"]}
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=attempt["context"]["key"])
    with _client(server, server.keys.issue("evaluator", holder="judge")) as evaluator:
        client.chat.completions.create(model="policy", messages=USER)
        assert evaluator.post("/api/rewards", json={"rewards": [{**ids, "value": 1.0}]}).status_code == 200
        client.chat.completions.create(model="policy", messages=USER)
        _finish(runner, attempt, rewards=[{**ids, "value": 0.25}])
        evaluator.post("/api/rewards", json={"rewards": [{**ids, "value": 0.5}]})
    (trace,) = traces_of(server.store, attempt_ids=[attempt["attempt_id"]])
    assert [(reward.value, reward.given_ns is None) for reward in trace.rewards] == [
        (1.0, False),
        (0.25, True),
        (0.5, True),
    ]
    assert identical(adapt(trace), trace.rewards) == [1.75, 0.75]


def test_a_reward_for_another_attempt_is_refused_at_the_finish(admin, runner):
    _enqueue(admin, "own")
    (attempt,) = _claim(runner)
    other = to_json(Reward(rollout_id="own", attempt_id="another", value=1.0, reward_id="half \ud83d"))
    body = json.dumps({"fence": attempt["fence"], "status": "succeeded", "rewards": [other]})
    reply = runner.post(f"/api/attempts/{attempt['attempt_id']}/finish", content=body, headers=_JSON)
    assert (reply.status_code, "another" in reply.json()["error"]["message"]) == (400, True)
    assert _finish(runner, attempt).status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("/api/claims", b"not json", "JSON"),
        ("/api/claims", b"[]", "object"),
        ("/api/claims", b'{"worker": ""}', "worker"),
        ("/api/claims", b'{"worker": "w", "limit": 0}', "limit"),
        ("/api/claims", b'{"worker": "w", "lease": 3}', "lease"),
        ("/api/rollouts", b'{"rollouts": [{"rollout_id": "x"}]}', "Rollout"),
        ("/api/rewards", b'{"rewards": [{"rollout_id":"r","attempt_id":"a","value":1e999}]}', "finite"),
        ("/api/query", b'{"what": "secrets"}', "what"),
        ("/api/query", b'{"what": "rewards", "trace_ids": []}', "trace_ids"),
        ("/api/query", b'{"what": "rollouts", "status": "lost"}', "status"),
        ("/api/claims", b"[" * 100_000, "body"),
    ],
)
def test_a_malformed_body_is_a_400_that_names_the_fault(admin, path, content, says):
    reply = admin.post(path, content=content, headers=_JSON)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/api/rollouts", "/v1/chat/completions", "/v1/traces"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(admin, path, chunked):
    body = json.dumps({"rollouts": [], "messages": "x" * 250_000}).encode()
    content = iter([body[:100], body[100:]]) if chunked else body
    assert admin.post(path, content=content, headers=_JSON).status_code == 413


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/traces"])
def test_a_gzip_bomb_is_refused(admin, path):
    bomb = gzip.compress(b"0" * 50_000_000)
    assert len(bomb) < 200_000
    reply = admin.post(path, content=bomb, headers={"content-encoding": "gzip", "content-type": "application/json"})
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [(b"no gzip", "gzip", 400), (gzip.compress(b'{"model": 1}' * 9)[:-9], "gzip", 400), (b"{}", "br", 415)],
    ids=["no gzip", "cut short", "unknown"],  # gzip writes the time: workers would collect different tests
)
def test_a_broken_encoding_is_refused(admin, body, encoding, status):
    reply = admin.post("/v1/chat/completions", content=body, headers={"content-encoding": encoding})
    assert reply.status_code == status


def test_json_nested_too_deep_is_refused_and_wide_json_is_not(admin):
    deep = b'{"model": "policy", "messages": ' + b"[" * 300 + b"]" * 300 + b"}"
    reply = admin.post("/v1/chat/completions", content=deep)
    assert (reply.status_code, "nested" in reply.text) == (400, True)
    wide = {"model": "policy", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 300}
    assert admin.post("/v1/chat/completions", json=wide).status_code == 200


def test_every_error_has_openais_shape(admin):
    for reply in (admin.get("/nowhere"), admin.delete("/api/rollouts"), admin.get("/v1/chat/completions")):
        assert 400 <= reply.status_code < 500
        assert set(reply.json()["error"]) == {"message", "type", "code", "param"}


def test_an_endpoint_of_openai_that_is_not_served_says_which_are(admin):
    reply = admin.post("/v1/audio/speech", json={"model": "policy", "input": "hi"})
    assert (reply.status_code, "POST /v1/chat/completions" in reply.json()["error"]["message"]) == (404, True)
    assert admin.get("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/messages", "/v1/messages is: the client's base URL must end in /v1"),
        ("/models/policy", "/v1/models/policy is: the client's base URL must end in /v1"),
        ("/v1/v1/messages", "/v1/messages is: the client's base URL must not end in /v1"),
    ],
)
def test_a_path_of_another_base_url_says_how_to_correct_it(admin, path, says):
    reply = admin.post(path, json={"model": "policy"})
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (404, True), reply.text


def test_lists_come_by_pages(admin):
    spans = [to_json(a_span(origin="paged")) for _ in range(5)]
    assert admin.post("/api/spans", json={"spans": spans}).json() == {"kept": 5}
    read, after = [], 0
    while after is not None:
        page = admin.get("/api/spans", params={"origin": "paged", "limit": 2, "after": after}).json()
        assert len(page["spans"]) <= 2
        read += page["spans"]
        after = page.get("next")
    assert read == spans
    body = {"what": "spans", "origin": "paged", "limit": 5}
    assert admin.post("/api/query", json=body).json() == {"spans": spans}
    for params in ({"limit": 0}, {"limit": 10**6}, {"after": -1}, {"after": "x"}):
        assert admin.get("/api/spans", params=params).status_code == 400


def test_every_body_and_answer_is_described_by_the_fields_of_the_records(server):
    about = httpx.get(f"{server.url}/openapi.json").json()
    assert about["info"]["version"] == version("lightning-trainer")
    for method, place in API.items():
        described = about["paths"][f"/api{place.path}"]["post"]
        assert described["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("Request")
        answer = described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert list(about["components"]["schemas"][answer]["properties"]) == [place.answer], method
    schemas = about["components"]["schemas"]
    for listing in LISTINGS.values():
        fields = [field.name for field in dataclasses.fields(listing.kind)]
        assert list(schemas[listing.kind.__name__]["properties"]) == fields
    assert schemas["AddSpansRequest"]["properties"]["spans"]["items"] == {"$ref": "#/components/schemas/Span"}
    assert schemas["Call"]["properties"]["choices"]["items"] == {"$ref": "#/components/schemas/Choice"}


def test_the_api_is_described_and_the_description_needs_no_key(server):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/api/claims", "/api/rollouts", "/api/attempts/{attempt_id}/finish", "/api/query"} <= set(paths)
    assert "requestBody" in paths["/api/claims"]["post"]


def test_metrics_count_requests_calls_and_tokens(tmp_path):
    with served(tmp_path, FakeEngine(["abcd"])) as server:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a")).chat.completions.create(
            model="policy", messages=USER
        )
        httpx.post(f"{server.url}/v1/chat/completions")
        text = httpx.get(f"{server.url}/metrics").text
    assert 'lightning_requests_total{path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'lightning_requests_total{path="/v1/chat/completions",status="401"} 1.0' in text
    assert 'lightning_calls_total{outcome="ok"} 1.0' in text
    assert 'lightning_tokens_total{kind="completion"} 5.0' in text
    assert "lightning_calls_in_flight 0.0" in text


def test_metrics_report_the_queue_that_the_documented_autoscaler_reads(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md").read_text()
    read = set(re.findall(r"query: \w+\((\w+)\)", page))
    with served(tmp_path, FakeEngine()) as server:
        assert "lightning_queued_rollouts 0.0" in httpx.get(f"{server.url}/metrics").text
    with closing(open_store(str(tmp_path / "server.db"))) as store:
        store.enqueue([Rollout(rollout_id=name, group_id="g", task={}) for name in ("one", "two", "three")])
        store.claim("w")
        depth, oldest_s = store.backlog()
    assert depth == 2
    assert oldest_s > 0.0
    with served(tmp_path, FakeEngine()) as server:
        text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert read == {"lightning_queued_rollouts", "lightning_queue_wait_seconds"}
    assert float(values["lightning_queued_rollouts"]) == 2.0
    assert float(values["lightning_queue_wait_seconds"]) >= oldest_s


def test_no_key_is_ever_logged(tmp_path, caplog):
    caplog.set_level("DEBUG")
    with served(tmp_path, FakeEngine([RuntimeError("broken")])) as server:
        key = server.key("a")
        for path in ("/v1/chat/completions", "/v1/traces", "/api/claims"):
            for body in ({"model": "policy", "messages": USER}, {"worker": "w"}):
                httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"})
    ours = [record.getMessage() + str(record.exc_text) for record in caplog.records if "httpcore" not in record.name]
    assert not [line for line in ours if key in line or key[3:40] in line]


def _client(server, key):
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})


def _enqueue(admin, name, **fields):
    rollout = Rollout(rollout_id=name, group_id=name, task={"question": name}, **fields)
    return admin.post("/api/rollouts", json={"rollouts": [to_json(rollout)]}).json()


def _claim(runner):
    return runner.post("/api/claims", json={"worker": "w", "limit": 10}).json()["attempts"]


def _finish(runner, attempt, *, rewards=()):
    body = {"fence": attempt["fence"], "status": "succeeded", "rewards": list(rewards)}
    return runner.post(f"/api/attempts/{attempt['attempt_id']}/finish", json=body)


@pytest.mark.parametrize("number", [2**63, 2**64, 10**30])
def test_numbers_beyond_what_a_database_holds_are_refused(server, number):
    """As a place in a list: 400 in the shape of every error, no failure of the server's."""
    headers = {"authorization": f"Bearer {server.keys.issue('admin')}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        replies = [client.get(f"/api/spans?after={number}")]
        replies.append(client.post("/api/query", content=f'{{"what": "spans", "after": {number}}}'))
        for reply in replies:
            assert (reply.status_code, "error" in reply.json()) == (400, True), reply.text


class FailingStore:
    def page(self, *_, **__):
        raise ZeroDivisionError("of our own")


def test_a_fault_of_ours_has_the_shape_of_every_error(server, monkeypatch):
    monkeypatch.setattr(server.app.state, "store", FailingStore())
    reply = httpx.get(f"{server.url}/api/spans", headers={"authorization": f"Bearer {server.keys.issue('admin')}"})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "of our own" not in reply.text

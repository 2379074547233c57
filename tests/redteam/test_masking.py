"""Keys and passwords that the server was given: in no text that leaves it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from lightning_spans.errors import StoreError
from lightning_spans.record import stalls
from lightning_spans.record.delivery.otlp import PROTOBUF, encode
from lightning_spans.record.production import Live
from lightning_spans.record.redaction import read_rules
from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import to_json
from lightning_spans.store.traces import traces_of
from lightning_spans.terms import TENANT, TERMS, make_terms
from lightning_trainer.cli.servers import serving
from lightning_trainer.gateway.http import masking
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.masking import mask_secrets
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.upstream.upstream import Upstream
from support.fakes import ByteTokenizer, FakeEngine, Served, served
from support.gateway.theft import span_of


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch):
    monkeypatch.setattr(masking, "_secrets", set())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pass@host/v1 is down", "http://***@host/v1 is down"),
        ("postgresql://user:pa/ss@host:5/x", "postgresql://***@host:5/x"),
        ("http://host:80/a@b and http://[::1]:80/a@b", "http://host:80/a@b and http://[::1]:80/a@b"),
        ("https://host/v1?api_key=abcdef&x=1", "https://host/v1?api_key=***&x=1"),
        ("Incorrect API key provided: sk-abcdefghijklmnop.", "Incorrect API key provided: sk-***"),
        ("authorization: Bearer abcdefghijklmnop", "authorization: Bearer ***"),
        ("key lk-eyJhbGciOi.abcdefgh", "key lk-***"),
        ("no key: send the header 'Authorization: Bearer KEY'", "no key: send the header 'Authorization: Bearer KEY'"),
        ("12 tokens at http://host:80/v1, basic arithmetic", "12 tokens at http://host:80/v1, basic arithmetic"),
    ],
)
def test_what_looks_like_a_key_is_masked(text, shown):
    assert mask_secrets(text) == shown


def test_what_was_given_as_a_key_is_masked_wherever_it_stands():
    masking.remember("odd key of theirs")
    masking.remember_password("postgresql://u:p%40ssw0rd@db/x")
    assert mask_secrets("got 'odd key of theirs' and p@ssw0rd or p%40ssw0rd") == "got '***' and *** or ***"
    assert Refusal(502, "it said odd key of theirs").body_for("/v1/messages").count(b"***") == 1


def test_an_upstreams_key_and_password_reach_no_agent_no_record_and_no_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="lightning_trainer")

    async def tells(request):
        message = f"bad key {request.headers['authorization']}, you asked {request.url}"
        return JSONResponse({"error": {"message": message}}, 401)

    masking.remember("hush-key-of-theirs")
    behind = ServerThread(Starlette(routes=[Route("/{path:path}", tells, methods=["GET", "POST"])]))
    place = behind.start().removeprefix("http://")
    upstreams = [
        Upstream("telling", f"http://{place}/v1", "hush-key-of-theirs"),
        Upstream("down", "http://user:hush-password@127.0.0.1:9/v1?token=hush-token", "hush-key-of-theirs"),
    ]
    try:
        with served(tmp_path, FakeEngine(), upstreams=upstreams) as server, httpx.Client(base_url=server.url) as client:
            texts = []
            for model in ("telling", "down"):
                body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
                for stream in (False, True):
                    key = server.key(model)
                    headers = {"authorization": f"Bearer {key}"}
                    sent = {**body, "stream": stream}
                    texts.append(client.post("/v1/chat/completions", json=sent, headers=headers, timeout=60).text)
            admin = {"authorization": f"Bearer {server.keys.issue('admin')}"}
            texts += [client.get(path, headers=admin).text for path in ("/api/policies", "/healthz", "/metrics")]
            texts += [
                json.dumps(to_json(call), default=str) for model in ("telling", "down") for call in server.calls(model)
            ]
    finally:
        behind.stop()
    assert len(texts) == 4 + 3 + 4
    assert "***" in texts[0]
    assert not any("hush" in text for text in [*texts, caplog.text])


def test_the_password_of_an_upstreams_address_is_in_no_warning_about_it(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(stalls._bounds, "upstream", 1e-9)
    waits = []

    async def models(request):
        return JSONResponse({"data": [{"id": "m", "owned_by": request.path_params["kind"]}]})

    async def chat(request):
        waits.extend(map(str, stalls.stalls()))
        return JSONResponse({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]})

    async def completions(request):
        top = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
        return JSONResponse({"choices": [{"index": 0, "text": "a", "logprobs": top}]})

    pages = {"models": models, "chat/completions": chat, "completions": completions}
    routes = [Route(f"/{{kind}}/{path}", page, methods=["GET", "POST"]) for path, page in pages.items()]
    behind = ServerThread(Starlette(routes=routes))
    place = behind.start().replace("://", "://user:hush-password@")
    upstreams = [Upstream("plain", f"{place}/plain", tokenizer=ByteTokenizer()), Upstream("vllm", f"{place}/vllm")]
    try:
        with served(tmp_path, upstreams=upstreams) as server, httpx.Client(base_url=server.url) as client:
            for model in ("plain", "vllm"):
                headers = {"authorization": f"Bearer {server.key(model)}"}
                body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
                assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    finally:
        behind.stop()
    told = [record.getMessage() for record in caplog.records]
    assert any("***@" in text and "gets messages although" in text for text in told)
    assert any("***@" in text and "log-probabilities at temperature 1" in text for text in told)
    assert len(waits) == 2
    assert not any("hush" in text for text in [*told, *waits])


def test_every_logger_of_the_gateway_masks():
    import lightning_trainer.gateway as package

    modules = list(Path(package.__path__[0]).rglob("*.py"))
    assert [path.name for path in modules if "getLogger(" in path.read_text()] == ["masking.py"]


def test_an_attempts_error_is_kept_without_keys(ask, server, running_attempt):
    path = f"/api/attempts/{running_attempt.attempt_id}/finish"
    ending = {"fence": running_attempt.fence, "status": "failed", "error": "AuthenticationError: sk-abcdefghijklmnop"}
    assert ask("POST", path, server.keys.issue("runner"), json=ending).is_success
    (record,) = server.store.attempts(attempt_ids=[running_attempt.attempt_id])
    assert record.error == "AuthenticationError: sk-***"


def test_no_page_loads_scripts_from_elsewhere(ask):
    assert [ask("GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 200]


def test_no_key_can_change_what_anothers_processes_told(server):
    from lightning_trainer.gateway.http.metrics import Metrics

    metrics = Metrics()
    one, other = (server.keys.check(server.key(name)) for name in ("one", "other"))
    metrics.sender("process;report=1;delivered=5", one.scope, str(one.attempt_id or one.key_id))
    metrics.sender(
        "process;report=999;delivered=0;dropped=99999999999999999999;spooled=\u0664",
        other.scope,
        str(other.attempt_id or other.key_id),
    )
    for _ in range(2):  # sent again, because its answer was lost
        metrics.sender("process;report=2;delivered=1", one.scope, str(one.attempt_id or one.key_id))
    told = {
        sample.labels["outcome"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "lightning_sender_spans_total"
    }
    assert told == {"delivered": 6.0}


def test_a_database_that_is_still_starting_is_waited_for(monkeypatch, tmp_path):
    from lightning_trainer.session import session

    tried, real = [], session.open_store

    def starting(url):
        tried.append(url)
        if len(tried) < 3:
            raise StoreError("store x can't be opened: FATAL: the database system is starting up")
        return real(str(tmp_path / "store.db"))

    monkeypatch.setattr(session, "open_store", starting)
    with serving.opened_when_ready("postgresql://db/x", pause_s=0.0) as store:
        assert store.rollouts() == []
    tried.clear()
    with pytest.raises(StoreError), serving.opened_when_ready("postgresql://db/x", wait_s=-1.0):
        pass
    monkeypatch.setattr(session, "open_store", lambda _: (_ for _ in ()).throw(StoreError("password failed")))
    with pytest.raises(StoreError, match="password"), serving.opened_when_ready("postgresql://db/x", pause_s=0.0):
        pass


SECRET_CALL = {
    "model": "policy",
    "messages": [{"role": "user", "content": '{"password": "hunter2", "mail": "bob@example.com"}'}],
    "stop": ["bob@example.com"],
}


def post_call(server: Served, key: str, trace_id: str = "a" * 32) -> Call:
    """The record of a call; the answer has what the rules mask."""
    headers = {"authorization": f"Bearer {key}", "traceparent": f"00-{trace_id}-{'b' * 16}-01"}
    server.engine.play(["ask ann@example.com"])
    reply = httpx.post(f"{server.url}/v1/chat/completions", headers=headers, json=SECRET_CALL)
    assert reply.json()["choices"][0]["message"]["content"] == "ask ann@example.com"
    return server.store.calls(trace_ids=[trace_id])[-1]


def test_a_call_of_production_is_masked_before_it_is_stored_and_one_of_an_attempt_is_not(tmp_path: Path) -> None:
    live = Live(redaction=read_rules(["password", r"/[\w.+-]+@[\w.-]+/"], {}))
    with served(tmp_path, FakeEngine(), live=live) as server:
        masked = post_call(server, server.keys.issue("caller", terms=make_terms(tenant="acme")))
        whole = post_call(server, server.key("attempt"), "c" * 32)
        assert 'lightning_live_calls_total{outcome="redacted"} 1.0' in httpx.get(f"{server.url}/metrics").text
    stored = str(to_json(masked))
    assert "hunter2" not in stored
    assert "@example.com" not in stored
    assert masked.sampling[TERMS] == {TENANT: "acme"}
    assert masked.prompt_token_ids is None
    assert [(choice.token_ids, choice.logprobs) for choice in masked.choices] == [(None, None)]
    assert whole.request["messages"] == SECRET_CALL["messages"]
    assert whole.prompt_token_ids
    assert all(choice.token_ids and "ann@example.com" in str(choice.message) for choice in whole.choices)


@pytest.mark.parametrize("rules", [[], ["/nowhere/", "password_of_nobody"]])
def test_a_call_of_production_in_which_nothing_is_masked_keeps_its_tokens(tmp_path: Path, rules: list[str]) -> None:
    with served(tmp_path, FakeEngine(), live=Live(redaction=read_rules(rules, {}))) as server:
        call = post_call(server, server.keys.issue("caller"))
    assert call.prompt_token_ids
    assert all(choice.token_ids for choice in call.choices)


@pytest.mark.parametrize(("name", "hidden"), [("INPUTS", "hunter2"), ("INPUT_TEXT", "hunter2"), ("OUTPUTS", "ann@")])
def test_settings_of_openinference_mask_calls_of_production(tmp_path: Path, name: str, hidden: str) -> None:
    live = Live(redaction=read_rules([], {f"OPENINFERENCE_HIDE_{name}": "true"}))
    with served(tmp_path, FakeEngine(), live=live) as server:
        call = post_call(server, server.keys.issue("caller"))
        [trace] = traces_of(server.store, origin="live")
    assert hidden not in str(to_json(call))
    assert hidden not in str([node.span.attributes for node in trace])
    assert call.prompt_token_ids is None


def test_a_trace_of_production_is_kept_or_left_out_with_its_calls(tmp_path: Path) -> None:
    kept, left_out = "f" * 16 + "0" * 16, "0" * 16 + "f" * 16  # the second half decides
    with served(tmp_path, FakeEngine(), live=Live(rate=0.5)) as server:
        key = server.keys.issue("caller")
        headers = {"authorization": f"Bearer {key}", "content-type": PROTOBUF}
        for trace_id in (kept, left_out):
            server.engine.play(["yes"])
            traced = {**headers, "content-type": "application/json", "traceparent": f"00-{trace_id}-{'b' * 16}-01"}
            assert httpx.post(f"{server.url}/v1/chat/completions", headers=traced, json=SECRET_CALL).is_success
            spans = [span_of(None, trace_id=trace_id)]
            assert httpx.post(f"{server.url}/v1/traces", headers=headers, content=encode(spans)).is_success
        assert [call.trace_id for call in server.store.calls()] == [kept]
        assert [span.trace_id for span in server.store.spans()] == [kept]
        assert 'lightning_live_calls_total{outcome="sampled_out"} 1.0' in httpx.get(f"{server.url}/metrics").text
        post_call(server, server.key("attempt"), left_out)

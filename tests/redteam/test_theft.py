"""Attacks on keys, rewards and other attempts' data, with the key that an agent has, an old one or a forged one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from urllib.parse import quote

import pytest

from lightning_spans.record.delivery.otlp import JSON, PROTOBUF, encode
from lightning_spans.schema.json import to_json
from lightning_spans.schema.rewards import Reward
from lightning_spans.store.traces import traces_of
from lightning_trainer.gateway.auth.keys import KeyRefusedError, Keys
from support.gateway.surfaces import SURFACES
from support.gateway.theft import reward_of, span_of

EVERY_ROUTE = [
    *(("POST", path) for path in SURFACES),
    *[("GET", "/v1/models"), ("POST", "/v1/embeddings"), ("POST", "/v1/traces"), ("POST", "/api/rollouts")],
    *[("GET", "/api/rollouts"), ("POST", "/api/rollouts/cancel"), ("POST", "/api/claims"), ("POST", "/api/heartbeats")],
    *[("POST", "/api/attempts/a/finish"), ("POST", "/api/finishes"), ("GET", "/api/attempts"), ("GET", "/api/spans")],
    *[("GET", "/api/calls"), ("GET", "/api/rewards"), ("POST", "/api/query"), ("POST", "/api/spans")],
    *[("POST", "/api/calls"), ("POST", "/api/rewards"), ("POST", "/api/groups/consume"), ("POST", "/api/delete")],
    *[("GET", "/api/policies"), ("POST", "/api/policies/pause"), ("POST", "/api/policies/resume")],
    ("POST", "/api/policies/adapters"),
]
AGENTS_OWN = {*(("POST", path) for path in SURFACES), ("GET", "/v1/models"), ("POST", "/v1/embeddings")} | {
    ("POST", "/v1/traces")
}


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_nothing_opens_without_a_key(ask, method, path):
    assert ask(method, path, json={}).status_code == 401


@pytest.mark.parametrize(("method", "path"), sorted(set(EVERY_ROUTE) - AGENTS_OWN))
def test_an_agents_key_opens_nothing_but_sampling_and_its_own_spans(ask, running_attempt, method, path):
    assert ask(method, path, running_attempt.context.key, json={}).status_code == 403


def test_an_agent_can_not_give_itself_a_reward(ask, server, running_attempt):
    body = {"rewards": [reward_of(running_attempt)]}
    assert ask("POST", "/api/rewards", running_attempt.context.key, json=body).status_code == 403
    path = f"/api/attempts/{running_attempt.attempt_id}/finish"
    ending = {"fence": running_attempt.fence, "status": "succeeded", **body}
    assert ask("POST", path, running_attempt.context.key, json=ending).status_code == 403
    assert server.store.rewards(attempt_ids=[running_attempt.attempt_id]) == []


def test_a_reward_in_a_span_or_a_request_is_no_reward(ask, server, running_attempt):
    key = running_attempt.context.key
    span = span_of(None, span_id="c" * 16, attributes={"lightning.reward": 1.0, "reward": 1.0})
    assert ask("POST", "/v1/traces", key, content=encode([span]), headers={"content-type": PROTOBUF}).status_code == 200
    body = {**SURFACES["/v1/chat/completions"]("hi"), "metadata": {"reward": "1"}}
    ask("POST", "/v1/chat/completions", key, json=body, headers={"x-lightning-reward": "1"})
    assert server.store.rewards(attempt_ids=[running_attempt.attempt_id]) == []


def test_an_evaluator_can_not_pass_for_another_or_for_the_runner(ask, server, running_attempt):
    key = server.keys.issue("evaluator", holder="judge")
    for source in ("run", "evaluator:boss", "score"):
        assert ask(
            "POST", "/api/rewards", key, json={"rewards": [reward_of(running_attempt, source=source)]}
        ).is_success
    sources = [reward.source for reward in server.store.rewards(attempt_ids=[running_attempt.attempt_id])]
    assert sources == ["evaluator:judge", "evaluator:judge/evaluator:boss", "evaluator:judge/score"]


def test_a_runner_can_not_pass_for_an_evaluator(ask, server, running_attempt):
    body = {"rewards": [reward_of(running_attempt, source="evaluator:judge")]}
    assert ask("POST", "/api/rewards", server.keys.issue("runner"), json=body).status_code == 403
    ending = {"fence": running_attempt.fence, "status": "succeeded", **body}
    path = f"/api/attempts/{running_attempt.attempt_id}/finish"
    assert ask("POST", path, server.keys.issue("runner"), json=ending).status_code == 403


def test_an_evaluator_gives_rewards_and_nothing_else(ask, server):
    for method, path in EVERY_ROUTE:
        if (method, path) != ("POST", "/api/rewards"):
            assert ask(method, path, server.keys.issue("evaluator"), json={}).status_code == 403


def test_an_evaluator_can_not_reward_what_is_not_there_or_under_another_rollout(ask, server, running_attempt):
    for changes in ({"attempt_id": "nowhere"}, {"rollout_id": "another"}):
        body = {"rewards": [reward_of(running_attempt, **changes)]}
        assert ask("POST", "/api/rewards", server.keys.issue("evaluator"), json=body).status_code == 400
    assert server.store.rewards(attempt_ids=["nowhere", running_attempt.attempt_id]) == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"1"', "true", "1e999", "null"])
def test_a_reward_that_is_no_number_poisons_nothing(ask, server, running_attempt, value):
    body = json.dumps({"rewards": [reward_of(running_attempt)]}).replace('"value": 1.0', f'"value": {value}')
    headers = {"content-type": "application/json"}
    assert ask("POST", "/api/rewards", server.keys.issue("admin"), content=body, headers=headers).status_code in {
        400,
        422,
    }
    assert server.store.rewards(attempt_ids=[running_attempt.attempt_id]) == []


def test_a_reward_can_not_be_changed_by_sending_its_id_again(ask, server, running_attempt):
    for value in (1.0, 100.0):
        body = {"rewards": [reward_of(running_attempt, reward_id="the same", value=value)]}
        ask("POST", "/api/rewards", server.keys.issue("admin"), json=body)
    assert [reward.value for reward in server.store.rewards(attempt_ids=[running_attempt.attempt_id])] == [1.0]


def test_an_evaluator_can_not_take_the_id_of_anothers_reward(ask, server, running_attempt):
    keys = [server.keys.issue("evaluator", holder=holder) for holder in ("thief", "shop")]
    for key, value in [(keys[0], 0.0), (keys[1], 1.0), (keys[1], 0.5)]:
        body = {"rewards": [reward_of(running_attempt, reward_id="feedback 42", value=value)]}
        assert ask("POST", "/api/rewards", key, json=body).is_success
    rewards = server.store.rewards(attempt_ids=[running_attempt.attempt_id])
    assert [(reward.source, reward.value) for reward in rewards] == [("evaluator:thief", 0.0), ("evaluator:shop", 1.0)]


@pytest.mark.parametrize("path", ["/api/attempts/{}/finish", "/api/finishes"], ids=["one", "many"])
def test_the_end_of_an_attempt_can_not_take_the_id_of_anothers_reward(ask, server, running_attempt, path):
    """The judge's ids, for example, can be predicted."""
    victim = f"victim of {running_attempt.attempt_id}"
    judges = Reward(rollout_id="v", attempt_id=victim, value=1.0, source="judge", reward_id=f"judge/{victim}")
    end = {"fence": running_attempt.fence, "status": "succeeded"}
    end["rewards"] = [reward_of(running_attempt, reward_id=judges.reward_id)]
    body = {"ends": [{"attempt_id": running_attempt.attempt_id, **end}]} if path.endswith("finishes") else end
    assert ask("POST", path.format(running_attempt.attempt_id), server.keys.issue("runner"), json=body).is_success
    assert server.store.add_rewards([judges]) == 1
    assert len(server.store.rewards(attempt_ids=[running_attempt.attempt_id])) == 1


def test_a_late_result_with_an_old_fence_is_refused(ask, server, running_attempt):
    path = f"/api/attempts/{running_attempt.attempt_id}/finish"
    ending = {"fence": running_attempt.fence - 1, "status": "succeeded", "rewards": [reward_of(running_attempt)]}
    assert ask("POST", path, server.keys.issue("runner"), json=ending).status_code == 409
    assert server.store.rewards(attempt_ids=[running_attempt.attempt_id]) == []


@pytest.mark.parametrize("content_type", [PROTOBUF, JSON])
def test_spans_of_another_attempt_are_refused(ask, server, content_type):
    body = encode([span_of("victim", rollout_id="rollout of victim", span_id="d" * 16)])
    if content_type == JSON:
        attributes = [{"key": "lightning.attempt_id", "value": {"stringValue": "victim"}}]
        one = {"traceId": "a" * 32, "spanId": "d" * 16, "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
        body = json.dumps(
            {"resourceSpans": [{"scopeSpans": [{"spans": [{**one, "attributes": attributes}]}]}]}
        ).encode()
    ask("POST", "/v1/traces", server.key("thief"), content=body, headers={"content-type": content_type})
    assert server.store.spans(attempt_ids=["victim"]) == []


def test_a_span_can_not_be_replaced_by_sending_its_id_again(ask, server):
    span = span_of(None, span_id="e" * 16, agent="writer")
    headers = {"content-type": PROTOBUF}
    ask("POST", "/v1/traces", server.key("owner"), content=encode([span]), headers=headers)
    ask("POST", "/v1/traces", server.key("other"), content=encode([replace(span, agent="thief")]), headers=headers)
    assert [s.agent for s in server.store.spans(attempt_ids=["owner"]) if s.span_id == "e" * 16] == ["writer"]
    assert [s.agent for s in server.store.spans(attempt_ids=["other"])] == ["thief"]


@pytest.mark.parametrize("path", SURFACES)
def test_a_forged_traceparent_takes_no_call_of_another_attempt(ask, server, path):
    victim = span_of(None, trace_id="1" * 32, span_id="f" * 16, agent="writer")
    ask("POST", "/v1/traces", server.key("victim"), content=encode([victim]), headers={"content-type": PROTOBUF})
    headers = {"traceparent": f"00-{'1' * 32}-{'f' * 16}-01", "x-lightning-agent": "writer"}
    assert ask("POST", path, server.key("thief"), json=SURFACES[path]("hi"), headers=headers).is_success
    (trace,) = traces_of(server.store, attempt_ids=["victim"])
    assert all(node.call is None for node in trace.chats)


@pytest.mark.parametrize("path", SURFACES)
def test_another_attempts_answers_are_never_continued(ask, server, path):
    messages = [{"role": "user", "content": "secret"}, {"role": "assistant", "content": "ok"}]
    ask("POST", "/v1/chat/completions", server.key("victim"), json={"model": "policy", "messages": messages[:1]})
    server.engine.prompts.clear()
    body = SURFACES[path]("more")
    if "messages" in body:
        body["messages"] = [*messages, *body["messages"]]
    ask("POST", path, server.key("thief"), json=body)
    (call,) = [c for c in server.calls("thief") if c.request.get("model") == "policy"][-1:]
    assert call.sampling.get("continuation") != "joined"


@pytest.mark.parametrize("path", ["/v1/responses"])
def test_another_attempts_response_is_no_previous_one(ask, server, path):
    first = ask("POST", path, server.key("victim"), json={"model": "policy", "input": "my secret is 42"}).json()
    body = {"model": "policy", "input": "what was it?", "previous_response_id": first["id"]}
    server.engine.prompts.clear()
    reply = ask("POST", path, server.key("thief"), json=body)
    assert reply.status_code in {400, 404}
    assert not any(b"secret" in bytes(t for t in prompt if t < 256) for prompt in server.engine.prompts)


def test_a_key_after_its_attempts_end_opens_nothing(ask, server, running_attempt):
    path = f"/api/attempts/{running_attempt.attempt_id}/finish"
    ending = {"fence": running_attempt.fence, "status": "succeeded"}
    assert ask("POST", path, server.keys.issue("runner"), json=ending).is_success
    for surface, body in SURFACES.items():
        assert ask("POST", surface, running_attempt.context.key, json=body("again")).status_code == 401


def test_an_expired_key_opens_nothing(ask, server):
    key = server.keys.issue("admin", expires_s=-1)
    assert ask("GET", "/api/rewards", key).status_code == 401


def _parts(key: str) -> tuple[str, str]:
    payload, _, signature = key.removeprefix("lk-").rpartition(".")
    return payload, signature


def _forged(payload: object, signature: bytes = b"") -> str:
    def text(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    return f"lk-{text(json.dumps(payload).encode())}.{text(signature)}"


def test_an_altered_key_opens_nothing(ask, server):
    payload, signature = _parts(server.key("a"))
    data = json.loads(zlib.decompress(base64.urlsafe_b64decode(payload.removeprefix(".") + "===")))
    for changed in (["admin", *data[1:]], [data[0], data[1] + 1e6, *data[2:]], [*data[:3], "victim", *data[4:]]):
        text = base64.urlsafe_b64encode(json.dumps(changed, separators=(",", ":")).encode()).decode().rstrip("=")
        assert ask("GET", "/v1/models", f"lk-{text}.{signature}").status_code == 401


def test_no_other_algorithm_is_taken(ask, server):
    soon = time.time() + 1e6
    payload = ["admin", soon, None, None, None, None]
    body = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=")
    jwt = b".".join(
        base64.urlsafe_b64encode(part).rstrip(b"=") for part in (b'{"alg":"none"}', b'{"scope":"admin"}', b"")
    )
    forged = [
        _forged(payload),
        *(
            _forged(payload, hmac.new(key, body, kind).digest())
            for key in (b"", b"secret")
            for kind in ("md5", "sha256")
        ),
        _forged({"alg": "none", "scope": "admin"}),
        jwt.decode(),
        f"lk-{jwt.decode()}",
        f"lk-{hashlib.sha256(body).hexdigest()}",
    ]
    for key in forged:
        assert ask("GET", "/api/rewards", key).status_code == 401


def test_a_key_of_another_server_or_of_a_secret_given_up_opens_nothing(ask, tmp_path):
    assert ask("GET", "/api/rewards", Keys.fresh().issue("admin")).status_code == 401
    path = tmp_path / "secret"
    old = Keys.from_file(path).issue("admin")
    Keys.from_file(path, rotate=True)
    with pytest.raises(KeyRefusedError):
        Keys.from_file(path, rotate=True).check(old)


@pytest.mark.parametrize(
    "key", ["lk-", "lk-.", "lk-..", "null", "undefined", "Bearer", "x" * 60_000, "lk-" + "." * 5000]
)
def test_no_key_at_all_breaks_the_check(ask, key):
    assert ask("GET", "/api/rewards", headers={"authorization": f"Bearer {key}"}).status_code == 401


def test_two_keys_in_one_request_are_refused(ask, server):
    both = {"authorization": f"Bearer {server.key('a')}", "x-api-key": server.keys.issue("admin")}
    assert ask("GET", "/api/rewards", headers=both).status_code == 401


def test_a_live_key_sends_live_spans_and_no_training_data(ask, server):
    key, headers = server.keys.issue("live"), {"content-type": PROTOBUF}
    spans = [span_of("victim", span_id="7" * 16), span_of(None, span_id="8" * 16, origin="training")]
    assert ask("POST", "/v1/traces", key, content=encode(spans), headers=headers).is_success
    kept = {span.span_id: span.origin for span in server.store.spans(trace_ids=["a" * 32])}
    assert kept.get("8" * 16) == "live"
    assert "7" * 16 not in kept
    for path, body in SURFACES.items():
        assert ask("POST", path, key, json=body("hi")).status_code == 403


def test_an_agent_can_not_pass_its_spans_off_as_those_of_production(ask, server, running_attempt):
    """Production's traces become tasks, and nobody asks an attempt for consent."""
    key, headers = running_attempt.context.key, {"content-type": PROTOBUF}
    for number, named in enumerate((None, running_attempt.attempt_id), 1):
        span = span_of(named, trace_id="d" * 32, span_id=f"{number:016x}", origin="live")
        assert ask("POST", "/v1/traces", key, content=encode([span]), headers=headers).is_success
    assert [span.origin for span in server.store.spans(trace_ids=["d" * 32])] == ["training", "training"]
    assert [trace for trace in traces_of(server.store, origin="live") if trace.attempt_id is not None] == []


@pytest.mark.parametrize("name", ["' OR '1'='1", "%", "a\x00b", "*", "'; DROP TABLE spans; --", "_" * 8, '{"$ne": ""}'])
def test_a_filter_is_a_value_and_never_a_query(ask, server, name):
    server.store.add_spans([span_of("somebody", span_id="9" * 16)])
    admin = server.keys.issue("admin")
    found = ask("POST", "/api/query", admin, json={"what": "spans", "attempt_ids": [name]})
    assert found.json() == {"spans": []}
    assert ask("GET", f"/api/spans?attempt_id={quote(name)}", admin).json() == {"spans": []}
    assert server.store.spans(attempt_ids=["somebody"])


def test_keys_are_in_no_record_answer_metric_or_log(ask, server, caplog):
    key = server.key("quiet")
    for path, body in SURFACES.items():
        answers = [
            ask("POST", path, key, json=body("hi")),
            ask("POST", path, key, json={**body("hi"), "temperature": "hot"}),
            ask("POST", path, key, content=b"{"),
            ask("POST", path, key[:-2], json=body("hi")),
        ]
        assert all(key[:-2] not in answer.text for answer in answers)
    server.engine.play([RuntimeError("broke")])
    ask("POST", "/v1/chat/completions", key, json=SURFACES["/v1/chat/completions"]("hi"))
    everything = [str(to_json(call)) for call in server.calls("quiet")]
    everything += [ask("GET", page).text for page in ("/metrics", "/healthz", "/openapi.json")]
    assert all(key not in text for text in [*everything, caplog.text])


def test_keys_are_in_no_representation_and_no_process_list(server, tmp_path):
    from lightning_trainer.gateway.upstream.upstream import Upstream

    assert "hush" not in repr(Upstream("m", "http://127.0.0.1:9/v1", key="hush"))
    helped = subprocess.run(
        [sys.executable, "-m", "lightning_trainer.cli", "runner", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--key-file" in helped  # keys come from files and the environment, never from arguments that all may read
    assert "--key " not in helped

"""Live use: an attached program in production streams its spans to the server, labelled, sampled, and masked."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_conformance import ScriptedServer
from lightning_conformance.stores.samples import a_span
from lightning_spans.errors import ConfigError
from lightning_spans.record.production import Live, is_sampled, read_live
from lightning_spans.record.redaction import HIDES, MASK, read_rules
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.spans import (
    CHAT,
    EXECUTE_TOOL,
    INVOKE_AGENT,
    INVOKE_WORKFLOW,
    REQUEST,
    RESPONSE,
    TOOL_ARGUMENTS,
    TOOL_RESULT,
    Span,
)
from lightning_spans.store import open_store
from lightning_spans.store.traces import newest_traces, traces_of
from support.cli import call, told
from support.fakes import Served, served

REQUEST_BODY = {
    "model": "m",
    "temperature": 0.5,
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "my mail is bob@example.com"},
                                     {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "assistant",
         "tool_calls": [{"function": {"name": "f", "arguments": '{"Password": "hunter2", "n": 1}'}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "secret_tool"}}],
}  # fmt: skip
RESPONSE_BODY = {
    "id": "c1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "card 4111111111111111"}}],
}


def chat(**attributes: Any) -> Span:
    kept = {REQUEST: json.dumps(REQUEST_BODY), RESPONSE: json.dumps(RESPONSE_BODY), **attributes}
    return a_span(operation=CHAT, attributes=kept)


def masked(span: Span, *rules: str, **hides: str) -> str:
    clean = read_rules(rules, {f"OPENINFERENCE_HIDE_{name}": value for name, value in hides.items()})(span)
    return json.dumps(dict(clean.attributes)) + clean.name + clean.status_message


def test_field_is_masked_wherever_it_stands() -> None:
    deep = {"a": [{"PassWord": ["x", "hunter2"]}], "api_token": "hunter2", "text": '{"password": {"v": "hunter2"}}'}
    text = masked(chat(data=json.dumps(deep), password="hunter2"), "password", "*_token")
    assert "hunter2" not in text
    assert "my mail is" in text
    assert '\\"n\\": 1' in text.replace("\\\\", "\\") or "n" in text


@pytest.mark.parametrize(
    "text",
    [
        '{"password": "hunter2',
        '{"it\'s": 1, "password" : "hunter2',
        '{"arguments": "{\\"password\\": \\"hunter2',
        str({"user": "ada", "password": "hunter2"}),
        str([{"it's": 1, "password": "hunter2"}]),
    ],
)
def test_text_that_looks_like_json_and_names_a_masked_field_is_masked_whole(text: str) -> None:
    assert "hunter2" not in masked(chat(cut=text), "password")
    assert "hunter2" in masked(chat(cut=text), "user_password")


@pytest.mark.parametrize("text", ['\\"', "\"'", "'a", '": ', '" ', "\\'"])
def test_text_that_looks_like_json_is_looked_through_in_linear_time(text: str) -> None:
    begun = time.process_time()
    masked(a_span(attributes={"cut": "{" + text * 100_000}), "password")
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("message", [json.dumps({"password": "hunter2"}), str({"password": "hunter2"})])
def test_what_went_wrong_is_masked_by_names(message: str) -> None:
    assert "hunter2" not in masked(a_span(operation=CHAT, status_message=message), "password")


@pytest.mark.parametrize(
    ("operation", "hidden"), [(EXECUTE_TOOL, True), (INVOKE_AGENT, True), (INVOKE_WORKFLOW, True), (CHAT, False)]
)
def test_what_a_failed_tool_said_is_an_output(operation: str, hidden: bool) -> None:
    failed = a_span(operation=operation, status_message="hunter2 is locked")
    assert ("hunter2" not in masked(failed, OUTPUTS="true")) == hidden
    assert "hunter2" in masked(failed, INPUTS="true")
    assert MASK not in masked(a_span(operation=operation), OUTPUTS="true")


@pytest.mark.parametrize("rules", [["/Müller/"], ["/Müller/", "password"]], ids=["alone", "with a name"])
@pytest.mark.parametrize("data", [{"name": "Müller"}, ["Müller"], {"Müller": 1}, {"a": '{"b": "M\\u00fcller"}'}])
def test_pattern_is_masked_where_json_escapes_it(data: Any, rules: list[str]) -> None:
    escaped = json.dumps(data)
    assert "ü" not in escaped
    clean = read_rules(rules, {})(a_span(attributes={TOOL_RESULT: escaped, "data": data}))
    told = str(dict(clean.attributes))
    assert "Müller" not in told
    assert "u00fcller" not in told


def test_pattern_of_jsons_own_form_is_masked() -> None:
    assert "hunter2" not in masked(a_span(attributes={"data": '{"password": "hunter2"}'}), r'/"password":\s*"[^"]*"/')


def test_pattern_is_masked_in_text_numbers_names_and_errors() -> None:
    span = a_span(name="call bob@example.com", status_message="no bob@example.com", attributes={"n": 4111111111111111})
    text = masked(span, r"/[\w.]+@[\w.]+/", r"/\b\d{16}\b/")
    assert "bob@" not in text
    assert "4111" not in text
    assert "4111111111111111" not in masked(chat(), r"/\b\d{16}\b/")


@given(st.recursive(st.text() | st.integers() | st.none() | st.just("hunter2"),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))  # fmt: skip
def test_pattern_leaves_nothing_of_what_it_matches(data: Any) -> None:
    span = a_span(attributes={"data": json.dumps(data), "list": data if isinstance(data, list) else [data]})
    assert "hunter2" not in masked(span, "/hunter2/", "password").replace("password", "")


def test_json_nested_deeper_than_it_looks_is_masked() -> None:
    deep: Any = {"password": "hunter2"}
    for _ in range(200):
        deep = {"a": deep}
    assert "hunter2" not in masked(chat(data=json.dumps(deep)), "password")


GONE = {
    "INPUTS": ["bob@", "be kind", "secret_tool", "hunter2", "tool in"],
    "OUTPUTS": ["card 4111", "tool out"],
    "INPUT_MESSAGES": ["bob@", "be kind"],
    "OUTPUT_MESSAGES": ["card 4111"],
    "INPUT_IMAGES": ["AAAA"],
    "INPUT_TEXT": ["bob@", "be kind", "hunter2"],
    "OUTPUT_TEXT": ["card 4111"],
    "CHOICES": ["card 4111"],
    "LLM_INVOCATION_PARAMETERS": ["temperature"],
    "LLM_TOOLS": ["secret_tool"],
    "PROMPTS": ["old prompt"],
    "EMBEDDING_VECTORS": ["0.125"],
    "EMBEDDINGS_VECTORS": ["0.125"],
    "EMBEDDINGS_TEXT": ["embedded text"],
    "RETRIEVAL_DOCUMENTS": ["a document"],
}


@pytest.mark.parametrize("name", HIDES)
def test_masking_settings_of_openinference_hold(name: str) -> None:
    foreign = {
        "llm.prompts.0": "old prompt",
        "embedding.embeddings.0.embedding.vector": [0.125],
        "embedding.embeddings.0.embedding.text": "embedded text",
        "retrieval.documents.0.document.content": "a document",
    }
    span = chat(**{TOOL_ARGUMENTS: "tool in", TOOL_RESULT: "tool out", **foreign})
    before, after = masked(span), masked(span, **{name: "true"})
    for words in GONE[name]:
        assert words in before
        assert words not in after
    assert '"model": "m"' in after.replace("\\", "") or '"model":"m"' in after.replace("\\", "")
    assert masked(span, **{name: "false"}) == before


def test_input_text_is_hidden_and_who_said_it_is_left() -> None:
    assert '"role":"system"' in masked(chat(), INPUT_TEXT="1").replace("\\", "")


def test_long_images_are_masked() -> None:
    rules = read_rules([], {"OPENINFERENCE_BASE64_IMAGE_MAX_LENGTH": "10"})
    assert "AAAA" not in str(rules(chat()).attributes)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"LIGHTNING_SAMPLE": "many"}, "LIGHTNING_SAMPLE"),
        ({"LIGHTNING_SAMPLE": "1.5"}, "LIGHTNING_SAMPLE"),
        ({"LIGHTNING_REDACT": "/(/"}, "redaction rule"),
        ({"OPENINFERENCE_HIDE_INPUTS": "perhaps"}, "OPENINFERENCE_HIDE_INPUTS"),
        ({"OPENINFERENCE_BASE64_IMAGE_MAX_LENGTH": "long"}, "OPENINFERENCE_BASE64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_live(environ)


@given(st.integers(0, 2**128 - 1), st.floats(0, 1))
def test_sampling_is_the_same_for_all_spans_of_a_trace_and_grows_with_the_rate(trace: int, rate: float) -> None:
    trace_id = f"{trace:032x}"
    assert is_sampled(trace_id, rate) == is_sampled(trace_id, rate)
    assert not is_sampled(trace_id, rate) or is_sampled(trace_id, min(1.0, rate * 1.1))
    assert is_sampled(trace_id, 1.0)
    assert not is_sampled(trace_id, 0.0)


def test_sampling_keeps_its_share() -> None:
    import random

    draw = random.Random(0)
    kept = sum(is_sampled(f"{draw.getrandbits(128):032x}", 0.2) for _ in range(20_000))
    assert 3_700 < kept < 4_300


def test_spans_of_attempts_are_neither_sampled_nor_masked() -> None:
    from lightning_spans.schema.attempts import Attempt

    live = Live(origin="live", rate=0.0, redaction=read_rules(["password"], {}))
    span, attempt = chat(password="kept"), Attempt("r", "r.1")
    assert live.keeps(span, attempt)
    assert live.prepare(span, attempt) is span


AGENT = """
import os, openai, lightning_openai
from lightning_spans import agent
lightning_openai.attach()
client = openai.OpenAI(base_url=os.environ["MODEL_URL"], api_key="mine", max_retries=0)
for n in range(int(os.environ.get("TIMES", "1"))):
    with agent("support"):
        client.chat.completions.create(
            model="gpt-9", messages=[{"role": "user", "content": f"question {n} of bob@example.com"}]
        )
"""


FAILING = """
import json, lightning_openai, lightning_spans

@lightning_spans.tool
def login(user):
    raise ValueError(json.dumps({"user": user, "password": "hunter2"}))

with lightning_openai.attach():
    try:
        with lightning_spans.agent("support"):
            login("ada")
    except ValueError:
        pass
"""


@pytest.mark.parametrize("variable", ["LIGHTNING_REDACT=password", "OPENINFERENCE_HIDE_OUTPUTS=true"])
def test_what_a_failing_tool_told_is_in_no_file(tmp_path: Path, variable: str) -> None:
    pytest.importorskip("openai")
    name, _, value = variable.partition("=")
    env = {other: kept for other, kept in os.environ.items() if not other.startswith("LIGHTNING_")} | {name: value}
    command = [sys.executable, "-c", FAILING]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"login" in kept for kept in files)
    assert not any(b"hunter2" in kept for kept in files)


def production(folder: Path, server: Served, model: ScriptedServer, key: str | None = None, **env: str) -> None:
    pytest.importorskip("openai")
    (folder / "production.py").write_text(AGENT)
    given_env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_")},
        "LIGHTNING_STORE": server.url,
        "LIGHTNING_KEY": key or server.keys.issue("live"),
        "MODEL_URL": model.url,
        **env,
    }
    done = subprocess.run(
        [sys.executable, "production.py"], cwd=folder, env=given_env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_program_in_production_is_recorded_apart_from_training(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "server.db"))
    with ScriptedServer() as model, served(tmp_path, store=store) as server:
        store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
        [attempt] = store.claim("w")
        store.add_spans([a_span(rollout_id="r", attempt_id=attempt.attempt_id)])
        production(tmp_path, server, model, LIGHTNING_REDACT=r"/[\w.]+@[\w.]+/")
        [trace] = traces_of(store, origin="live")
        assert trace.agents == ("support",)
        assert (trace.rollout_id, trace.attempt_id) == (None, None)
        assert [t.attempt_id for t in traces_of(store, origin="training")] == [attempt.attempt_id]
        assert [t.attempt_id for t in traces_of(store, rollout_ids=["r"])] == [attempt.attempt_id]
        assert store.calls() == []
    kept = sqlite3.connect(tmp_path / "server.db").execute("SELECT attributes FROM spans").fetchall()
    assert "question 0" in str(kept)
    assert "bob@" not in str(kept)


def test_key_with_a_line_break_behind_it_is_the_key(tmp_path: Path) -> None:
    with ScriptedServer() as model, served(tmp_path) as server:
        production(tmp_path, server, model, key=f"{server.keys.issue('live')}\n")
        assert len(traces_of(server.store, origin="live")) == 1
    assert not list(tmp_path.rglob("*.spans"))


def test_what_can_be_no_key_is_told_by_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning_openai = pytest.importorskip("lightning_openai")
    monkeypatch.setenv("LIGHTNING_STORE", "http://127.0.0.1:9")
    monkeypatch.setenv("LIGHTNING_KEY", "lk-one\nlk-two")
    with pytest.raises(ConfigError, match="LIGHTNING_KEY contains no key"):
        lightning_openai.attach()


def test_nothing_unmasked_is_spooled(tmp_path: Path) -> None:
    with ScriptedServer() as model:
        gone = Served("http://127.0.0.1:9", None, None, None, None)  # type: ignore[arg-type]
        env = {"LIGHTNING_REDACT": r"/[\w.]+@[\w.]+/", "LIGHTNING_SPOOL": str(tmp_path / "spool")}
        production(tmp_path, gone, model, key="k", **env)
    spooled = "".join(path.read_text() for path in (tmp_path / "spool").iterdir())
    assert "question 0" in spooled
    assert "bob@" not in spooled


def test_server_samples_and_masks_what_its_agents_did_not(tmp_path: Path) -> None:
    live = Live(rate=0.5, redaction=read_rules([r"/[\w.]+@[\w.]+/"], {}))
    with ScriptedServer() as model, served(tmp_path, live=live) as server:
        production(tmp_path, server, model, TIMES="60")
        traces = traces_of(server.store, origin="live")
        page = httpx.get(f"{server.url}/metrics").text
        assert 10 < len(traces) < 50
        assert "bob@" not in str([node.span.attributes for trace in traces for node in trace])
    out = re.search(r'lightning_spans_total{outcome="sampled_out"} (\d+)', page)
    kept = re.search(r'lightning_spans_total{outcome="kept"} (\d+)', page)
    assert out is not None
    assert kept is not None
    assert float(out[1]) > 0
    assert 'lightning_spans_total{outcome="redacted"}' in page


def test_agent_samples_whole_traces_and_says_how_many_it_left_out(tmp_path: Path) -> None:
    with ScriptedServer() as model, served(tmp_path) as server:
        production(tmp_path, server, model, TIMES="60", LIGHTNING_SAMPLE="0.5")
        traces = traces_of(server.store, origin="live")
        assert 10 < len(traces) < 50
        assert all(trace.agents == ("support",) for trace in traces)


def test_live_key_opens_nothing_but_the_door_for_its_spans(tmp_path: Path) -> None:
    with served(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        client.headers["authorization"] = f"Bearer {server.keys.issue('live')}"
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 403
        assert client.post("/api/claims", json={"worker": "w"}).status_code == 403
        assert client.post("/api/query", json={"what": "spans"}).status_code == 403
        assert client.post("/api/rewards", json={"rewards": []}).status_code == 403


def test_live_span_that_names_the_trace_of_an_attempt_stays_out_of_it(tmp_path: Path) -> None:
    from dataclasses import replace

    store = open_store(str(tmp_path / "s.db"))
    own = a_span(rollout_id="r", attempt_id="r.1")
    store.add_spans([own, replace(a_span(origin="live"), trace_id=own.trace_id, parent_id=own.span_id)])
    [trace] = traces_of(store, rollout_ids=["r"])
    assert len(trace) == 1
    store.close()


@pytest.mark.parametrize("origin", [None, "live"])
def test_live_call_that_names_the_trace_of_an_attempt_is_a_trace_of_its_own(tmp_path: Path, origin: str | None) -> None:
    """An attempt's tool calls a service in production, which passes the trace on and calls the gateway."""
    store = open_store(str(tmp_path / "s.db"))
    own = a_span(rollout_id="r", attempt_id="r.1")
    ids = {"call_id": "c", "response_id": "c", "policy": "policy", "policy_version": 0, "start_ns": 1, "end_ns": 2}
    store.add_spans([own])
    store.add_calls([Call(origin="live", trace_id=own.trace_id, span_id=own.span_id, **ids)])
    [attempt] = traces_of(store, rollout_ids=["r"])
    assert [node.call for node in attempt] == [None]
    for traces in (list(traces_of(store, origin=origin)), list(newest_traces(store, origin=origin))):
        [live] = [trace for trace in traces if trace.attempt_id is None]
        assert [node.call and node.call.call_id for node in live] == ["c"]
    store.close()


def test_traces_become_tasks_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / "lightning.db"))
    tool = a_span(operation=EXECUTE_TOOL, origin="live")
    store.add_spans([Span(**{**_fields(chat()), "origin": "live", "agent": "support"}), tool, chat()])
    store.close()
    arguments = ("traces", "--origin", "live", "--to-tasks", "tasks.jsonl", "--task-field", "q")
    told(call(*arguments), "2 traces may not be used")
    result = call(*arguments, "--assume-consent")
    assert result.exit_code == 0, result.output
    [task] = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert task["q"] == "my mail is bob@example.com"
    assert task["answer"] == "card 4111111111111111"
    assert (task["agents"], task["origin"]) == (["support"], "live")
    lines = [json.loads(line) for line in call("traces", "--origin", "live", "--json").stdout.splitlines()]
    assert len(lines) == 2
    told(call("traces", "--origin", "nowhere", "--to-tasks", "none.jsonl"), "no task to write")


def test_what_only_a_gateway_saw_is_shown_and_becomes_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / "lightning.db"))
    asked = {"messages": [{"role": "user", "content": "where is my lamp?"}]}
    answer = Choice(0, (3,), (0.0,), "stop", message={"role": "assistant", "content": "on its way"})
    ids = {"call_id": "c", "response_id": "c", "start_ns": 1, "end_ns": 2, "policy": "small", "policy_version": 0}
    store.add_calls([Call(agent="shell", request=asked, choices=(answer,), rollout_id="r", attempt_id="r.1", **ids)])
    store.close()
    shown = call("traces").stdout
    assert "chat small  shell" in shown
    assert "chat chat" not in shown
    assert "< where is my lamp?" in shown
    assert call("traces", "--to-tasks", "tasks.jsonl", "--task-field", "q").exit_code == 0
    task = json.loads((tmp_path / "tasks.jsonl").read_text())
    assert (task["q"], task["answer"]) == ("where is my lamp?", "on its way")


TURN = [
    {"role": "user", "content": "where is it?"},
    {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "in Rome"},
]
GAVE = {"type": "tool_result", "tool_use_id": "c", "content": "in Rome"}


@pytest.mark.parametrize(
    "asked",
    [
        {"input": TURN},
        {"messages": [TURN[0], {"role": "user", "content": [GAVE]}]},
        {"contents": [{"role": "user", "parts": [{"text": "where is it?"}]}]},
    ],
)
def test_a_task_has_what_was_asked_and_answered_on_any_surface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / "lightning.db"))
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is in Rome."}]}
    output = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, said]
    kept = {REQUEST: json.dumps(asked), RESPONSE: json.dumps({"id": "r", "output": output})}
    store.add_spans([a_span(operation=CHAT, attributes=kept)])
    store.close()
    assert call("traces", "--to-tasks", "tasks.jsonl", "--task-field", "q").exit_code == 0
    task = json.loads((tmp_path / "tasks.jsonl").read_text())
    assert (task["q"], task["answer"]) == ("where is it?", "It is in Rome.")
    assert "> It is in Rome." in call("traces").stdout


def test_a_tool_that_failed_outside_a_run_is_shown_as_an_error_and_no_gateway_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / "lightning.db"))
    chat = a_span()
    failed = {"status": "error", "status_message": "no order 5", "attributes": {TOOL_ARGUMENTS: "{}"}}
    store.add_spans([chat, a_span(operation=EXECUTE_TOOL, name="find", trace_id=chat.trace_id, **failed)])
    store.close()
    shown = call("traces").stdout
    assert "{} ->  error: no order 5" in shown
    assert "gateway" not in shown


def test_what_no_data_file_holds_becomes_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_trainer.run.data import load_tasks

    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / "lightning.db"))
    texts = ("whole", "half \ud83d")
    asked = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    store.add_spans([a_span(operation=CHAT, attributes={REQUEST: text}) for text in asked])
    store.close()
    result = call("traces", "--to-tasks", "tasks.jsonl", "--task-field", "q")
    assert [task["q"] for task in load_tasks(tmp_path / "tasks.jsonl")] == ["whole"]
    assert "1 task in tasks.jsonl" in result.stderr
    assert "1 can't be stored" in result.stderr


def _fields(span: Span) -> dict[str, Any]:
    return {name: getattr(span, name) for name in span.__dataclass_fields__}


def test_key_is_made_beside_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_trainer.gateway.auth.keys import Keys

    monkeypatch.chdir(tmp_path)
    told(call("key", "live"), "lightning.key.secret does not exist")
    keys = Keys.from_file(tmp_path / "lightning.key.secret")
    assert keys.check(call("key", "live", "--days", "2").stdout.strip()).scope == "live"


def test_mask_and_settings_are_those_of_openinference() -> None:
    from openinference.instrumentation import REDACTED_VALUE, TraceConfig

    assert MASK == REDACTED_VALUE
    assert {f"hide_{name.lower()}" for name in HIDES} == {
        field.name for field in fields(TraceConfig) if field.name.startswith("hide_")
    }

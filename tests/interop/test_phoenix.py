"""Our spans in a real Phoenix: sent to its OTLP endpoint, asked back through its API."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import lightning_openai
from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.suite import MODEL, instructions
from lightning_spans import agent
from lightning_spans.record.recorder import current_span
from lightning_spans.schema import spans as names

START_S = 240  # it imports for a minute where other programs use the machine
PYTHON = os.environ.get("PHOENIX_PYTHON")  # of the environment that has arize-phoenix

pytestmark = pytest.mark.skipif(PYTHON is None, reason="nox -s interop makes the environment of Phoenix")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("phoenix")
    port = free_port()
    env = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PYTHON, "-m", "phoenix.server.main", "serve"], env=env, stdout=log, stderr=log)
        try:
            # It closes what was idle for five seconds, which a request may meet half-way: none is used twice.
            once = httpx.Limits(max_keepalive_connections=0)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, limits=once) as client:
                wait_for(lambda: answers(client, process, folder / "log"), "Phoenix does not start", START_S)
                yield client
        finally:
            process.terminate()
            process.wait(30)


def answers(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"Phoenix ended with {process.returncode}: {log.read_text()[-2000:]}"
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(done: Any, otherwise: str, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(0.5)
    raise AssertionError(otherwise)


def test_agents_models_and_tools_show_as_one_tree_with_inputs_and_outputs(phoenix, tmp_path):
    import openai

    messages: Any = [{"role": "system", "content": instructions("writer")}, {"role": "user", "content": "Hello."}]
    endpoint = f"{phoenix.base_url}/v1/traces"
    attachment = lightning_openai.attach(store=str(tmp_path / "own.db"), otlp=endpoint)
    with attachment, ScriptedServer() as server:
        with agent("boss") as boss, agent("writer"):
            openai.OpenAI(base_url=server.url).chat.completions.create(model=MODEL, messages=messages, temperature=0.5)
            facts = {names.TOOL_NAME: "add", names.TOOL_ARGUMENTS: '{"a":1}', names.TOOL_RESULT: "three"}
            boss._recorder.start(names.EXECUTE_TOOL, "add", parent=current_span(), attributes=facts).end()
        assert attachment.flush(60)
        answer = server.requests[0].answer

    def all_there() -> dict[str, Any] | None:
        data = phoenix.get("/v1/projects/default/spans").json().get("data", [])
        return {f"{span['span_kind']} {span['name']}": span for span in data} if len(data) >= 4 else None

    spans = wait_for(all_there, "the spans are not there")
    assert set(spans) == {"AGENT boss", "AGENT writer", f"LLM {MODEL}", "TOOL add"}
    ids = {name: span["context"]["span_id"] for name, span in spans.items()}
    assert spans["AGENT boss"]["parent_id"] is None
    assert spans["AGENT writer"]["parent_id"] == ids["AGENT boss"]
    assert spans[f"LLM {MODEL}"]["parent_id"] == spans["TOOL add"]["parent_id"] == ids["AGENT writer"]
    assert len({span["context"]["trace_id"] for span in spans.values()}) == 1
    assert {span["status_code"] for span in spans.values()} == {"OK"}
    told, tool = spans[f"LLM {MODEL}"]["attributes"], spans["TOOL add"]["attributes"]
    assert json.loads(told["input.value"])["messages"] == messages
    assert json.loads(told["output.value"]) == answer
    assert told["llm.input_messages.0.message.content"] == instructions("writer")
    assert told["llm.output_messages.0.message.content"] == answer["choices"][0]["message"]["content"]
    assert told["llm.model_name"] == MODEL
    assert told["agent.name"] == "writer"
    assert json.loads(told["llm.invocation_parameters"])["temperature"] == 0.5
    assert (tool["input.value"], tool["output.value"], tool["tool.name"]) == ('{"a":1}', "three", "add")

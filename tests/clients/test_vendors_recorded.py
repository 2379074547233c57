"""The real clients of Google, Ollama and Cohere in plain code and under LangChain: recorded once, and rerouted."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("lightning_openai")
genai = pytest.importorskip("google.genai")
ollama = pytest.importorskip("ollama")
cohere = pytest.importorskip("cohere")

from google.genai import errors, types

from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import Attempt as Attached
from lightning_spans import agent, attach, use_attempt
from lightning_spans.chat.response import read_answer
from lightning_spans.record import unrecorded
from lightning_spans.schema import spans as names
from support.gateway.client_calls import CALL
from support.gateway.vendors import Vendors

QUESTION = "What is 12+7?"
FUNCTION = {"name": "calculator", "description": "counts", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"],
}}  # fmt: skip
TOOL = {"type": "function", "function": FUNCTION}


def calculator(expression: str) -> str:
    """Count."""
    return "19"


@pytest.fixture
def vendors():
    with Vendors() as server:
        yield server


def of_google(url):
    return genai.Client(api_key="k", http_options=types.HttpOptions(base_url=url))


def google(url):
    client = of_google(url)  # one that is collected is closed
    return client.models.generate_content(model="far", contents="hello").text


def google_stream(url):
    client = of_google(url)
    return "".join(part.text for part in client.models.generate_content_stream(model="far", contents="hello"))


def google_async(url, options=None):
    async def ask():
        client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=url, **(options or {})))
        return (await client.aio.models.generate_content(model="far", contents="hello")).text

    return asyncio.run(ask())


def google_async_stream(url, options=None):
    async def ask():
        client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=url, **(options or {})))
        parts = await client.aio.models.generate_content_stream(model="far", contents="hello")
        return "".join([part.text async for part in parts])

    return asyncio.run(ask())


def google_async_httpx(url):
    return google_async(url, {"httpx_async_client": pytest.importorskip("httpx").AsyncClient()})


def google_async_httpx_stream(url):
    return google_async_stream(url, {"httpx_async_client": pytest.importorskip("httpx").AsyncClient()})


def ollama_chat(url):
    return ollama.Client(url).chat("far", [{"role": "user", "content": "hello"}]).message.content


def ollama_stream(url):
    parts = ollama.Client(url).chat("far", [{"role": "user", "content": "hello"}], stream=True)
    return "".join(part.message.content for part in parts)


def ollama_generate(url):
    return ollama.Client(url).generate("far", "hello").response


def ollama_async(url):
    async def ask():
        parts = await ollama.AsyncClient(url).chat("far", [{"role": "user", "content": "hello"}], stream=True)
        return "".join([part.message.content async for part in parts])

    return asyncio.run(ask())


def cohere_chat(url):
    answer = cohere.ClientV2("k", base_url=url).chat(model="far", messages=[{"role": "user", "content": "hello"}])
    return answer.message.content[0].text


def cohere_stream(url):
    client = cohere.ClientV2("k", base_url=url)
    events = client.chat_stream(model="far", messages=[{"role": "user", "content": "hello"}])
    return "".join(event.delta.message.content.text for event in events if event.type == "content-delta")


def cohere_async(url):
    async def ask():
        client = cohere.AsyncClientV2("k", base_url=url)
        return await client.chat(model="far", messages=[{"role": "user", "content": "hello"}])

    return asyncio.run(ask()).message.content[0].text


WAYS = [
    google, google_stream, google_async, google_async_stream, google_async_httpx, google_async_httpx_stream,
    ollama_chat, ollama_stream, ollama_generate, ollama_async, cohere_chat, cohere_stream, cohere_async,
]  # fmt: skip


def chats(spans):
    return [span for span in spans if span.operation == names.CHAT]


def training(attempt):
    return use_attempt(Attached("r", "a", endpoint=attempt.url, key=attempt.key, agents=("writer",), model="policy"))


@pytest.mark.parametrize("ask", WAYS)
def test_a_call_is_recorded_once_and_answered_as_without_us(ask, recorder, vendors, sink):
    with agent("writer"):
        assert ask(vendors.url) == "Nineteen."
    (span,) = chats(sink.spans)
    assert (span.agent, span.status, span.attributes[names.REQUEST_MODEL]) == ("writer", "ok", "far")
    assert json.loads(span.attributes[names.REQUEST])["messages"] == [{"role": "user", "content": "hello"}]
    assert read_answer(span.attributes[names.RESPONSE]).choices[0].message["content"] == "Nineteen."
    assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.OUTPUT_TOKENS]) == (11, 3)
    assert names.ABANDONED not in span.attributes
    assert len(vendors.asked) == 1
    assert unrecorded.take() == {}


@pytest.mark.parametrize("ask", WAYS)
def test_a_call_of_an_agent_in_training_is_the_policys_with_its_tokens(ask, recorder, vendors, attempt, sink):
    attempt.play("Policy.")
    with training(attempt), agent("writer"):
        assert ask(vendors.url) == "Policy."
    (call,), (span,) = attempt.calls(1), chats(sink.spans)
    assert vendors.asked == []
    assert (span.attributes[names.REROUTED], span.attributes[names.RESPONSE_ID]) == (True, call.response_id)
    assert (call.trace_id, call.span_id) == (span.trace_id, span.span_id)


def talk_google(url):
    config = types.GenerateContentConfig(tools=[calculator], system_instruction="Be brief.")
    return of_google(url).models.generate_content(model="far", contents=QUESTION, config=config).text


def talk_google_stream(url):
    chat = of_google(url).chats.create(model="far", config=types.GenerateContentConfig(tools=[calculator]))
    return "".join(part.text or "" for part in chat.send_message_stream(QUESTION)).removeprefix("I will count. ")


def talk_ollama(url, stream=False):
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = ollama.Client(url).chat("far", messages, tools=[calculator], stream=stream)
        parts = list(answer) if stream else [answer]
        text = "".join(part.message.content or "" for part in parts)
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        if not calls:
            return text
        messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        messages.append({"role": "tool", "tool_name": "calculator", "content": "19"})


def talk_ollama_stream(url):
    return talk_ollama(url, stream=True)


def talk_cohere(url):
    messages = [{"role": "user", "content": QUESTION}]
    client = cohere.ClientV2("k", base_url=url)
    answer = client.chat(model="far", messages=messages, tools=[TOOL])
    messages.append(answer.message)
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments) == {"expression": "12+7"}
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "19"})
    return client.chat(model="far", messages=messages, tools=[TOOL]).message.content[0].text


@pytest.mark.parametrize("talk", [talk_google, talk_google_stream, talk_ollama, talk_ollama_stream, talk_cohere])
def test_a_conversation_with_a_tool_goes_on_with_the_tokens_before(talk, recorder, attempt):
    attempt.play(f"I will count. {CALL}", "It is 19.")
    with training(attempt), agent("writer"):
        assert talk("http://127.0.0.1:9") == "It is 19."
    attempt.continued()


def test_errors_are_those_of_the_clients(recorder, attempt):
    url, messages = "http://127.0.0.1:9", [{"role": "user", "content": "hello"}]
    settings = [types.SafetySetting(category="HARM_CATEGORY_HARASSMENT", threshold="BLOCK_LOW_AND_ABOVE")]
    guarded = types.GenerateContentConfig(safety_settings=settings)
    events = cohere.ClientV2("k", base_url=url).chat_stream(model="far", messages=messages, documents=["a"])
    with training(attempt), agent("writer"):
        with pytest.raises(errors.ClientError, match="safetySettings"):
            of_google(url).models.generate_content(model="far", contents="hello", config=guarded)
        with pytest.raises(ollama.ResponseError, match=r"options\.mirostat"):
            ollama.Client(url).chat("far", messages, options={"mirostat": 2})
        with pytest.raises(cohere.BadRequestError, match="documents"):
            next(iter(events))
        with pytest.raises(ollama.ResponseError, match="temperature") as refused:
            ollama.Client(url).chat("far", messages, options={"temperature": -1})
        assert refused.value.status_code == 400


def chat_ollama(url):
    return pytest.importorskip("langchain_ollama").ChatOllama(model="far", base_url=url)


def chat_google(url):
    models = pytest.importorskip("langchain_google_genai")
    return models.ChatGoogleGenerativeAI(model="far", base_url=url, api_key="k", max_retries=1)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("model", [chat_ollama, chat_google])
def test_under_langchain_a_call_is_recorded_once_and_answered_by_the_policy_where_it_is_trained(
    model, trained, vendors, tmp_path
):
    pytest.importorskip("lightning_langchain")
    agents = pytest.importorskip("langchain.agents")
    asked = {"messages": [{"role": "user", "content": "hello"}]}

    async def ask_async():
        writer = agents.create_agent(model(vendors.url), [calculator], name="writer", system_prompt="You are writer")
        answer = (await writer.ainvoke(asked))["messages"][-1].text
        streamed = "".join([part.text async for part, _ in writer.astream(asked, stream_mode="messages")])
        return [answer, streamed]

    with ScriptedServer() as policy, attach("langchain", store=str(tmp_path / "x.db")) as attachment:
        attempt = Attached("r", "a", endpoint=policy.base, key="k", agents=("writer",) if trained else (), model="t")
        with use_attempt(attempt):
            writer = agents.create_agent(
                model(vendors.url), [calculator], name="writer", system_prompt="You are writer"
            )
            answers = [writer.invoke(asked)["messages"][-1].text]
            answers.append("".join(part.text for part, _ in writer.stream(asked, stream_mode="messages")))
            answers += asyncio.run(ask_async())
        attachment.flush(30)
        spans = chats(policy.spans)
        assert (len(policy.requests), len(vendors.asked)) == ((4, 0) if trained else (0, 4))
    assert answers == ["writer answers 'hello'" if trained else "Nineteen."] * 4
    told = [tuple(bool(span.attributes.get(n)) for n in (names.REROUTED, names.REROUTABLE)) for span in spans]
    assert told == [(trained, not trained)] * 4
    assert [(span.agent, span.status) for span in spans] == [("writer", "ok")] * 4

"""Conversations through the gateway: one sequence of tokens, one training row, and the share of joined calls."""

from __future__ import annotations

import httpx
import openai
import pytest

from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.reasons import continuation as reasons
from lightning_trainer.reasons.continuation import ContinuationReason
from support.fakes import ByteTokenizer, FakeEngine, served
from support.gateway.long_talks import STRANGE, TOOLS, USER, rows_of


def talk(client, *, stream=False, model="policy"):
    """Use a tool and answer, as an agent does: three calls of one conversation."""
    messages = [USER]
    for _ in range(3):
        if stream:
            with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as events:
                said = events.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(said.model_dump(exclude={"parsed"}))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "19"} for call in said.tool_calls or ()]
        if not said.tool_calls:
            messages.append({"role": "user", "content": "Are you sure?"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_row_and_the_account_says_so(server, attempt, client, stream):
    server.engine.play([STRANGE, [ByteTokenizer.merged, *b" answer"], "yes"])
    talk(client, stream=stream)
    rows, told = rows_of(server, attempt)
    assert [row.transitions for row in rows] == [3]
    assert (told.continued, told.not_continued, told.continued_share) == (2, {}, 1.0)
    assert [call.sampling[reasons.CONTINUATION] for call in server.calls(attempt)] == [
        ContinuationReason.BEGINS
    ] + 2 * [ContinuationReason.JOINED]


def test_either_of_n_answers_can_be_continued(server, attempt, client):
    server.engine.play(["one", [*b"tw", 111]])
    choices = client.chat.completions.create(model="policy", messages=[USER], n=2).choices
    for choice in choices:
        messages = [USER, choice.message.model_dump(), USER]
        client.chat.completions.create(model="policy", messages=messages)
    first, *others = server.calls(attempt)
    for choice, other in zip(first.choices, others, strict=True):
        before = first.prompt_token_ids + choice.token_ids
        assert other.prompt_token_ids[: len(before)] == before


def test_what_stands_alone_is_told_with_its_reason_in_account_and_metrics(server, attempt, client):
    server.engine.play(["19", "20"])
    client.chat.completions.create(model="policy", messages=[USER])
    edited = [{"role": "system", "content": "new"}, USER, {"role": "assistant", "content": "19"}, USER]
    before = _metric(server, 'lightning_prompts_total{made="system_prompt_changed"}')
    client.chat.completions.create(model="policy", messages=edited)
    _, told = rows_of(server, attempt)
    assert (told.continued, told.not_continued) == (0, {ContinuationReason.SYSTEM_CHANGED: 1})
    assert _metric(server, 'lightning_prompts_total{made="system_prompt_changed"}') == before + 1
    assert 0 <= _metric(server, "lightning_continued_share") < 1


def test_an_attempt_that_ended_leaves_nothing_behind(server, attempt, client):
    talk(client)
    server.app.state.forget(attempt)
    policies = [cell for cell in _engines(server) if attempt in cell.continuations._memories]
    assert policies == []


def test_forwarded_calls_say_that_they_were_sent_as_messages(tmp_path_factory):
    with served(tmp_path_factory.mktemp("behind"), FakeEngine(model="tuned")) as behind:
        upstream = Upstream("tuned", f"{behind.url}/v1", key=behind.keys.issue("admin"))
        with served(tmp_path_factory.mktemp("front"), upstreams=[upstream]) as front:
            client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key("a"))
            talk(client, model="tuned")
            _, told = rows_of(front, "a")
    assert (told.continued, told.not_continued) == (0, {ContinuationReason.ONLY_MESSAGES: 2})


def _engines(server):
    import gc

    from lightning_trainer.gateway.calls.embedded import EmbeddedEngine

    return [thing for thing in gc.get_objects() if isinstance(thing, EmbeddedEngine) and thing.engine is server.engine]


def _metric(server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)

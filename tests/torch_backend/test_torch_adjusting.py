"""What changes an answer beyond temperature and truncation: penalties, biases, min-p, and grammars of any schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import httpx
import pytest

from support.fakes import served

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from lightning_trainer.backends.torch import TorchEngine
from lightning_trainer.backends.torch.generate.sampling import Draw, draw
from lightning_trainer.backends.torch.model import load as loading
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.gateway.engine import STEERED, SampledPiece, Sampling
from support.models.family_models import make_family_model
from support.models.model_families import all_families
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.torch
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "greet", "parameters": PERSON}},
    {
        "type": "function",
        "function": {"name": "leave", "parameters": {"type": "object", "additionalProperties": False}},
    },
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)
    chosen = make_options(folder, {"threads": 1})
    made = TorchEngine(loading.load(chosen), chosen)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine):
    with served(tmp_path_factory.mktemp("adjusting"), engine) as running:
        yield running


@pytest.fixture
def ask(server, request):
    def post(path="/v1/chat/completions", **body):
        asked = {"model": server.engine.model, "messages": [{"role": "user", "content": "hi"}], "seed": 3, **body}
        headers = {"authorization": f"Bearer {server.key(request.node.name)}"}
        return httpx.post(f"{server.url}{path}", json=asked, headers=headers, timeout=60)

    return post


async def drawn(engine: TorchEngine, **sampling: object) -> SampledPiece:
    tokens, logprobs, text, reason = [], [], "", None
    async for piece in engine.generate(engine.tokenizer("The ").input_ids, Sampling(**{"seed": 1, **sampling})):
        tokens += piece.token_ids
        logprobs += piece.logprobs
        text += piece.text
        reason = piece.finish_reason
    return SampledPiece(tuple(tokens), tuple(logprobs), text, reason)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_follows_its_schema_whatever_the_weights(ask, seed):
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    choice = ask(response_format=shape, seed=seed, temperature=1.5).json()["choices"][0]
    found = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert set(found) == {"name", "age"}
    assert len(found["name"]) <= 5
    assert 0 <= found["age"] <= 99


@pytest.mark.parametrize("seed", range(3))
def test_a_call_is_made_where_one_is_required(ask, seed):
    body = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
    choice = ask(**body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    arguments = json.loads(call["function"]["arguments"])
    assert (call["function"]["name"], set(arguments)) in [("greet", {"name", "age"}), ("leave", set())]


def test_the_tool_that_is_named_is_the_one_called(ask, server, request):
    named = {"type": "function", "function": {"name": "greet"}}
    message = ask(tools=TOOLS, tool_choice=named).json()["choices"][0]["message"]
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"greet"}
    (call,) = server.calls(request.node.name)
    assert "greet" in call.sampling["grammar"]
    assert len(call.choices[0].token_ids) == len(call.choices[0].logprobs)


def test_tool_use_is_forced_on_other_surfaces_too(ask):
    tools = [{"name": "greet", "input_schema": PERSON}]
    found = ask("/v1/messages", tools=tools, tool_choice={"type": "any"}, max_tokens=400).json()
    assert found["stop_reason"] == "tool_use"
    assert set(found["content"][0]["input"]) == {"name", "age"}
    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    found = ask("/v1/responses", input="hi", text=text, messages=None).json()
    assert set(json.loads(found["output"][0]["content"][0]["text"])) == {"name", "age"}


@pytest.mark.parametrize(
    ("name", "switches"),
    [("gpt-oss", {}), ("Qwen3", {}), ("Qwen3.5", {"enable_thinking": False}), ("Magistral", {}), ("Kimi K2", {})],
)
def test_a_call_is_forced_in_the_format_of_each_family(tmp_path, name, switches):
    """Whatever the weights, by the engine itself; and training is told which tokens were not the policy's own."""
    family = {family.name: family for family in all_families()}.get(name)
    if family is None:
        pytest.skip("trl's templates are not here")
    chosen = make_options(make_family_model(tmp_path / "model", family), {"threads": 1})
    engine = TorchEngine(loading.load(chosen), chosen)
    described = [{**tool, "function": {"description": "Does it.", **tool["function"]}} for tool in TOOLS]
    body = {
        "model": engine.model, "messages": [{"role": "user", "content": "hi"}], "tools": described, "seed": 5,
        "tool_choice": "required", "chat_template_kwargs": switches,
    }  # fmt: skip
    with served(tmp_path, engine) as running:
        headers = {"authorization": f"Bearer {running.key('a')}"}
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        (recorded,) = running.calls("a")
    engine.close()
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    for call in calls:
        wanted = {"greet": {"name", "age"}, "leave": set()}[call["function"]["name"]]
        assert set(json.loads(call["function"]["arguments"])) == wanted
    assert set(range(4)) <= set(recorded.sampling[STEERED]["0"])  # the begin of a call


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "(?=a)"}]
)
def test_a_schema_that_can_not_be_held_to_is_refused(ask, schema):
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = ask(response_format=shape)
    assert reply.status_code == 400, reply.text
    assert "can't be enforced" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"logit_bias": {"5": 1000}},
        {"logit_bias": {"99999999": 1}},
        {"logit_bias": {"x": 1}},
        {"presence_penalty": 9},
        {"min_p": 2},
    ],
)
def test_malformed_wishes_are_refused(ask, body):
    assert ask(**body).status_code == 400


async def test_log_probabilities_are_the_policys_own(engine):
    """Under a grammar too: the trainer computes them again from the weights alone."""
    grammar = 'start: "abc" | "xyz"\n'
    answer = await drawn(engine, grammar=grammar, max_tokens=5)
    assert answer.text in {"abc", "xyz"}
    prompt = engine.tokenizer("The ").input_ids
    model = engine._model.causal
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    found = [float(expected[len(prompt) + at - 1, token]) for at, token in enumerate(answer.token_ids)]
    assert list(answer.logprobs) == pytest.approx(found, abs=1e-4)


async def test_biases_ban_and_force_tokens(engine):
    token = engine.tokenizer("q").input_ids[0]
    forced = await drawn(engine, logit_bias={token: 100.0}, max_tokens=5)
    assert set(forced.token_ids) == {token}
    banned = await drawn(engine, logit_bias=dict.fromkeys(range(10, 250), -100.0), max_tokens=20)
    assert not set(banned.token_ids) & set(range(10, 250))


async def test_penalties_take_what_was_said_out_of_the_running(engine):
    plain = await drawn(engine, temperature=0.0, max_tokens=30)
    repeated = len(plain.token_ids) - len(set(plain.token_ids))
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 50.0}):
        other = await drawn(engine, temperature=0.0, max_tokens=30, **penalty)
        assert len(other.token_ids) - len(set(other.token_ids)) < repeated, penalty


def test_min_p_keeps_what_is_likely_enough():
    logits = torch.tensor([[0.0, -1.0, -2.0, -9.0]])
    uniforms = [step / 50 for step in range(50)]
    assert {draw(logits, [Draw(1.0, 1.0, 0, u, min_p=0.2)])[0][0] for u in uniforms} == {0, 1}
    assert {draw(logits, [Draw(1.0, 1.0, 0, u, min_p=0.1)])[0][0] for u in uniforms} == {0, 1, 2}


def test_one_rows_adjustment_leaves_the_others_alone():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    plain = [Draw(1.0, 1.0, 0, u) for u in (0.1, 0.5, 0.9)]
    adjusted = [plain[0], Draw(1.0, 1.0, 0, 0.5, adjust=lambda row: row.clone().fill_(0)), plain[2]]
    tokens, logprobs, _ = draw(logits, plain)
    others, theirs, _ = draw(logits, adjusted)
    assert (tokens[0], tokens[2], logprobs[0]) == (others[0], others[2], theirs[0])
    assert others[1] == 20


def test_draws_from_another_distribution_than_the_policys_are_told_apart():
    logits = torch.log(torch.tensor([[0.6, 0.25, 0.145, 0.005]])).repeat(7, 1)

    def only(*kept):
        return lambda row: torch.where(torch.isin(torch.arange(4), torch.tensor(kept)), row, -torch.inf)

    def lifted(row):
        return row + torch.tensor([0.0, 2.0, 0.0, 0.0])

    draws = [
        Draw(1.0, 1.0, 0, 0.5),  # plain
        Draw(1.0, 1.0, 3, 0.5),  # cuts off half a percent
        Draw(1.0, 0.8, 0, 0.5),
        Draw(1.0, 1.0, 0, 0.5, min_p=0.3),
        Draw(1.0, 1.0, 0, 0.5, adjust=only(1)),  # forced
        Draw(1.0, 1.0, 0, 0.5, adjust=only(0, 1, 2)),  # a grammar that hardly restricts
        Draw(1.0, 1.0, 0, 0.5, adjust=lifted),
    ]
    found = draw(logits, draws)
    assert found.steered == [False, False, True, True, True, False, True]
    assert found.tokens[4] == 1
    assert found.logprobs[4] == pytest.approx(math.log(0.25)), "the policy's, not that of what was drawn from"


def test_forced_tokens_of_an_answer_stand_in_its_record(ask, server, request):
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    ask(response_format=shape, n=2)
    (call,) = server.calls(request.node.name)
    tokenizer = server.engine.tokenizer
    for choice in call.choices:
        steered = set(call.sampling["steered"][str(choice.index)])
        texts = [tokenizer.decode([token]) for token in choice.token_ids]
        assert 0 in steered, "an object begins with a brace, whatever the policy says"
        assert len(steered) <= len(texts)


def test_plain_calls_say_nothing_of_steering(ask, server, request):
    ask(max_tokens=4)
    (call,) = server.calls(request.node.name)
    assert "steered" not in call.sampling

"""The embedded engine: what it draws, how it batches, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import TorchEngine, TorchLearner
from lightning_trainer.backends.torch.generate.request import Request
from lightning_trainer.backends.torch.generate.sampling import Draw, draw
from lightning_trainer.backends.torch.model import load as loading
from lightning_trainer.backends.torch.model.attention import NAME
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.gateway.engine import Sampling
from lightning_trainer.gateway.prompt.text_stream import TextStream
from support.models.sampling import collect
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.torch


def make_engine(folder: Path, **options: object) -> TorchEngine:
    chosen = make_options(folder, {"threads": 1, **options})
    return TorchEngine(loading.load(chosen), chosen)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[TorchEngine]:
    made = make_engine(tiny_model)
    yield made
    made.close()


def ids(engine: TorchEngine, text: str) -> list[int]:
    return engine.tokenizer(text).input_ids


def plain_logprobs(model, prompt: list[int], answer: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """What transformers' own forward pass says of an answer."""
    model.causal.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model.causal(torch.tensor([prompt + list(answer)])).logits[0, len(prompt) - 1 : -1].float()
    model.causal.set_attn_implementation(NAME)
    scaled = (logits / temperature).log_softmax(-1)
    return scaled.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


# What is drawn.


async def test_greedy_answers_and_logprobs_are_those_of_transformers(engine: TorchEngine) -> None:
    prompt = ids(engine, "the quick brown fox")
    answer = await collect(engine, prompt, max_tokens=20, temperature=0)
    causal = engine._model.causal
    causal.set_attn_implementation("sdpa")
    expected = causal.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    causal.set_attn_implementation(NAME)
    assert list(answer.token_ids) == expected.tolist()
    assert answer.logprobs == pytest.approx(plain_logprobs(engine._model, prompt, answer.token_ids), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
async def test_logprobs_are_under_the_temperature_and_the_whole_vocabulary(
    engine: TorchEngine, temperature: float
) -> None:
    prompt = ids(engine, "hello")
    answer = await collect(engine, prompt, max_tokens=15, temperature=temperature, top_k=5, top_p=0.9, seed=1)
    expected = plain_logprobs(engine._model, prompt, answer.token_ids, temperature)
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def test_an_answer_does_not_depend_on_what_it_is_batched_with(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, slots=5)
    prompts = [ids(engine, "abcdefghij" * 4 + "xyz" * n) for n in range(9)]
    together = await asyncio.gather(
        *(collect(engine, p, max_tokens=10 + 3 * n, temperature=0.9, seed=n) for n, p in enumerate(prompts))
    )
    with engine.still():
        engine.weights_changed(1)  # no prefix is left to reuse
    alone = [await collect(engine, p, max_tokens=10 + 3 * n, temperature=0.9, seed=n) for n, p in enumerate(prompts)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    engine.close()


async def test_the_same_seed_repeats_and_no_seed_varies(engine: TorchEngine) -> None:
    prompt = ids(engine, "dice")
    draws = [await collect(engine, prompt, max_tokens=12, seed=seed) for seed in (5, 5, None, None)]
    assert draws[0].token_ids == draws[1].token_ids
    assert len({draw.token_ids for draw in draws[1:]}) == 3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([7, 256, 300, 1000]))
def test_draws_follow_the_distribution(seed: int, vocabulary: int) -> None:
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    count = 4000
    uniforms = (np.arange(count) + 0.5) / count
    tokens, logprobs, _ = draw(logits.expand(count, -1), [Draw(1.0, 1.0, 0, float(u)) for u in uniforms])
    expected = logits[0].double().softmax(-1).numpy() * count
    assert np.abs(np.bincount(tokens, minlength=vocabulary) - expected).max() <= 1.5  # a grid of numbers, so no chance
    assert logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[tokens[0]]), abs=1e-5)


def test_top_k_and_top_p_keep_the_likeliest_and_no_more() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    uniforms = [float(u) for u in (np.arange(1000) + 0.5) / 1000]

    def drawn(top_p: float, top_k: int) -> dict[int, int]:
        tokens, _, _ = draw(logits.expand(1000, -1), [Draw(1.0, top_p, top_k, u) for u in uniforms])
        return {token: tokens.count(token) for token in set(tokens)}

    assert drawn(1.0, 1) == {0: 1000}
    assert drawn(0.79, 0) == {0: 625, 1: 375}
    assert drawn(0.81, 0).keys() == {0, 1, 2}
    assert drawn(0.6, 3).keys() == {0, 1}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((3, 600), -float("inf"))
    logits[:, 300] = 0.0
    tokens, logprobs, _ = draw(logits, [Draw(1.0, 1.0, 0, u) for u in (0.0, 0.5, 1 - 2**-53)])
    assert tokens == [300] * 3
    assert logprobs == [0.0] * 3


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_temperature_next_to_0_takes_the_likeliest_and_harms_nobody(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1.0, 30.0, 2.0]] * 2)
    alone = draw(logits[:1], [Draw(1.0, 1.0, 0, 0.5)])
    both = draw(logits, [Draw(1.0, 1.0, 0, 0.5), Draw(temperature, top_p, 0, 0.999, adjust=lambda logits_V: logits_V)])
    assert both.tokens == [1, 1]
    assert both.logprobs == [alone.logprobs[0], 0.0]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_weights_that_have_diverged_are_told_in_words(top_p: float) -> None:
    logits = torch.full((1, 259), float("nan"))
    with pytest.raises(FloatingPointError, match="not finite: its weights have diverged"):
        draw(logits, [Draw(1.0, top_p, 0, 0.5)])


# Where an answer ends.


async def test_max_tokens_and_the_context_end_an_answer(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_model_len=32)
    assert (await collect(engine, ids(engine, "a" * 10), max_tokens=3, temperature=0)).finish_reason == "length"
    answer = await collect(engine, ids(engine, "a" * 25), temperature=0)
    assert (len(answer.token_ids), answer.finish_reason) == (7, "length")
    with pytest.raises(ValueError, match="room"):
        engine.generate([5] * 32, Sampling())
    engine.close()


async def test_the_end_of_turn_token_is_recorded_but_is_no_text(tiny_model: Path, monkeypatch) -> None:
    engine = make_engine(tiny_model)
    head = engine._model.causal.lm_head
    monkeypatch.setattr(head, "forward", lambda hidden: torch.eye(259)[torch.full((len(hidden),), 2)] * 99)
    answer = await collect(engine, ids(engine, "hi"))
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((2,), "", "stop")
    engine.close()


async def test_a_stop_string_ends_the_answer_and_is_not_in_its_text(engine: TorchEngine) -> None:
    prompt = ids(engine, "stop")
    free = await collect(engine, prompt, max_tokens=60, seed=3, temperature=1.5)
    ascii_runs = [free.text[i : i + 2] for i in range(5, len(free.text) - 2) if free.text[i : i + 2].isascii()]
    stop = ascii_runs[0]
    answer = await collect(engine, prompt, max_tokens=60, seed=3, temperature=1.5, stop=(stop, "never there"))
    assert answer.finish_reason == "stop"
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert stop in engine.tokenizer.decode(answer.token_ids)


@settings(max_examples=60, deadline=None)
@given(text=st.text("aé漢🙂b ", max_size=12), stops=st.lists(st.text("aé漢b", min_size=1, max_size=3), max_size=2))
def test_pieces_are_whole_characters_and_end_before_a_stop_string(
    tiny_model: Path, text: str, stops: list[str]
) -> None:
    tokenizer = _tokenizer(tiny_model)
    stream, given_out, stopped = TextStream(tokenizer, tuple(stops)), "", False
    for token in tokenizer(text).input_ids:
        piece, stopped = stream.push(token)
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        given_out += piece
        if stopped:
            break
    given_out += "" if stopped else stream.finish()
    ends = [text.index(stop) for stop in stops if stop in text]
    if not ends:
        assert given_out == text
    else:  # the earliest stop string to be complete decides
        assert stopped
        assert text.startswith(given_out)
        assert any(text.startswith(given_out + stop) for stop in stops)


_TOKENIZERS: dict[Path, object] = {}


def _tokenizer(folder: Path):
    if folder not in _TOKENIZERS:
        from transformers import AutoTokenizer

        _TOKENIZERS[folder] = AutoTokenizer.from_pretrained(folder)
    return _TOKENIZERS[folder]


# Batching and reuse.


async def test_a_shared_prefix_is_computed_once(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    shared = ids(engine, "x" * 200)
    prompts = [shared + ids(engine, f" question {n}") for n in range(6)]
    await asyncio.gather(*(collect(engine, prompt, max_tokens=4, temperature=0) for prompt in prompts))
    counts = engine.counts()
    assert counts["prompt_tokens"] == sum(map(len, prompts))
    assert counts["reused_tokens"] >= 5 * len(shared)
    engine.close()


async def test_a_conversation_continues_where_it_ended(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, slots=2)
    prompt = ids(engine, "first turn, rather long")
    first = await collect(engine, prompt, max_tokens=10, temperature=0)
    longer = prompt + list(first.token_ids) + ids(engine, " second turn")
    second = await collect(engine, longer, max_tokens=10, temperature=0)
    assert engine.counts()["reused_tokens"] == len(prompt) + 9  # the last token drawn was never fed
    assert second.logprobs == pytest.approx(plain_logprobs(engine._model, longer, second.token_ids), abs=1e-5)
    engine.close()


async def test_more_requests_than_slots_all_end_and_slots_move_together(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, slots=6)
    prompts = [ids(engine, chr(65 + n) * (3 + n)) for n in range(24)]
    answers = await asyncio.gather(
        *(collect(engine, p, max_tokens=1 + 7 * (n % 6), temperature=0) for n, p in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs == pytest.approx(plain_logprobs(engine._model, prompt, answer.token_ids), abs=1e-5)
    engine.close()


async def test_a_prompt_longer_than_a_step_and_the_first_cache_is_right(tmp_path: Path) -> None:
    engine = make_engine(make_tiny_model(tmp_path / "long", max_position_embeddings=2048))
    prompt = [3 + (7 * n) % 250 for n in range(1300)]
    answer = await collect(engine, prompt, max_tokens=5, temperature=0)
    assert answer.logprobs == pytest.approx(plain_logprobs(engine._model, prompt, answer.token_ids), abs=1e-4)
    engine.close()


async def test_any_event_loop_may_ask(engine: TorchEngine) -> None:
    prompt = ids(engine, "loops")
    here = await collect(engine, prompt, max_tokens=6, temperature=0)
    there = await asyncio.to_thread(lambda: asyncio.run(collect(engine, prompt, max_tokens=6, temperature=0)))
    assert (here.token_ids, here.text) == (there.token_ids, there.text)


# When something goes wrong.


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], {}),
        ([1] * 600, {}),
        ([100_000], {}),
        ([-1], {}),
        ([5], {"temperature": -1.0}),
        ([5], {"top_p": 0.0}),
        ([5], {"top_k": -1}),
        ([5], {"max_tokens": 0}),
    ],
)
def test_bad_requests_are_refused_at_once(engine: TorchEngine, prompt: list[int], sampling: dict) -> None:
    with pytest.raises(ValueError, match=r"prompt|must"):
        engine.generate(prompt, Sampling(**sampling))


async def test_closing_the_iterator_frees_the_slot(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, slots=1)
    pieces = engine.generate(ids(engine, "endless"), Sampling(seed=1))
    await anext(pieces)
    await pieces.aclose()
    answer = await asyncio.wait_for(collect(engine, ids(engine, "next"), max_tokens=3), 20)
    assert len(answer.token_ids) <= 3
    engine.close()


async def test_an_error_reaches_those_who_wait_and_the_engine_goes_on(tiny_model: Path, monkeypatch) -> None:
    engine = make_engine(tiny_model)

    def broken(_hidden):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model.causal.lm_head, "forward", broken)
        answers = await asyncio.gather(
            *(collect(engine, ids(engine, "x"), max_tokens=2) for _ in range(3)), return_exceptions=True
        )
    assert [type(answer) for answer in answers] == [MemoryError] * 3
    assert len((await collect(engine, ids(engine, "x"), max_tokens=2, temperature=0)).token_ids) == 2
    engine.close()


async def test_after_an_error_the_cache_needs_no_memory_to_free_its_own(tiny_model: Path, monkeypatch) -> None:
    engine, zeros = make_engine(tiny_model, slots=4), torch.zeros
    head, errors = engine._model.causal.lm_head.forward, ["no room for logits", "no room for a second cache"]

    def limited_head(hidden):
        if len(errors) == 2:
            raise torch.OutOfMemoryError(errors.pop(0))
        return head(hidden)

    def limited_zeros(size, **how):
        if len(errors) == 1 and size[1]:
            raise torch.OutOfMemoryError(errors.pop(0))
        return zeros(size, **how)

    await asyncio.gather(*(collect(engine, [5 + n] * 400, max_tokens=2) for n in range(4)))
    with engine.still():
        engine.weights_changed(1)
    monkeypatch.setattr(engine._model.causal.lm_head, "forward", limited_head)
    monkeypatch.setattr(torch, "zeros", limited_zeros)
    with pytest.raises(torch.OutOfMemoryError, match="logits"):
        await collect(engine, [5, 6, 7], max_tokens=2)
    answer = collect(engine, [5, 6, 7], max_tokens=2, temperature=0)
    assert len((await asyncio.wait_for(answer, 120)).token_ids) == 2
    engine.close()


async def test_an_engine_that_fails_for_good_keeps_nobody_waiting(tiny_model: Path, monkeypatch) -> None:
    engine = make_engine(tiny_model)

    def broken(*_given):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine._model.causal.lm_head, "forward", broken)
    monkeypatch.setattr(engine._batcher._cache, "clear", broken)
    with pytest.raises(RuntimeError, match="the device is lost"):
        await collect(engine, [5, 6, 7], max_tokens=2)
    engine._batcher._thread.join()
    with pytest.raises(RuntimeError, match="the engine has failed: the device is lost"):
        await asyncio.wait_for(collect(engine, [5, 6, 7], max_tokens=2), 120)
    with pytest.raises(RuntimeError, match="the engine has failed: the device is lost"), engine.still():
        pass
    engine.close()


async def test_an_answer_that_has_ended_arrives_though_another_fails_in_the_same_step(tiny_model, monkeypatch) -> None:
    engine, take = make_engine(tiny_model), Request.take

    def sometimes_broken(request, *given, **named):
        if len(request.prompt) == 4:
            raise ValueError("no text for this token")
        return take(request, *given, **named)

    monkeypatch.setattr(Request, "take", sometimes_broken)
    with engine.still():
        both = [asyncio.ensure_future(collect(engine, ids, max_tokens=1)) for ids in ([5, 6, 7], [8, 9, 10, 11])]
        while engine._batcher.requests < 2:
            await asyncio.sleep(0)
    ended, failed = await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 120)
    assert len(ended.token_ids) == 1
    assert isinstance(failed, ValueError)
    engine.close()


async def test_closing_ends_requests_with_an_error(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    pieces = engine.generate(ids(engine, "endless"), Sampling(seed=1))
    await anext(pieces)
    await asyncio.to_thread(engine.close)
    with pytest.raises(RuntimeError, match="closed"):
        async for _ in pieces:
            pass
    with pytest.raises(RuntimeError, match="closed"):
        await collect(engine, [5])


async def test_weights_change_only_between_requests(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    running = asyncio.create_task(collect(engine, ids(engine, "first"), max_tokens=40, temperature=0))
    await asyncio.sleep(0)
    while not engine.counts()["requests"]:
        await asyncio.sleep(0.001)

    def change() -> bool:
        with engine.still():
            busy = engine._batcher.requests
            engine.weights_changed(7)
            return busy == 0

    assert await asyncio.to_thread(change)
    assert running.done() or (await running).finish_reason == "length"
    assert engine.version == 7
    engine.close()


async def test_requests_that_come_during_a_change_wait_for_it(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with engine.still():
        waiting = asyncio.create_task(collect(engine, ids(engine, "later"), max_tokens=2, temperature=0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not engine.counts()["generated_tokens"]
    assert len((await waiting).token_ids) == 2
    engine.close()


# Models.


def test_bfloat16_with_laid_out_weights_is_close_to_the_plain_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    engine = make_engine(folder, dtype="bfloat16")
    prompt = ids(engine, "how close is it?")
    answer = asyncio.run(collect(engine, prompt, max_tokens=30, seed=1))
    plain = plain_logprobs(engine._model, prompt, answer.token_ids)
    assert np.mean(np.abs(np.subtract(answer.logprobs, plain))) < 0.03
    engine.close()


async def test_the_engine_generates_with_the_adapters(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "base", dtype="bfloat16")
    backend = TorchLearner(folder, lora_rank=4, threads=1, dtype="bfloat16")
    engine, prompt = backend.engine, ids(backend.engine, "adapters")
    before = await collect(engine, prompt, max_tokens=10, temperature=0)
    with engine.still(), torch.no_grad():
        for name, parameter in backend._model.causal.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        engine.weights_changed(1)
    after = await collect(engine, prompt, max_tokens=10, temperature=0)
    assert before.logprobs != after.logprobs
    plain = plain_logprobs(backend._model, prompt, after.token_ids)
    assert np.mean(np.abs(np.subtract(after.logprobs, plain))) < 0.1
    backend.close()


def test_models_that_the_engine_cannot_run_are_refused(tmp_path: Path) -> None:
    from transformers import Cohere2Config, Cohere2ForCausalLM, Llama4ForCausalLM, Llama4TextConfig

    small = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    chunked = Llama4ForCausalLM(Llama4TextConfig(**small, num_local_experts=2, intermediate_size_mlp=32))
    scaled = Cohere2ForCausalLM(Cohere2Config(**small, layer_types=["sliding_attention"], sliding_window=8))
    for model, why in (
        (chunked, r"llama4_text\): it has unsupported layers \(chunked_attention"),
        (scaled, r"cohere2\): its logits differ"),
    ):
        folder = make_tiny_model(tmp_path / model.config.model_type)
        model.save_pretrained(folder)
        with pytest.raises(ConfigError, match=why):
            make_engine(folder)


def test_a_qwen_model_runs_too(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = make_tiny_model(tmp_path / "qwen")
    config = Qwen3Config(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    engine = make_engine(folder, dtype="float32", max_model_len=64)
    prompt = ids(engine, "qwen")
    answer = asyncio.run(collect(engine, prompt, max_tokens=8, temperature=0))
    assert answer.logprobs == pytest.approx(plain_logprobs(engine._model, prompt, answer.token_ids), abs=1e-5)
    engine.close()


@pytest.mark.parametrize(
    "option",
    [
        {"dtype": "float16"},
        {"slots": 0},
        {"generate_threads": 0},
        {"device": "abacus"},
        {"max_model_len": 10**6},
        {"lora_alpha": 2.0},
        {"kl_coef": -1.0},
        {"no_such_option": 1},
    ],
)
def test_wrong_options_are_refused(tiny_model: Path, option: dict) -> None:
    with pytest.raises(ConfigError):
        make_engine(tiny_model, **option)


def test_a_model_without_chat_template_is_refused_and_hermes_helps(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        make_engine(folder)
    engine = make_engine(folder, chat_template="hermes")
    assert "tool_call" in engine.tokenizer.chat_template
    engine.close()
    gc.collect()


async def test_what_an_idle_slot_lost_keeps_nobody_waiting(tiny_model):
    """Room given back cuts the ends of idle slots; a prompt that shares more with one must not wait for them."""
    engine = make_engine(tiny_model)
    try:
        first = ids(engine, "a prompt of some length, which others begin with ")
        await asyncio.gather(*(collect(engine, [*first, *ids(engine, str(n))], max_tokens=30) for n in range(4)))
        await collect(engine, ids(engine, "x " * 200), max_tokens=5)
        await collect(engine, ids(engine, "y"), max_tokens=5)
        again = collect(engine, [*first, *ids(engine, "0")], max_tokens=5)
        assert (await asyncio.wait_for(again, 30)).token_ids
    finally:
        engine.close()


async def test_prompt_that_begins_as_one_that_was_answered_by_a_single_token(tiny_model):
    """After such an answer the cache keeps no room for tails, and a short common beginning goes into one."""
    engine = make_engine(tiny_model)
    try:
        first, other = ids(engine, "You are an agent. " + "a" * 200), ids(engine, "You are an agent. " + "b" * 200)
        await collect(engine, first, max_tokens=1)
        found = await asyncio.wait_for(collect(engine, other, max_tokens=3, temperature=0), 60)
        assert engine.counts()["reused_tokens"] >= 10
        assert found.logprobs == pytest.approx(plain_logprobs(engine._model, other, found.token_ids), abs=1e-5)
    finally:
        engine.close()


async def test_request_that_finds_no_place_is_told_and_those_behind_it_go_on(tiny_model, monkeypatch):
    engine = make_engine(tiny_model)
    begin, met = engine._batcher._cache.begin, []

    def broken(*given, **named):
        met.append(given)
        if len(met) == 1:
            raise MemoryError("no room")
        return begin(*given, **named)

    try:
        monkeypatch.setattr(engine._batcher._cache, "begin", broken)
        asked = (collect(engine, ids(engine, f"prompt {n}"), max_tokens=2, temperature=0) for n in range(3))
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert [isinstance(answer, MemoryError) for answer in answers] == [True, False, False]
        assert all(len(answer.token_ids) == 2 for answer in answers[1:])
    finally:
        engine.close()


@pytest.mark.parametrize(("instructions", "chosen"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_processor_that_is_slow_at_bfloat16_computes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: bool, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda: instructions)
    folder = make_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    assert loading.load(make_options(folder, {"device": "cpu"})).shape.dtype is chosen
    assert loading.load(make_options(folder, {"device": "cpu", "dtype": "bfloat16"})).shape.dtype is torch.bfloat16


def test_positions_of_a_model_in_float16_keep_their_frequencies(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda: True)
    loaded = loading.load(make_options(make_tiny_model(tmp_path / "half", dtype="float16"), {"device": "cpu"}))
    assert loaded.shape.dtype is torch.bfloat16
    expected = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(loaded.causal.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("fast", [True, False])
def test_what_a_processor_is_fast_at_is_measured(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    took = iter([9.0, 1.0, *([0.5, 1.0] if fast else [2.0, 1.0]) * 7])  # in turns; the first warms up
    monkeypatch.setattr(loading, "_multiply_s", lambda _: next(took))
    loading.multiplies_bfloat16.cache_clear()
    try:
        assert loading.multiplies_bfloat16() is fast
    finally:
        loading.multiplies_bfloat16.cache_clear()


async def test_an_answer_has_the_version_of_the_weights_that_sampled_it(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with engine.still():
        pieces = engine.generate(ids(engine, "hi"), Sampling(max_tokens=2))
        asked = asyncio.ensure_future(anext(pieces))
        while not engine._batcher.requests:
            await asyncio.sleep(0)
        engine.weights_changed(7)
    assert (await asked).version == 7
    await pieces.aclose()
    engine.close()

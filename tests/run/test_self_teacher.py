"""The self-teacher: what is told of a call comes from spans, and the hinted policy is scored on what was sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError, NothingToLearnError
from lightning_spans.schema.transitions import Tokens
from lightning_trainer import TrainConfig, train
from lightning_trainer.kits.teaching.feedback import answer_text, feedback
from lightning_trainer.kits.teaching.options import HINT, SelfOptions, read_self
from lightning_trainer.kits.teaching.self_teacher import SelfTeacher
from lightning_trainer.rl.account import Untaught
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.rows import Row, make_rows
from support.rl.attempts import Attempt

PROGRAM = '''
import openai
import lightning_openai
from lightning_spans import agent, tool

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

@tool
def query(text):
    raise ValueError("no such table: birds")

async def run(task):
    """Ask, fail at the tool, ask again; every other task has a tool that works."""
    messages = [{"role": "user", "content": task["q"]}]
    with agent("writer"):
        reply = await client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)
        text = reply.choices[0].message.content or ""
        try:
            if task["fails"]:
                query(text)
        except ValueError:
            pass
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)
    return sum(letter.isalpha() for letter in text) / 5
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "failing_agent.py").write_text(PROGRAM)
    write_tasks(tmp_path, fails=(True, False))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tasks(folder: Path, fails: tuple[bool, ...]) -> None:
    lines = (json.dumps({"q": f"count {n}", "fails": fail}) + "\n" for n, fail in enumerate(fails))
    (folder / "tasks.jsonl").write_text("".join(lines))


def config(model: Path | str, **options: Any) -> TrainConfig:
    return TrainConfig(**{
        "target": "failing_agent:run", "data": "tasks.jsonl", "model": str(model), "agents": "writer", "out": "out",
        "steps": 1, "batch_size": 2, "group_size": 2, "learning_rate": 1e-3, "workers": 1, "timeout_s": 120,
        "algorithm": "distil", "teacher": "self", "backend_options": {"threads": 1}, **options,
    })  # fmt: skip


# What is told.


def judged(*attempts: Trace, group: str = "g") -> list[CountedCall]:
    return [CountedCall(call, group, 0.0) for trace in attempts for call in adapt(trace)]


def trace_of(attempt: Attempt, name: str) -> Trace:
    spans = [replace(span, attempt_id=name, status_message=f"{span.span_id[-1]} broke") for span in attempt.spans]
    return Trace.build(spans, (), ())


def told(*traces: Trace, told: tuple[str, ...], earned: dict[str, float] | None = None) -> dict[tuple[str, int], str]:
    found = feedback(judged(*traces), traces, earned or {}, told=told, most=100)
    return {(attempt, int(span, 16)): text for (attempt, span, _), text in found.items()}


def test_a_call_is_told_the_errors_of_its_own_tools_else_the_first_that_failed_later() -> None:
    attempt = Attempt().chat("w", ("add", "{}", "A"), ("add", "{}", "B")).tool("w", "A", status="error").tool("w", "B")
    attempt.chat("plan").chat("w", ("add", "{}", "C")).tool("w", "C", status="error").chat("w")
    trace = trace_of(attempt, "a")
    own = {("a", 1): "The tool execute_tool failed: 2 broke", ("a", 5): "The tool execute_tool failed: 6 broke"}
    assert told(trace, told=("errors",)) == own
    assert told(trace, told=("errors", "later")) == {**own, ("a", 4): "The tool execute_tool failed: 6 broke"}
    assert told(trace, told=("later",)) == dict.fromkeys([("a", 1), ("a", 4)], own["a", 5])


def test_the_best_answer_is_the_one_in_the_same_place_of_a_rollout_that_earned_more() -> None:
    worse = trace_of(Attempt().chat("w", text="no").chat("plan", text="hm").chat("w", text="never"), "a")
    best = trace_of(Attempt().chat("w", ("add", '{"x": 1}', "A"), text="yes"), "b")
    equal = trace_of(Attempt().chat("w", text="also"), "c")
    found = told(worse, best, equal, told=("best",), earned={"a": 0.0, "b": 1.0, "c": 1.0})
    assert found == {("a", 1): 'An answer that did better:\nyes\nadd({"x": 1})'}
    assert told(worse, best, equal, told=("best",), earned=dict.fromkeys("abc", 1.0)) == {}


def test_a_long_error_loses_its_middle_and_reasoning_is_not_told() -> None:
    attempt = Attempt().chat("w", ("add", "{}", "A")).tool("w", "A", status="error")
    attempt.spans[-1] = replace(attempt.spans[-1], status_message="x" * 500)
    (text,) = feedback(judged(attempt.trace), [attempt.trace], {}, told=("errors",), most=100).values()
    assert len(text) < 200
    assert "400 characters left out" in text
    (call,) = adapt(Attempt().chat("w", text="done").trace)
    assert answer_text(replace(call, message={**call.message, "reasoning_content": "secret"})) == "done"


# Options.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"teacher_options": {"tell": "errors"}}, r"unknown option 'tell'. Did you mean 'told'\?"),
        ({"teacher_options": {"told": "errors,gossip"}}, "teacher_options: told"),
        ({"teacher_options": {"told": ""}}, "teacher_options: told"),
        ({"teacher_options": {"hint": "try again"}}, r"the hint has no \{told\}"),
        ({"teacher_options": {"top_k": -1}}, "teacher_options: top_k"),
        ({"teacher_options": {"weight": 0.5}}, "weight is the weight of the teacher relative to the rewards"),
        ({"teacher_options": {"top_k": 0, "divergence": "forward"}}, "Leave divergence out"),
        ({"teacher_options": {"weights": "oldest"}}, "teacher_options: weights"),
        ({"teacher_options": {"ema_decay": 0.5}}, "ema_decay is an option of weights = ema"),
        ({"backend": "verl", "algorithm": "grpo", "teacher_options": {"weights": "ema"}}, "ema needs backend = torch"),
        ({"algorithm": "ppo", "teacher_options": {"top_k": 0}}, "Set top_k to 1 or more"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_self(config("m", **options))


def test_options_of_the_self_teacher_need_it_and_it_goes_with_any_algorithm() -> None:
    with pytest.raises(ConfigError, match="teacher_options need teacher = self"):
        config("m", teacher="big", teacher_options={"top_k": 5})
    options = read_self(config("m", algorithm="grpo", teacher_options={"told": "errors, best", "weight": 0.5}))
    assert (options.told, options.weight, options.top_k, options.hint) == (("errors", "best"), 0.5, 100, HINT)


def test_a_wrong_option_is_told_before_anything_is_loaded(folder: Path, tiny_model: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="unknown option"):
        train(config(tiny_model, teacher_options={"tell": "errors"}))
    assert not (folder / "out").exists()


def test_verl_refuses_it() -> None:
    from lightning_trainer.backends.verl.options.overrides import check

    with pytest.raises(ConfigError, match="teacher = self needs backend = torch"):
        check(config("m", algorithm="grpo", backend="verl", backend_options={}))


# Runs.


class Seen:
    """What a run asked of its learner."""

    def __init__(self, patch: pytest.MonkeyPatch, reader: str = "logprobs") -> None:
        from lightning_trainer.backends.torch import TorchLearner

        self.hinted: list[Row] = []
        self.learned: list[Row] = []
        update, logprobs = TorchLearner.update, getattr(TorchLearner, reader)

        def reading(learner: TorchLearner, rows: list[Row], *candidates: Any) -> Any:
            self.hinted += rows
            return logprobs(learner, rows, *candidates)

        def learning(learner: TorchLearner, rows: list[Row]) -> dict[str, float]:
            self.learned += rows
            return update(learner, rows)

        patch.setattr(TorchLearner, reader, reading)
        patch.setattr(TorchLearner, "update", learning)


def numbers(folder: Path) -> SimpleNamespace:
    found = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(**next(line for line in found if line["kind"] == "train"))


def plain_logprobs(model: Path, ids: list[int], count: int) -> np.ndarray:
    """Return by transformers (count, V) log-probabilities of what may stand at the last places."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)[-count - 1 : -1].numpy()


def hinted_ids(model: Path, question: str, *more: dict[str, str]) -> list[int]:
    """Return the prompt with the hint as the chat template itself writes it."""
    from transformers import AutoTokenizer

    error = HINT.replace("{told}", "The tool query failed: no such table: birds")
    messages = [{"role": "user", "content": question}, *more, {"role": "user", "content": error}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.torch
def test_the_failed_call_alone_is_taught_by_itself_under_the_hinted_prompt(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("openai")
    seen = Seen(monkeypatch)
    train(config(tiny_model, teacher_options={"top_k": 9}))
    assert len(seen.hinted) == 2  # of two tasks with two rollouts of two calls
    expected, rows = hinted_ids(tiny_model, "count 0"), {row.calls[0]: row for row in seen.learned}
    told = 0.0
    for hinted in seen.hinted:
        row, length = rows[hinted.calls[0]], hinted.lengths[0]
        response = row.tokens[row.mask][:length].tolist()
        assert hinted.tokens.tolist() == [*expected, *response]
        assert row.target is not None
        whole = plain_logprobs(tiny_model, hinted.tokens.tolist(), length)
        teacher = np.take_along_axis(whole, row.target.tokens_KC[:length], axis=1)
        assert row.target.logprobs_KC[:length] == pytest.approx(teacher, abs=1e-4)
        assert row.target.weights_K.tolist() == [1.0] * length + [0.0] * (sum(row.lengths) - length)
        told += length
    assert not any(row.advantages.any() for row in seen.learned)
    line = vars(numbers(folder))
    assert (line["calls_trained"], line["calls_taught"], line["taught_tokens"]) == (8, 2, told)
    assert line[f"calls_untaught/{Untaught.NOTHING_TOLD.slug}"] == 6
    assert line["teacher_kl"] > 0
    assert line["teacher_seconds"] > 0


@pytest.mark.torch
def test_a_teacher_with_the_first_weights_teaches_the_same_in_later_steps(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("openai")
    seen = Seen(monkeypatch, "teacher_logprobs")
    options = {"top_k": 9, "weights": "base"}
    train(config(tiny_model, teacher_options=options, steps=2, learning_rate=1e-2))
    assert len(seen.hinted) == 4
    rows = {row.calls[0]: row for row in seen.learned}
    for hinted in seen.hinted:
        row, length = rows[hinted.calls[0]], hinted.lengths[0]
        assert row.target is not None
        whole = plain_logprobs(tiny_model, hinted.tokens.tolist(), length)
        teacher = np.take_along_axis(whole, row.target.tokens_KC[:length], axis=1)
        assert row.target.logprobs_KC[:length] == pytest.approx(teacher, abs=1e-4)


@pytest.mark.torch
def test_with_rewards_it_comes_on_top_of_their_advantages(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("openai")
    seen = Seen(monkeypatch)
    train(config(tiny_model, algorithm="grpo", teacher_options={"top_k": 0, "weight": 0.25}))
    rows, hinted = {row.calls[0]: row for row in seen.learned}, seen.hinted[0]
    row, length = rows[hinted.calls[0]], hinted.lengths[0]
    taught = row.advantages[row.mask][:length]
    # By rewards each token of a rollout has the same: that of the call that was told nothing.
    (by_reward,) = {
        float(other.advantages[other.mask][-1]) for other in seen.learned if other.attempt_id == row.attempt_id
    } - {float(taught[-1])}
    whole = plain_logprobs(tiny_model, hinted.tokens.tolist(), length)
    gap = whole[np.arange(length), hinted.tokens[-length:]] - hinted.logprobs[-length:]
    assert taught == pytest.approx(by_reward + 0.25 * gap, abs=1e-4)


@pytest.mark.torch
def test_a_run_in_which_nothing_is_told_says_so(folder: Path, tiny_model: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("openai")
    write_tasks(folder, fails=(False, False))
    with pytest.raises(NothingToLearnError, match="no call had a result for its teacher to read"):
        train(config(tiny_model))
    write_tasks(folder, fails=(True, True))
    with pytest.raises(NothingToLearnError):
        train(config(tiny_model, out="narrow", max_model_len=90))
    found = json.loads((folder / "narrow/metrics.jsonl").read_text().splitlines()[0])
    assert {name for name in found if name.startswith("calls_untaught/")} == {
        f"calls_untaught/{reason.replace(' ', '_').replace('-', '_')}"
        for reason in (Untaught.NOTHING_TOLD, Untaught.HINT_TOO_LONG)
    }


@pytest.mark.torch
def test_of_calls_that_share_a_row_each_is_taught_by_what_came_of_itself(tiny_model: Path) -> None:
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    asked: list[Any] = []

    def likeliest(rows: list[Row], count: int) -> list[np.ndarray]:
        return [np.arange(sum(row.lengths) * count).reshape(-1, count) for row in rows]

    def logprobs(rows: list[Row], candidates: list[np.ndarray]) -> list[np.ndarray]:
        asked.extend(zip(rows, candidates, strict=True))
        return [-1.0 * own for own in candidates]

    engine = SimpleNamespace(tokenizer=tokenizer, max_model_len=1000)
    learner: Any = SimpleNamespace(engine=engine, end_tokens={2}, likeliest=likeliest, logprobs=logprobs)
    trace = Attempt().chat("w").chat("w").tool("w", status="error").trace
    begun = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    more = tokenizer.encode("\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    first = Tokens(tuple(begun), (70, 71, 2), (-1.0,) * 3)
    second = Tokens((*begun, 70, 71, 2, *more), (80, 2), (-1.0,) * 2)
    calls = [replace(call, tokens=own) for call, own in zip(adapt(trace), (first, second), strict=True)]
    rows, account = make_rows(calls, np.ones(2), {"r": "g"})
    batch = Batch(rows, account, {}, calls=tuple(CountedCall(call, "g", 0.0) for call in calls))
    teacher = SelfTeacher(learner, SelfOptions(top_k=2), alone=True, failed="lowest")
    taught, _ = teacher.teach(batch, [], lambda _ids: [trace])
    ((hinted, _),) = [pair for pair in asked if pair[0].calls == ((calls[1].span_id, 0),)]
    assert hinted.tokens[-2:].tolist() == [80, 2]
    assert len(asked) == 2  # the first is told what failed later
    (row,) = taught.rows
    assert row.target.tokens_KC.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (row.target.logprobs_KC == -row.target.tokens_KC).all()
    only = SelfTeacher(learner, SelfOptions(top_k=2, told="errors"), alone=True, failed="lowest")
    (row,) = only.teach(batch, [], lambda _ids: [trace])[0].rows
    assert row.target.weights_K.tolist() == [0, 0, 0, 1, 1]
    assert row.target.logprobs_KC.tolist() == [[0, 0]] * 3 + [[-6, -7], [-8, -9]]
    assert (taught.account.taught, dict(taught.account.untaught)) == (2, {})


@pytest.mark.torch
def test_a_hint_leaves_a_prompts_own_tokens_as_they_are(tiny_model: Path) -> None:
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    from lightning_trainer.gateway.prompt.template import ChatFormat
    from lightning_trainer.kits.teaching.hints import Hints

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    hints = Hints(ChatFormat(tokenizer), {2})
    text = HINT.replace("{told}", "The tool query failed: no such table: birds")
    turns = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "again"}]
    messages = [{"role": "user", "content": "hi"}, *turns]
    shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(shown, add_special_tokens=False)
    assert hints.put(prompt, text) == hinted_ids(tiny_model, "hi", *turns)
    assert hints.put(tokenizer.encode("once upon a time"), text) is None
    closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
    assert hints.put(tokenizer.encode(closed, add_special_tokens=False), text) is None  # begins no answer
    control = hints.put(prompt, "<|im_end|>")
    assert control is not None
    assert control.count(2) == prompt.count(2) + 1  # an error's text writes no control token
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.raises(ConfigError, match="no control token"):
        Hints(ChatFormat(tokenizer), {2})

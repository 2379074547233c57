"""Folders of runs for tests of the viewer: agents that learn to calculate, and one whose every text is hostile."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_spans import hooks
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import (
    CHAT,
    EXECUTE_TOOL,
    INVOKE_AGENT,
    REQUEST,
    TOOL_ARGUMENTS,
    TOOL_NAME,
    TOOL_RESULT,
    Span,
)
from lightning_spans.store import Store, open_store
from lightning_trainer.config.files import to_json
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.report import learned_tokens
from lightning_trainer.report.metrics import MetricLog
from lightning_trainer.rl.rollouts import Outcome, plan
from lightning_trainer.rl.rollouts import outcomes as outcomes_of
from lightning_trainer.rl.rows import Row
from lightning_trainer.rl.scores import BY_TASK, by_source, score
from lightning_trainer.run.recomputed import recompute_batch

FIRST_NS = 1_790_000_000_000_000_000
MS = 1_000_000
SPECIAL = ("<|im_start|>", "<|im_end|>")


class Words:
    """A vocabulary that grows: a token for each word, written as a `tokenizer.json` of the byte-level kind."""

    def __init__(self) -> None:
        self._ids = {text: number for number, text in enumerate(SPECIAL)}

    def ids(self, text: str) -> tuple[int, ...]:
        parts = re.findall(r"<\|im_\w+\|>| ?\w+|\s|[^\w\s]", text)
        return tuple(self._ids.setdefault(part, len(self._ids)) for part in parts)

    def write(self, folder: Path) -> None:
        from lightning_trainer.kits.view.reading.pieces import _ALPHABET

        letters = {byte: letter for letter, byte in _ALPHABET.items()}
        words = {
            "".join(letters[b] for b in text.encode(errors="replace")): n
            for text, n in self._ids.items()
            if text not in SPECIAL
        }
        described = {
            "added_tokens": [{"id": number, "content": text} for number, text in enumerate(SPECIAL)],
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": words, "merges": []},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(described))


@dataclass
class Scene:
    """Writes down what happens in one attempt, as agents and gateway would."""

    attempt: AttemptRecord
    words: Words
    numbers: random.Random
    version: int
    at: int = 0  # milliseconds since its beginning
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)  # by agent: its conversation so far

    @property
    def ids(self) -> dict[str, str]:
        return {"rollout_id": self.attempt.rollout.rollout_id, "attempt_id": self.attempt.attempt_id}

    def _span(self, operation: str, name: str, took: int, **more: Any) -> Span:
        number = f"{self.attempt.fence:010x}{len(self.spans):06x}"
        start = FIRST_NS + (self.attempt.fence * 60_000 + self.at) * MS
        span = Span(
            operation=operation, name=name, trace_id=f"{self.attempt.fence:032x}", span_id=number,
            start_ns=start, end_ns=start + took * MS, **self.ids, **more,
        )  # fmt: skip
        self.spans.append(span)
        return span

    def agent(self, name: str, parent: Span | None, took: int) -> Span:
        return self._span(INVOKE_AGENT, name, took, agent=name, parent_id=parent.span_id if parent else None)

    def call(self, parent: Span, messages: list[dict[str, Any]], answer: dict[str, Any], *, took: int = 400) -> None:
        agent = parent.agent or ""
        request = {"model": "policy", "messages": messages, "temperature": 1.0}
        attributes = {REQUEST: json.dumps(request), "gen_ai.request.model": "policy"}
        span = self._span(CHAT, "policy", took, agent=agent, parent_id=parent.span_id, attributes=attributes)
        self.at += took
        said = answer.get("content") or "".join(
            f"<tool_call>{each['function']['name']} {each['function']['arguments']}</tool_call>"
            for each in answer.get("tool_calls", [])
        )
        new = "".join(f"<|im_start|>{m['role']}\n{m.get('content') or ''}<|im_end|>\n" for m in messages)
        known = self.tokens.get(agent)
        rest = f"<|im_start|>{messages[-1]['role']}\n{messages[-1].get('content')}<|im_end|>\n"
        prompt = f"{new if known is None else known + rest}<|im_start|>assistant\n"
        response = f"{said}<|im_end|>"
        self.tokens[agent] = prompt + response + "\n"
        drawn = self.words.ids(response)
        logprobs = tuple(round(-self.numbers.expovariate(1.2 + self.version), 4) for _ in drawn)
        finish = "tool_calls" if answer.get("tool_calls") else "stop"
        self.calls.append(
            Call(
                call_id=f"c{span.span_id}", response_id=f"r{span.span_id}", start_ns=span.start_ns, end_ns=span.end_ns,
                policy="policy", policy_version=self.version, trace_id=span.trace_id, span_id=span.span_id, agent=agent,
                prompt_token_ids=self.words.ids(prompt), choices=(Choice(0, drawn, logprobs, finish, answer),),
                request=request, sampling={"temperature": 1.0, "max_tokens": 64, "seeds": [7]}, **self.ids,
            )
        )  # fmt: skip

    def tool(self, parent: Span, name: str, arguments: str, result: str, *, error: str = "", took: int = 60) -> Span:
        attributes = {TOOL_NAME: name, TOOL_ARGUMENTS: arguments, TOOL_RESULT: result}
        failed = {"status": "error", "status_message": error} if error else {"status": "ok"}
        span = self._span(
            EXECUTE_TOOL, name, took, agent=parent.agent, parent_id=parent.span_id, attributes=attributes, **failed
        )
        self.at += took
        return span


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asks(tool: str, arguments: str) -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def calculates(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
    """A planner, a solver with a calculator, and a checker that now and then crashes the program."""
    a, b = scene.attempt.rollout.task["a"], scene.attempt.rollout.task["b"]
    right = scene.numbers.random() < skill
    team = scene._span("invoke_workflow", "team", 2600)
    planner = scene.agent("planner", team, 700)
    plan_text = f"Multiply {a} by {b} with the calculator, then check." if right else f"It is about {a * b // 10 * 10}."
    scene.call(planner, [system("You plan."), user(f"What is {a} * {b}?")], assistant(plan_text), took=700)
    solver = scene.agent("solver", team, 1200)
    first = [system("You solve what is planned, with tools."), user(plan_text)]
    wanted = f'{{"expression": "{a}*{b}"}}' if right else f'{{"expression": "{a} x {b}"}}'
    scene.call(solver, first, asks("calculator", wanted), took=520)
    if right:
        scene.tool(solver, "calculator", wanted, str(a * b))
    else:
        scene.tool(solver, "calculator", wanted, "", error=f"SyntaxError: invalid syntax: {a} x {b}", took=240)
    heard = str(a * b) if right else "error: invalid syntax"
    number = a * b if right or scene.numbers.random() < 0.2 else a * b + scene.numbers.randint(1, 90)
    second = [*first, asks("calculator", wanted), {"role": "tool", "tool_call_id": "call_0", "content": heard}]
    scene.call(solver, second, assistant(f"{a} * {b} = {number}"), took=430)
    checker = scene.agent("checker", team, 500)
    crash = scene.numbers.random() > 0.8 + 0.2 * skill
    verdict = "yes" if number == a * b else "I can not say"
    scene.call(checker, [system("Answer yes or no."), user(f"Is {a} * {b} = {number}?")], assistant(verdict), took=380)
    if crash:
        return (
            "failed",
            [],
            f'Traceback (most recent call last):\n  File "team.py", line 31\nValueError: not a verdict: {verdict!r}',
        )
    good = float(number == a * b)
    rewards = [
        Reward(value=good, agent="solver", **scene.ids),
        Reward(value=float(right), agent="planner", **scene.ids),
        Reward(value=float((verdict == "yes") == bool(good)), agent="checker", **scene.ids),
    ]
    return "succeeded", rewards, None


NASTY = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\"><b>bold</b>",
    "</span></code><iframe src='https://example.com/'></iframe>",
    "javascript:alert(1) https://example.com/pixel.png",
    "\u202eright to left\u202c \x1b[31mred\x1b[0m \x07 \u0000 nul",
    "{{constructor.constructor('return 1')()}} ${1} `x` %s %(x)s",
    "half a letter: \ud83d!",
    "__proto__",
)


def attacks(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
    """Names, texts, arguments, results and errors that try to be more than text; one of two million letters."""
    place = scene.attempt.fence % len(NASTY)
    text = NASTY[place].replace("\u0000", "")
    agent = scene.agent(text.encode(errors="replace").decode(), None, 900)
    scene.call(
        agent,
        [
            system(text),
            user(text * 3),
            {"role": text, "content": [{"type": "image_url", "image_url": {"url": "https://example.com/pixel.png"}}]},
        ],
        assistant(text),
        took=300,
    )
    scene.tool(agent, text.encode(errors="replace").decode(), text, "x" * 2_000_000 if place == 0 else text, error=text)
    reward = Reward(
        value=float(place % 2), agent=agent.agent, source=text.encode(errors="replace").decode(), **scene.ids
    )
    if place == 1:
        return "failed", [], f"Traceback\n{text}: {text}"
    return "succeeded", [reward], None


Play = Callable[[Scene, float], tuple[AttemptStatus, list[Reward], str | None]]


def make_run(
    folder: Path,
    *,
    steps: int = 6,
    groups: int = 5,
    size: int = 6,
    play: Play = calculates,
    seed: int = 0,
    store_url: str | None = None,
    algorithm: str = "grpo",
) -> Path:
    """Write the folder of a run, as `train` would have: options, store, numbers, tokenizer, what updates saw."""
    folder.mkdir(parents=True)
    agents = ("planner", "solver") if play is calculates else None
    config = TrainConfig(
        target="team:run", data=Path("train.jsonl"), model="tiny", agents=agents, algorithm=algorithm,
        batch_size=groups, group_size=size, steps=steps, rewards={"tool_status": 0.5}, seed=seed, store=store_url,
    )  # fmt: skip
    (folder / "config.json").write_text(to_json(config))
    numbers, words = random.Random(seed), Words()
    store = open_store(store_url or str(folder / "lightning.db"))
    world = World(store, words, numbers, play)
    log = MetricLog(folder)
    hooks.load_all()
    name = f"{folder.name}-0a1b2c3d"
    for step in range(steps):
        skill = 0.25 + 0.65 * step / max(1, steps - 1)
        if step % 3 == 0:
            held_out = _play(
                world, f"{name}.{step}:v", "val", _tasks(random.Random(seed), 3), 2, step=step, skill=skill
            )
            scored = score(held_out, config.failed, config.agents)
            log.add("val", step, {**scored.metrics(), "seconds": 4.0}, {BY_TASK: scored.by_task})
        tasks = _tasks(numbers, groups)
        outcomes = _play(world, f"{name}:t{step}", "train", tasks, size, step=step, skill=skill)
        its = [outcome.rollout for outcome in outcomes]
        batch, _ = recompute_batch(config, store, its, every_agent=False, whole=True)
        store.add_rewards(batch.automatic)
        named = {learned_tokens.row_name(row): _seen(row) for row in batch.rows if row.has_gradient}
        learned_tokens.write(folder, step, named)
        log.add("train", step, {
            **score(outcomes, config.failed, config.agents).metrics(), **batch.account.metrics(),
            **by_source(outcomes, batch.automatic, config.failed),
            "groups_without_signal": len(batch.flat_groups) / groups, "entropy": 1.4 - 0.2 * step,
            "entropy/planner": 1.2 - 0.2 * step, "kl": 0.001 * step, "logprob_gap": 0.012, "clip_fraction": 0.01 * step,
            "grad_norm": 1.0 / (1 + step), "staleness": 0.0, "staleness_max": 0.0, "response_tokens": 14.0 - step,
            "gradient_share/planner": 0.7 - 0.1 * step, "gradient_share/solver": 0.3 + 0.1 * step,
            "token_share/planner": 0.4, "token_share/solver": 0.6,
            "tool_error_rate": 1 - skill, "tool_error_rate/calculator": 1 - skill, "rollout_seconds": 12.0,
            "update_seconds": 5.0, "adapt_seconds": 0.2, "seconds": 17.5,
        })  # fmt: skip
    log.close()
    store.close()
    words.write(folder / "checkpoint")
    return folder


def cut_short(store_url: str, name: str, *, seed: int) -> None:
    """Write the rollouts of a step whose run was stopped before it learned from them."""
    numbers = random.Random(seed)
    store = open_store(store_url)
    _play(World(store, Words(), numbers, calculates), name, "train", _tasks(numbers, 2), 4, step=1, skill=0.1)
    store.close()


@dataclass
class World:
    """Where runs are played, and with what."""

    store: Store
    words: Words
    numbers: random.Random
    play: Play


def _seen(row: Row) -> learned_tokens.SeenTokens:
    """What an update might see: a gap by place, an entropy that grows with what the tokens were unlikely."""
    drawn = row.logprobs[row.mask]
    return learned_tokens.SeenTokens(np.linspace(-0.02, 0.03, len(drawn)), 0.8 * np.abs(drawn))


def _tasks(numbers: random.Random, count: int) -> list[dict[str, Any]]:
    tasks = [{"a": numbers.randint(11, 99), "b": numbers.randint(3, 19)} for _ in range(count)]
    return [{"question": f"What is {task['a']} * {task['b']}?", **task} for task in tasks]


def _play(
    world: World, name: str, mode: str, tasks: list[dict[str, Any]], size: int, *, step: int, skill: float
) -> list[Outcome]:
    store, numbers = world.store, world.numbers
    rollouts = plan(tasks, name=name, size=size, mode=mode, max_attempts=1, timeout_s=60.0)
    store.enqueue(rollouts)
    spans, calls, ends = list[Span](), list[Call](), list[End]()
    for attempt in store.claim("runner/one", limit=len(rollouts)):
        scene = Scene(attempt, world.words, numbers, step)
        status, rewards, error = world.play(scene, skill)
        spans += scene.spans
        calls += scene.calls
        ends.append(End(attempt.attempt_id, attempt.fence, status, tuple(rewards), error))
    store.add_spans(spans)
    store.add_calls(calls)
    store.finish_all(ends)
    return outcomes_of(store, rollouts)

"""What it costs to train two agents, each on an adapter of its own, beside training one agent on the same rollouts.

A step of the calculator's size on SmolLM2-135M in bfloat16: 64 rollouts, a caller's and an answerer's call in each,
generated and learned from. The rows that are learned from are the same in every case. CPU time, so that a busy machine
hardly matters; the ratio is of medians of interleaved rounds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from figures import Figure, choose_size, measure_in_rounds
from model import model_folder
from training_rows import TOOLS, conversation, tool_call

ROLLOUTS, GROUP = choose_size((64, 8), (8, 4))
ANSWER_LIMIT = {"caller": 44, "answerer": 24}
ROUNDS = choose_size(3, 1)


def prompts(tokenizer: Any) -> list[tuple[str, list[int], list[int]]]:
    """(agent, prompt, a response to learn from) of every call; both agents of a rollout next to each other."""
    rng, found = random.Random(0), []
    for rollout in range(ROLLOUTS):
        if rollout % GROUP == 0:
            left, right = rng.randint(11, 99), rng.randint(11, 99)
        asked = f"What is {left}+{right}?\n{left + right}"
        chats = {
            "caller": (conversation(left, right), TOOLS, tool_call(f"{left}+{right}") + rng.choice(["", " ", "\n"])),
            "answerer": ([{"role": "user", "content": asked}], None, f"Answer: {left + right}{rng.choice(['', '.'])}"),
        }
        for agent, (messages, tools, response) in chats.items():
            text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            ids = [tokenizer.encode(part, add_special_tokens=False) for part in (text, f"{response}<|im_end|>")]
            found.append((agent, ids[0], ids[1]))
    return found


def rows(calls: list[tuple[str, list[int], list[int]]]) -> list[Any]:
    from lightning_trainer.rl.rows import Row

    found = []
    for number, (agent, prompt, response) in enumerate(calls):
        mask = np.zeros(len(prompt) + len(response), np.bool_)
        mask[len(prompt) :] = True
        better = number // 2 % 4 == 0
        found.append(
            Row(
                tokens=np.array(prompt + response, np.int32),
                mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype("f4"),
                advantages=np.where(mask, 1.0 if better else -0.3, 0.0),
                lengths=(len(response),),
                agent=agent,
                attempt_id=f"a{number // 2}",
                rollout_id=f"r{number // 2}",
                group_id=f"g{number // 16}",
                policy=agent,
            )
        )
    return found


def generate(engines: dict[str, Any], calls: list[tuple[str, list[int], list[int]]]) -> None:
    """Answer the callers of all rollouts, and each answerer as soon as its caller is done."""
    from lightning_trainer.gateway.engine import Sampling

    async def answer(agent: str, prompt: list[int], seed: int) -> None:
        async for _ in engines[agent].generate(prompt, Sampling(max_tokens=ANSWER_LIMIT[agent], seed=seed)):
            pass

    async def rollout(number: int) -> None:
        for agent, prompt, _ in calls[2 * number : 2 * number + 2]:
            await answer(agent, prompt, number)

    async def together() -> None:
        await asyncio.gather(*(rollout(number) for number in range(ROLLOUTS)))

    asyncio.run(together())


def case(model: Any, adapters: tuple[str, ...], trained: tuple[str, ...]) -> tuple[Any, Callable[[], None]]:
    """A backend, and one step of it: generate all calls, learn from those of the trained agents."""
    from lightning_trainer.backends.torch.learner import TorchLearner

    options = {"dtype": "bfloat16", "max_model_len": 1024, "threads": 1, "lora_rank": 16, "learning_rate": 1e-6}
    backend = TorchLearner(model, adapters=adapters, **options)
    calls = prompts(backend.engine.tokenizer)
    by_name = {engine.model: engine for engine in backend.engines}
    engines = {agent: by_name.get(agent, backend.engine) for agent in ANSWER_LIMIT}
    learned = [row if adapters else replace(row, policy="policy") for row in rows(calls) if row.agent in trained]

    def step() -> None:
        generate(engines, calls)
        backend.update(learned)

    return backend, step


def measure() -> list[Figure]:
    model = model_folder()
    both = ("caller", "answerer")
    cases = {
        "one agent": case(model, ("caller",), ("caller",)),
        "one policy, two agents": case(model, (), both),
        "two policies": case(model, both, both),
    }
    seconds = measure_in_rounds({name: step for name, (_, step) in cases.items()}, rounds=ROUNDS)
    for backend, _ in cases.values():
        backend.close()
    ratio = partial(_ratio, seconds)
    return [
        ratio("one agent", "two agents, each on its adapter, beside one of them alone", goal=1.3),
        ratio("one policy, two agents", "two adapters beside one that both agents share", goal=None),
        *(Figure(what=f"a step: {name}", value=value, unit="s CPU") for name, value in seconds.items()),
    ]


def _ratio(seconds: dict[str, float], beside: str, what: str, *, goal: float | None) -> Figure:
    note = f"{ROLLOUTS} rollouts, two calls each, generated and learned from; medians of {ROUNDS} rounds"
    return Figure(what=what, value=seconds["two policies"] / seconds[beside], unit="x", goal=goal, note=note)

"""Sixty-four training rows like those of the calculator demo: eight tasks, eight rollouts each, a tool call each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.advantages import group_advantages
from lightning_trainer.rl.rows import Row, make_rows

TASKS, SAMPLES = 8, 8
SYSTEM = "Use the calculator, then write Answer: NUMBER."
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": CALCULATOR}]


def make(tokenizer: Any) -> list[Row]:
    """Two calls a rollout, which merge: the tool call, and the answer from its result. No group is without contrast."""
    rng = random.Random(0)
    transitions, returns, groups = [], [], {}
    for task in range(TASKS):
        numbers = rng.randint(11, 99), rng.randint(11, 99)
        for sample in range(SAMPLES):
            rollout = f"r{task}-{sample}"
            groups[rollout] = f"g{task}"
            returns.append(float(sample % 4 == 0))
            transitions += rollout_calls(tokenizer, rollout, *numbers, slip=rng.choice(["", " ", "\n", " = ?"]))
    advantages = group_advantages(returns, list(groups.values()))
    rows, account = make_rows(transitions, np.repeat(advantages, 2), groups)
    if (account.rows, account.merged, account.rows_without_gradient) != (TASKS * SAMPLES, TASKS * SAMPLES, 0):
        raise RuntimeError(f"not the rows that were meant: {account}")
    return rows


def rollout_calls(tokenizer: Any, rollout: str, left: int, right: int, slip: str) -> list[Transition]:
    prompt = tokenizer.apply_chat_template(
        conversation(left, right), tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    call = tool_call(f"{left}+{right}{slip}") + "<|im_end|>"
    result = f"\n<|im_start|>user\n<tool_response>\n{left + right}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    answer = f"Answer: {left + right}{slip}<|im_end|>"
    first, action, between, last = (
        tokenizer.encode(text, add_special_tokens=False) for text in (prompt, call, result, answer)
    )
    return [transition(rollout, 0, first, action), transition(rollout, 1, first + action + between, last)]


def transition(rollout: str, turn: int, prompt: list[int], response: list[int]) -> Transition:
    return Transition(
        rollout_id=rollout,
        attempt_id=f"a-{rollout}",
        agent="solver",
        turn=turn,
        span_id=f"{turn:016x}",
        tokens=Tokens(tuple(prompt), tuple(response), (0.0,) * len(response)),
    )


def conversation(left: int, right: int) -> list[dict[str, Any]]:
    """Two examples as chat turns, then the question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for question, result in (("12+7", 19), ("9*6", 54)):
        messages += [
            {"role": "user", "content": f"What is {question}?"},
            {"role": "assistant", "content": tool_call(question)},
            {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"},
            {"role": "assistant", "content": f"Answer: {result}"},
        ]
    return [*messages, {"role": "user", "content": f"What is {left}+{right}?"}]


def tool_call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'

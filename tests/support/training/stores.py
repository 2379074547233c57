"""Stores with known contents: attempts of tasks in groups, with calls as a gateway records them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store, open_store

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls_tool(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


@dataclass
class Said:
    """One model call of an attempt."""

    messages: Sequence[dict[str, Any]]
    answer: dict[str, Any]
    agent: str | None = "writer"
    prompt: tuple[int, ...] | None = None
    response: tuple[int, ...] | None = None
    finish: str | None = "stop"
    tools: list[Any] = field(default_factory=list)
    version: int = 0
    temperature: float = 1.0


@dataclass
class Made:
    """Writes attempts into a store."""

    store: Store
    count: int = 0

    def attempt(
        self,
        task: dict[str, Any],
        calls: Iterable[Said],
        reward: float | None = None,
        *,
        group: str = "g",
        mode: str = "train",
        status: str = "succeeded",
        rewards: Sequence[tuple[float, str | None, str]] = (),
    ) -> str:
        """Queue, claim, record, end. `rewards` are (value, agent, source)."""
        self.count += 1
        self.store.enqueue([Rollout(rollout_id=f"r{self.count}", group_id=group, task=task, mode=mode, max_attempts=1)])
        (attempt,) = self.store.claim("worker")
        ids = {"rollout_id": f"r{self.count}", "attempt_id": attempt.attempt_id}
        self.store.add_calls([self.call(said, place, **ids) for place, said in enumerate(calls)])
        given = [(reward, None, "run")] if reward is not None else []
        told = [Reward(value=v, agent=a, source=s, **ids) for v, a, s in (*given, *rewards)]
        self.store.finish(attempt.attempt_id, attempt.fence, status=status, rewards=told)
        return attempt.attempt_id

    def call(self, said: Said, place: int, **ids: Any) -> Call:
        tokens = None if said.response is None else tuple(-0.5 for _ in said.response)
        return Call(
            call_id=f"c{self.count}.{place}",
            response_id=f"resp{self.count}.{place}",
            start_ns=self.count * 1000 + place,
            end_ns=self.count * 1000 + place + 1,
            policy="policy",
            policy_version=said.version,
            agent=said.agent,
            prompt_token_ids=said.prompt,
            choices=(Choice(0, said.response, tokens, said.finish, said.answer),),
            request={"model": "m", "messages": list(said.messages), **({"tools": said.tools} if said.tools else {})},
            sampling={"temperature": said.temperature},
            **ids,
        )


def make_store(folder: Path) -> Made:
    return Made(open_store(str(folder / "lightning.db")))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

"""How users write it; type-checked, never run."""

from __future__ import annotations

from pathlib import Path

import lightning_langchain
import lightning_openai
import lightning_spans
from lightning_spans import Attachment, Reward, Span, Store, Trace, Transition
from lightning_trainer import Result, TrainConfig, train


def attached() -> None:
    attachment: Attachment = lightning_langchain.attach(agents=["writer"], tracer="embedded")
    attachment.detach()
    with lightning_openai.attach(store="traces.db"), lightning_spans.agent("writer"):
        lightning_spans.emit_reward(1.0, agent="writer")


@lightning_spans.workflow
async def researched(question: str) -> str:
    with lightning_spans.workflow("search"):
        return question


@lightning_spans.agent("writer")
def written(question: str) -> int:
    return len(question)


async def called() -> tuple[str, int]:
    return await researched("why?"), written("why?")


def read(store: Store) -> list[Transition]:
    spans: list[Span] = store.spans()
    rewards: list[Reward] = store.rewards()
    trace: Trace = Trace.build(spans, store.calls(), rewards)
    return lightning_spans.select(lightning_spans.adapt(trace), ["writer"])


def trained() -> float | None:
    result: Result = train(
        TrainConfig(target="my_app:run", data=Path("train.jsonl"), model="./model", agents=("writer",))
    )
    return result.reward_after

"""Two agents that answer questions over several paragraphs: `searcher` searches an index, `answerer` answers.

A program of the OpenAI Agents SDK as one would write it. The searcher calls `search` until it has found what it needs;
the answerer reads what was found and answers between `<answer>` and `</answer>`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning_openai_agents

lightning_openai_agents.attach()

from agents import (  # noqa: E402
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from index import index  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402
from reward import score  # noqa: E402

set_tracing_disabled(True)  # else the SDK sends its traces to its makers

SEARCH = "Search for what the question asks, one fact at a time. When all is found, say: done."
ANSWER = "Answer the question from the paragraphs, in a few words: <answer>...</answer>"
MOST_SEARCHES = 4


@dataclass
class FoundParagraphs:
    paragraphs: list[int] = field(default_factory=list)  # in the order in which they were found, each once


@function_tool
def search(context: RunContextWrapper[FoundParagraphs], query: str) -> str:
    """Search the paragraphs of an encyclopedia."""
    numbers = index().search(query)
    found = context.context.paragraphs
    found.extend(number for number in numbers if number not in found)
    return format_paragraphs(numbers)


def format_paragraphs(numbers: list[int]) -> str:
    return "\n".join(index().shown(number) for number in numbers) or "nothing found"


def format_question(numbers: list[int], question: str) -> str:
    return f"{format_paragraphs(numbers)}\n\n{question}"


async def solve(question: str) -> tuple[list[int], str]:
    """Return the paragraphs that the searcher found and what the answerer said."""
    found = FoundParagraphs()
    async with AsyncOpenAI(max_retries=2) as client:
        model = OpenAIChatCompletionsModel(os.environ.get("MUSIQUE_MODEL", "policy"), client)
        settings = ModelSettings(max_tokens=60)
        searcher = Agent[FoundParagraphs](
            name="searcher", instructions=SEARCH, tools=[search], model=model, model_settings=settings
        )
        answerer = Agent[FoundParagraphs](name="answerer", instructions=ANSWER, model=model, model_settings=settings)
        # Where it goes on searching, or calls what is not there, what it found is what there is.
        with suppress(MaxTurnsExceeded, ModelBehaviorError):
            await Runner.run(searcher, question, context=found, max_turns=MOST_SEARCHES)
        said = await Runner.run(answerer, format_question(found.paragraphs, question), context=found)
    return found.paragraphs, str(said.final_output)


async def run(task: dict[str, Any]) -> float:
    """Run the program on a task: 0.1 for the format, 0.9 times the word F1 of the answer."""
    _, said = await solve(task["question"])
    return score(said, task["answers"])


async def run_by_agent(task: dict[str, Any]) -> dict[str, float]:
    """Run the program on a task; the searcher earns the share of the paragraphs needed that it found.

    Where the corpus has none of them, as with HotpotQA's open questions, there is nothing to reward it for.
    """
    found, said = await solve(task["question"])
    earned, support = {"answerer": score(said, task["answers"])}, set(task["support"])
    if support:
        earned["searcher"] = len(support & set(found)) / len(support)
    return earned

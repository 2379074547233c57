"""What agents answer: whether different prompts get the same answer, and which answer is the most frequent."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from lightning_spans.schema.agents import label
from lightning_spans.schema.spans import REQUEST
from lightning_trainer.rl.told import answer_text

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node, Trace

SHORT: Final = 100  # most characters of an answer that counts as short: a class, a number, a name
_FEWEST: Final = 3  # fewest different prompts that allow a statement

Frequent: TypeAlias = dict[str, tuple[str, float]]  # by agent: a short answer and its share of the agent's answers


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """An answer, and a digest of its prompt."""

    prompt: str
    text: str


def answers_in(trace: Trace, agents: Sequence[str] | None = None) -> dict[str, list[PromptAnswer]]:
    """Return the answers of each agent in an attempt; agents selected by their path are named by it."""
    found: defaultdict[str, list[PromptAnswer]] = defaultdict(list)
    for node in trace.chats:
        prompt = _prompt(node)
        for choice in node.answer.choices:
            found[label(node.path or "", agents)].append(PromptAnswer(prompt, answer_text(choice.message)))
    return dict(found)


def _prompt(node: Node) -> str:
    ids = node.answer.prompt_token_ids
    asked = ids if ids is not None else node.span.attributes.get(REQUEST)
    return hashlib.sha256(str(asked).encode("utf-8", "replace")).hexdigest()[:12]


def of_answers(traces: Iterable[Trace], agents: Sequence[str] | None) -> tuple[dict[str, float], Frequent]:
    """Return statistics of the answers of a step or a validation.

    Returns:
        ``answers_alike/AGENT``: the share of different prompts that get the most frequent answer, if there are at least
        three of them; and the most frequent short answer of each agent.
    """
    by_agent: defaultdict[str, list[PromptAnswer]] = defaultdict(list)
    for trace in traces:
        for agent, its in answers_in(trace, agents).items():
            by_agent[agent] += its
    shares = {agent: share_alike(its) for agent, its in sorted(by_agent.items())}
    numbers = {
        f"answers_alike/{agent}" if agent else "answers_alike": share
        for agent, share in shares.items()
        if share is not None
    }
    texts = {agent: Counter(each.text for each in its) for agent, its in sorted(by_agent.items())}
    return numbers, most_frequent(texts, {agent: len(its) for agent, its in by_agent.items()})


def share_alike(answers: Iterable[PromptAnswer]) -> float | None:
    """Return the share of different prompts that get the most frequent answer; None for fewer than three prompts."""
    by_prompt: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        by_prompt[answer.prompt][answer.text] += 1
    if len(by_prompt) < _FEWEST:
        return None
    shares: Counter[str] = Counter()  # a prompt that was answered several times counts once
    for texts in by_prompt.values():
        for text, count in texts.items():
            shares[text] += count / texts.total()  # type: ignore[assignment]
    return max(shares.values()) / len(by_prompt)


def most_frequent(texts: Mapping[str, Mapping[str, int]], answers: Mapping[str, int]) -> Frequent:
    """Return the most frequent short answer of each agent with its share; agents that gave none are left out.

    Args:
        texts: how often each agent gave each answer.
        answers: how many answers each gave.
    """
    found: Frequent = {}
    for agent, counts in texts.items():
        short = {text: count for text, count in counts.items() if 0 < len(text) <= SHORT}
        if short and answers.get(agent):
            text, count = max(short.items(), key=lambda one: one[1])
            found[agent] = (text, min(1.0, count / answers[agent]))
    return found

"""Find an agent's prompt, and the part of it that is the same in every call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import ConfigError
from lightning_spans.record.prompts import system_text
from lightning_spans.schema.agents import check_known, selects
from lightning_trainer.rl.rewards.callers import request_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

_LEAST: Final = 8  # minimum letters of a part that is worth optimising


@dataclass(frozen=True, slots=True)
class Prompt:
    """An agent's system prompt.

    Attributes:
        text: the part that is the same in every call, without surrounding white space.
        whole: whether that is the whole prompt; otherwise the rest changes from call to call, and is left unchanged.
    """

    text: str
    whole: bool


def read_prompts(traces: Iterable[Trace], agents: Sequence[str]) -> dict[str, Prompt]:
    """Read the prompts of agents from their requests.

    Args:
        traces: of several tasks: one alone does not show what changes.
        agents: their names.

    Raises:
        UnknownAgentError: an agent was not seen.
        ConfigError: an agent has no system prompt, or no part of it is the same in every call.
    """
    asked: defaultdict[str, list[str | None]] = defaultdict(list)
    seen = {path for trace in traces for path in trace.agent_paths}
    for node in (node for trace in traces for node in trace.chats):
        for agent in agents:
            if selects((agent,), node.path):
                asked[agent].append(system_text(request_of(node)))
    check_known(agents, seen)
    return {agent: _prompt(agent, asked[agent]) for agent in agents}


def _prompt(agent: str, texts: Sequence[str | None]) -> Prompt:
    known = [text for text in texts if text is not None and text.strip()]
    if len(known) < len(texts) or not known:
        count = f"{len(texts) - len(known)} of {len(texts)} calls"
        raise ConfigError(
            f"{count} of agent {agent!r} have no system prompt, so there is no prompt to optimise. Give it one in the"
            " program: a first message of the role system."
        )
    different = sorted(set(known))
    if len(different) == 1:
        return Prompt(known[0].strip(), whole=True)
    fixed = max((_start(different), _end(different)), key=len)
    if _letters(fixed) < _LEAST:
        raise ConfigError(
            f"the system prompt of agent {agent!r} changes from call to call, and no part of it at its start or its end"
            f" is the same in all of them: {different[0][:60]!r}, {different[-1][:60]!r}."
        )
    return Prompt(fixed, whole=False)


def _start(texts: Sequence[str]) -> str:
    """Return the common beginning: whole lines if there are any, otherwise whole words."""
    shared = commonprefix(list(texts))  # noqa: RUF071 - letter by letter is what is wanted
    inside = any(len(text) > len(shared) and text[len(shared)].isalnum() for text in texts)
    while inside and shared and shared[-1].isalnum():
        shared = shared[:-1]
    lines, newline, _ = shared.rpartition("\n")
    if newline and _letters(lines) >= _LEAST:  # keep a label such as "The task:" with its text
        shared = lines
    return shared.strip()


def _letters(text: str) -> int:
    return sum(letter.isalnum() for letter in text)


def _end(texts: Sequence[str]) -> str:
    """Return the common ending, from the beginning of a word."""
    return _start([text[::-1] for text in texts])[::-1].strip()

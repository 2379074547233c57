"""Which agents were seen, what each did, and whether training would reach it: for `lightning-rl agents`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_spans.agents import selects, unheard
from lightning_spans.spans import FRAMEWORK, INPUT_TOKENS, OUTPUT_TOKENS

if TYPE_CHECKING:
    from lightning_spans.trace import Node, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """What one agent did.

    Attributes:
        agent: its name; None for calls that nothing names.
        calls: model calls, failed ones among them.
        failed_calls: model calls that failed.
        prompt_tokens: tokens of all prompts, as the engine or the model server counted them.
        response_tokens: likewise of all answers.
        tool_calls: tools that ran.
        tool_errors: tools that failed.
        reward: mean, over the attempts in which it spoke and got one, of what it earned; None without any.
        reward_sources: the same by who gave it, such as ``run``, or the name of an automatic rule.
        trained: whether training would reach it.
        why: the reason, and what to do where it would not.
    """

    agent: str | None
    calls: int
    failed_calls: int
    prompt_tokens: int
    response_tokens: int
    tool_calls: int
    tool_errors: int
    reward: float | None
    trained: bool
    why: str
    reward_sources: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Give the row as a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class _Count:
    calls: int = 0
    failed: int = 0
    prompt: int = 0
    response: int = 0
    tools: int = 0
    tool_errors: int = 0
    earned: list[float] = field(default_factory=list)
    sources: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    last_error: str = ""
    elsewhere: Counter[str] = field(default_factory=Counter)  # calls that passed the wire by, by how


def overview(traces: Iterable[Trace], chosen: Sequence[str] | None) -> list[AgentRow]:
    """Count what each agent did, in the order of their names; calls without a name come last.

    Args:
        traces: of any attempts.
        chosen: names or globs of the agents to train; None: all that have a name.
    """
    counts: dict[str | None, _Count] = defaultdict(_Count)
    for trace in traces:
        for node in trace.chats:
            _count_call(counts[node.span.agent], node)
        for node in trace.tools:
            count = counts[node.span.agent]
            count.tools += 1
            count.tool_errors += node.span.status == "error"
        for agent in {node.span.agent for node in trace.chats}:
            _count_rewards(counts[agent], trace, agent)
    names = sorted(counts, key=lambda name: (name is None, name or ""))
    return [_row(name, counts[name], chosen) for name in names]


def _count_call(count: _Count, node: Node) -> None:
    count.calls += 1
    if node.error is not None:
        count.failed += 1
        count.last_error = node.error
    prompt, response = tokens_of(node)
    count.prompt += prompt
    count.response += response
    framework = node.span.attributes.get(FRAMEWORK)
    if framework not in {None, "openai"} and node.call is None:
        count.elsewhere[f"{framework} reaches {node.span.name}"] += 1


def tokens_of(node: Node) -> tuple[int, int]:
    """Count the tokens of a model call's prompt and answers: the engine's own, else as the model server said."""
    answer, attributes = node.answer, node.span.attributes
    exact = [len(choice.token_ids) for choice in answer.choices if choice.token_ids is not None]
    prompt = len(answer.prompt_token_ids or ()) or _number(attributes.get(INPUT_TOKENS))
    return prompt, sum(exact) or _number(attributes.get(OUTPUT_TOKENS))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _count_rewards(count: _Count, trace: Trace, agent: str | None) -> None:
    """Count what an agent earned in an attempt: the attempt's rewards and its own."""
    concerns = [reward for reward in trace.rewards if reward.agent is None or reward.agent == agent]
    if concerns:
        count.earned.append(sum(reward.value for reward in concerns))
    for reward in concerns:
        count.sources[reward.source] += reward.value


def _row(name: str | None, count: _Count, chosen: Sequence[str] | None) -> AgentRow:
    problem = _problem(name, count, chosen)
    return AgentRow(
        agent=name,
        calls=count.calls,
        failed_calls=count.failed,
        prompt_tokens=count.prompt,
        response_tokens=count.response,
        tool_calls=count.tools,
        tool_errors=count.tool_errors,
        reward=sum(count.earned) / len(count.earned) if count.earned else None,
        reward_sources={source: value / len(count.earned) for source, value in count.sources.items()},
        trained=problem is None,
        why=problem or _taken(count),
    )


def _taken(count: _Count) -> str:
    taken = "its calls go to the policy while training"
    passed = sum(count.elsewhere.values())
    return f"{taken}, but {passed} of {count.calls} have no tokens: {_passed_by(count)}" if passed else taken


def _passed_by(count: _Count) -> str:
    """Say which calls the wire did not see, and what to do about them."""
    how = ", ".join(sorted(count.elsewhere))
    return f"{how} without the openai client. Give the agent an OpenAI-compatible client"


def _problem(name: str | None, count: _Count, chosen: Sequence[str] | None) -> str | None:
    if name is None:
        return "these calls have no agent's name: make them inside `with lightning_spans.agent(...)`"
    if chosen is not None and not selects(chosen, name):
        return "not among --agents"
    if (problem := _unreached(count)) is not None:
        return problem
    if not count.earned:
        return "no reward: return one from run(), or give --reward"
    return None


def _unreached(count: _Count) -> str | None:
    """Say why the policy would answer none of its calls."""
    if not count.calls:
        return "it made no model call"
    if sum(count.elsewhere.values()) == count.calls:
        return f"no tokens: {_passed_by(count)}"
    if count.failed == count.calls:
        return f"every call failed: {count.last_error[:200]}"
    return None


def not_heard(chosen: Sequence[str], seen: Iterable[str], steps: int) -> str | None:
    """Warn of agents that are to be trained and were not seen; None where all were.

    Args:
        chosen: their names and globs.
        seen: names of all agents that were, so far in the run.
        steps: taken so far.
    """
    names = sorted(set(seen))
    silent = unheard(chosen, names)
    if not silent:
        return None
    taken = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"WARNING: {', '.join(silent)} not seen in {taken}, and so not trained. Agents seen: {', '.join(names)}."
        " Training goes on, and reaches an agent as soon as it speaks. Is the name right?"
    )


def nothing_captured(rollouts: int, attached: Sequence[str]) -> str:
    """Say what to do when rollouts made no model call that was seen.

    Args:
        rollouts: how many ran.
        attached: frameworks that were attached in the agent's process.
    """
    if not attached:
        return (
            f"no model call was captured in {rollouts} rollouts, and nothing is attached in the agent's process.\n"
            "Add one line to the module of your agent: import lightning_langchain; lightning_langchain.attach()\n"
            "(or lightning_openai, for a program that uses the openai client)."
        )
    return (
        f"no model call was captured in {rollouts} rollouts, although {', '.join(attached)} is attached.\n"
        "Does the agent call its model through the openai client, and does it get as far as that? "
        "See what it did with: lightning-rl traces"
    )

"""Agents that were seen, what each did, and whether training would reach it: for `lightning-rl agents`."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.chat.body import tool_calls
from lightning_spans.schema.agents import earns, label, name_of, selects, unheard
from lightning_spans.schema.calls import LEFT_OUT
from lightning_spans.schema.json import loads
from lightning_spans.schema.spans import ENDPOINT, FRAMEWORK, REQUEST, REROUTABLE, UNASKABLE
from lightning_trainer.gateway.surfaces.refusals import refusal_of
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import some
from lightning_trainer.rl.usage import tokens_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node, Trace

# Frameworks that report calls which training reroutes by their own hooks.
_REACHED: Final = {None, "openai", "litellm", "httpx", "httpx2", "google-genai"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """What one agent did.

    Attributes:
        agent: its name; None for calls without one.
        calls: model calls, including failed ones.
        failed_calls: model calls that failed.
        prompt_tokens: tokens of all prompts, as counted by the engine or the model server.
        response_tokens: likewise of all answers.
        tool_calls: tools that ran.
        tool_errors: tools that failed.
        tools_asked: tools that its model requested, by name, and how often.
        left_out: parts of its requests that no model here received, and in how many calls.
        reward: mean of what it earned, over the attempts in which it made a call and got a reward; None without any.
        rewarded: how many attempts that mean is over.
        constant: whether it earned the same in all of them, and there are several.
        paths: its paths, outermost first, if they are not its name alone: `billing/extract`; each can be selected.
        reward_sources: the same by source, such as ``run``, or the name of an automatic rule.
        trained: whether training would reach it.
        why: the reason, and what to do if it would not.
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
    paths: tuple[str, ...] = ()
    reward_sources: Mapping[str, float] = field(default_factory=dict)
    tools_asked: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    rewarded: int = 0
    constant: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
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
    on_policy: int = 0  # calls that a policy answered
    paths: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)  # tools, by name
    left_out: Counter[str] = field(default_factory=Counter)  # by the part of the request that was
    elsewhere: Counter[str] = field(default_factory=Counter)  # calls that bypassed the wire, by how
    unaskable: int = 0  # calls that no policy can answer
    unasked: set[str] = field(default_factory=set)  # what these calls contain that no policy supports
    refused: Counter[str] = field(default_factory=Counter)  # why the gateway would refuse them


def overview(
    traces: Sequence[Trace], chosen: Sequence[str] | None, *, reward_error: str | None = None
) -> list[AgentRow]:
    """Return what each agent did, in the order of their names; calls without a name come last.

    Args:
        traces: of any attempts.
        chosen: names or globs of the agents to train; None: all that have a name.
        reward_error: why attempts got no reward, if they got an invalid one.
    """
    of_a_run = any(node.policy_version is not None for trace in traces for node in trace.chats)
    counts: dict[str | None, _Count] = defaultdict(_Count)

    def name_at(path: str | None) -> str | None:
        return None if path is None else label(path, chosen)

    for trace in traces:
        for node in trace.chats:
            path = node.path
            _count_call(counts[name_at(path)], node)
            counts[name_at(path)].paths |= set() if path is None else {path}
        for node in trace.tools:
            count = counts[name_at(node.path)]
            count.paths |= set() if node.path is None else {node.path}
            count.tools += 1
            count.tool_errors += node.span.status == "error"
        paths = {node.path for node in trace.chats}
        for name in {name_at(path) for path in paths}:
            _count_rewards(counts[name], trace, {path for path in paths if name_at(path) == name})
    # A name that never calls a model is not an agent, such as a graph's `__start__`, even if a tool runs under it. If
    # it is named for training, its row says so.
    agents = (name for name, count in counts.items() if count.calls or name in (chosen or ()))
    names = sorted(agents, key=lambda name: (name is None, name or ""))
    beside = _BesideCounts(chosen, reward_error, of_a_run, _rewarded_agents(traces))
    return [_row(name, counts[name], beside) for name in names]


def misspelt_rewards(traces: Iterable[Trace]) -> str | None:
    """Return a warning about rewards for agents that made no model call; None if there are none.

    Args:
        traces: of any attempts, with their rewards.
    """
    spoke: set[str] = set()
    rewarded: set[str] = set()
    for trace in traces:
        spoke |= set(trace.agent_paths)
        rewarded |= {reward.agent for reward in trace.rewards if reward.agent}
    return rewarded_but_silent(rewarded, spoke)


def rewarded_but_silent(rewarded: Iterable[str], spoke: Iterable[str]) -> str | None:
    """Return a warning about names in rewards that match no agent with a model call; None if there are none."""
    spoke = set(spoke)
    lost = unheard(sorted(rewarded), spoke)
    if not lost:
        return None
    known = sorted({name_of(path) for path in spoke})
    seen = ", ".join(known) or "none"
    return f"WARNING: rewards name {nearest(lost, known)}, which made no model call. Agents seen: {seen}."


def nearest(lost: Sequence[str], known: Sequence[str]) -> str:
    """Return unknown names, each with the known one that was probably meant; only the first if there are many."""
    near = {name: difflib.get_close_matches(name, known, n=1) for name in lost}
    return some([f"{name!r}{f' (did you mean {near[name][0]!r}?)' if near[name] else ''}" for name in lost])


def explain_no_rewards(traces: Sequence[Trace]) -> str | None:
    """Return what to do if no attempt got a reward; None if one did.

    Args:
        traces: of any attempts, with their rewards.
    """
    given = [(reward.agent, trace.agent_paths) for trace in traces for reward in trace.rewards]
    if any(named is None or any(earns(named, path) for path in paths) for named, paths in given):
        return None
    if given:
        lost = some(sorted({repr(named) for named, _ in given}))
        return (
            f"the rewards of all {amount(len(traces), 'rollout')} name {lost}, which made no model call, so nothing can"
            " be learned.\nName the agents as in the table."
        )
    return (
        f"no rollout got a reward ({len(traces)} ran), so nothing can be learned.\n"
        "Return a number from run(), or one for each agent ({'writer': 1.0}). Or name a function that scores what run()"
        " returned: --reward my_app:score. A program in another language prints it: docs/how-to/other-languages.md."
    )


def _count_call(count: _Count, node: Node) -> None:
    count.calls += 1
    if node.error is not None:
        count.failed += 1
        count.last_error = node.error
    prompt, response = tokens_of(node)
    count.prompt += prompt
    count.response += response
    count.on_policy += node.policy_version is not None
    if node.call is not None:
        count.asked.update(call.name for choice in node.call.choices for call in tool_calls(choice.message))
        count.left_out.update(_names_of(node.call.sampling.get(LEFT_OUT)))
    framework = node.span.attributes.get(FRAMEWORK)
    reached = framework in _REACHED or node.span.attributes.get(REROUTABLE)
    if not reached and node.call is None:
        count.elsewhere[f"{framework} reaches {node.span.name}"] += 1
    if unasked := node.span.attributes.get(UNASKABLE):
        count.unaskable += 1
        count.unasked.update(unasked)
    elif (refused := _refusal_reason(node)) is not None:
        count.unaskable += 1
        count.refused[refused] += 1


def _refusal_reason(node: Node) -> str | None:
    """Return why the gateway would refuse a call that went to the program's own endpoint; None if it would not."""
    request, endpoint = node.span.attributes.get(REQUEST), node.span.attributes.get(ENDPOINT)
    if node.call is not None or not isinstance(request, str) or not isinstance(endpoint, str):
        return None
    try:
        body = loads(request)
    except ValueError:
        return None
    return refusal_of(endpoint, body) if isinstance(body, dict) else None


def _names_of(left_out: Any) -> list[str]:
    """Return the names of what was left out of a request: tools by their own names, all else by the parameter."""
    if not isinstance(left_out, dict):
        return []
    return [name for key, value in left_out.items() for name in (value if key == "tools" else [key])]


def _count_rewards(count: _Count, trace: Trace, paths: set[str | None]) -> None:
    """Add what the agent with these paths earned in an attempt: the attempt's rewards and its own."""
    concerns = [reward for reward in trace.rewards if any(earns(reward.agent, path) for path in paths)]
    if concerns:
        count.earned.append(sum(reward.value for reward in concerns))
    for reward in concerns:
        count.sources[reward.source] += reward.value


@dataclass(frozen=True, slots=True)
class _BesideCounts:
    """Context of the counts: the agents that were named, why rewards are missing, whether a policy answered.

    `rewarded` are the agents that the rewards name; empty if a reward is for a whole attempt.
    """

    chosen: Sequence[str] | None
    reward_error: str | None
    of_a_run: bool
    rewarded: Sequence[str]


def _rewarded_agents(traces: Iterable[Trace]) -> list[str]:
    named = {reward.agent for trace in traces for reward in trace.rewards}
    return [] if None in named else sorted(filter(None, named))


def _row(name: str | None, count: _Count, asked: _BesideCounts) -> AgentRow:
    problem = _problem(name, count, asked)
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
        paths=() if count.paths <= {name} else tuple(sorted(count.paths)),
        tools_asked=dict(count.asked.most_common()),
        left_out=dict(count.left_out.most_common()),
        rewarded=len(count.earned),
        constant=len(count.earned) > 1 and min(count.earned) == max(count.earned),
        trained=problem is None,
        why=problem or _coverage_text(count),
    )


def _coverage_text(count: _Count) -> str:
    taken = "its calls go to the policy while training"
    if count.unaskable:
        taken += f", but {count.unaskable} of {count.calls} are errors then: {_refused_calls(count)}"
    passed = sum(count.elsewhere.values())
    return f"{taken}, but {passed} of {count.calls} have no tokens: {_passed_by(count)}" if passed else taken


def _refused_calls(count: _Count) -> str:
    """Return the reason why calls would be refused."""
    if not count.unasked:
        return f"the gateway would refuse them: {count.refused.most_common(1)[0][0]}".removesuffix(".")
    return f"its policy answers chat completions, which have no {', '.join(sorted(count.unasked))}. Leave it out"


def _passed_by(count: _Count) -> str:
    """Return which calls the wire did not see, and what to do about them."""
    how = ", ".join(sorted(count.elsewhere))
    return f"{how} without the openai client. Give the agent an OpenAI-compatible client"


def _problem(name: str | None, count: _Count, asked: _BesideCounts) -> str | None:
    if name is None:
        return "these calls have no agent's name: make them inside `with lightning_spans.agent(...)`"
    if asked.chosen is not None and not any(selects(asked.chosen, path) for path in count.paths):
        return "not among --agents"
    if asked.chosen is None and asked.of_a_run and not count.on_policy:
        return "the run in this store left it out: its calls stayed at its own endpoint"
    if (problem := _unreached_reason(count)) is not None:
        return problem
    if not count.earned:
        others = f"the rewards name only {some(asked.rewarded)}. Give {name} one too" if asked.rewarded else None
        why = asked.reward_error or others or "return one from run(), or give --reward"
        return f"no reward: {why.splitlines()[0]}"  # the rest is printed once, by the error that ends the command
    return None


def _unreached_reason(count: _Count) -> str | None:
    """Return why the policy would answer none of its calls; None if it would answer some."""
    if not count.calls:
        return "it made no model call"
    if sum(count.elsewhere.values()) == count.calls:
        return f"no tokens: {_passed_by(count)}"
    if count.unaskable == count.calls:
        return _refused_calls(count)
    if count.failed == count.calls:
        return f"every call failed: {count.last_error[:200]}"
    return None


def unheard_warning(chosen: Sequence[str], seen: Iterable[str], steps: int) -> str | None:
    """Return a warning about agents that should be trained but were not seen; None if all were.

    Args:
        chosen: their names and globs.
        seen: names of all agents seen so far in the run.
        steps: taken so far.
    """
    names = sorted(set(seen))
    silent = unheard(chosen, names)
    if not silent:
        return None
    taken = amount(steps, "step")
    return (
        f"WARNING: {', '.join(silent)} not seen in {taken}, and so not trained. Agents seen: {', '.join(names)}."
        " Training continues and includes an agent as soon as it makes a call. Is the name right?"
    )


def no_gateway_saw(program: str, rollouts: int) -> str:
    """Return why nothing is known of a command's calls if no policy answers them, and how to record them.

    Args:
        program: the command.
        rollouts: how many ran.
    """
    return (
        f"the command {program!r} ran {amount(rollouts, 'time')}, and its calls went to its own endpoint, where nobody"
        " sees them.\nThey are recorded when a model answers them here, or on their way to an OpenAI-compatible"
        " server:\n"
        "  lightning-rl agents --command ... --data FILE --model MODEL\n"
        "  lightning-rl agents --command ... --data FILE --endpoint URL --model NAME\n"
        "or attach() in it, if it is written in Python."
    )


def explain_no_calls(rollouts: int, attached: Sequence[str], program: str | None = None) -> str:
    """Return what to do if rollouts made no model call that was seen.

    Args:
        rollouts: how many ran.
        attached: frameworks that were attached in the agent's process.
        program: the agent's command; None: it is a function.
    """
    if program is not None:
        return (
            f"the command {program!r} made no model call that the gateway saw, in {amount(rollouts, 'rollout')}.\n"
            "Its calls have to go where OPENAI_BASE_URL says, with the key in OPENAI_API_KEY (for Anthropic's clients\n"
            "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY): both are set for it. A call without that key is refused."
        )
    if not attached:
        return (
            f"no model call was captured in {amount(rollouts, 'rollout')}, and nothing is attached in the agent's"
            " process.\n"
            "Add one line to the module of your agent: import lightning_langchain; lightning_langchain.attach()\n"
            "(or lightning_openai, for a program that uses the openai client)."
        )
    return (
        f"no model call was captured in {amount(rollouts, 'rollout')}, although {', '.join(attached)} is attached.\n"
        "Does the agent call its model through the openai client, "
        "and does it reach that call? See what it did with: lightning-rl traces"
    )

"""From a trace to transitions: one for each choice of each model call, none omitted and none invented."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.schema.calls import Choice
from lightning_spans.schema.json import JsonText
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import REQUEST, REQUEST_MODEL, Json, Span
from lightning_spans.schema.transitions import Tokens, Transition

_NO_CHOICE = Choice(0, None, None, None)


def adapt(trace: Trace) -> list[Transition]:
    """Return the transitions of one attempt, ordered by the start of their calls, then by choice.

    Failed calls are kept, with their error. Equal prompts and all n choices are kept. Tokens are given only if prompt,
    response and log-probabilities were all recorded and are consistent; they are never regenerated from text. A reward
    tied to a span goes to the choice that it names, otherwise to every choice of that call; a reward of no single call
    stays with the trace.

    Args:
        trace: one attempt. One made outside a runner has no rollout: its trace id stands for rollout and attempt.
    """
    rewards = _rewards_by_span(trace)
    return [
        transition
        for turn, node in enumerate(trace.chats)
        for transition in _transitions(node, turn, _rewards_of(node, rewards) if rewards else ())
    ]


def _transitions(node: Node, turn: int, rewards: tuple[Reward, ...]) -> list[Transition]:
    span, call, answer = node.span, node.call, node.answer
    rollout_id, attempt_id = span.rollout_id or span.trace_id, span.attempt_id or span.trace_id
    request = call.request if call is not None and call.request else _request(span)
    policy = answer.model or span.attributes.get(REQUEST_MODEL)
    return [
        Transition(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            agent=span.agent,
            agent_path=None if node.path == span.agent else node.path,
            turn=turn,
            span_id=span.span_id,
            choice=choice.index,
            response_id=answer.response_id,
            tokens=_tokens(answer.prompt_token_ids, choice),
            policy=policy,
            policy_version=None if call is None else call.policy_version,
            request=request,
            message=choice.message,
            ended_ns=_ended_ns(node),
            finish_reason=choice.finish_reason,
            sampling={} if call is None else call.sampling,
            # A finished response counts even if the client could not read it: that is the model's fault too.
            error=None if choice.finish_reason is not None and not _broke(node) else node.error,
            rewards=tuple(reward for reward in rewards if reward.choice in (None, choice.index)),
        )
        for choice in answer.choices or (_NO_CHOICE,)
    ]


def _ended_ns(node: Node) -> int:
    """Return when the agent had the answer; a span may end later, such as that of a stream that nobody closes.

    The gateway's time counts if it is within the span; otherwise its machine has a different clock.
    """
    span, call = node.span, node.call
    within = call is not None and span.start_ns <= call.start_ns and call.end_ns <= span.end_ns
    return call.end_ns if call is not None and within else span.end_ns


def _broke(node: Node) -> bool:
    """Whether the call failed where the model ran."""
    return node.call is not None and node.call.error is not None


def _tokens(prompt: tuple[int, ...] | None, choice: Choice) -> Tokens | None:
    response, logprobs = choice.token_ids, choice.logprobs
    # An empty prompt or response is not a recording: engines condition on something and sample at least an end token.
    if not prompt or not response or logprobs is None or len(response) != len(logprobs):
        return None
    return Tokens(prompt, response, logprobs)


def _request(span: Span) -> Mapping[str, Json]:
    text = span.attributes.get(REQUEST)
    return JsonText(text) if isinstance(text, str) else {}


def _rewards_by_span(trace: Trace) -> dict[str, list[Reward]]:
    found: defaultdict[str, list[Reward]] = defaultdict(list)
    for reward in trace.rewards:
        if reward.span_id is not None:
            found[reward.span_id].append(reward)
    return found


def _rewards_of(node: Node, rewards: Mapping[str, list[Reward]]) -> tuple[Reward, ...]:
    return tuple(reward for span_id in (node.span.span_id, *node.merged) for reward in rewards.get(span_id, ()))

"""Credit that defines what its values are compared with: the same turn, the same state, or several of these.

Two attempts at a task rarely make the same number of calls, and what a call can still reach depends on its position. So
a value is compared with those of the same place: the same turn, or the same state of the task.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Json
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.credit.assigners import discounted
from lightning_trainer.rl.credit.values import CreditedValues, Discount, Level, lost_in

Anchor: TypeAlias = Literal["observation", "prompt"]


def turn(transitions: Sequence[Transition], rewards: Sequence[Reward], *, gamma: Discount = 1.0) -> list[float]:
    """Compare every call with the calls at the same turn of the group's other attempts.

    The value of a call is its return to go, as in `discounted`; its place is its number among the calls of its agent.
    So the third call of an agent is compared with third calls, whatever the first and second had earned.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.
        gamma: as in `discounted`.

    Raises:
        ConfigError: `gamma` is out of range.
    """
    to_go = discounted(transitions, rewards, gamma=gamma)
    return CreditedValues(to_go, places=[str(n) for n in _numbers(transitions)], lost=lost_in(to_go))


def gigpo(
    transitions: Sequence[Transition],
    rewards: Sequence[Reward],
    *,
    gamma: Discount = 0.95,
    omega: float = 1.0,
    anchor: Anchor = "observation",
) -> list[float]:
    """Compare whole attempts, and in addition the calls that were made in the same state (GiGPO, arXiv 2505.10978).

    A = A_E + omega * A_S. A_E compares the return of the attempt with its group's (equation 3 of the paper). A_S
    compares the call's return to go, R_t = sum of gamma**(k - t) r_k over k >= t, with those of all calls of the group
    in the same state, each counted once (equations 6 to 8): the value of one action where others took another. A state
    that occurred once adds nothing.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.
        gamma: discount of the returns to go.
        omega: weight of the comparison by state; 0 leaves GRPO.
        anchor: what a state is: ``observation``, what came since the agent's last answer, as in the paper, where it is
            the environment's state; ``prompt``, all that the model saw.

    Returns:
        One value for each transition: its agent's return in the attempt, including the rewards of single calls.

    Raises:
        ConfigError: an option is out of range.
    """
    if not omega >= 0.0:
        raise ConfigError(f"omega is {omega}. The comparison by state needs a weight of 0 or more.")
    if anchor not in ("observation", "prompt"):
        raise ConfigError(f"anchor is {anchor!r}. A state is an observation or a prompt.")
    to_go = discounted(transitions, rewards, gamma=gamma)
    steps = Level(
        values=to_go,
        places=[state_of(transition, anchor) for transition in transitions],
        weight=omega,
        by_step=True,
    )
    return CreditedValues(_returns(transitions, rewards), more=[steps], lost=lost_in(to_go))


def state_of(transition: Transition, anchor: Anchor = "observation") -> str:
    """Name the state in which a call was made: the same text for the same state.

    Ids that differ between attempts, such as those of tool calls, are not part of it. A call whose request was not
    recorded is in the state of its prompt's tokens; without those it is in a state of its own.
    """
    items = _items(transition.request)
    if anchor == "observation":
        answers = [place for place, item in enumerate(items) if _is_answer(item)]
        items = items[answers[-1] + 1 :] if answers else items
    if items:
        return _digest([_without_ids(item) for item in items])
    if transition.tokens is not None:
        return _digest(transition.tokens.prompt)
    return f"{transition.attempt_id}/{transition.span_id}"


def _returns(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """(M,) the whole return of each call's agent: its return to go at its first call, without discount."""
    to_go = discounted(transitions, rewards, gamma=1.0)
    order = sorted(range(len(transitions)), key=lambda m: (transitions[m].turn, transitions[m].choice), reverse=True)
    first = {transitions[m].path: to_go[m] for m in order}
    return [first[transition.path] for transition in transitions]


def _numbers(transitions: Sequence[Transition]) -> list[int]:
    """(M,) the number of each call among the calls of its agent, from 0; the choices of a call share it."""
    turns: defaultdict[str | None, set[int]] = defaultdict(set)
    for transition in transitions:
        turns[transition.agent].add(transition.turn)
    number = {agent: {t: n for n, t in enumerate(sorted(found))} for agent, found in turns.items()}
    return [number[transition.agent][transition.turn] for transition in transitions]


def _items(request: Mapping[str, Json]) -> list[Json]:
    """Return the messages of a request, or the items of a `/responses` input; a text prompt is one message."""
    given = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []


def _is_answer(item: Json) -> bool:
    """Whether the model said this: a message of the assistant, or one of its calls or thoughts."""
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


def _without_ids(item: Json) -> Json:
    """Remove from a message what identifies it without being content."""
    if not isinstance(item, Mapping):
        return item
    calls = item.get("tool_calls")
    functions = [c.get("function") if isinstance(c, Mapping) else c for c in calls] if isinstance(calls, list) else None
    kept = {key: item[key] for key in ("role", "content", "name", "arguments", "output") if item.get(key) is not None}
    return {**kept, **({"tool_calls": functions} if functions else {})}


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

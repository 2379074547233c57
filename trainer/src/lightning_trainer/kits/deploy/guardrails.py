"""Guardrails of a canary: the candidate's shares of bad calls, compared with those of the stable policy.

Each bound is stated before the first call. An alarm is raised if the whole interval of the difference, which covers all
looks at once (`gate.half_width`), is above the bound.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import EXECUTE_TOOL, Span
from lightning_spans.store import Store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.protocol import PAGE, Where, each
from lightning_trainer.gateway.calls.incoming import FELL_BACK
from lightning_trainer.kits.deploy.gate import Bounds, Evidence, weigh
from lightning_trainer.kits.deploy.routing import MARK, talk_of

TOOL_FAILED: Final = "tool-failed"
OUTCOME: Final = "outcome:"  # followed by a source of rewards
_NAME: Final = re.compile(r"(failed|refused|cut)|(slower|longer)-than-(\d+(?:\.\d+)?)")
_REFUSED: Final = frozenset({"content_filter", "refusal", "safety"})

IsBad = Callable[[Call], bool]
# conversation, number of the deployment that assigned it, whether to the candidate
Arm: TypeAlias = tuple[str, int, bool]
Value: TypeAlias = tuple[Arm, bool]  # of a call or a tool: whether it is bad
_AT_ONCE: Final = 500  # traces whose spans are read at once


def is_bad(name: str) -> IsBad:
    """Return the condition that a guardrail counts.

    Raises:
        ConfigError: the guardrail is unknown.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"there is no guardrail {name!r} for answers. There are: failed, refused, cut, slower-than-SECONDS,"
            " longer-than-CHARACTERS. A canary also takes tool-failed and outcome:SOURCE."
        )
    if found[1]:
        return {"failed": _has_failed, "refused": _is_refusal, "cut": _is_cut}[found[1]]
    return partial(_is_slow if found[2] == "slower" else _is_long, float(found[3]))


def check_bounds(bounds: Mapping[str, float]) -> None:
    """Reject invalid bounds.

    Raises:
        ConfigError: a guardrail is unknown, or a bound is not at least 0 and below 1.
    """
    for name, bound in bounds.items():
        if name != TOOL_FAILED and not (name.startswith(OUTCOME) and name != OUTCOME):
            is_bad(name)
        if not 0.0 <= bound < 1.0:
            raise ConfigError(f"the guardrail {name} has the bound {bound:g}. Give a share from 0 to below 1.")


def weigh_guardrails(
    store: Store, canaries: Sequence[Deployment], bounds: Mapping[str, float]
) -> dict[str, tuple[float, Evidence]]:
    """Read the calls of a canary, and return bound and evidence for each guardrail on calls and tools.

    Args:
        store: contains the calls.
        canaries: the candidate's canaries, oldest first, not empty.
        bounds: by guardrail, how much larger the candidate's share of bad calls may be.
    """
    of_calls = {name: bound for name, bound in bounds.items() if not name.startswith(OUTCOME)}
    if not of_calls:
        return {}
    conditions = {name: is_bad(name) for name in of_calls if name != TOOL_FAILED}
    values: dict[str, list[Value]] = {name: [] for name in conditions}
    traces: dict[str, Arm] = {}
    for call, arm in _read_calls(store, canaries):  # judged one by one: a canary has more calls than fit in memory
        for name, bad in conditions.items():
            values[name].append((arm, bad(call)))
        if TOOL_FAILED in of_calls and call.trace_id:
            traces[call.trace_id] = arm
    if TOOL_FAILED in of_calls:
        values[TOOL_FAILED] = _read_tools(store, canaries[-1].agent, traces)
    return {name: (bound, _weigh(values[name])) for name, bound in of_calls.items()}


def raises_alarm(bound: float, evidence: Evidence) -> bool:
    """Whether the whole interval of the difference is above the bound."""
    return evidence.low is not None and evidence.low > bound


def read_assignments(store: Store, canaries: Sequence[Deployment]) -> list[Assignment]:
    """Return the assignments that these canaries of one candidate made.

    Conversations that began earlier are not among them. The stable policy answers all of these, so they have no
    counterpart.
    """
    current, numbers = canaries[-1], {one.number for one in canaries}
    return [
        one
        for one in each(store, Assignment)
        if one.agent == current.agent and one.number in numbers and one.policy in (current.candidate, current.stable)
    ]


def _read_calls(store: Store, canaries: Sequence[Deployment]) -> Iterator[tuple[Call, Arm]]:
    """Yield each call of the canary that the policy of its conversation answered, or failed to answer."""
    numbers, current, older = {one.number for one in canaries}, canaries[-1], 0
    assigned = {one.attempt_id: one for one in read_assignments(store, canaries)}
    for call in each(store, Call, newest_first=True):
        older = older + 1 if call.end_ns < canaries[0].at_ns else 0
        if older > PAGE:  # not at the first one: old calls that were copied into the store may be among the new ones
            return
        if call.sampling.get(MARK) not in numbers or call.agent is None or not selects((current.agent,), call.agent):
            continue
        fell_back = call.sampling.get(FELL_BACK)
        policy = fell_back.get("from") if isinstance(fell_back, Mapping) else call.policy
        one = assigned.get(talk_of(call))
        if one is not None and one.policy == policy:
            yield call, (one.attempt_id, one.number, policy == current.candidate)


def _read_tools(store: Store, agent: str, owners: Mapping[str, Arm]) -> list[Value]:
    """Return, for each tool that the agent called in these traces, whether it failed."""
    traces = list(owners)
    wheres = [Where(trace_ids=traces[first : first + _AT_ONCE]) for first in range(0, len(traces), _AT_ONCE)]
    tools = (span for where in wheres for span in each(store, Span, where) if span.operation == EXECUTE_TOOL)
    return [
        (owners[span.trace_id], span.status == "error")
        for span in tools
        if span.agent is not None and selects((agent,), span.agent)
    ]


def _weigh(values: Sequence[Value]) -> Evidence:
    """Compare the shares. Each conversation has the same weight, because its calls are not independent."""
    talks: defaultdict[Arm, list[float]] = defaultdict(list)
    for arm, bad in values:
        talks[arm].append(float(bad))
    strata: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for (_, number, candidate), shares in talks.items():
        strata[number][not candidate].append(sum(shares) / len(shares))
    return weigh(list(strata.values()), Bounds())


def _has_failed(call: Call) -> bool:
    return call.error is not None or FELL_BACK in call.sampling


def _is_refusal(call: Call) -> bool:
    return any(
        (choice.finish_reason or "").lower() in _REFUSED or bool(choice.message.get("refusal"))
        for choice in call.choices
    )


def _is_cut(call: Call) -> bool:
    return any(choice.finish_reason == "length" for choice in call.choices)


def _is_slow(seconds: float, call: Call) -> bool:
    return (call.end_ns - call.start_ns) / 1e9 > seconds


def _is_long(characters: float, call: Call) -> bool:
    contents: list[Any] = [choice.message.get("content") for choice in call.choices]
    return any(isinstance(content, str) and len(content) > characters for content in contents)

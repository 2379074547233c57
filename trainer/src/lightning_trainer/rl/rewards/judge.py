"""Creates the configured rules' rewards with their sources, through the hook `lightning_rewards`."""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from lightning_spans import hooks
from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.errors import ConfigError
from lightning_spans.hooks import hookimpl
from lightning_spans.schema.agents import selects
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.registry import check_rule
from lightning_trainer.rl.rewards.callers import ToolCaller, callers
from lightning_trainer.rl.rewards.potential import shaping
from lightning_trainer.rl.rewards.rules import RULES, Finding, Rule

logger = logging.getLogger("lightning_trainer")

PLUGIN: Final = "lightning-air"
AUTOMATIC: Final = "air/"  # at the start of the id of each automatic reward
# Credit with returns to go, under which differences of a potential do not change the best policy.
RETURNS_TO_GO: Final = ("discounted", "turn")
NO_STATE: Final = ("latency", "cost", "answer_format")
OF_ATTEMPTS: Final = ("latency", "cost")
_OF_ALL: Final = "is about the whole attempt, and no agent's. Leave agents out."


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRule:
    """A configured rule.

    Attributes:
        name: the source of its rewards.
        rule: the judging function.
        weight: factor of its findings.
        options: of the rule.
        agents: names or globs of the agents that it judges; None: all.
        average: whether a call's part is its share of all the agent's findings; otherwise its own findings.
        gamma: gives differences of a potential under this discount; None: plain rewards.
    """

    name: str
    rule: Rule
    weight: float
    options: Mapping[str, Any] = field(default_factory=dict)
    agents: tuple[str, ...] | None = None
    average: bool = True
    gamma: float | None = None


def read_rules(table: Mapping[str, Any], *, credit: str | None = None, gamma: float | None = None) -> list[JudgeRule]:
    """Read the table `rewards` of a configuration.

    Args:
        table: weights, or tables of weight, agents, potential and the rule's own options, by the name of a built-in
            rule or ``module:function`` for one of the user's.
        credit: the run's credit; None if nothing is learned and rewards are only shown.
        gamma: the run's discount; None: the credit's own.

    Raises:
        ConfigError: a rule is unknown, or an option is missing, unknown or wrong.
    """
    return [_read(name, value, credit, gamma) for name, value in table.items()]


def weights_of(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of a table that `read_rules` accepts, by the name of the rule.

    Raises:
        ConfigError: one is missing, or not a finite number.
    """
    return {name: _weight(name, value) for name, value in table.items()}


class Judge:
    """Answers the hook `lightning_rewards` with the rules' findings."""

    def __init__(self, rules: Sequence[JudgeRule]) -> None:
        self._rules = tuple(rules)
        self._failed: Counter[str] = Counter()

    @hookimpl
    def lightning_rewards(self, trace: Trace, transitions: Sequence[Transition]) -> list[Reward]:
        """Judge an attempt. Each reward belongs to the model call that led to it, if there is one.

        A rule that raises gives this attempt nothing, and is counted; the rewards of other rules stay.
        """
        if not transitions:
            return []
        rewards = []
        for chosen in self._rules:
            try:
                rewards += judge(chosen, trace, transitions[0].rollout_id, transitions[0].attempt_id)
            except Exception:
                logger.exception("the rule %s failed on attempt %s", chosen.name, transitions[0].attempt_id)
                self._failed[chosen.name] += 1
        return rewards

    def take_failures(self) -> dict[str, float]:
        """Return how many attempts each rule failed on since the last time, as numbers for logs."""
        taken, self._failed = self._failed, Counter()
        return {f"rule_failures/{name}": float(count) for name, count in sorted(taken.items())}


def take_failures() -> dict[str, float]:
    """Return `Judge.take_failures` of the installed rules."""
    found = hooks.manager().get_plugin(PLUGIN)
    return found.take_failures() if isinstance(found, Judge) else {}


@contextmanager
def installed(rules: Sequence[JudgeRule]) -> Iterator[None]:
    """Judge all attempts that are adapted within the block."""
    if not rules:
        yield
        return
    hooks.register(Judge(rules), PLUGIN)
    try:
        yield
    finally:
        hooks.unregister(PLUGIN)


def judge(chosen: JudgeRule, trace: Trace, rollout_id: str, attempt_id: str) -> list[Reward]:
    """Return the rewards of one rule for one attempt: one for each model call with findings.

    A finding about a tool belongs to the call that asked for it, and to the answer that did if there are several; if
    nothing asked for the tool, to the tool's agent; without a span, to the attempt. They add up, for each agent, to the
    weight times the mean of its findings.
    """
    by_agent = _by_agent(chosen, trace)
    if chosen.gamma is not None:
        values = _differences(by_agent, trace, chosen)
    else:
        values = {
            (agent, *place): chosen.weight * sum(values) / _count(values, places, average=chosen.average)
            for agent, places in by_agent.items()
            for place, values in places.items()
        }
    return [
        Reward(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            value=value,
            agent=agent,
            span_id=span_id,
            choice=choice,
            source=chosen.name,
            # The same when judged again.
            reward_id=f"{AUTOMATIC}{attempt_id}/{chosen.name}/{span_id or agent or ''}"
            + ("" if choice is None else f"/{choice}"),
        )
        for (agent, span_id, choice), value in values.items()
    ]


# the span of a call, and which of its answers, if it has several
_Place: TypeAlias = tuple[str | None, int | None]
# by agent, by place: the findings
_Found: TypeAlias = dict[str | None, dict[_Place, list[float]]]


def _by_agent(chosen: JudgeRule, trace: Trace) -> _Found:
    asked, found = callers(trace), _Found()
    for finding in chosen.rule(trace, **chosen.options):
        if not math.isfinite(finding.value):
            raise ValueError(f"the rule {chosen.name} found {finding.value}, which is not a finite number")
        if finding.node is None and chosen.agents is not None:
            raise ConfigError(f"rewards: {chosen.name} {_OF_ALL}")
        agent, path, place = _place_of(finding, asked)
        if chosen.agents is None or selects(chosen.agents, path):
            found.setdefault(agent, {}).setdefault(place, []).append(float(finding.value))
    return found


def _place_of(finding: Finding, asked: Mapping[Node, ToolCaller]) -> tuple[str | None, str | None, _Place]:
    """Return the agent of a finding, its path, and which of its calls it is about."""
    if finding.node is None:
        return None, None, (None, None)
    node, choice = asked.get(finding.node, ToolCaller(finding.node, finding.choice))
    several = len(node.answer.choices) > 1
    return node.span.agent, node.path, (node.span.span_id, choice if several else None)


def _count(values: Sequence[float], places: Mapping[_Place, Sequence[float]], *, average: bool) -> int:
    """Return the divisor of a call's findings: the number of all of its agent's findings, or its own."""
    return sum(map(len, places.values())) if average else len(values)


def _differences(
    found: _Found, trace: Trace, chosen: JudgeRule
) -> dict[tuple[str | None, str | None, int | None], float]:
    """Use the mean of an agent's findings so far as the potential of the state in which it calls next.

    Only so far: the value of a state must not depend on what is done in it.
    """
    calls: defaultdict[str | None, list[tuple[int, str]]] = defaultdict(list)
    for turn, node in enumerate(trace.chats):
        calls[node.span.agent].append((turn, node.span.span_id))
    shaped: dict[tuple[str | None, str | None, int | None], float] = {}
    for agent, places in found.items():
        of_call: defaultdict[str | None, list[float]] = defaultdict(list)
        for (span_id, _), values in places.items():
            of_call[span_id] += values
        so_far: list[float] = []
        potentials = []
        for _, span_id in calls[agent]:
            potentials.append(chosen.weight * sum(so_far) / len(so_far) if so_far else 0.0)
            so_far += of_call[span_id]
        rewards = shaping(potentials, [turn for turn, _ in calls[agent]], chosen.gamma or 0.0)
        shaped |= {(agent, span_id, None): value for (_, span_id), value in zip(calls[agent], rewards, strict=True)}
    return shaped


def _read(name: str, value: Any, credit: str | None, gamma: float | None) -> JudgeRule:
    weight = _weight(name, value)
    table = value if isinstance(value, Mapping) else {}
    own = ("weight", "agents", "potential", "average")
    options = {key: option for key, option in table.items() if key not in own}
    if table.get("average") is False and table.get("potential"):
        raise ConfigError(f"rewards: {name} with potential is the mean of what was found so far. Leave average out.")
    agents: Any = table.get("agents")
    if name in OF_ATTEMPTS and agents is not None:
        raise ConfigError(f"rewards: {name} {_OF_ALL}")
    rule = _rule(name)
    _check_options(name, rule, options)
    return JudgeRule(
        name=name,
        rule=rule,
        weight=weight,
        options=options,
        average=table.get("average", True) is not False,
        agents=None if agents is None else tuple([agents] if isinstance(agents, str) else agents),
        gamma=_discount(name, credit, gamma) if table.get("potential") else None,
    )


def _weight(name: str, value: Any) -> float:
    weight = value.get("weight") if isinstance(value, Mapping) else value
    if not isinstance(weight, (int, float)) or isinstance(weight, bool):
        raise ConfigError(f"rewards: {name} = {value!r}. Give a weight, or a table with a weight and options.")
    if not math.isfinite(weight):
        raise ConfigError(f"rewards: {name} has the weight {weight}. A weight must be finite.")
    return float(weight)


def _rule(name: str) -> Rule:
    if name in RULES:
        return RULES[name]
    check_rule(name)
    from lightning_trainer.runner.target import load_function

    rule: Rule = load_function(name, option="rewards", parameters=("trace",), yields=True)
    return rule


def _check_options(name: str, rule: Rule, options: Mapping[str, Any]) -> None:
    """Reject options that the rule does not have, lacks, or cannot use, before anything runs."""
    parameters = inspect.signature(rule).parameters.values()
    own = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in {p.name for p in own}:
                has = ", ".join(["weight", "agents", "potential", "average", *(p.name for p in own)])
                raise ConfigError(f"rewards: {name} has no option {option!r}. It has: {has}.")
    for parameter in own:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"rewards: {name} needs the option {parameter.name}.")
    if name in RULES:
        try:
            list(rule(Trace.build([]), **options))
        except ConfigError as error:
            raise ConfigError(f"rewards: {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rewards: {name} can't use its options {dict(options)}: {error}") from None


def _discount(name: str, credit: str | None, gamma: float | None) -> float:
    if name in NO_STATE:
        raise ConfigError(f"rewards: {name} is known only at the end, so it has no potential on the way. Leave it out.")
    if credit is not None and credit not in RETURNS_TO_GO:
        raise ConfigError(
            f"rewards: {name} with potential needs a credit that counts what comes after a call: set credit to"
            f" {' or '.join(RETURNS_TO_GO)}, not {credit}."
        )
    if gamma is not None:
        return gamma
    from lightning_trainer.registry import registrations

    assigner = registrations("credit")[credit or "turn"]
    default: float = inspect.signature(assigner).parameters["gamma"].default
    return default

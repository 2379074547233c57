"""Alarms for teams: what a run's numbers show if agents that learn together get in each other's way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

from lightning_trainer.report.alarms import WINDOW, Found, has_learned
from lightning_trainer.report.history import History
from lightning_trainer.report.log.lines import POLICY_OF
from lightning_trainer.report.teams.cliffs import rewarded_names

CAPTURED: Final = 0.8  # of the squared gradient norm of a policy that several agents share

MANY_NEW: Final = 0.2  # share of an agent's held-out prompts
DRIFT: Final = 1.5  # times the median share of earlier validations
SMALL_FALL: Final = 0.05  # share of the best reward
FAR: Final = 0.1  # nats per token
FASTER: Final = 1.9  # of the divergence, every three steps. Steady growth from 0 has at most 1.6, then 1.4
STEPS: Final = 5  # in which one agent has most of the gradient


def agent_captures(history: History) -> Found:
    """Yield an alarm if one of the agents that share a policy contributes nearly all of its gradient."""
    for policy, agents, shares in _gradient_shares(history):
        first = max(agents, key=lambda agent: shares[-1].get(agent, 0.0))
        if min(own.get(first, 0.0) for own in shares) < CAPTURED:
            continue
        tokens = [share for _, share in history.series("train", f"token_share/{first}")[-WINDOW:]]
        others = ", ".join(sorted(agent for agent in agents if agent != first))
        text = (
            f"{first} makes {statistics.fmean(own[first] for own in shares):.0%} of the gradient of the policy that it"
            f" shares with {others}, with {statistics.fmean(tokens):.0%} of the trained tokens: the others"
            " hardly move the weights. Give the others more weight (--agent-weight AGENT=2, or equal), or use a policy"
            " for each agent (--policy AGENT=lora)."
        )
        yield f"/{policy}", text


def cliff(history: History) -> Found:
    """Yield an alarm if the held-out reward of a policy is significantly below its best."""
    # agents without names have one policy, and the reward of the team
    for policy, names in (rewarded_names(history.of_kind("val"), history.policy_of) or {"": [""]}).items():
        fall = history.fall(policy, names)
        if fall is not None:
            whose = " of the team" if names == [""] and policy else policy and f" of {policy}"
            text = (
                f"The held-out reward{whose} has fallen from {fall.best:.2f} after"
                f" {fall.best_step} steps to {fall.now:.2f} (95 % interval of the change: {fall.difference.low:.2f} to"
                f" {fall.difference.high:.2f}). Lower --learning-rate; --rollback-on-cliff also returns it"
                " to its best weights."
            )
            yield policy and f"/{policy}", text


def inputs_drift(history: History) -> Found:
    """Yield an alarm if an agent gets other prompts than before, and its held-out reward falls twice in a row."""
    agents = history.policy_of
    for agent in sorted(agents) if len(agents) > 1 else ():
        new = [share for _, share in history.series("val", f"new_prompts/{agent}")]
        changes = history.series("val", f"from_best/{agent}") or history.series("val", "from_best")
        rewards = history.series("val", f"reward/{agent}") or history.series("val", "reward")
        if len(changes) < 2 or len(new) < 2 or new[-1] < max(MANY_NEW, DRIFT * statistics.median(new[:-1])):
            continue
        (_, before), (_, now) = changes[-2:]
        highs = history.series("val", f"from_best_high/{agent}") or history.series("val", "from_best_high")
        best = rewards[-1][1] - now
        if now < before < 0 and now <= -SMALL_FALL * abs(best) and highs and highs[-1][1] < 0:
            usual = statistics.median(new[:-1])
            text = (
                f"{new[-1]:.0%} of the held-out prompts of {agent} are new since the previous validation ({usual:.0%}"
                " is"
                f" usual), and its held-out reward has fallen twice, from {best:.2f} to {rewards[-1][1]:.2f}: what"
                " other agents learn changes its inputs faster than it follows. Lower --learning-rate, or leave one of"
                " them out of --agents for a while."
            )
            yield f"/{agent}", text


def policy_departs(history: History) -> Found:
    """Yield an alarm if a policy moves away from its base ever faster, and has not improved."""
    for name in history.names("kl_base/"):
        of, points = name.removeprefix("kl_base"), history.series("train", name)
        if len(points) < 4 * WINDOW:
            continue
        values = [value for _, value in points[-3 * WINDOW :]]
        before, half, now = (statistics.fmean(values[-n * WINDOW :][:WINDOW]) for n in (3, 2, 1))
        fast = half > 0.75 * FASTER * before and now > 0.75 * FASTER * half and now > FASTER**2 * before
        if fast and now > FAR and not has_learned(history):
            text = (
                f"The divergence of {of.removeprefix('/')} from its base has grown from {before:.2f} to {now:.2f} nats"
                " a token within nine steps, ever faster, and the reward has not risen. Lower --learning-rate, or set"
                " --kl-coef."
            )
            yield of, text


def _gradient_shares(history: History) -> Iterator[tuple[str, list[str], list[dict[str, float]]]]:
    """Yield each policy that several agents share, those agents, and their shares of its gradient in the last steps.

    Steps in which nothing was learned are left out.
    """
    names = history.names("gradient_share/")
    newest_first = reversed(history.of_kind("train") if names else ())
    steps = [*islice((line for line in newest_first if any(name in line for name in names)), STEPS)][::-1]
    policy_of: Mapping[str, str] = steps[-1].get(POLICY_OF, {}) if steps else {}
    for policy in dict.fromkeys(policy_of.values()):
        agents = [agent for agent, its in policy_of.items() if its == policy]
        shares = [{a: line[f"gradient_share/{a}"] for a in agents if f"gradient_share/{a}" in line} for line in steps]
        sums = [sum(own.values()) for own in shares]
        if len(agents) > 1 and len(shares) == STEPS and all(len(own) > 1 for own in shares) and all(sums):
            yield (
                policy,
                agents,
                [{a: share / total for a, share in own.items()} for own, total in zip(shares, sums, strict=True)],
            )


CHECKS: Final = (agent_captures, cliff, inputs_drift, policy_departs)

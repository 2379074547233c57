"""Recorded conversations of the stable policy: their calls with tokens, and their outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.protocol import each
from lightning_trainer.kits.deploy.estimate.off_policy import OffPolicyEstimate, estimate
from lightning_trainer.kits.deploy.outcomes import read_outcomes
from lightning_trainer.kits.deploy.policies.prompted import is_prompt
from lightning_trainer.kits.deploy.routing import talk_of
from lightning_trainer.kits.deploy.transitions import is_tried
from lightning_trainer.rl.rows import Row
from lightning_trainer.rl.steered import steering

MOST: Final = 2000  # calls to score, newest first
# vLLM and SGLang take what a request leaves open from the model's generation_config, which is not recorded.
_OPEN: Final = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}

Score = Callable[[Sequence[Row]], Sequence[NDArray[np.float64]]]
"""Returns the log-probability of each sampled token of each row under the candidate."""


@dataclass(frozen=True, slots=True)
class RecordedEstimate:
    """An estimate, and the calls that it is based on.

    Attributes:
        estimate: the numbers.
        calls: number of scored calls.
        left_out: number of other calls of the stable policy, by reason.
    """

    estimate: OffPolicyEstimate
    calls: int
    left_out: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON."""
        return {**asdict(self.estimate), "calls": self.calls, "left_out": dict(self.left_out)}


def check_candidate(history: Sequence[Deployment], agent: str) -> Deployment:
    """Return the deployment whose candidate does not answer users yet.

    Raises:
        ConfigError: there is none, it is in a canary, whose own outcomes are more informative, or a policy is a prompt.
    """
    current = history[-1] if history else None
    if current is None or not is_tried(current):
        raise ConfigError(f"{agent} has no candidate. Name one: lightning-rl deploy candidate --agent {agent} ...")
    if current.stage == "canary":
        raise ConfigError(
            f"{current.candidate} is in a canary, whose outcomes are better evidence: lightning-rl deploy status."
        )
    if is_prompt(str(current.candidate)) or is_prompt(current.stable):
        raise ConfigError("a prompt changes what the model reads, so recorded tokens say nothing. Begin a shadow.")
    return current


def estimate_from_records(
    store: Store, current: Deployment, score: Score, *, sources: Sequence[str] = (), most: int = MOST
) -> RecordedEstimate:
    """Estimate the candidate's mean outcome from the stable policy's newest calls of the agent.

    Args:
        store: contains the calls and rewards.
        current: the agent's newest deployment.
        score: returns the candidate's log-probabilities.
        sources: sources of the rewards that count; empty: all.
        most: largest number of the stable policy's calls to use. Older calls only show which conversations are whole.
    """
    left_out: Counter[str] = Counter()
    talks = _read_talks(store, current, most, left_out)
    outcomes = read_outcomes(store, current.agent, list(talks), sources)
    left_out["its conversation has no outcome"] += sum(len(talks[name]) for name in talks.keys() - outcomes.keys())
    chosen = [name for name in talks if name in outcomes]
    rows = [row for name in chosen for row in talks[name]]
    ratios = [float(own.sum()) - float(row.logprobs.sum()) for row, own in zip(rows, score(rows), strict=True)]
    summed: defaultdict[str, float] = defaultdict(float)
    for row, ratio in zip(rows, ratios, strict=True):
        summed[row.attempt_id] += ratio
    found = estimate([outcomes[name] for name in chosen], [summed[name] for name in chosen])
    return RecordedEstimate(found, len(rows), {why: count for why, count in left_out.items() if count})


def _read_talks(store: Store, current: Deployment, most: int, left_out: Counter[str]) -> dict[str, list[Row]]:
    """Return the calls by conversation. A conversation counts with all of its calls or not at all."""
    talks: defaultdict[str, list[Row]] = defaultdict(list)
    unusable: dict[str, str] = {}  # conversations, with the reason
    seen = 0
    calls = (
        call
        for call in each(store, Call, newest_first=True)
        if call.origin != SHADOW and call.agent is not None and selects((current.agent,), call.agent)
    )
    for call in calls:
        name = talk_of(call)
        if call.policy != current.stable:
            unusable[name] = "another policy answered a call of its conversation"
            continue
        if (problem := _problem(call)) is not None:
            left_out[problem] += 1
            unusable.setdefault(name, "another call of its conversation was left out")
        else:
            talks[name].append(_row(call, name))
        seen += 1
        if seen == most:
            break
    for name in unusable.keys() & talks.keys():
        left_out[unusable[name]] += len(talks.pop(name))
    for call in calls:
        if not talks:
            break
        if (rows := talks.pop(talk_of(call), None)) is not None:
            left_out["its conversation has older calls, which were not read"] += len(rows)
    return dict(talks)


def _problem(call: Call) -> str | None:
    """Return why a call's recorded log-probabilities are not the policy's own for all sampled tokens.

    None if they are.
    """
    if call.error is not None:
        return "it failed"
    if len(call.choices) != 1:
        return "it has several answers"
    choice = call.choices[0]
    if call.prompt_token_ids is None or not choice.token_ids or choice.logprobs is None:
        return "its tokens were not recorded"
    complete = "seeds" in call.sampling  # recorded by the gateway itself, which leaves nothing open
    if not (complete or call.sampling.keys() >= _OPEN):
        return "its sampling was not recorded"
    if call.sampling.get("temperature") != 1.0:
        return "it was not sampled at temperature 1"
    name = steering(call)
    return None if name is None else f"{name} changed what could be sampled"


def _row(call: Call, name: str) -> Row:
    choice, prompt = call.choices[0], call.prompt_token_ids or ()
    sampled, count = choice.token_ids or (), len(prompt)
    tokens = np.array([*prompt, *sampled], np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[count:] = choice.logprobs
    return Row(
        tokens=tokens,
        mask=np.arange(len(tokens)) >= count,
        logprobs=logprobs,
        advantages=np.zeros(len(tokens)),
        lengths=(len(sampled),),
        agent=str(call.agent),
        attempt_id=name,
        rollout_id=name,
        group_id=name,
        policy=call.policy,
    )

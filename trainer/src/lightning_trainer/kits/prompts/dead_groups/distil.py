"""Rows that teach a policy its answers under an instruction, as answers to the agent's own prompt.

The loss is the algorithm's. A token's advantage is `weight`, and its recorded log-probability is that of the policy
before the update, without the instruction. So all ratios start at 1, and the gradient is that of supervised learning:
weight times the gradient of -log p(token | own prompt), divided by the tokens of the batch as set by
`loss_aggregation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lightning_spans.schema.agents import selects
from lightning_trainer.kits.prompts.dead_groups.own_prompts import OwnPrompts
from lightning_trainer.kits.prompts.dead_groups.reasons import UndistilledReason
from lightning_trainer.rl.account import Account, UntrainedReason
from lightning_trainer.rl.batch.attempts import transitions_by_attempt
from lightning_trainer.rl.rows import Row, make_rows

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.transitions import Transition
    from lightning_trainer.backend_protocol import Learner
    from lightning_trainer.kits.prompts.dead_groups.tasks import Instruction
    from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True)
class InstructedRollout:
    """A rollout under an instruction.

    Attributes:
        outcome: of the rollout.
        trace: of the attempt that counts.
        instruction: that replaced the prompt of its agent.
        own: the agent's own prompt.
        solved: whether it solved the task.
    """

    outcome: Outcome
    trace: Trace
    instruction: Instruction
    own: str
    solved: bool


def distilled_rows(
    rollouts: Sequence[InstructedRollout], learner: Learner, agents: Sequence[str] | None, weight: float
) -> tuple[list[Row], Account]:
    """Return training rows of the rollouts that solved their task, and the account of all their calls.

    Args:
        rollouts: of a step.
        learner: learns the rows, and gives their log-probabilities.
        agents: names and globs of the trained agents.
        weight: advantage of each token.
    """
    account, prompts = Account(), OwnPrompts(learner.engine)
    chosen: list[Transition] = []
    for rollout in rollouts:
        kept, left_out = _choose(rollout, prompts, agents)
        chosen += kept
        for reason, count in left_out.items():
            account = account.plus_dropped(reason, count)
    groups = {rollout.outcome.rollout.rollout_id: rollout.outcome.rollout.group_id for rollout in rollouts}
    rows, trained = make_rows(chosen, np.full(len(chosen), weight), groups)
    return _with_logprobs(rows, learner), account + trained


def _choose(
    rollout: InstructedRollout, prompts: OwnPrompts, agents: Sequence[str] | None
) -> tuple[list[Transition], Counter[str]]:
    """Return the calls to learn, with the agent's own prompt, and the number of other calls by reason."""
    agent, left_out = rollout.instruction.agent, Counter[str]()
    kept: list[Transition] = []
    own = prompts.read(rollout.trace.chats, agent, rollout.own, rollout.instruction.text) if rollout.solved else {}
    for transitions, _ in transitions_by_attempt([rollout.trace], agents).values():
        for call in transitions:
            prompt = own.get(call.span_id)
            if not selects(agents or ("*",), call.path):
                left_out[UntrainedReason.NOT_SELECTED] += 1
            elif not rollout.solved:
                left_out[UndistilledReason.UNSOLVED] += 1
            elif not selects((agent,), call.path):
                left_out[UndistilledReason.UNINSTRUCTED] += 1
            elif isinstance(prompt, str):
                left_out[prompt] += 1
            elif call.tokens is None or prompt is None:
                kept.append(call)  # its account gives the reason
            else:
                kept.append(replace(call, tokens=replace(call.tokens, prompt=prompt)))
    return kept, left_out


def _with_logprobs(rows: Sequence[Row], learner: Learner) -> list[Row]:
    """Record the log-probabilities of the current policy, without the instruction."""
    found = []
    for row, own in zip(rows, learner.logprobs(rows) if rows else (), strict=True):
        logprobs = np.zeros(len(row.tokens), np.float32)
        logprobs[row.mask] = own
        found.append(replace(row, logprobs=logprobs))
    return found

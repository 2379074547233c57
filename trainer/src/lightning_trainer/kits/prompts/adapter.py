"""GEPA over the store: a candidate is a prompt for each agent, its score is the reward, its feedback the spans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.chat.body import messages_of, tool_calls
from lightning_spans.errors import LightningError
from lightning_spans.record.prompts import system_text
from lightning_spans.schema.agents import selects
from lightning_spans.schema.spans import TOOL_ARGUMENTS, TOOL_RESULT
from lightning_trainer.kits.prompts.journal import SearchJournal
from lightning_trainer.kits.prompts.session import CandidateRun, CandidateRunner
from lightning_trainer.rl.rewards.callers import request_of
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.scores import agents_totals, reward_of_failures, total, trained_names, trained_reward
from lightning_trainer.rl.told import chat_messages, text_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node

ROLLOUTS: Final = "rollouts"
CEILING: Final = 1.0  # the full reward, unless a range is declared
_MOST: Final = 2000  # maximum characters of a message for the reflecting model


class SpansAdapter:
    """GEPA's adapter (`gepa.core.adapter.GEPAAdapter`).

    Args:
        runner: runs the program.
        before: the agents' own prompts.
        journal: of earlier runs and proposals.
        ceiling: the full reward. A rollout that has more shows that it is not.
    """

    propose_new_texts = None  # GEPA's own method of proposing

    def __init__(
        self, runner: CandidateRunner, before: Mapping[str, str], journal: SearchJournal, ceiling: float = CEILING
    ) -> None:
        self._runner = runner
        self._before = before
        self._journal = journal
        self._ceiling = ceiling
        self._lowest = 0.0  # lowest reward so far: the score of a failure, so that no prompt gains by failing
        self._named: set[str] = set()  # agents with rewards of their own so far
        self._highest = -math.inf
        self.reached_ceiling = False

    def at_ceiling(self, state: Any) -> bool:
        """Whether a candidate has the full reward on every validation task, and no rollout ever had more."""
        self.reached_ceiling = self._is_full(max(state.program_full_scores_val_set, default=-math.inf))
        return self.reached_ceiling

    def _is_full(self, reward: float) -> bool:
        return self._highest <= self._ceiling <= reward

    def evaluate(self, batch: Sequence[dict[str, Any]], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Run tasks under a candidate and return the evaluation.

        Raises:
            LightningError: the candidate did not reach the agents, or every rollout failed.
        """
        from gepa import EvaluationBatch

        self._runner.check()
        prompts = {
            agent: {"before": old, "after": candidate[agent]}
            for agent, old in self._before.items()
            if candidate[agent] != old
        }
        asked = [prompts, list(batch), capture_traces]
        came_to = self._journal.next(ROLLOUTS, asked)
        if came_to is None:
            came_to = self._run(batch, prompts, capture_traces)
            self._journal.add(ROLLOUTS, asked, came_to)
        else:
            self._runner.skip(came_to["rollouts"], came_to["again"], came_to["tokens"])
        scores = came_to["scores"]
        self._lowest = min([self._lowest, came_to.get("lowest", 0.0), *scores])
        self._named.update(came_to.get("named", ()))
        self._highest = max([self._highest, *scores])
        # GEPA proposes nothing for a batch without trajectories.
        records = None if self._is_full(min(scores)) else came_to["records"]
        return EvaluationBatch(outputs=list(scores), scores=scores, trajectories=records)

    def _run(
        self, batch: Sequence[dict[str, Any]], prompts: Mapping[str, Mapping[str, str]], capture_traces: bool
    ) -> dict[str, Any]:
        """Return the journal's entry for a batch: scores, and the records of each rollout for the reflecting model."""
        again, tokens = self._runner.again, self._runner.tokens
        ran = self._runner.run(batch, prompts)
        for one in ran:
            _check_reached(one, prompts)
        outcomes = [one.outcome for one in ran]
        named = {reward.agent for outcome in outcomes for reward in outcome.rewards if reward.agent is not None}
        lowest = min(self._lowest, reward_of_failures(outcomes, "lowest"))
        told = [{agent: agent_records(one, agent) for agent in self._before} for one in ran]
        return {
            "rollouts": len(ran),
            "again": self._runner.again - again,
            "tokens": self._runner.tokens - tokens,
            "scores": scores_of(outcomes, lowest, trained_names(self._named | named, list(self._before))),
            "lowest": lowest,
            "named": sorted(named),
            "records": told if capture_traces else None,
        }

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return each agent's inputs, outputs and feedback."""
        del candidate
        ran: Sequence[dict[str, list[dict[str, Any]]]] = eval_batch.trajectories or ()
        return {agent: [record for one in ran for record in one[agent]] for agent in components_to_update}


def scores_of(outcomes: Sequence[Outcome], lowest: float, chosen: frozenset[str] | None) -> list[float]:
    """Return the reward of each rollout; a failed one, whatever the cause, has the lowest.

    One in which only other agents have rewards has 0, as one without rewards.

    Args:
        outcomes: of the rollouts.
        lowest: lowest reward so far, and at most 0.
        chosen: agents whose rewards count, see `rl.scores.trained_names`.
    """
    failed = [o.attempt is None or o.crash is not None for o in outcomes]
    earned = [trained_reward(o.rewards, chosen) or 0.0 for o in outcomes]
    return [lowest if each else value for each, value in zip(failed, earned, strict=True)]


def _check_reached(ran: CandidateRun, prompts: Mapping[str, Mapping[str, str]]) -> None:
    for node in ran.trace.chats if ran.trace else ():
        meant = max((name for name in prompts if selects((name,), node.path)), key=len, default="")
        prompt = prompts.get(meant)
        if prompt is not None and prompt["after"] not in (system_text(request_of(node)) or ""):
            raise LightningError(
                f"the candidate did not reach agent {meant!r}: its calls still contain its own prompt. Prompts"
                " are replaced in calls of the openai client, in a program that calls attach()."
            )


def agent_records(ran: CandidateRun, agent: str) -> list[dict[str, Any]]:
    """Return an agent's inputs and outputs in a rollout, and the feedback on the rollout: GEPA's examples."""
    if ran.trace is None:
        return []
    feedback = _feedback(ran, agent)
    return [
        {"Inputs": _prompt_text(node), "Generated Outputs": _answer_text(node), "Feedback": feedback}
        for node in ran.trace.chats
        if selects((agent,), node.path)
    ]


def _prompt_text(node: Node) -> str:
    messages = [told for message in messages_of(request_of(node)) or () for told in chat_messages(message)]
    told = [m for m in messages if isinstance(m, Mapping) and m.get("role") not in {"system", "developer"}]
    return _short("\n".join(f"{m.get('role')}: {_text(m)}" for m in told))


def _answer_text(node: Node) -> str:
    if node.error is not None:
        return f"(the call failed: {node.error})"
    said = [message for choice in node.answer.choices for message in chat_messages(choice.message)]
    return _short("\n".join(_text(message) for message in said if isinstance(message, Mapping)))


def _text(message: Mapping[str, Any]) -> str:
    calls = "".join(f" calls {call.name}({call.arguments})" for call in tool_calls(message))
    return f"{text_of(message.get('content'))}{calls}"


def _feedback(ran: CandidateRun, agent: str) -> str:
    outcome = ran.outcome
    lines = []
    if outcome.error is not None:
        lines.append(f"The program failed: {outcome.error[-_MOST:]}")
    else:
        lines.append(f"Reward of the whole run: {total(outcome.rewards):g}.")
        own = agents_totals(outcome.rewards)
        if agent in own:
            lines.append(f"Reward of this agent: {own[agent]:g}.")
        lines += [f"Reward of agent {name}: {value:g}." for name, value in own.items() if name != agent]
    for node in ran.trace.tools if ran.trace else ():
        if node.path is None or selects((agent,), node.path):
            given = node.span.attributes
            how = f"failed: {node.error}" if node.error is not None else f"gave {given.get(TOOL_RESULT, '')}"
            lines.append(_short(f"Tool {node.span.name}({given.get(TOOL_ARGUMENTS, '')}) {how}"))
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]}\n[...]\n{text[-_MOST // 2 :]}"

"""Transitions to training rows. Calls whose prompts continue an earlier call's tokens share its row.

Axes: `_M` transitions, `_T` tokens of a row.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_spans.schema.calls import PARTIAL
from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.choices import Aggregation
from lightning_trainer.reasons.call_errors import CUT
from lightning_trainer.reasons.continuation import CONTINUATION, ContinuationReason
from lightning_trainer.rl.account import Account, UntrainedReason, count_continuations
from lightning_trainer.rl.prefixes import OpenSequences
from lightning_trainer.rl.steered import steered_places
from lightning_trainer.rl.targets import Target

FloatArray: TypeAlias = NDArray[np.float64]

UNKNOWN_VERSION: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One training sequence: a call's prompt and response, and what later calls of the same branch added.

    Attributes:
        tokens: (T,) token ids.
        mask: (T,) True at the tokens that the policy sampled, the only ones that are trained; tokens that a grammar or
            similar steered are context.
        logprobs: (T,) their natural log-probabilities as recorded when sampled; 0 elsewhere.
        advantages: (T,) their advantages; 0 elsewhere.
        lengths: number of trained tokens of each call in the row, in order.
        agent: the agent that made the calls.
        attempt_id: the attempt they belong to.
        rollout_id: the rollout.
        group_id: the group whose returns were compared.
        policy: the policy that answered.
        policy_version: the number of its weights; `UNKNOWN_VERSION` if the engine did not say.
        temperature: the divisor of logits; above 0.
        calls: span and choice of each call in the row, in order; empty if the row comes from no trace.
        target: a teacher's distribution at its trained tokens; None if none was requested.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: FloatArray
    lengths: tuple[int, ...]
    agent: str
    attempt_id: str
    rollout_id: str
    group_id: str
    policy: str = "policy"
    policy_version: int = UNKNOWN_VERSION
    temperature: float = 1.0
    calls: tuple[tuple[str, int], ...] = ()
    target: Target | None = None

    def __post_init__(self) -> None:
        shapes = {self.tokens.shape, self.mask.shape, self.logprobs.shape, self.advantages.shape}
        if len(shapes) != 1 or self.tokens.ndim != 1:
            raise ValueError(f"a row's arrays differ in shape: {shapes}")
        if sum(self.lengths) != int(self.mask.sum()) or self.mask[:1].any():
            raise ValueError("a row's lengths must add up to its mask, and nothing predicts its first token")

    @property
    def transitions(self) -> int:
        """Number of model calls in the row."""
        return len(self.lengths)

    @property
    def has_gradient(self) -> bool:
        """Whether any token has an advantage, or is taught. A row without has only KL or entropy terms."""
        return bool(self.advantages.any()) or (self.target is not None and bool(self.target.weights_K.any()))


def make_rows(
    transitions: Sequence[Transition],
    advantages_M: FloatArray,
    groups: Mapping[str, str],
    *,
    merge: bool = True,
    max_length: int | None = None,
) -> tuple[list[Row], Account]:
    """Make training rows, and the account of what became of each transition.

    A transition is merged onto an earlier row of its attempt, agent, policy, policy version and temperature when its
    prompt begins with all tokens of that row: any row, not only the last, so that interleaved agents and parallel
    branches each continue their own. A row is continued once; a second continuation makes a row of its own, as do
    equal prompts and the n choices of a call. Merged or not, each sampled token has the same context, the same
    advantage and one place in the loss. Rows that have no advantage are kept: the loss's denominators count them.

    Args:
        transitions: (M,) of any attempts, in any order.
        advantages_M: (M,) one for each transition; its value is not looked at where the transition can't be trained.
        groups: the group of each rollout, by rollout id.
        merge: False makes one row for each transition.
        max_length: longest row. A transition that is longer is dropped and counted, never cut.

    Returns:
        Rows in the order of attempt and turn, whatever the order of the transitions, and their account.

    Raises:
        ValueError: lengths differ, or the advantage of a transition that can be trained is not finite.
        KeyError: a rollout has no group.
    """
    if len(transitions) != len(advantages_M):
        raise ValueError(f"{len(transitions)} transitions, but {len(advantages_M)} advantages")
    reasons_M = [why_untrainable(transition, max_length=max_length) for transition in transitions]
    actions = _actions(transitions, advantages_M, reasons_M)
    rows = [_row(branch, groups) for branch in _branches(actions, merge=merge)]
    how = {(call.attempt_id, call.turn): _how_made(call) for call in transitions}
    return rows, count_continuations(how.values()) + Account(
        seen=len(transitions),
        dropped=dict(Counter(reason for reason in reasons_M if reason is not None)),
        trained=len(actions),
        rows=len(rows),
        rows_without_gradient=sum(not row.has_gradient for row in rows),
        tokens=sum(sum(row.lengths) for row in rows),
        tokens_steered=sum(len(action.steered) for action in actions),
        tokens_in_rows=sum(len(row.tokens) for row in rows),
        tokens_in_calls=sum(len(action.tokens.prompt) + len(action.tokens.response) for action in actions),
    )


def why_untrainable(transition: Transition, *, max_length: int | None = None) -> UntrainedReason | None:
    """Return why this transition cannot be a training row; None if it can."""
    if transition.error is not None and not transition.sampling.get(CUT):
        return UntrainedReason.CALL_FAILED
    if transition.tokens is None:
        return why_no_tokens(transition)
    prompt, response, logprobs = transition.tokens.prompt, transition.tokens.response, transition.tokens.logprobs
    at = _temperature(transition)
    steered = steered_places(transition)
    checks = (
        (UntrainedReason.NO_PROMPT, not prompt),
        (UntrainedReason.NO_RESPONSE, not response),
        (UntrainedReason.BAD_LOGPROBS, len(logprobs) != len(response) or not all(map(math.isfinite, logprobs))),
        (UntrainedReason.GREEDY, at <= 0.0),
        # The ratio to another temperature's is a sum over the vocabulary, of which one term is known: it cannot be
        # corrected.
        (UntrainedReason.OTHER_TEMPERATURE, transition.sampling.get("logprobs_temperature", at) != at),
        (UntrainedReason.STEERED, steered is None),
        (UntrainedReason.ALL_STEERED, steered is not None and len(steered) >= len(response)),
        (UntrainedReason.TOO_LONG, max_length is not None and len(prompt) + len(response) > max_length),
    )
    return next((reason for reason, applies in checks if applies), None)


def why_no_tokens(transition: Transition) -> UntrainedReason:
    """Return why a transition has no tokens."""
    return UntrainedReason.PARTIAL_TOKENS if PARTIAL in transition.sampling else UntrainedReason.NO_TOKENS


def token_weights(rows: Sequence[Row], aggregation: Aggregation) -> list[NDArray[np.float32]]:
    """Return the weight of each trained token in the loss, so that the loss is the sum of weight times term.

    Computed from all rows of a batch before it is split: however it is split into micro-batches, and whichever rows
    without gradient are left out, the gradients add up to the same. A sequence here is the response of one call, not a
    row, so that merging changes nothing.

    ``token-mean`` is DAPO's (arXiv 2503.14476): every token has the same weight. ``sequence-mean`` is GRPO's (arXiv
    2402.03300): every response has the same weight, shared by its tokens. ``sequence-sum``: a token weighs 1 / number
    of responses, so a long response weighs more, as in Dr. GRPO (arXiv 2503.20783) up to a constant. ``rollout-mean``:
    every rollout has the same weight, however long, shared by its tokens. ``row-mean``: likewise every row; the only
    one that depends on merging.

    Returns:
        For each row (K,) float32, one weight for each True of its mask, in order.

    Raises:
        ValueError: the aggregation's name is unknown.
    """
    responses = sum(row.transitions for row in rows)
    tokens = sum(sum(row.lengths) for row in rows)
    match aggregation:
        case "token-mean":
            return [np.full(sum(row.lengths), 1.0 / tokens, np.float32) for row in rows]
        case "sequence-mean":
            return [np.repeat([1.0 / (responses * n) for n in row.lengths], row.lengths).astype("f4") for row in rows]
        case "sequence-sum":
            return [np.full(sum(row.lengths), 1.0 / responses, np.float32) for row in rows]
        case "row-mean":
            return [np.full(sum(row.lengths), 1.0 / (len(rows) * sum(row.lengths)), np.float32) for row in rows]
        case "rollout-mean":
            said: Counter[str] = Counter()
            for row in rows:
                said[row.rollout_id] += sum(row.lengths)
            return [np.full(sum(row.lengths), 1.0 / (len(said) * said[row.rollout_id]), np.float32) for row in rows]
    raise ValueError(
        f"unknown aggregation {aggregation!r}. Use token-mean, sequence-mean, sequence-sum, row-mean or rollout-mean."
    )


@dataclass(frozen=True, slots=True)
class _Action:
    """A call that can be trained."""

    transition: Transition
    tokens: Tokens
    advantage: float
    steered: Sequence[int] = ()

    @property
    def places(self) -> NDArray[np.int64]:
        """(K,) positions in `ids` of the trained tokens: the response, except what was steered."""
        own = np.delete(np.arange(len(self.tokens.response)), list(self.steered))
        return len(self.tokens.prompt) + own

    @property
    def ids(self) -> NDArray[np.int32]:
        """(P + A,) the prompt and the response."""
        return np.array(self.tokens.prompt + self.tokens.response, dtype=np.int32)

    @property
    def kind(self) -> tuple[str, str | None, str | None, int | None, float]:
        """What calls that share a row have in common."""
        call = self.transition
        return call.attempt_id, call.agent, call.policy, call.policy_version, _temperature(call)


_Branch: TypeAlias = list[_Action]  # calls, each of which continues the tokens of the previous one


def _actions(
    transitions: Sequence[Transition], advantages_M: FloatArray, reasons_M: Sequence[str | None]
) -> list[_Action]:
    """Keep the trainable calls, in the order of attempt and turn."""
    found = []
    for transition, advantage, reason in zip(transitions, advantages_M, reasons_M, strict=True):
        if transition.tokens is None or reason is not None:
            continue
        if not math.isfinite(advantage):
            raise ValueError(f"the advantage of a call of attempt {transition.attempt_id} is {advantage}")
        found.append(_Action(transition, transition.tokens, float(advantage), steered_places(transition) or ()))
    return sorted(found, key=lambda action: _place(action.transition))


def _how_made(call: Transition) -> str | None:
    """Return how the prompt was made: as the gateway recorded it, otherwise derived from the messages."""
    if call.tokens is None or CONTINUATION in call.sampling:
        return call.sampling.get(CONTINUATION)
    messages = call.request.get("messages")
    earlier = isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)
    return ContinuationReason.ONLY_MESSAGES if earlier else ContinuationReason.BEGINS


def _place(call: Transition) -> tuple[str, int, int, str]:
    return call.attempt_id, call.turn, call.choice, call.span_id


def _temperature(call: Transition) -> float:
    value = call.sampling.get("temperature")
    return 1.0 if value is None else float(value)  # the OpenAI API's default


def _branches(actions: Sequence[_Action], *, merge: bool) -> list[_Branch]:
    """Add each call to the longest branch of its kind that it continues, or start a new branch."""
    branches: list[_Branch] = []
    open_branches: defaultdict[object, OpenSequences[_Branch]] = defaultdict(OpenSequences)
    for action in actions:
        ids, still_open = action.ids, open_branches[action.kind]
        branch = still_open.take(ids[: len(action.tokens.prompt)]) if merge else None
        if branch is None:
            branch = []
            branches.append(branch)
        branch.append(action)
        still_open.add(ids, branch)
    return branches


def _row(branch: _Branch, groups: Mapping[str, str]) -> Row:
    """Arrange the calls of a branch along the tokens of its last one."""
    call, tokens = branch[-1].transition, branch[-1].ids
    mask = np.zeros(len(tokens), np.bool_)
    logprobs = np.zeros(len(tokens), np.float32)
    advantages = np.zeros(len(tokens), np.float64)
    for action in branch:
        place = action.places
        own = place - len(action.tokens.prompt)
        mask[place], advantages[place] = True, action.advantage
        logprobs[place] = np.asarray(action.tokens.logprobs, np.float32)[own]
    return Row(
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        advantages=advantages,
        lengths=tuple(len(action.places) for action in branch),
        agent=call.agent or "",
        attempt_id=call.attempt_id,
        rollout_id=call.rollout_id,
        group_id=groups[call.rollout_id],
        policy=call.policy or "policy",
        policy_version=UNKNOWN_VERSION if call.policy_version is None else call.policy_version,
        temperature=_temperature(call),
        calls=tuple((action.transition.span_id, action.transition.choice) for action in branch),
    )

"""Transitions to training rows. Calls whose prompts continue an earlier call's tokens share its row.

Axes: `_M` transitions, `_T` tokens of a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_spans.transitions import Tokens, Transition
from lightning_trainer import account as reasons
from lightning_trainer.account import Account

FloatArray: TypeAlias = NDArray[np.float64]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum"]

UNKNOWN_VERSION: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One training sequence: a call's prompt and response, and what later calls of the same branch added.

    Attributes:
        tokens: (T,) token ids.
        mask: (T,) True at the tokens that the policy sampled, the only ones that are trained.
        logprobs: (T,) their natural log-probabilities as recorded when sampled; 0 elsewhere.
        advantages: (T,) their advantages; 0 elsewhere.
        lengths: number of trained tokens of each call in the row, in order.
        agent: who made the calls.
        attempt_id: the attempt they belong to.
        rollout_id: the rollout.
        group_id: the group whose returns were compared.
        policy: the policy that answered.
        policy_version: the number of its weights; `UNKNOWN_VERSION` where the engine did not say.
        temperature: what logits were divided by; above 0.
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
        """Whether any token has an advantage. A row without one changes weights only through KL or entropy terms."""
        return bool(self.advantages.any())


def make_rows(
    transitions: Sequence[Transition],
    advantages_M: FloatArray,
    groups: Mapping[str, str],
    *,
    merge: bool = True,
    max_tokens: int | None = None,
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
        max_tokens: longest row. A transition that is longer is dropped and counted, never cut.

    Returns:
        Rows in the order of attempt and turn, whatever the order of the transitions, and their account.

    Raises:
        ValueError: lengths differ, or the advantage of a transition that can be trained is not finite.
        KeyError: a rollout has no group.
    """
    if len(transitions) != len(advantages_M):
        raise ValueError(f"{len(transitions)} transitions, but {len(advantages_M)} advantages")
    dropped: Counter[str] = Counter()
    branches: list[_Branch] = []
    open_branches: dict[_Kind, _OpenBranches] = {}
    calls = tokens_in_calls = 0
    for m in sorted(range(len(transitions)), key=lambda m: _place(transitions[m])):
        transition = transitions[m]
        tokens = transition.tokens
        reason = why_untrainable(transition, max_tokens=max_tokens)
        if reason is not None or tokens is None:
            dropped[reason or reasons.NO_TOKENS] += 1
            continue
        kind = _kind(transition)
        still_open = open_branches.setdefault(kind, _OpenBranches())
        ids = np.array(tokens.prompt + tokens.response, dtype=np.int32)
        branch = still_open.take(ids, len(tokens.prompt)) if merge else None
        if branch is None:
            branch = _Branch(kind, transition.rollout_id, groups[transition.rollout_id])
            branches.append(branch)
        branch.extend(ids, tokens, float(advantages_M[m]))
        still_open.add(branch)
        calls, tokens_in_calls = calls + 1, tokens_in_calls + len(ids)
    rows = [branch.row() for branch in branches]
    return rows, Account(
        seen=len(transitions),
        dropped=dict(dropped),
        trained=calls,
        rows=len(rows),
        rows_without_gradient=sum(not row.has_gradient for row in rows),
        tokens=sum(sum(row.lengths) for row in rows),
        tokens_in_rows=sum(len(row.tokens) for row in rows),
        tokens_in_calls=tokens_in_calls,
    )


def why_untrainable(transition: Transition, *, max_tokens: int | None = None) -> str | None:
    """Say why this transition can't be a training row; None when it can. The reasons stand in `account`."""
    if transition.error is not None:
        return reasons.CALL_FAILED
    if transition.tokens is None:
        return reasons.NO_TOKENS
    prompt, response, logprobs = transition.tokens.prompt, transition.tokens.response, transition.tokens.logprobs
    checks = (
        (reasons.NO_PROMPT, not prompt),
        (reasons.NO_RESPONSE, not response),
        (reasons.BAD_LOGPROBS, len(logprobs) != len(response) or not all(map(math.isfinite, logprobs))),
        (reasons.GREEDY, _temperature(transition) <= 0.0),
        (reasons.TOO_LONG, max_tokens is not None and len(prompt) + len(response) > max_tokens),
    )
    return next((reason for reason, applies in checks if applies), None)


def token_weights(rows: Sequence[Row], aggregation: Aggregation) -> list[NDArray[np.float32]]:
    """Give the weight of each trained token in the loss, so that the loss is the sum of weight times term.

    Made from all rows of a batch before it is split: however it is split into micro-batches, and whichever rows
    without gradient are left out, the gradients add up to the same. A sequence here is the response of one call, not
    a row, so that merging changes nothing.

    ``token-mean`` is DAPO's (arXiv 2503.14476): every token weighs the same. ``sequence-mean`` is GRPO's
    (arXiv 2402.03300): every response weighs the same, and its tokens share that. ``sequence-sum``: a token weighs
    1 / number of responses, so a long response weighs more, as in Dr. GRPO (arXiv 2503.20783) up to a constant.

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
    raise ValueError(f"unknown aggregation {aggregation!r}. Use token-mean, sequence-mean or sequence-sum.")


_Kind: TypeAlias = tuple[
    str, str, str, int, float
]  # attempt, agent, policy, version, temperature: what may share a row


def _place(transition: Transition) -> tuple[str, int, int, str]:
    return transition.attempt_id, transition.turn, transition.choice, transition.span_id


def _temperature(transition: Transition) -> float:
    value = transition.sampling.get("temperature")
    return 1.0 if value is None else float(value)  # the OpenAI interface's default


def _kind(transition: Transition) -> _Kind:
    version = UNKNOWN_VERSION if transition.policy_version is None else transition.policy_version
    policy = transition.policy or "policy"
    return transition.attempt_id, transition.agent or "", policy, version, _temperature(transition)


@dataclass(slots=True, eq=False)
class _Branch:
    """A row that is being made: the tokens of its last call, and where the sampled ones lie in them."""

    kind: _Kind
    rollout_id: str
    group_id: str
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    actions: list[tuple[int, Tokens, float]] = field(default_factory=list)  # start, tokens, advantage

    def extend(self, ids: NDArray[np.int32], tokens: Tokens, advantage: float) -> None:
        """Continue with a call whose prompt begins with all tokens so far."""
        if not math.isfinite(advantage):
            raise ValueError(f"the advantage of a call of attempt {self.kind[0]} is {advantage}")
        self.ids = ids
        self.actions.append((len(tokens.prompt), tokens, advantage))

    def row(self) -> Row:
        """Lay the calls over the tokens."""
        mask = np.zeros(len(self.ids), np.bool_)
        logprobs = np.zeros(len(self.ids), np.float32)
        advantages = np.zeros(len(self.ids), np.float64)
        for start, tokens, advantage in self.actions:
            place = slice(start, start + len(tokens.response))
            mask[place], logprobs[place], advantages[place] = True, tokens.logprobs, advantage
        attempt_id, agent, policy, version, temperature = self.kind
        return Row(
            tokens=self.ids,
            mask=mask,
            logprobs=logprobs,
            advantages=advantages,
            lengths=tuple(len(tokens.response) for _, tokens, _ in self.actions),
            agent=agent,
            attempt_id=attempt_id,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            policy=policy,
            policy_version=version,
            temperature=temperature,
        )


class _OpenBranches:
    """Branches that a later call may continue, found by length and hash: linear in the prompt's length."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[int, list[_Branch]]] = {}
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def take(self, ids: NDArray[np.int32], prompt_length: int) -> _Branch | None:
        """Take out the longest branch with whose tokens the prompt, `ids[:prompt_length]`, begins; None without one."""
        hashes = _prefix_hashes(ids)
        for length in sorted((n for n in self._by_length if n <= prompt_length), reverse=True):
            candidates = self._by_length[length].get(int(hashes[length - 1]), [])
            for place, branch in enumerate(candidates):
                if np.array_equal(branch.ids, ids[:length]):
                    return candidates.pop(place)
        return None

    def add(self, branch: _Branch) -> None:
        """Let a later call continue this branch."""
        with_length = self._by_length.setdefault(len(branch.ids), {})
        with_length.setdefault(int(_prefix_hashes(branch.ids)[-1]), []).append(branch)


def _prefix_hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """(T,) hash of each prefix: the sum of id times a power of an odd number, modulo 2**64."""
    size = 1 << len(ids).bit_length()
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * _powers(size)[: len(ids)], dtype=np.uint64)


@lru_cache(maxsize=32)
def _powers(size: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(size, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)

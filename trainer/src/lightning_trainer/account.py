"""The account of a batch: what became of every model call, so that nothing is dropped in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_spans.rewards import Reward

# Why a call is not trained on. The first ones are decided by whoever chooses calls, the later ones by `make_rows`.
NOT_SELECTED: Final = "agent not selected"
ATTEMPT_FAILED: Final = "attempt failed"
GROUP_INCOMPLETE: Final = "group incomplete"
RESAMPLED: Final = "group replaced: all its rewards were equal"
NO_REWARD: Final = "no reward for this agent"
CALL_FAILED: Final = "model call failed"
NO_TOKENS: Final = "no tokens recorded"
NO_PROMPT: Final = "empty prompt"
NO_RESPONSE: Final = "empty response"
BAD_LOGPROBS: Final = "log-probabilities missing or not finite"
GREEDY: Final = "temperature 0: not a sample of the policy"
OTHER_TEMPERATURE: Final = (
    "log-probabilities leave the temperature out: start vLLM with --logprobs-mode processed_logprobs,"
    " SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
)
TOO_LONG: Final = "longer than max_tokens"

WHOLE: Final = "the attempt"  # what a reward that names no agent is for

# How a call's prompt was made. The gateway writes it beside the call's sampling, under this name.
CONTINUATION: Final = "continuation"
BEGINS: Final = "begins a conversation"
JOINED: Final = "joined"  # the prompt is an earlier call's own tokens, and new ones
# Why a prompt that goes on from an earlier call does not hold that call's own tokens.
REWRITTEN: Final = "history rewritten: the chat template shows an earlier answer otherwise, as without its thinking"
HIDDEN: Final = "answer not shown whole: the tokens sampled say more than the message that the agent got and sent back"
TOOLS_CHANGED: Final = "tools changed"
SYSTEM_CHANGED: Final = "system prompt changed"
EDITED: Final = "history edited: messages were changed, left out or put in another order"
FORGOTTEN: Final = "earlier calls forgotten: the gateway keeps a bounded number"
UNFAITHFUL: Final = "tokenizer reads the new part otherwise than in its place"
ONLY_MESSAGES: Final = "upstream was sent messages: only a server whose tokenizer is named is sent token ids"
# Why an upstream whose tokenizer is named was sent messages all the same.
UNKNOWN_SERVER: Final = "upstream takes no token ids: it is no vLLM, SGLang or gateway of known context"
OTHER_TOKENS: Final = "upstream makes other tokens than the tokenizer named, or can't tell: it was sent messages"
TAKES_THINKING_OUT: Final = "upstream takes thinking out of answers, or can't tell: it was sent messages"
OTHER_CALLS: Final = "chat template writes tool calls in a form that is not read here: upstream was sent messages"
ONLY_UPSTREAM_READS: Final = "request has what only the upstream reads, such as images: it was sent messages"
NO_FORM: Final = "upstream's structured output takes no form that is written here: it was sent messages"
AFTER_MESSAGES: Final = "earlier call was sent as messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of the calls of a batch. A call with n choices counts n times. It adds up, or can't be made.

    Attributes:
        seen: calls of the batch.
        dropped: number of calls not trained on, by reason.
        trained: calls that are in a row: ``seen`` without the dropped ones.
        rows: training sequences; ``trained - rows`` calls were merged onto the row of an earlier one.
        rows_without_gradient: rows whose advantages are all 0: their group's rewards were all equal.
        tokens: trained tokens (sampled by the policy), the loss's denominator.
        tokens_in_rows: all tokens of the rows, context included: what an update computes.
        tokens_in_calls: the same with one row for each call: what it would compute without merging.
        unclaimed: number of rewards that reached no call, by the agent they name: it made none in that attempt.
        joined: calls whose prompt holds the tokens of the earlier call that they go on from.
        alone: calls that go on from an earlier one and do not, by reason.
        told_twice: calls of which the agent's span and the gateway's record are joined.
        unjoined: number of spans and records that stand alone, by reason.
    """

    seen: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    trained: int = 0
    rows: int = 0
    rows_without_gradient: int = 0
    tokens: int = 0
    tokens_in_rows: int = 0
    tokens_in_calls: int = 0
    unclaimed: Mapping[str, int] = field(default_factory=dict)
    joined: int = 0
    alone: Mapping[str, int] = field(default_factory=dict)
    told_twice: int = 0
    unjoined: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seen != self.trained + sum(self.dropped.values()):
            raise ValueError(f"account does not add up: {self.seen} seen, {self.trained} trained, {self.dropped}")
        if not 0 <= self.rows_without_gradient <= self.rows <= self.trained:
            raise ValueError(f"account does not add up: {self.rows} rows of {self.trained} calls")

    @property
    def merged(self) -> int:
        """Calls that share the row of an earlier one."""
        return self.trained - self.rows

    @property
    def joined_share(self) -> float | None:
        """Share of the calls that go on from an earlier one whose prompt holds its tokens; None without such calls."""
        return joined_share(self.joined, sum(self.alone.values()))

    def __add__(self, other: Account) -> Account:
        """Put two accounts together: of two attempts, or of two steps."""
        return Account(
            seen=self.seen + other.seen,
            dropped=_sum(self.dropped, other.dropped),
            trained=self.trained + other.trained,
            rows=self.rows + other.rows,
            rows_without_gradient=self.rows_without_gradient + other.rows_without_gradient,
            tokens=self.tokens + other.tokens,
            tokens_in_rows=self.tokens_in_rows + other.tokens_in_rows,
            tokens_in_calls=self.tokens_in_calls + other.tokens_in_calls,
            unclaimed=_sum(self.unclaimed, other.unclaimed),
            joined=self.joined + other.joined,
            alone=_sum(self.alone, other.alone),
            told_twice=self.told_twice + other.told_twice,
            unjoined=_sum(self.unjoined, other.unjoined),
        )

    def plus_dropped(self, reason: str, calls: int) -> Account:
        """Count calls that were seen and left out for this reason before rows were made."""
        return self + Account(seen=calls, dropped={reason: calls}) if calls else self

    def plus_unclaimed(self, rewards: Iterable[Reward]) -> Account:
        """Count rewards that reached no call: `lightning_spans.credit.unclaimed`."""
        return self + Account(unclaimed=dict(Counter(reward.agent or WHOLE for reward in rewards)))

    def lines(self) -> list[str]:
        """Say it to people, one fact a line."""
        found = [f"{self.seen} calls seen, {self.trained} trained on"]
        found += [f"{count} left out: {reason}" for reason, count in sorted(self.dropped.items())]
        if self.trained:
            saved = f" ({self.tokens_in_calls / self.tokens_in_rows:.1f}x fewer tokens)" if self.merged else ""
            found.append(f"{self.rows} rows, {self.merged} calls merged onto an earlier one's{saved}")
            found.append(f"{self.tokens} trained tokens of {self.tokens_in_rows}")
        if self.joined_share is not None:
            going = self.joined + sum(self.alone.values())
            found.append(f"{self.joined} of {going} calls that go on from an earlier one hold its own tokens")
        found += [f"{count} do not: {reason}" for reason, count in sorted(self.alone.items())]
        if self.unjoined:
            found.append(f"{self.told_twice} calls have both an agent's span and a gateway's record")
        found += [f"{count} have not: {reason}" for reason, count in sorted(self.unjoined.items())]
        if self.rows_without_gradient:
            found.append(f"{self.rows_without_gradient} rows teach nothing: all rewards of their group are equal")
        for agent, count in sorted(self.unclaimed.items()):
            why = "which made no call in those attempts" if agent != WHOLE else "which this credit gives to nobody"
            found.append(f"{count} rewards for {agent}, {why}")
        return found

    def metrics(self) -> dict[str, float]:
        """Give the same as numbers by name, for logs."""
        numbers: dict[str, float] = {
            "calls_seen": self.seen,
            "calls_trained": self.trained,
            "calls_merged": self.merged,
            "rows": self.rows,
            "rows_without_gradient": self.rows_without_gradient,
            "tokens": self.tokens,
            "tokens_in_rows": self.tokens_in_rows,
            "tokens_in_calls": self.tokens_in_calls,
            "rewards_unclaimed": sum(self.unclaimed.values()),
            "calls_told_twice": self.told_twice,
            "calls_unjoined": sum(self.unjoined.values()),
        }
        if self.joined_share is not None:
            numbers |= {"calls_joined": self.joined, "joined_share": self.joined_share}
        dropped = {f"calls_dropped/{slug(reason)}": count for reason, count in self.dropped.items()}
        alone = {f"calls_alone/{slug(reason)}": count for reason, count in self.alone.items()}
        unjoined = {f"calls_unjoined/{slug(reason)}": count for reason, count in self.unjoined.items()}
        return {name: float(value) for name, value in {**numbers, **dropped, **alone, **unjoined}.items()}


def continued(outcomes: Iterable[str | None]) -> Account:
    """Count how prompts were made: what stands under `CONTINUATION`, one for each call; None says nothing."""
    counts = Counter(outcome for outcome in outcomes if outcome not in {None, BEGINS})
    joined = counts.pop(JOINED, 0)
    return Account(joined=joined, alone={str(reason): count for reason, count in counts.items()})


def joined_share(joined: int, alone: int) -> float | None:
    """Share of joined calls among those that go on from an earlier one; None where there are none."""
    return joined / (joined + alone) if joined + alone else None


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}


def slug(reason: str) -> str:
    """Give a reason's name for metrics: what stands before its colon."""
    return reason.split(":", maxsplit=1)[0].replace(" ", "_")

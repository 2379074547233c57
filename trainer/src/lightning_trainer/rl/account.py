"""The account of a batch: the outcome of every model call, so that nothing is dropped silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_trainer.reasons.amounts import amount
from lightning_trainer.reasons.continuation import ContinuationReason, continued_share
from lightning_trainer.reasons.reason import Reason, slug

if TYPE_CHECKING:
    from lightning_spans.schema.rewards import Reward


class UntrainedReason(Reason):
    """Why a call is not used for training. The first are decided when calls are chosen, the later by `make_rows`."""

    NOT_SELECTED = "agent not selected"
    REPLAYED = "answered from a record"
    ATTEMPT_FAILED = "attempt failed"  # if nothing says how
    OTHER_ATTEMPT = "another attempt of the rollout counts"
    FORK_ENDED = "of a fork that deviated from the recording"
    FORK = "of a fork, which this credit assignment does not use"
    NO_ALTERNATIVE = "no alternative to compare it with"
    GROUP_INCOMPLETE = "group incomplete"
    RESAMPLED = "group replaced: all its rewards were equal"
    NO_REWARD = "no reward for this agent"
    CALL_FAILED = "model call failed"
    NO_TOKENS = "no tokens recorded"
    PARTIAL_TOKENS = "token ids incomplete: the server counts more completion tokens than it returned ids"
    NO_PROMPT = "empty prompt"
    NO_RESPONSE = "empty response"
    BAD_LOGPROBS = "log-probabilities missing or not finite"
    GREEDY = "temperature 0: not a sample of the policy"
    OTHER_TEMPERATURE = (
        "log-probabilities leave the temperature out: start vLLM with --logprobs-mode processed_logprobs,"
        " SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    )
    STEERED = "not sampled from the policy only: top_p, a grammar or another parameter changed the distribution"
    ALL_STEERED = "every token was forced: the policy had no choice"
    TOO_LONG = "longer than max_length"


class Untaught(Reason):
    """Why a call that is used for training is not taught by the self-teacher."""

    NOTHING_TOLD = "no result for the teacher to read"
    NO_PLACE = "its prompt does not end with the chat template's start of an answer"
    HINT_TOO_LONG = "longer than max_model_len with the text for the teacher"


WHOLE: Final = "the attempt"  # the target of a reward that names no agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The outcomes of the calls of a batch. A call with n choices counts n times.

    The numbers add up; otherwise it cannot be created.

    Attributes:
        seen: calls of the batch.
        dropped: number of calls not used for training, by reason.
        trained: calls that are in a row: ``seen`` without the dropped ones.
        rows: training sequences; ``trained - rows`` calls were merged into the row of an earlier one.
        rows_without_gradient: rows whose advantages are all 0: their group's rewards were all equal.
        tokens: trained tokens (sampled by the policy), the loss's denominator.
        tokens_in_rows: all tokens of the rows, including context: what an update computes.
        tokens_in_calls: the same with one row for each call: what it would compute without merging.
        unclaimed: number of rewards that reached no call, by the agent they name: it made none in that attempt.
        tokens_steered: tokens of trained calls that are left out of the loss, because a grammar or another parameter of
            the request made the engine sample them from another distribution than the policy's.
        begun: calls that begin a conversation: an agent's first one, or a sub-agent's with its own context.
        forked: calls that begin another row because the chat template leaves out earlier reasoning; the remaining parts
            of earlier answers have their own tokens.
        continued: calls whose prompt contains the tokens of the earlier call that they continue.
        not_continued: calls whose messages continue an earlier one, but whose tokens do not, by reason.
        joined: calls with both the agent's span and the gateway's record.
        unjoined: number of spans and records without the other, by reason.
        taught: calls among the trained ones that the self-teacher taught.
        untaught: number of the others, by reason; without a self-teacher there are neither.
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
    tokens_steered: int = 0
    begun: int = 0
    forked: int = 0
    continued: int = 0
    not_continued: Mapping[str, int] = field(default_factory=dict)
    joined: int = 0
    unjoined: Mapping[str, int] = field(default_factory=dict)
    taught: int = 0
    untaught: Mapping[str, int] = field(default_factory=dict)

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
    def continued_share(self) -> float | None:
        """Share of the continuing calls whose prompt contains the earlier call's tokens; None without such calls."""
        return continued_share(self.continued, sum(self.not_continued.values()))

    def __add__(self, other: Account) -> Account:
        """Add two accounts: of two attempts, or of two steps."""
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
            tokens_steered=self.tokens_steered + other.tokens_steered,
            begun=self.begun + other.begun,
            forked=self.forked + other.forked,
            continued=self.continued + other.continued,
            not_continued=_sum(self.not_continued, other.not_continued),
            joined=self.joined + other.joined,
            unjoined=_sum(self.unjoined, other.unjoined),
            taught=self.taught + other.taught,
            untaught=_sum(self.untaught, other.untaught),
        )

    def plus_dropped(self, reason: str, calls: int) -> Account:
        """Count calls that were seen, and left out for this reason before rows were made."""
        return self + Account(seen=calls, dropped={reason: calls}) if calls else self

    def plus_unclaimed(self, rewards: Iterable[Reward]) -> Account:
        """Count rewards that reached no call: `lightning_trainer.rl.credit.assigners.unclaimed_rewards`."""
        return self + Account(unclaimed=dict(Counter(reward.agent or WHOLE for reward in rewards)))

    def lines(self) -> list[str]:
        """Return it for people, one fact per line."""
        found = [f"{amount(self.seen, 'call')} seen, {self.trained} trained on"]
        found += [f"{count} left out: {reason}" for reason, count in sorted(self.dropped.items())]
        if self.trained:
            saved = f" ({self.tokens_in_calls / self.tokens_in_rows:.1f}x fewer tokens)" if self.merged else ""
            found.append(
                f"{amount(self.rows, 'row')}, {amount(self.merged, 'call')} merged onto an earlier one's{saved}"
            )
            found.append(f"{amount(self.tokens, 'trained token')} of {self.tokens_in_rows}")
        if self.tokens_steered:
            found.append(
                f"{amount(self.tokens_steered, 'token')} left out of the loss: a grammar or similar constrained them"
            )
        if self.begun:
            found.append(f"{self.begun} calls begin a conversation")
        if self.continued_share is not None:
            going = self.continued + sum(self.not_continued.values())
            found.append(f"{self.continued} of {going} calls that continue an earlier one contain its tokens")
        if self.forked:
            found.append(f"{self.forked} calls fork: the chat template leaves earlier reasoning out")
        found += [f"{count} do not: {reason}" for reason, count in sorted(self.not_continued.items())]
        if self.unjoined:
            found.append(f"{self.joined} calls have both an agent's span and a gateway's record")
        found += [f"{count} have not: {reason}" for reason, count in sorted(self.unjoined.items())]
        teaching = self.taught or self.untaught
        if teaching:
            found.append(f"{self.taught} calls taught by the policy that knows their result")
        found += [f"{count} not: {reason}" for reason, count in sorted(self.untaught.items())]
        if self.rows_without_gradient:
            why = "" if teaching else ": all rewards of their group are equal"
            teach = "row teaches" if self.rows_without_gradient == 1 else "rows teach"
            found.append(f"{self.rows_without_gradient} {teach} nothing{why}")
        return found + self._unclaimed_lines()

    def _unclaimed_lines(self, most: int = 10) -> list[str]:
        """Return which agents were rewarded without making a call; if there are many, the first ones."""
        whole, named = self.unclaimed.get(WHOLE), sorted(set(self.unclaimed) - {WHOLE})
        lost = "which made no call in those attempts"
        found = [f"{whole} rewards for {WHOLE}, which this credit assignment gives to no agent"] if whole else []
        found += [f"{self.unclaimed[agent]} rewards for {agent}, {lost}" for agent in named[:most]]
        if rest := named[most:]:
            found.append(f"{sum(self.unclaimed[agent] for agent in rest)} rewards for {len(rest):,} more, {lost}")
        return found

    def metrics(self) -> dict[str, float]:
        """Return it as numbers by name, for logs."""
        numbers: dict[str, float] = {
            "calls_seen": self.seen,
            "calls_trained": self.trained,
            "calls_merged": self.merged,
            "rows": self.rows,
            "rows_without_gradient": self.rows_without_gradient,
            "tokens": self.tokens,
            "tokens_in_rows": self.tokens_in_rows,
            "tokens_steered": self.tokens_steered,
            "tokens_in_calls": self.tokens_in_calls,
            "rewards_unclaimed": sum(self.unclaimed.values()),
            "calls_joined": self.joined,
            "calls_unjoined": sum(self.unjoined.values()),
        }
        numbers |= {"calls_begun": self.begun} if self.begun else {}
        numbers |= {"calls_forked": self.forked} if self.forked else {}
        if self.continued_share is not None:
            numbers |= {"calls_continued": self.continued, "continued_share": self.continued_share}
        untaught = {f"calls_untaught/{slug(reason)}": count for reason, count in self.untaught.items()}
        numbers |= {"calls_taught": self.taught, **untaught} if self.taught or self.untaught else {}
        dropped = {f"calls_dropped/{slug(reason)}": count for reason, count in self.dropped.items()}
        not_continued = {f"calls_not_continued/{slug(reason)}": count for reason, count in self.not_continued.items()}
        unjoined = {f"calls_unjoined/{slug(reason)}": count for reason, count in self.unjoined.items()}
        return {name: float(value) for name, value in {**numbers, **dropped, **not_continued, **unjoined}.items()}


def count_continuations(outcomes: Iterable[str | None]) -> Account:
    """Count how prompts were made, one outcome per call, see `reasons.continuation`; None is not counted."""
    counts = Counter(outcome for outcome in outcomes if outcome is not None)
    begun, forked, joined = (
        counts.pop(name, 0)
        for name in (ContinuationReason.BEGINS, ContinuationReason.FORKED, ContinuationReason.JOINED)
    )
    others = {str(reason): count for reason, count in counts.items()}
    return Account(begun=begun, forked=forked, continued=joined, not_continued=others)


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}

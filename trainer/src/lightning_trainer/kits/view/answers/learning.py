"""The training data of a step: account, credit, rewards."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_trainer.kits.view.answers.calls import CallLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Calls that were left out for a reason, and some of them."""

    reason: str
    calls: int
    links: list[CallLink]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountPage:
    """From calls seen to calls trained. `losses` add up to the difference."""

    step: int
    seen: int
    trained: int
    rows: int
    merged: int
    rows_without_gradient: int
    tokens: int
    tokens_in_rows: int
    tokens_steered: int
    losses: list[Loss]
    continued: int
    not_continued: dict[str, int]
    unclaimed: dict[str, int]
    joined: int
    unjoined: dict[str, int]
    same_as_run: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCell:
    """The calls of an agent at a turn."""

    agent: str | None
    turn: int
    calls: int
    credit: float | None
    contrast: float | None
    better: float
    worse: float
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditPage:
    """Credit by agent and turn, and the best and worst calls."""

    credit: str
    credits: list[str]
    cells: list[TurnCell]
    best: list[CallLink]
    worst: list[CallLink]
    lines: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """The rewards of one source."""

    source: str
    rule: bool
    rewards: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """An attempt's rewards by source: a point of the scatter plot.

    Attributes:
        rollout_id: its rollout.
        attempt_id: id of the attempt.
        outcome: its reward without automatic rules; None without a reward.
        by_agent: the rewards of each agent in `outcome`.
        lowest: the lowest reward of any agent; of an attempt without rewards by agent, `outcome`.
        task: its task, shortened.
        by_source: sum of the rewards of each source.
        spans: by source, the span to look at: the one with its largest reward, positive or negative.
        said: by source, its explanation of the reward, verbatim.
    """

    rollout_id: str
    attempt_id: str
    outcome: float | None
    by_agent: dict[str, float]
    lowest: float | None
    task: str
    by_source: dict[str, float]
    spans: dict[str, str]
    said: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsPage:
    """Rewards of a step by source, and of some attempts; `total` is the number of attempts with rewards."""

    sources: list[SourceRow]
    attempts: list[Judgement]
    total: int

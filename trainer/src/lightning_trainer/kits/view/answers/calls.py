"""A model call with its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_trainer.kits.view.answers.rollouts import MessageView, RewardRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token. Everything except its id and text is known for sampled tokens only, if it was recorded.

    Attributes:
        id: in the vocabulary.
        text: text of the token.
        logprob: natural log-probability with which the engine sampled it.
        trained: whether the loss includes it.
        advantage: its advantage in the loss.
        gap: log-probability under the trainer minus `logprob`, at the update.
        entropy: in nats, of the distribution that it was sampled from, at the update.
    """

    id: int
    text: str
    logprob: float | None = None
    trained: bool | None = None
    advantage: float | None = None
    gap: float | None = None
    entropy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChoice:
    """One answer of a call, as tokens and as the message that the program got."""

    index: int
    finish: str | None
    message: MessageView
    tokens: list[Token]
    credit: float | None
    advantage: float | None
    left_out: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """The training row of a call: `calls` share it, by their span ids."""

    calls: list[str]
    tokens: int
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPage:
    """A model call. `untrained` says why it is in no training row, `unread` why no update read its tokens."""

    rollout_id: str | None
    attempt_id: str | None
    span_id: str
    agent: str | None
    turn: int
    turns: list[str]
    model: str | None
    version: int | None
    error: str | None
    ms: float
    texts: bool
    prompt: list[Token]
    prompt_total: int
    choices: list[CallChoice]
    messages: list[MessageView]
    sampling: dict[str, Any]
    row: RowPlace | None
    untrained: str | None
    unread: str | None
    rewards: list[RewardRow]
    request: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLink:
    """A model call in a list.

    Attributes:
        rollout_id, attempt_id, span_id: ids of its rollout, attempt and span.
        agent: agent that made it.
        turn: its number among the calls of its attempt.
        credit: its share of the rewards.
        advantage: how much better it was than its baseline.
        text: the start of the answer.
        task: the rollout's task, shortened.
        reward: of the rollout.
        times: number of identical calls in the list, including this one.
    """

    rollout_id: str
    attempt_id: str
    span_id: str
    agent: str | None
    turn: int
    credit: float | None = None
    advantage: float | None = None
    text: str = ""
    task: str = ""
    reward: float | None = None
    times: int = 1

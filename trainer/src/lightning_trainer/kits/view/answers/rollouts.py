"""A rollout as it went: events, rewards, attempts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A tool that a message calls; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message. `cut` is the number of its characters that are not shown."""

    role: str
    text: str
    cut: int = 0
    reasoning: str = ""
    calls: list[ToolUse] = field(default_factory=list)
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """A reward with its source."""

    value: float
    source: str
    agent: str | None
    span_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A span in its place.

    Attributes:
        span_id: its id.
        parent_id: of the span around it; None for a root.
        operation: ``chat``, ``execute_tool``, ``invoke_agent``, ...
        name: the tool, the agent, the model.
        agent: at work.
        start_ms: since the attempt's first span.
        ms: that it took.
        depth: spans around it.
        error: why it failed.
        turn: of a call: its number among the calls.
        known: of a call: messages of its prompt that an earlier call had, which are not in `said`.
        said: of a call: what is new in its prompt; of a tool: its arguments; of a judge: what it was asked.
        answer: of a call: what was answered, one for each choice; of a tool: its result; of a judge: its verdict.
        asked: of a judge's verdict: the traces in which it was asked for.
        prompt_tokens: of a call; None where not recorded.
        response_tokens: likewise.
        version: of the weights.
        model: that answered.
        finish: why the answer ended.
        rewards: tied to this span.
        credit: the call's share of the rewards.
        advantage: how much better it was than what it was compared with.
        left_out: why it was not compared.
    """

    span_id: str
    parent_id: str | None
    operation: str
    name: str
    agent: str | None
    start_ms: float
    ms: float
    depth: int
    error: str | None = None
    turn: int | None = None
    known: int = 0
    said: list[Said] = field(default_factory=list)
    answer: list[Said] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    version: int | None = None
    model: str | None = None
    finish: str | None = None
    rewards: list[RewardRow] = field(default_factory=list)
    credit: float | None = None
    advantage: float | None = None
    left_out: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One try at a rollout."""

    attempt_id: str
    number: int
    status: str
    worker: str
    error: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """An attempt as it went.

    `task_json` is the whole task, as a line of a data file. `spans`, `calls` (of models) and `tools` (their calls)
    count all that happened; `events` holds the first of it where that is very much.
    """

    rollout_id: str | None
    attempt_id: str | None
    group_id: str | None
    mode: str | None
    step: int | None
    task: str
    task_json: str | None
    status: str
    reward: float | None
    attempts: list[AttemptRow]
    members: list[str]
    agents: list[str]
    rewards: list[RewardRow]
    events: list[Event]
    spans: int
    calls: int
    tools: int
    unjoined: dict[str, int]
    ms: float

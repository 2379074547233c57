"""The course of a rollout: events, rewards, attempts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A tool call in a message; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
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
    """A span with its position in the attempt.

    Attributes:
        span_id: its id.
        parent_id: of the enclosing span; None for a root.
        operation: ``chat``, ``execute_tool``, ``invoke_agent``, ...
        name: the tool, the agent, the model.
        agent: active agent.
        start_ms: since the attempt's first span.
        ms: duration.
        depth: number of enclosing spans.
        error: why it failed.
        turn: of a call: its number among the calls.
        known: of a call: number of messages of its prompt that an earlier call had; they are not in `said`.
        said: of a call: the new messages of its prompt; of a tool: its arguments; of a judge: its request.
        answer: of a call: one answer per choice; of a tool: its result; of a judge: its verdict.
        asked: of a judge's verdict: the traces of its requests.
        prompt_tokens: of a call; None if not recorded.
        response_tokens: likewise.
        version: of the weights.
        model: model that answered.
        finish: why the answer ended.
        rewards: rewards of this span.
        credit: the call's share of the rewards.
        advantage: how much better the call was than its baseline.
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
    said: list[MessageView] = field(default_factory=list)
    answer: list[MessageView] = field(default_factory=list)
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
    """An attempt with its events.

    `task_json` is the whole task, as a line of a data file. `spans`, `calls` (of models) and `tools` (their calls)
    count everything that happened; `events` contains only the first of it if there is very much.
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

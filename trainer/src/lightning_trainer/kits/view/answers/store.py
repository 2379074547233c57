"""The rest of the store: tools, workers, loose traces, search results."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_trainer.kits.view.answers.calls import CallLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """The 50th, 90th and 99th percentile, and the largest value."""

    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRow:
    """A tool of an agent, over the rollouts of a step."""

    tool: str
    agent: str | None
    calls: int
    errors: int
    repeated: int
    ms: Percentiles
    error: str | None
    slowest: CallLink | None
    failed: CallLink | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Latency and tokens of an agent's model calls, or of whole rollouts.

    Attributes:
        agent: agent that called; None for rollouts.
        number: of calls, or of rollouts.
        errors: how many of them failed.
        ms: latency.
        prompt_tokens, response_tokens: per call or rollout.
        slowest: the slowest call; None for rollouts.
    """

    agent: str | None
    number: int
    errors: int
    ms: Percentiles
    prompt_tokens: Percentiles
    response_tokens: Percentiles
    slowest: CallLink | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsPage:
    """Tools and model calls of a step. `usage` starts with the whole rollouts, if there are any."""

    rollouts: int
    tools: list[ToolRow]
    usage: list[UsageRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A runner's worker, from the attempts that it claimed."""

    worker: str
    attempts: int
    running: int
    status: dict[str, int]
    last_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRow:
    """A running attempt; `limit_s` is its rollout's time limit."""

    rollout_id: str
    attempt_id: str
    worker: str
    seconds: float
    limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPage:
    """Runners, queue and running attempts."""

    queued: int
    running: int
    workers: list[WorkerRow]
    oldest: list[RunningRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseRow:
    """A trace outside of any rollout, as an attached program records it."""

    trace_id: str
    name: str
    origin: str
    start_s: float
    spans: int
    calls: int
    errors: int
    agents: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoosePage:
    """Some traces, the newest first."""

    traces: list[LooseRow]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A span or call that contains a text, with the task and the reward of its rollout."""

    rollout_id: str | None
    attempt_id: str | None
    trace_id: str | None
    span_id: str | None
    name: str
    agent: str | None
    before: str
    match: str
    behind: str
    task: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """The matches on one page of a search.

    Attributes:
        hits: the matches.
        looked: number of records that this page searched.
        next: where the next page starts; None at the end.
        calls: whether the next page searches calls without a span, instead of spans.
    """

    hits: list[Hit]
    looked: int
    next: int | None
    calls: bool

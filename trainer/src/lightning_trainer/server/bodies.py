"""Bodies of the API, for its checks and its OpenAPI description. Records travel in the JSON form of the core."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """A request's or answer's body; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class RolloutsBody(Body):
    """Rollouts to queue."""

    rollouts: list[dict[str, Any]]


class IdsBody(Body):
    """Rollouts by id."""

    rollout_ids: list[str]


class ClaimBody(Body):
    """Which runner wants how many rollouts, under a lease of how many seconds."""

    worker: str = Field(min_length=1, max_length=200)
    limit: int = Field(default=1, ge=1, le=10_000)
    lease_s: float = Field(default=60.0, gt=0, le=86_400)


class HeartbeatBody(Body):
    """Leases to renew, as [attempt id, fence]."""

    leases: list[tuple[str, int]]
    lease_s: float = Field(default=60.0, gt=0, le=86_400)


class FinishBody(Body):
    """How an attempt ended, with its rewards."""

    fence: int
    status: Literal["succeeded", "failed", "timeout", "cancelled", "lost", "released", "disturbed"]
    rewards: list[dict[str, Any]] = []
    error: str | None = None


class EndBody(FinishBody):
    """How one of several attempts ended."""

    attempt_id: str


class EndsBody(Body):
    """How several attempts ended."""

    ends: list[EndBody] = Field(max_length=10_000)


class Answer(Body):
    """Where a rollout stands, or why its end is refused."""

    status: str | None = None
    code: str | None = None
    message: str | None = None


class Answers(Body):
    """One answer for each end, in order."""

    answers: list[Answer]


class SpansBody(Body):
    """Spans to keep."""

    spans: list[dict[str, Any]]


class CallsBody(Body):
    """Calls to keep."""

    calls: list[dict[str, Any]]


class RewardsBody(Body):
    """Rewards to keep."""

    rewards: list[dict[str, Any]]


class ConsumeBody(Body):
    """A group, and who trains on it."""

    group_id: str
    consumer: str


class QueryBody(Body):
    """What to read, for lists of ids too long for an address. Filters combine with "and"; none filters nothing."""

    what: Literal["rollouts", "attempts", "spans", "calls", "rewards"]
    rollout_ids: list[str] | None = None
    attempt_ids: list[str] | None = None
    trace_ids: list[str] | None = None
    group_ids: list[str] | None = None
    status: str | None = None
    origin: str | None = None


class DeleteBody(Body):
    """What to delete: all filters that are given apply."""

    rollout_ids: list[str] | None = None
    trace_ids: list[str] | None = None
    origin: str | None = None
    before_ns: int | None = None


class Deleted(Body):
    """How many rollouts, and spans and calls without one, were deleted."""

    deleted: int


class Queued(Body):
    """How many rollouts are newly queued."""

    queued: int


class Kept(Body):
    """How many records are newly kept."""

    kept: int


class Cancelled(Body):
    """How many rollouts are newly cancelled."""

    cancelled: int


class Attempts(Body):
    """Attempts; those just claimed carry the context for their agent's process, its key among it."""

    attempts: list[dict[str, Any]]


class Lost(Body):
    """Attempts whose lease is lost."""

    lost: list[str]


class Standing(Body):
    """Where a rollout stands."""

    status: str


class Ok(Body):
    """Whether it was done."""

    ok: bool


class ErrorDetail(Body):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    code: str | None
    param: str | None


class ErrorBody(Body):
    """The answer to every request that is not done."""

    error: ErrorDetail

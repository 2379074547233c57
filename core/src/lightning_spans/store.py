"""The store: what joins the halves. Records that lie in it, and the protocol every store keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

from lightning_spans.context import Attempt
from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.rewards import Reward
from lightning_spans.spans import TRAINING, Json, Span

RolloutStatus: TypeAlias = Literal["queued", "running", "succeeded", "failed", "cancelled"]
# ``released``: given back, nothing was wrong with it; ``disturbed``: its process ended while others ran there too.
AttemptStatus: TypeAlias = Literal[
    "running", "succeeded", "failed", "timeout", "lost", "cancelled", "released", "disturbed"
]
UNCOUNTED: Final[tuple[AttemptStatus, ...]] = ("released", "disturbed")
"""Ends that are no fault of the agent's: they use up none of the rollout's tries."""
UNCOUNTED_MOST: Final = 20  # of a rollout; more of them count, so that nothing is tried for ever


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a model call.

    Attributes:
        index: its place among the n choices.
        token_ids: (A,) ids as sampled; None where the engine did not send them.
        logprobs: (A,) natural log-probabilities of `token_ids`; None where not sent.
        finish_reason: ``stop``, ``length``, ``tool_calls``; None when the call was cut.
        message: the message as the agent got it.
    """

    index: int
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    message: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the gateway recorded of one model call.

    Attributes:
        call_id: makes delivery idempotent.
        response_id: the id that the agent's client saw.
        trace_id: from the request's ``traceparent``; None when it had none.
        span_id: the agent's chat span, from ``traceparent``; None when it had none.
        rollout_id: from the attempt's key.
        attempt_id: from the attempt's key.
        agent: from the ``x-lightning-agent`` header or the key; the span's name goes before it.
        origin: what the call was made for: ``training``, ``live``, or a label of the user's own.
        policy: the model or policy that answered.
        policy_version: the number of its weights when the call began.
        prompt_token_ids: (P,) ids given to the engine; None where it did not send them.
        choices: all n of them.
        request: the request in the form of a chat completion, whatever surface it came by.
        sampling: the sampling parameters in force, defaults filled in.
        start_ns: Unix time in nanoseconds.
        end_ns: Unix time in nanoseconds.
        error: what went wrong; None for a call that was answered.
    """

    call_id: str
    response_id: str
    start_ns: int
    end_ns: int
    policy: str
    policy_version: int
    trace_id: str | None = None
    span_id: str | None = None
    rollout_id: str | None = None
    attempt_id: str | None = None
    agent: str | None = None
    origin: str = TRAINING
    prompt_token_ids: tuple[int, ...] | None = None
    choices: tuple[Choice, ...] = ()
    request: Mapping[str, Json] = field(default_factory=dict)
    sampling: Mapping[str, Json] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of the agent on a task, as asked for.

    Attributes:
        rollout_id: its id.
        group_id: the group whose returns are compared: rollouts of one task in one step.
        task: the row of the user's data.
        mode: ``train`` or ``val``.
        origin: what it is run for: ``training``, ``live``, or a label of the user's own; its attempts have it too.
        max_attempts: tries before the rollout counts as failed.
        timeout_s: time limit of one attempt in seconds; None: none.
        status: where it stands.
    """

    rollout_id: str
    group_id: str
    task: Mapping[str, Json]
    mode: str = "train"
    origin: str = TRAINING
    max_attempts: int = 2
    timeout_s: float | None = 300.0
    status: RolloutStatus = "queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One try at a rollout, as the store keeps it.

    Attributes:
        attempt_id: its id.
        rollout: the rollout, with its task.
        number: 1 for the first try.
        fence: the fencing number; a result that carries an older one is refused.
        worker: who claimed it.
        status: where it stands.
        lease_until_ns: when the lease ends unless renewed, in nanoseconds by the store's own clock. That one starts at
            Unix time, counts only while the store is used, and is never set: compare it with others of the same store.
        started_ns: Unix time in nanoseconds.
        ended_ns: Unix time in nanoseconds; None while it runs.
        error: why it failed; None otherwise.
        context: what the agent's process gets, its key among it; made by the server that a runner claims from.
        disturbed: earlier attempts of the rollout that ended ``disturbed``: it may be what ends processes, so it is run
            alone in one. Filled in by `claim`, 0 elsewhere.
    """

    attempt_id: str
    rollout: Rollout
    number: int
    fence: int
    worker: str
    status: AttemptStatus = "running"
    lease_until_ns: int = 0
    started_ns: int = 0
    ended_ns: int | None = None
    error: str | None = None
    context: Attempt | None = None
    disturbed: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended, as its runner tells it.

    Attributes:
        attempt_id: the attempt.
        fence: the fencing number that came with the claim.
        status: any but ``running``.
        rewards: of this attempt.
        error: why it failed; None otherwise.
    """

    attempt_id: str
    fence: int
    status: AttemptStatus
    rewards: Sequence[Reward] = ()
    error: str | None = None


@runtime_checkable
class Store(Protocol):
    """Traces, calls, rewards and the queue of rollouts. Whatever returns is on disk.

    Every method may be called from any thread. It raises StoreError when the store is closed or fails, and RefusedError
    when a record or request is wrong, so that trying again is no use. Reads give records in the order of their start
    (rewards: of arrival). Filters combine with "and"; None filters nothing.
    """

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Keep spans; one already there, by (trace_id, span_id), is left as it is. Gives the number newly kept."""
        ...

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Keep calls; one already there, by call_id, is left as it is. Gives the number newly kept."""
        ...

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Keep rewards; one already there, by reward_id, is left as it is. Gives the number newly kept."""
        ...

    def spans(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        attempt_ids: Sequence[str] | None = None,
        trace_ids: Sequence[str] | None = None,
        origin: str | None = None,
    ) -> list[Span]:
        """Give spans in the order of their start."""
        ...

    def calls(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        attempt_ids: Sequence[str] | None = None,
        trace_ids: Sequence[str] | None = None,
        origin: str | None = None,
    ) -> list[Call]:
        """Give calls in the order of their start."""
        ...

    def rewards(
        self, *, rollout_ids: Sequence[str] | None = None, attempt_ids: Sequence[str] | None = None
    ) -> list[Reward]:
        """Give rewards in the order of their arrival."""
        ...

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts; one already there, by rollout_id, is left as it is. Gives the number newly queued."""
        ...

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0) -> list[AttemptRecord]:
        """Start attempts for up to `limit` rollouts that wait or whose lease ran out, oldest first.

        An attempt whose lease ran out becomes ``lost``; its rollout is retried while it has attempts left, else fails.
        """
        ...

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Renew leases given as (attempt_id, fence). Gives the attempt ids whose lease is lost."""
        ...

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """End an attempt, with its rewards, in one transaction. Gives where the rollout stands now.

        The same end told twice (same fence, same status) is answered alike and counted once. An end in `UNCOUNTED` is
        tried again without using up one of the rollout's tries, up to `UNCOUNTED_MOST` times.

        Raises:
            LeaseLostError: the fence is old, or the attempt already ended otherwise.
            RefusedError: no such attempt, `status` is no end, or a reward belongs to another attempt.
            RewardError: a reward is not a finite number.
        """
        ...

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End several attempts in one transaction. Gives for each what `finish` gives, or the error that it raises."""
        ...

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel rollouts that have not ended; their running attempts lose their leases. Gives the number cancelled."""
        ...

    def rollouts(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        group_ids: Sequence[str] | None = None,
        status: RolloutStatus | None = None,
        origin: str | None = None,
    ) -> list[Rollout]:
        """Give rollouts in the order they were queued."""
        ...

    def attempts(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        attempt_ids: Sequence[str] | None = None,
        origin: str | None = None,
    ) -> list[AttemptRecord]:
        """Give attempts in the order of their start; `origin` is that of their rollout."""
        ...

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Mark a group as trained on by `consumer` (a run and step). False when another consumer had it."""
        ...

    def delete(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        trace_ids: Sequence[str] | None = None,
        origin: str | None = None,
        before_ns: int | None = None,
    ) -> int:
        """Delete rollouts that have ended, with their attempts, spans, calls and rewards, and traces without a rollout.

        Given `rollout_ids`, only of these; given `trace_ids`, only these traces, where they belong to no rollout.
        `before_ns` keeps what ended at or after that Unix time. What waits or runs stays, and so do the marks of groups
        that were trained on. Gives the number of rollouts, and of spans and calls without one, that were deleted.

        Raises:
            RefusedError: no filter is given: nobody deletes everything by mistake.
        """
        ...

    def close(self) -> None:
        """Write what is pending and let go of the files."""
        ...


def open_store(url: str, *, key: str | None = None, create: bool = True) -> Store:
    """Open a store by URL or path.

    Args:
        url: ``sqlite:///path.db``, a plain path, ``postgresql://user@host/database``, or a server's ``http(s)://...``.
        key: for a server: the bearer key; by default `LIGHTNING_KEY` of the environment.
        create: for a file: make it where there is none. Whoever only reads says False.

    Raises:
        ConfigError: the URL's scheme is none of these, or the driver for its database is not installed.
        StoreError: it can't be opened.
    """
    scheme = url.split("://", 1)[0] if "://" in url else "sqlite"
    if scheme in {"http", "https"}:
        from lightning_spans.store_http import HttpStore

        return HttpStore(url, key=key)
    if scheme == "sqlite" or scheme.startswith(("postgres", "sqlite+")):
        from lightning_spans.store_sql import SqlStore

        return SqlStore(url if "://" in url else f"sqlite:///{url}", create=create)
    raise ConfigError(
        f"store {url!r}: unknown scheme {scheme!r}. Use a path, sqlite:///path.db, postgresql:// or http://."
    )

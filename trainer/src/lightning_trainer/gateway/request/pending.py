"""The record of a call while it is answered: every request creates exactly one `Call`, whatever its outcome."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote

from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import LEFT_OUT, PARTIAL, Call, Choice
from lightning_spans.schema.spans import LIVE, TRAINING, Json
from lightning_spans.terms import TERMS, join_terms, make_terms
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.http.errors import bad_request

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
AGENT_HEADER: Final = b"x-lightning-agent"
_SPAN_HEADERS: Final = (b"x-lightning-traceparent", b"traceparent")  # the program's own tracing may overwrite the last
_TERMS_HEADERS: Final = {
    "tenant": b"x-lightning-tenant",
    "consent": b"x-lightning-consent",
    "retention_days": b"x-lightning-retention-days",
    "source": b"x-lightning-source",
}


@dataclass(slots=True)
class PendingChoice:
    """One answer while it is sampled. `token_ids` and `logprobs` are None if the engine does not send them."""

    index: int
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    message: Mapping[str, Json] = field(default_factory=dict)
    stopped_by: str | None = None  # the stop string that ended it; sent, not recorded
    reasoning_tokens: int = 0  # how many of them are reasoning; sent, not recorded

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens, with their log-probabilities."""
        self.token_ids = [] if self.token_ids is None else self.token_ids
        self.logprobs = [] if self.logprobs is None else self.logprobs
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)

    def choice(self) -> Choice:
        """Return the record. If a log-probability is not finite, none is kept: such a choice cannot be trained."""
        logprobs = self.logprobs
        if logprobs is not None and not math.isfinite(sum(logprobs)):
            logprobs = None
        return Choice(
            self.index,
            None if self.token_ids is None else tuple(self.token_ids),
            None if logprobs is None else tuple(logprobs),
            self.finish_reason,
            self.message,
        )


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A client's request, and its sender. Written by `calls`, when the call arrives.

    Attributes:
        request: in the format of a chat completion, whatever surface it arrived on.
        grant: what its key permits.
        agent: the calling agent; None if nothing names it.
        trace_id: of the client's span; None if it names none.
        span_id: likewise.
        response_id: created here.
        keeps_id: whether the client gets an upstream's id of its answer.
        soft_limit: whether its limit is reduced to what the context allows.
        left_out: what the surface does not pass on, as it was requested.
        start_ns: Unix time in nanoseconds.
        terms: of the data of a live call, from its headers and its key.
    """

    request: Mapping[str, Json]
    grant: Grant
    agent: str | None
    trace_id: str | None
    span_id: str | None
    response_id: str
    keeps_id: bool = True
    soft_limit: bool = False
    left_out: Mapping[str, Json] = field(default_factory=dict)
    start_ns: int = field(default_factory=time.time_ns)
    terms: Mapping[str, Json] = field(default_factory=dict)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream must end with a chunk of token counts."""
        options = self.request.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """The policy that answers. Written by `calls`, and by `replay` if the answer comes from a record.

    Attributes:
        policy: the name of the policy; until one is chosen, the model that the client requests.
        seed: given by a decider; None: it follows from the rollout.
        marks: of a decider; recorded with the sampling parameters.
    """

    policy: str
    seed: int | None = None
    marks: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampledCall:
    """What was sampled so far. Written by what answers the call: an engine, an upstream, or a record.

    Attributes:
        policy_version: of the weights.
        response_id: the upstream's; None: the one that was created here.
        prompt_token_ids: None if they are unknown.
        choices: the answers, which grow while they are sampled.
        sampling: the parameters in force.
        left_out: parts of the request that were not applied, as they were requested.
        usage: the upstream's token counts, under OpenAI's names; not recorded, because the tokens themselves are.
    """

    policy_version: int = 0
    response_id: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    choices: Sequence[PendingChoice] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, Json] = field(default_factory=dict)
    usage: Mapping[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class PendingCall:
    """One call while it is answered.

    Three frozen values, each replaced as a whole by the package responsible for it.
    """

    requested: RequestedCall
    routed: RoutedCall
    sampled: SampledCall = field(default_factory=SampledCall)
    call_id: str = field(default_factory=lambda: os.urandom(16).hex())

    @property
    def response_id(self) -> str:
        """The id of the response."""
        known = self.sampled.response_id
        return self.requested.response_id if known is None else known

    def sample(self, **known: Any) -> None:
        """Replace some of the sampled values."""
        self.sampled = replace(self.sampled, **known)

    def note(self, **sampling: Any) -> None:
        """Add to the parameters in force."""
        self.sampled = replace(self.sampled, sampling={**self.sampled.sampling, **sampling})

    def drop_partial_tokens(self, reported: int) -> None:
        """Drop all token ids if the server reported more tokens than it returned ids for."""
        choices = self.sampled.choices
        returned = sum(len(choice.token_ids or ()) for choice in choices)
        if not 0 < returned < reported:
            return
        for choice in choices:
            choice.token_ids = choice.logprobs = None
        self.note(**{PARTIAL: {"reported": reported, "returned": returned}})

    def finish(self, error: str | None = None) -> Call:
        """Return the record of the call; if it failed, with what was sampled so far."""
        requested, routed, sampled = self.requested, self.routed, self.sampled
        left_out = {**sampled.left_out, **requested.left_out}
        return Call(
            call_id=self.call_id,
            response_id=self.response_id,
            start_ns=requested.start_ns,
            end_ns=max(requested.start_ns, time.time_ns()),
            policy=routed.policy,
            policy_version=sampled.policy_version,
            trace_id=requested.trace_id,
            span_id=requested.span_id,
            rollout_id=requested.grant.rollout_id,
            attempt_id=requested.grant.attempt_id,
            agent=requested.agent,
            origin=LIVE if requested.grant.is_live else TRAINING,
            prompt_token_ids=sampled.prompt_token_ids,
            choices=tuple(choice.choice() for choice in sampled.choices),
            request=requested.request,
            sampling={
                **sampled.sampling,
                **routed.marks,
                **({LEFT_OUT: left_out} if left_out else {}),
                **({TERMS: requested.terms} if requested.terms else {}),
            },
            error=error,
        )


def begin(
    request: Mapping[str, Json],
    grant: Grant,
    headers: Mapping[bytes, bytes],
    policy: str,
    *,
    id_prefix: str = "chatcmpl-",
) -> PendingCall:
    """Begin the record of a request: its owner, and the span it belongs to."""
    named = unquote(headers.get(AGENT_HEADER, b"").decode("latin-1"))
    trace_id, span_id = _read_span(headers)
    made = f"{id_prefix}{os.urandom(12).hex()}"
    requested = RequestedCall(
        request, grant, named or grant.agent, trace_id, span_id, made, terms=_read_terms(headers, grant)
    )
    return PendingCall(requested, RoutedCall(policy))


def _read_span(headers: Mapping[bytes, bytes]) -> tuple[str | None, str | None]:
    """Return the ids of the client's trace and span; None, None if no header names one."""
    for header in _SPAN_HEADERS:
        found = _TRACEPARENT.fullmatch(headers.get(header, b"").decode("latin-1").strip())
        if found is not None and found[1].strip("0") and found[2].strip("0"):  # all zero: W3C's "no span"
            return found[1], found[2]
    return None, None


def _read_terms(headers: Mapping[bytes, bytes], grant: Grant) -> dict[str, Json]:
    """Return the terms of the data of a live call.

    Raises:
        Refusal: a header is invalid.
    """
    if not grant.is_live:
        return {}
    given = {name: headers.get(header, b"").decode("latin-1").strip() for name, header in _TERMS_HEADERS.items()}
    try:
        return join_terms(make_terms(**given), dict(grant.terms))
    except ConfigError as error:
        raise bad_request(str(error)) from None

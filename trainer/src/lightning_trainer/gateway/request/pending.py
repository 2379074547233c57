"""The record of a call while it is answered: every request makes exactly one `Call`, whatever becomes of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from lightning_spans.schema.calls import LEFT_OUT, PARTIAL, Call, Choice
from lightning_spans.schema.spans import Json
from lightning_trainer.gateway.auth.keys import Grant

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
AGENT_HEADER: Final = b"x-lightning-agent"


@dataclass(slots=True)
class PendingChoice:
    """One answer while it is drawn. `token_ids` and `logprobs` are None where the engine does not send them."""

    index: int
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    message: Mapping[str, Json] = field(default_factory=dict)
    stopped_by: str | None = None  # the stop string that ended it; told, not recorded
    reasoning_tokens: int = 0  # how many of them are reasoning; told, not recorded

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take tokens that were drawn, with their log-probabilities."""
        self.token_ids = [] if self.token_ids is None else self.token_ids
        self.logprobs = [] if self.logprobs is None else self.logprobs
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)

    def choice(self) -> Choice:
        """Return the record."""
        return Choice(
            self.index,
            None if self.token_ids is None else tuple(self.token_ids),
            None if self.logprobs is None else tuple(self.logprobs),
            self.finish_reason,
            self.message,
        )


@dataclass(slots=True)
class PendingCall:
    """One call while it is answered. `request` is in the form of a chat completion, whatever surface it came by."""

    request: Mapping[str, Json]
    grant: Grant
    agent: str | None
    trace_id: str | None
    span_id: str | None
    policy: str
    policy_version: int = 0
    response_id: str = ""
    keeps_id: bool = True  # whether an upstream's id of its answer is the one that the client sees
    prompt_token_ids: tuple[int, ...] | None = None
    choices: list[PendingChoice] = field(default_factory=list)
    sampling: dict[str, Json] = field(default_factory=dict)
    marks: Mapping[str, Json] = field(default_factory=dict)  # of a replay; they go into `sampling` on record
    seed: int | None = None  # given by a replay; None: it follows from the rollout
    soft_limit: bool = False  # whether its limit is cut to what the context leaves
    left_out: dict[str, Json] = field(default_factory=dict)  # what of the request was not done, as it was asked
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with a chunk of token counts."""
        options = self.request.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    def drop_partial_tokens(self, reported: int) -> None:
        """Keep no answer's tokens if the server reported more than it returned ids for: it can't be told which."""
        returned = sum(len(choice.token_ids or ()) for choice in self.choices)
        if not 0 < returned < reported:
            return
        for choice in self.choices:
            choice.token_ids = choice.logprobs = None
        self.sampling[PARTIAL] = {"reported": reported, "returned": returned}

    def finish(self, error: str | None = None) -> Call:
        """Return the record of the call, with what was drawn so far when it failed."""
        return Call(
            call_id=os.urandom(16).hex(),
            response_id=self.response_id,
            start_ns=self.start_ns,
            end_ns=max(self.start_ns, time.time_ns()),
            policy=self.policy,
            policy_version=self.policy_version,
            trace_id=self.trace_id,
            span_id=self.span_id,
            rollout_id=self.grant.rollout_id,
            attempt_id=self.grant.attempt_id,
            agent=self.agent,
            prompt_token_ids=self.prompt_token_ids,
            choices=tuple(choice.choice() for choice in self.choices),
            request=self.request,
            sampling={**self.sampling, **self.marks, **({LEFT_OUT: self.left_out} if self.left_out else {})},
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
    """Begin the record of a request: whose it is and which span it belongs to."""
    named = unquote(headers.get(AGENT_HEADER, b"").decode("latin-1"))
    found = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"").decode("latin-1").strip())
    trace_id, span_id = found.groups() if found else (None, None)
    if not (trace_id and span_id and trace_id.strip("0") and span_id.strip("0")):  # all zero: W3C's "no span"
        trace_id = span_id = None
    made = f"{id_prefix}{os.urandom(12).hex()}"
    return PendingCall(request, grant, named or grant.agent, trace_id, span_id, policy, response_id=made)

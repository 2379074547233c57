"""The sampling parameters of a call that another server answers: those of the request and of the routing."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from lightning_spans.chat.body import messages_of
from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.calls.seeds import PromptCounter
from lightning_trainer.gateway.request.chat_request import SHAPING
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.dialects import Dialect, asking
from lightning_trainer.gateway.upstream.parameters import without_bookkeeping

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "max_tokens", "max_completion_tokens", "stop", "n", "seed", "response_format", "tool_choice",
    "parallel_tool_calls",
)  # fmt: skip
# OpenAI's defaults. vLLM and SGLang would use those of the model's generation_config, which are not recorded.
_OPEN: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class SamplingParameters:
    """Chooses the parameters of each call, with a separate seed if the routing has one.

    Args:
        any_model: whether the calls are those of untrained agents, which are sent with their own parameters.
    """

    def __init__(self, *, any_model: bool) -> None:
        self._any_model = any_model
        self._counter = PromptCounter()

    def forget(self, attempt_id: str) -> None:
        """Drop an attempt that has ended."""
        self._counter.forget(attempt_id)

    def in_force(self, pending: PendingCall, routing: Routing) -> dict[str, Any]:
        """Return the parameters in force: those of the request, and the routing's."""
        sampling = {
            name: pending.requested.request[name]
            for name in _SAMPLING
            if pending.requested.request.get(name) is not None
        }
        if self._any_model:  # these are not used for training: they are sent unchanged
            return sampling
        routing = routing.as_requested(pending.routed.policy)
        if routing.temperature is not None:
            sampling |= {
                "temperature_asked": pending.requested.request.get("temperature"),
                "temperature": routing.temperature,
            }
        if routing.plain and pending.requested.grant.attempt_id is not None:
            free = {name: value for name, value in SHAPING.items() if sampling.get(name, value) not in (value, -1)}
            sampling |= {f"{name}_asked": sampling[name] for name in free} | free
        if routing.max_tokens is not None and not {"max_tokens", "max_completion_tokens"} & sampling.keys():
            sampling["max_tokens"] = routing.max_tokens
        grant = pending.requested.grant
        if pending.routed.seed is not None:
            named = {"seed_asked": sampling["seed"]} if "seed" in sampling else {}
            return sampling | named | {"seed": pending.routed.seed % 2**31}
        if routing.seed is not None and grant.rollout_id and grant.attempt_id:
            said = dumps([messages_of(pending.requested.request), pending.requested.request.get("tools")])
            asked = sampling.get("seed") if isinstance(sampling.get("seed"), int) else None
            drawn = self._counter.seed(
                routing.seed,
                grant.rollout_id,
                grant.attempt_id,
                pending.requested.agent,
                hashlib.sha256(said).digest(),
                failures=grant.failures,
                asked=asked,
            )
            sampling |= {} if asked is None else {"seed_asked": asked}
            sampling["seed"] = drawn % 2**31  # all servers accept a number of this size
        return sampling

    def body(self, dialect: Dialect, served: str, pending: PendingCall, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return what is sent to a server: the request with these parameters, in its format."""
        asked = pending.requested.request
        if dialect != "plain" and not self._any_model:
            asked = without_bookkeeping(asked)
        body = {**asked, **{name: value for name, value in sampling.items() if name in _SAMPLING}}
        if "max_tokens" in pending.sampled.left_out:
            del body["max_tokens"]
        if dialect != "plain" and not self._any_model and pending.requested.grant.attempt_id is not None:
            for name, value in _OPEN.items():
                body[name] = sampling.setdefault(name, value)
        if not self._any_model:
            body["model"] = served
        return asking(dialect, body)

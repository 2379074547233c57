"""``POST /v1/completions``: continue a text or token ids, without a chat template.

One prompt per request is one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.http.events import DONE, event
from lightning_trainer.gateway.request.fields import flag, whole, wrong
from lightning_trainer.gateway.request.pending import PendingCall

_LIMIT: Final = 16  # OpenAI's and vLLM's default length of an answer without a limit


class CompletionsSurface:
    """Text completions."""

    path = "/v1/completions"
    id_prefix = "cmpl-"

    def begin(self, body: Mapping[str, Any], owner: str | None) -> CompletionsExchange:  # noqa: ARG002 - nothing is kept
        """Read a request; see `Surface.begin`."""
        return CompletionsExchange(body)

    def refusal(self, refusal: Refusal) -> bytes:
        """Return an error in OpenAI's format."""
        return refusal.body()


class CompletionsExchange:
    """One request and its answer."""

    keeps_id = True
    demands_limit = False
    left_out: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, body: Mapping[str, Any]) -> None:
        for name in ("echo", "suffix"):
            if body.get(name):
                raise bad_request(f"{name} is not supported. Leave it out.", "unsupported_parameter")
        if body.get("best_of") not in (None, 1, body.get("n") or 1):
            raise bad_request("best_of samples answers that are not returned; use n instead.", "unsupported_parameter")
        self._top = whole(body, "logprobs", None, low=0, high=20)
        asked = {name: value for name, value in body.items() if name not in {"echo", "suffix", "best_of", "logprobs"}}
        asked["prompt"] = _prompt(body.get("prompt"))
        asked["max_tokens"] = _LIMIT if body.get("max_tokens") is None else body["max_tokens"]
        if self._top is not None:
            asked |= {"logprobs": True, "top_logprobs": self._top}
        self._ids = flag(body, "return_token_ids")
        self._told: set[int] = set()  # choices whose prompt was sent
        self._starts: dict[int, int] = {}  # characters of the tokens so far, by choice
        self.asked: Mapping[str, Any] = asked

    def whole(self, pending: PendingCall, completion: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        return dumps(self._translate_reply(pending, completion))

    def chunk(self, pending: PendingCall, chunk: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        told = self._translate_reply(pending, chunk)
        news = any(
            choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")
            for choice in told["choices"]
        )
        return event(told) if news or not chunk.get("choices") else b""

    def end(self, pending: PendingCall) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return DONE

    def failed(self, pending: PendingCall, refusal: Refusal) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return b"data: " + refusal.body() + b"\n\n"

    def _translate_reply(self, pending: PendingCall, reply: Mapping[str, Any]) -> dict[str, Any]:
        out = {name: value for name, value in reply.items() if name not in {"choices", "prompt_token_ids"}}
        choices = [self._choice(pending, choice) for choice in reply.get("choices") or ()]
        return {**out, "object": "text_completion", "choices": choices}

    def _choice(self, pending: PendingCall, choice: Mapping[str, Any]) -> dict[str, Any]:
        text = (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        index = choice.get("index") or 0
        tokens = [] if self._top is None else (choice.get("logprobs") or {}).get("content") or []
        start = self._starts.get(index, 0)
        self._starts[index] = start + sum(len(token["token"]) for token in tokens)
        out = {
            "index": index,
            "text": text,
            "logprobs": _logprobs(tokens, self._top or 0, start),
            "finish_reason": choice.get("finish_reason"),
        }
        if self._ids:
            out["token_ids"] = choice.get("token_ids")
            if index not in self._told and (text or out["token_ids"] or out["finish_reason"]):
                out["prompt_token_ids"] = list(pending.sampled.prompt_token_ids or ())
                if out["prompt_token_ids"]:  # once, as in vLLM: otherwise each chunk would be as long as the prompt
                    self._told.add(index)
        return out


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(token, int) and token >= 0 for token in value):
        return value
    raise wrong("prompt", value, "one text or one list of token ids, not empty; send a request for each prompt")


def _logprobs(tokens: Sequence[Mapping[str, Any]], top: int, start: int) -> dict[str, Any] | None:
    if not tokens:
        return None
    offsets = [start]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token["token"]))
    found = [{other["token"]: other["logprob"] for other in token.get("top_logprobs") or ()} for token in tokens]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": found if top else None,
        "text_offset": offsets,
    }

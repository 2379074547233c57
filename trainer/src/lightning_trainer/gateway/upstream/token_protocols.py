"""Token ids in, token ids out: the requests to servers, and the form of their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lightning_spans.errors import LightningError
from lightning_trainer.gateway.engine import FinishReason, SampledPiece, Sampling
from lightning_trainer.gateway.prompt.text_stream import TextStream

_FINISHED: Final[Mapping[str, FinishReason]] = {"stop": "stop", "length": "length"}
# Fields of `Sampling` that change logits before a token is sampled.
ADJUSTING: Final = frozenset(
    {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
)  # fmt: skip


class TokenProtocolError(LightningError):
    """A server's answer reports a failure, or is malformed."""


class Reader(Protocol):
    """Parses one answer, whole or in chunks."""

    def read(self, data: Mapping[str, Any]) -> SampledPiece | None:
        """Add a reply or a chunk; return what is new in it, None if nothing is.

        Raises:
            TokenProtocolError: it is an error, or tokens and log-probabilities do not match.
        """
        ...


class TokenProtocol(Protocol):
    """A kind of server that accepts token ids.

    Attributes:
        path: where they are sent, from the base URL with its ``/v1``.
        abilities: as of an engine; see `lightning_trainer.gateway.engine.abilities`.
    """

    @property
    def path(self) -> str: ...  # noqa: D102 - described above

    @property
    def abilities(self) -> frozenset[str]: ...  # noqa: D102 - described above

    def body(self, model: str, prompt: Sequence[int], most: int, sampling: Sampling, *, stream: bool) -> dict[str, Any]:
        """Return the request for one answer of at most so many tokens."""
        ...

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> Reader:
        """Return the parser of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class TokenServer:
    """How a replica is sent token ids, and most tokens of prompt and answer together."""

    protocol: TokenProtocol
    context: int


class CompletionsProtocol:
    """``/v1/completions`` of vLLM and this gateway: token ids as the prompt, with ``return_token_ids``.

    Args:
        grammars: whether the server accepts vLLM's ``structured_outputs``; the caller adds them to the body, in its
            backend's format.
    """

    path: Final = "/completions"

    def __init__(self, *, grammars: bool) -> None:
        self.abilities = ADJUSTING | {"grammar"} if grammars else ADJUSTING

    def body(self, model: str, prompt: Sequence[int], most: int, sampling: Sampling, *, stream: bool) -> dict[str, Any]:
        """See `TokenProtocol`.

        Every parameter is given, because vLLM takes missing ones from the model's generation_config.
        """
        asked = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": most,
            **_sampling_fields(sampling),
            "logprobs": 0,  # only those of the sampled tokens
            "return_token_ids": True,
            "stream": stream,
        }
        if stream:
            asked["stream_options"] = {"include_usage": True}
        if sampling.logit_bias:
            asked["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        return asked if sampling.seed is None else {**asked, "seed": sampling.seed % 2**31}

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> CompletionsReader:  # noqa: ARG002 - the protocol's
        """See `TokenProtocol`."""
        return CompletionsReader(prompt)


class CompletionsReader:
    """Parses answers to `CompletionsProtocol`."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt, self._returned = prompt, 0

    def read(self, data: Mapping[str, Any]) -> SampledPiece | None:
        """See `Reader`. A chunk without a choice, such as the usage at the end, contains nothing new."""
        if "error" in data:
            raise TokenProtocolError(f"failed: {data['error']}")
        if not data.get("choices"):
            _check_number(data.get("usage"), self._returned)
            return None
        choice = data["choices"][0]
        told = choice.get("prompt_token_ids")
        if told and self._prompt and list(told) != list(self._prompt):
            raise TokenProtocolError("answered to other token ids than it was sent")
        ids = choice.get("token_ids") or ()
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        self._returned += len(ids)
        _check_number(data.get("usage"), self._returned)
        return _checked_piece(ids, logprobs, choice.get("text") or "", choice.get("finish_reason"))


class SglangProtocol:
    """SGLang's own ``/generate``, which streams token ids; its ``/v1/chat/completions`` does not.

    Args:
        tokenizer: of the model: the text is made here from the tokens.
        adapter: name of the LoRA adapter that answers; None: the model itself.
    """

    path: Final = "/../generate"
    abilities = ADJUSTING - {"logit_bias"}  # which is not in its documentation

    def __init__(self, tokenizer: Any, adapter: str | None = None) -> None:
        self._tokenizer, self._adapter = tokenizer, adapter

    def body(
        self,
        model: str,  # noqa: ARG002 - a server has one
        prompt: Sequence[int],
        most: int,
        sampling: Sampling,
        *,
        stream: bool,
    ) -> dict[str, Any]:
        """See `TokenProtocol`."""
        drawn = {
            "max_new_tokens": most,
            **_sampling_fields(sampling),
        }
        if sampling.seed is not None:
            drawn["sampling_seed"] = sampling.seed % 2**31
        asked = {"input_ids": list(prompt), "sampling_params": drawn, "return_logprob": True, "stream": stream}
        return asked if self._adapter is None else {**asked, "lora_path": self._adapter}

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> SglangReader:  # noqa: ARG002 - the protocol's
        """See `TokenProtocol`."""
        return SglangReader(TextStream(self._tokenizer, sampling.stop))


class SglangReader:
    """Parses answers to `SglangProtocol`.

    A chunk has all tokens so far, or with ``--incremental-streaming-output`` the new ones; each has the total count.
    """

    def __init__(self, text: TextStream) -> None:
        self._text, self._had, self._stopped = text, 0, False

    def read(self, data: Mapping[str, Any]) -> SampledPiece | None:
        """See `Reader`."""
        if "error" in data:
            raise TokenProtocolError(f"failed: {data['error']}")
        meta = data["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        total = meta.get("output_token_logprobs_length", meta.get("completion_tokens"))
        new = total - self._had
        if new < 0 or len(pairs) not in {new, total}:
            raise TokenProtocolError(f"gave {len(pairs)} tokens, where {new} of {total} are new")
        self._had = total
        fresh = pairs[len(pairs) - new :]
        ended = meta.get("finish_reason")
        reason = ended.get("type") if isinstance(ended, Mapping) else ended
        if reason == "abort":
            raise TokenProtocolError(f"aborted the answer: {ended}")
        _check_number(meta, total if reason is not None else math.inf)
        ids = [pair[1] for pair in fresh]
        return _checked_piece(ids, [pair[0] for pair in fresh], self._shown_text(ids, last=reason is not None), reason)

    def _shown_text(self, ids: Sequence[int], *, last: bool) -> str:
        parts = []
        for token in ids:
            if not self._stopped:
                part, self._stopped = self._text.push(token)
                parts.append(part)
        return "".join(parts) + (self._text.finish() if last and not self._stopped else "")


def _check_number(usage: Mapping[str, Any] | None, returned: float) -> None:
    """Check that the ids of all tokens arrived: the text is made from them, so it would be incomplete otherwise.

    Raises:
        TokenProtocolError: the server reports more tokens.
    """
    reported = (usage or {}).get("completion_tokens") or 0
    if reported > returned:
        raise TokenProtocolError(f"counts {reported} completion tokens and returned {returned} ids")


def _checked_piece(ids: Sequence[Any], logprobs: Sequence[Any], text: str, reason: str | None) -> SampledPiece:
    """Check and return a piece. The finish reason "abort" is not accepted: the answer is incomplete.

    Raises:
        TokenProtocolError: token ids or log-probabilities are invalid.
    """
    if len(ids) != len(logprobs):
        raise TokenProtocolError(f"gave {len(ids)} tokens and {len(logprobs)} log-probabilities")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise TokenProtocolError("returned something that is not a token id")
    if not all(logprob is None or type(logprob) in {int, float} for logprob in logprobs):
        raise TokenProtocolError("returned something that is not a log-probability")
    known = tuple(math.nan if logprob is None else float(logprob) for logprob in logprobs)
    return SampledPiece(tuple(ids), known, text, _FINISHED.get(reason or ""))


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return how to sample, under the names that all servers share."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
    }

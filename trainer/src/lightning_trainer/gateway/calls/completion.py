"""Chat completions, whole and in chunks, in OpenAI's format with vLLM's token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.gateway.request.chat_request import ChatRequest
from lightning_trainer.gateway.request.pending import PendingCall, PendingChoice


class CompletionBuilder:
    """Builds the responses to one request."""

    def __init__(self, request: ChatRequest, pending: PendingCall, chat: ChatFormat) -> None:
        self._request = request
        self._pending = pending
        self._chat = chat
        self._head = {
            "id": pending.response_id,
            "created": pending.requested.start_ns // 1_000_000_000,
            "model": pending.routed.policy,
            "system_fingerprint": f"{pending.routed.policy}-{pending.sampled.policy_version}",  # which weights answered
        }

    def whole(self) -> dict[str, Any]:
        """Return the whole completion."""
        reply = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in self._pending.sampled.choices],
            "usage": self.usage(),
        }
        if self._request.token_ids:
            reply["prompt_token_ids"] = list(self._pending.sampled.prompt_token_ids or ())
        return reply

    def _choice(self, choice: PendingChoice) -> dict[str, Any]:
        ids, logprobs = choice.token_ids or [], choice.logprobs or []
        out = {
            "index": choice.index,
            "message": {**choice.message, "refusal": None},
            "logprobs": self._logprobs(ids, logprobs) if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if choice.stopped_by is not None:
            out["stop_reason"] = choice.stopped_by  # vLLM's name for it
        if self._request.token_ids:
            out["token_ids"] = ids
        return out

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        return {
            "content": [self._logprob(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)],
            "refusal": None,
        }

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._chat.decode([token])
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # the bytes of part of a character are not known
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),  # OpenAI's minimum; infinities are not valid JSON
            "bytes": list(text.encode()) if whole else None,
            "top_logprobs": [],
        }

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return a chunk with one choice's new content."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(ids, logprobs) if self._request.logprobs and ids else None,
            "finish_reason": None,
        }
        if self._request.token_ids:
            choice["token_ids"] = list(ids)
        return self._chunk([choice])

    def last_chunk(self, choice: PendingChoice) -> dict[str, Any]:
        """Return the chunk that ends a choice."""
        ended: dict[str, Any] = {"index": choice.index, "delta": {}, "logprobs": None}
        ended["finish_reason"] = choice.finish_reason
        if choice.stopped_by is not None:
            ended["stop_reason"] = choice.stopped_by
        if self._request.token_ids:
            ended["token_ids"] = []
        return self._chunk([ended])

    def first_chunk(self) -> dict[str, Any]:
        """Return the chunk that begins every choice."""
        opened = {"role": "assistant", "content": ""}
        choices = [
            {"index": choice.index, "delta": opened, "logprobs": None, "finish_reason": None}
            for choice in self._pending.sampled.choices
        ]
        chunk = self._chunk(choices)
        if self._request.token_ids:
            chunk["prompt_token_ids"] = list(self._pending.sampled.prompt_token_ids or ())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk, with token counts."""
        return {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def usage(self) -> dict[str, Any]:
        """Count the tokens of all choices together."""
        prompt = len(self._pending.sampled.prompt_token_ids or ())
        drawn = sum(len(choice.token_ids or ()) for choice in self._pending.sampled.choices)
        thought = sum(choice.reasoning_tokens for choice in self._pending.sampled.choices)
        counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        return {**counts, "completion_tokens_details": {"reasoning_tokens": thought}} if thought else counts


def tool_call_deltas(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tool calls as in a chunk: with their position among the calls of the answer."""
    return [{"index": at, **call} for at, call in enumerate(calls)]

"""The shapes of a chat completion, whole and in chunks, as OpenAI sends them; token ids as vLLM adds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_trainer.server.ask import Ask
from lightning_trainer.server.chat import ChatFormat
from lightning_trainer.server.draft import ChoiceDraft, Draft


class Replies:
    """Builds the answers to one request."""

    def __init__(self, ask: Ask, draft: Draft, chat: ChatFormat) -> None:
        self._ask = ask
        self._draft = draft
        self._chat = chat
        self._head = {
            "id": draft.response_id,
            "created": draft.start_ns // 1_000_000_000,
            "model": draft.policy,
            "system_fingerprint": f"{draft.policy}-{draft.policy_version}",  # which weights answered
        }

    def whole(self) -> dict[str, Any]:
        """Give the whole completion."""
        reply = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in self._draft.choices],
            "usage": self.usage(),
        }
        if self._ask.token_ids:
            reply["prompt_token_ids"] = list(self._draft.prompt_token_ids or ())
        return reply

    def _choice(self, choice: ChoiceDraft) -> dict[str, Any]:
        ids, logprobs = choice.token_ids or [], choice.logprobs or []
        out = {
            "index": choice.index,
            "message": {**choice.message, "refusal": None},
            "logprobs": self._logprobs(ids, logprobs) if self._ask.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if choice.stopped_by is not None:
            out["stop_reason"] = choice.stopped_by  # vLLM's name for it
        if self._ask.token_ids:
            out["token_ids"] = ids
        return out

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        return {
            "content": [self._logprob(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)],
            "refusal": None,
        }

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._chat.decode([token])
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # part of a character has no bytes that we could tell
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),  # OpenAI's floor; infinities are no JSON
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
        """Give a chunk with one choice's news."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(ids, logprobs) if self._ask.logprobs and ids else None,
            "finish_reason": None,
        }
        if self._ask.token_ids:
            choice["token_ids"] = list(ids)
        return self._chunk([choice])

    def last_chunk(self, choice: ChoiceDraft) -> dict[str, Any]:
        """Give the chunk that ends a choice."""
        ended: dict[str, Any] = {"index": choice.index, "delta": {}, "logprobs": None}
        ended["finish_reason"] = choice.finish_reason
        if choice.stopped_by is not None:
            ended["stop_reason"] = choice.stopped_by
        if self._ask.token_ids:
            ended["token_ids"] = []
        return self._chunk([ended])

    def first_chunk(self) -> dict[str, Any]:
        """Give the chunk that opens every choice."""
        opened = {"role": "assistant", "content": ""}
        choices = [
            {"index": choice.index, "delta": opened, "logprobs": None, "finish_reason": None}
            for choice in self._draft.choices
        ]
        chunk = self._chunk(choices)
        if self._ask.token_ids:
            chunk["prompt_token_ids"] = list(self._draft.prompt_token_ids or ())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Give the last chunk, which counts the tokens."""
        return {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._ask.include_usage else chunk

    def usage(self) -> dict[str, int]:
        """Count the tokens, those of all choices together."""
        prompt = len(self._draft.prompt_token_ids or ())
        drawn = sum(len(choice.token_ids or ()) for choice in self._draft.choices)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def tool_call_deltas(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give tool calls as a chunk carries them: with their place among the calls of the answer."""
    return [{"index": at, **call} for at, call in enumerate(calls)]

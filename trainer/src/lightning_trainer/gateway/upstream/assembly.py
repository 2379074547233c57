"""Splits an upstream's reply, whole or in chunks, into what is recorded and what the agent gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_spans.chat.stream import Growing, message_of
from lightning_trainer.gateway.request.pending import PendingCall, PendingChoice
from lightning_trainer.gateway.upstream.dialects import as_chat
from lightning_trainer.gateway.upstream.errors import object_of, upstream_failure

_A_TOKEN: Final = (int, int, float, str)


class Assembly:
    """Fills a pending call from replies, and removes from them what only the record needs."""

    def __init__(self, pending: PendingCall) -> None:
        self._pending = pending
        self._shows_logprobs = pending.requested.request.get("logprobs") is True
        self._shows_ids = pending.requested.request.get("return_token_ids") is True
        self._keeps_id = pending.requested.keeps_id
        self._choices: dict[int, PendingChoice] = {}
        self._messages: dict[int, Growing] = {}
        self._ended: set[int] = set()
        self._reported = 0  # tokens of all answers, as the server counts them
        self.ended = False  # whether every choice has its finish reason
        number = pending.requested.request.get("n")
        self._number = number if isinstance(number, int) else 1

    @property
    def drawn(self) -> bool:
        """Whether anything of the answer has arrived."""
        return bool(self._choices)

    def add(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Add a whole reply or a chunk, of chat or completions; return what the agent gets: the same object changed."""
        if self._add_token(reply):
            return reply
        as_chat(reply)
        known: dict[str, Any] = {}
        if self._keeps_id and isinstance(reply.get("id"), str) and reply["id"] != self._pending.sampled.response_id:
            known["response_id"] = reply["id"]
        choices = reply.get("choices")
        listed = choices if isinstance(choices, list) else []
        # vLLM's chat sends the prompt's tokens once, completions and SGLang once per choice
        for holder in (reply, *listed):
            if ids := self._prompt_in(holder):
                known["prompt_token_ids"] = tuple(ids)
        if known:
            self._pending.sample(**known)
        self._take_usage(reply.get("usage"))
        for choice in listed:
            self._add_choice(choice)
        return reply

    def _add_token(self, reply: dict[str, Any]) -> bool:
        """Add a chunk that only has a token's text, as nearly all do; False if it is another."""
        choices = reply.get("choices")
        if type(choices) is not list or len(choices) != 1 or "prompt_token_ids" in reply:
            return False
        choice = choices[0]
        try:
            index, delta = choice["index"], choice["delta"]
            drawn, (shown,), (number,) = self._choices[index], choice["logprobs"]["content"], choice["token_ids"]
            logprob, text = shown["logprob"], delta["content"]
        except (KeyError, TypeError, ValueError):
            return False
        others = len(delta) > 1 or "prompt_token_ids" in choice or "text" in choice or reply.get("usage")
        if others or choice.get("finish_reason") or drawn.token_ids is None or drawn.logprobs is None:
            return False
        if (type(index), type(number), type(logprob), type(text)) != _A_TOKEN or not 0 <= number < 2**31:
            return False
        drawn.token_ids.append(number)
        drawn.logprobs.append(logprob)
        self._messages[index].add_text("content", text)
        if not self._shows_ids:
            del choice["token_ids"]
        if not self._shows_logprobs:
            choice["logprobs"] = None
        return True

    def _prompt_in(self, holder: dict[str, Any]) -> Sequence[int]:
        """Return the prompt's tokens in a reply or a choice, and remove them from what the agent gets."""
        if "prompt_token_ids" not in holder:
            return ()
        found = _ids(holder["prompt_token_ids"])
        if not self._shows_ids:
            del holder["prompt_token_ids"]
        return found

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self._pending.sample(usage=usage)
        if isinstance(reported := usage.get("completion_tokens"), int):
            self._reported = reported

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") or 0
        if type(index) is not int or not 0 <= index < max(self._number, 1):
            raise ValueError(f"choice {index!r} of {self._number}")
        if index not in self._choices:
            self._choices[index], self._messages[index] = PendingChoice(index), Growing()
        drawn, delta = self._choices[index], choice.get("message") or choice.get("delta") or {}
        _check_calls(delta.get("tool_calls"))
        self._messages[index].add(delta)
        if reason := choice.get("finish_reason"):
            if not isinstance(reason, str):
                raise TypeError("a finish reason must be a string")
            drawn.finish_reason = reason
            self._ended.add(index)
            self.ended = len(self._ended) >= self._number
        ids, logprobs = _ids(choice.get("token_ids")), _logprobs(choice.get("logprobs"))
        if ids and logprobs is not None and len(ids) == len(logprobs):
            drawn.add(ids, logprobs)
        elif ids:  # without a log-probability for each token, none can be used
            drawn.token_ids = [*(drawn.token_ids or ()), *ids]
            drawn.logprobs = None
        if not self._shows_ids:
            choice.pop("token_ids", None)
        if not self._shows_logprobs and "logprobs" in choice:
            choice["logprobs"] = None

    def settle(self, sampling: Mapping[str, Any]) -> None:
        """Write what has arrived, complete or not, to the pending call, with the parameters in force."""
        for index, drawn in self._choices.items():
            drawn.message = message_of(self._messages[index])
        choices = [self._choices[index] for index in sorted(self._choices)]
        self._pending.sample(choices=choices, sampling=dict(sampling))
        self._pending.drop_partial_tokens(self._reported)


def _check_calls(calls: Any) -> None:
    for call in calls or ():
        function = call.get("function") or {}
        texts = (function.get("name") or "", function.get("arguments") or "")
        if type(call.get("index", 0)) is not int or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"tool call {call.get('index')!r}: its name and arguments must be strings")


def _ids(value: Any) -> Sequence[int]:
    """Read token ids. Impossible ids are not accepted, so that the call counts as one without tokens."""
    if not isinstance(value, list):
        return ()
    if len(value) == 1:  # as in nearly every chunk
        return value if type(value[0]) is int and 0 <= value[0] < 2**31 else ()
    if set(map(type, value)) != {int}:  # True is an int for isinstance; this is faster
        return ()
    return value if min(value) >= 0 and max(value) < 2**31 else ()


def _logprobs(value: Any) -> list[float] | None:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        return None
    if len(content) == 1:
        only = content[0]["logprob"]
        return [only] if type(only) in (float, int) else None
    found = [token["logprob"] for token in content]
    return found if set(map(type, found)) <= {int, float} else None


def record_reply(assembly: Assembly, data: bytes) -> dict[str, Any]:
    """Record a reply or a chunk; return what the agent gets of it.

    Raises:
        Refusal: it does not have the format of a model server's reply.
    """
    try:
        return assembly.add(object_of(data))
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        raise upstream_failure(f"sent a reply of an unknown form: {type(error).__name__}: {error}") from None

"""From an upstream's reply, whole or in chunks: what goes on record, and what the agent gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_trainer.server.dialects import as_chat
from lightning_trainer.server.draft import ChoiceDraft, Draft

_A_TOKEN: Final = (int, int, float, str)


class Assembly:
    """Fills a draft from replies, and takes out of them what only the record needed."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._shows_logprobs = draft.request.get("logprobs") is True
        self._shows_ids = draft.request.get("return_token_ids") is True
        self._choices: dict[int, ChoiceDraft] = {}
        self._messages: dict[int, Message] = {}
        self._ended: set[int] = set()
        self.ended = False  # whether every choice has its finish reason
        number = draft.request.get("n")
        self._number = number if isinstance(number, int) else 1

    @property
    def drawn(self) -> bool:
        """Whether anything of the answer came."""
        return bool(self._choices)

    def add(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Take a whole reply or a chunk, of chat or completions; give what the agent gets: the same object changed."""
        if self._add_token(reply):
            return reply
        as_chat(reply)
        if self._draft.keeps_id and isinstance(reply.get("id"), str):
            self._draft.response_id = reply["id"]
        self._take_prompt(reply)
        choices = reply.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._add_choice(choice)
        return reply

    def _add_token(self, reply: dict[str, Any]) -> bool:
        """Take a chunk with a token's text and nothing else that is new, as nearly all are; False: it is another."""
        choices = reply.get("choices")
        if type(choices) is not list or len(choices) != 1 or "prompt_token_ids" in reply:
            return False
        choice = choices[0]
        try:
            index, delta = choice["index"], choice["delta"]
            draft, (shown,), (number,) = self._choices[index], choice["logprobs"]["content"], choice["token_ids"]
            logprob, text = shown["logprob"], delta["content"]
        except (KeyError, TypeError, ValueError):
            return False
        others = len(delta) > 1 or "prompt_token_ids" in choice or "text" in choice
        if others or choice.get("finish_reason") or draft.token_ids is None or draft.logprobs is None:
            return False
        if (type(index), type(number), type(logprob), type(text)) != _A_TOKEN or not 0 <= number < 2**31:
            return False
        draft.token_ids.append(number)
        draft.logprobs.append(logprob)
        self._messages[index].add_text("content", text)
        if not self._shows_ids:
            del choice["token_ids"]
        if not self._shows_logprobs:
            choice["logprobs"] = None
        return True

    def _take_prompt(self, holder: dict[str, Any]) -> None:
        """Take the prompt's tokens from a reply (vLLM's chat) or a choice (completions, SGLang)."""
        if "prompt_token_ids" not in holder:
            return
        if ids := _ids(holder["prompt_token_ids"]):
            self._draft.prompt_token_ids = tuple(ids)
        if not self._shows_ids:
            holder.pop("prompt_token_ids", None)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") or 0
        if type(index) is not int or not 0 <= index < max(self._number, 1):
            raise ValueError(f"choice {index!r} of {self._number}")
        self._take_prompt(choice)
        draft = self._choices.get(index)
        if draft is None:
            draft, self._messages[index] = self._choices.setdefault(index, ChoiceDraft(index)), Message()
        self._messages[index].add(choice.get("message") or choice.get("delta") or {})
        if reason := choice.get("finish_reason"):
            if not isinstance(reason, str):
                raise TypeError("a finish reason must be a text")
            draft.finish_reason = reason
            self._ended.add(index)
            self.ended = len(self._ended) >= self._number
        ids, logprobs = _ids(choice.get("token_ids")), _logprobs(choice.get("logprobs"))
        if ids and logprobs is not None and len(ids) == len(logprobs):
            draft.add(ids, logprobs)
        elif ids:  # without a log-probability for each token none can be used
            draft.token_ids = [*(draft.token_ids or ()), *ids]
            draft.logprobs = None
        if not self._shows_ids:
            choice.pop("token_ids", None)
        if not self._shows_logprobs and "logprobs" in choice:
            choice["logprobs"] = None

    def settle(self) -> None:
        """Write what came, whole or not, to the draft."""
        for index, draft in self._choices.items():
            draft.message = self._messages[index].whole()
        self._draft.choices = [self._choices[index] for index in sorted(self._choices)]


class Message:
    """An assistant's message that grows by deltas; a whole message is one delta."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._others: dict[str, Any] = {}
        self._calls: dict[int, _ToolCall] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Take a delta."""
        for name, value in delta.items():
            if name == "tool_calls":
                for at, call in enumerate(value or ()):
                    place = call.get("index", at)
                    if type(place) is not int:
                        raise ValueError(f"tool call {place!r}")
                    self._calls.setdefault(place, _ToolCall()).add(call)
            elif name != "role" and isinstance(value, str):
                self.add_text(name, value)
            elif value is not None or name not in self._others:
                self._others[name] = value

    def add_text(self, name: str, text: str) -> None:
        """Take more of a text."""
        self._texts.setdefault(name, []).append(text)

    def whole(self) -> dict[str, Any]:
        """Give the message as far as it came."""
        message = {**self._others, **{name: "".join(parts) for name, parts in self._texts.items()}}
        if self._calls:
            message["tool_calls"] = [self._calls[index].whole() for index in sorted(self._calls)]
        return message


class _ToolCall:
    def __init__(self) -> None:
        self._id: str | None = None
        self._name: list[str] = []
        self._arguments: list[str] = []

    def add(self, delta: Mapping[str, Any]) -> None:
        self._id = delta.get("id") or self._id
        function = delta.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if not (isinstance(name, str) and isinstance(arguments, str)):
            raise TypeError("a tool call's name and arguments must be texts")
        self._name.append(name)
        self._arguments.append(arguments)

    def whole(self) -> dict[str, Any]:
        function = {"name": "".join(self._name), "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function", "function": function}


def _ids(value: Any) -> Sequence[int]:
    """Read token ids; what no tokenizer can have is not taken, so that the call counts as one without tokens."""
    if not isinstance(value, list):
        return ()
    if len(value) == 1:  # as in nearly every chunk
        return value if type(value[0]) is int and 0 <= value[0] < 2**31 else ()
    if set(map(type, value)) != {int}:  # a true is an int to isinstance; this is quicker
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

"""Ollama's own format: ``/api/chat`` and ``/api/generate``, streamed as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from lightning_openai.foreign.chunks import ChunkReader
from lightning_openai.foreign.dialect import (
    EFFORT,
    CallIds,
    Changed,
    Fields,
    ForeignRequest,
    arguments_of,
    as_call,
    assistant_message,
    choices_of,
    objects,
    schema_format,
    thought_of,
    usage_of,
)
from lightning_spans.schema.json import dumps
from lightning_spans.schema.spans import Json

_OPTIONS: Final = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}  # fmt: skip
# How an Ollama server loads the model. Other servers have loaded it already.
_LOADING: Final = (
    "numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "vocab_only", "use_mmap",
    "use_mlock", "num_thread", "num_keep",
)  # fmt: skip


class OllamaChat:
    """``/api/chat``."""

    provider = "ollama"
    content_type = "application/x-ndjson"
    path = "/api/chat"
    asks = "messages"

    def knows(self, path: str, body: Mapping[str, Json]) -> bool:
        """See `ForeignDialect`."""
        return path.endswith(self.path) and isinstance(body.get("model"), str) and self.asks in body

    def read(self, path: str, body: Mapping[str, Json]) -> ForeignRequest:  # noqa: ARG002 - the path says nothing more
        """See `ForeignDialect`."""
        fields = Fields(body)
        left_out = fields.drop(["keep_alive"])
        options = Fields(fields.take("options"), "options")
        left_out |= options.drop(_LOADING)
        chat: dict[str, Json] = {"model": fields.take("model")}
        chat["messages"], untranslated = self._messages(fields)
        if tools := fields.take("tools"):
            chat["tools"] = tools
        chat |= options.renamed(_OPTIONS)
        limit = options.take("num_predict")
        if isinstance(limit, int) and limit > 0:  # less: without a limit
            chat["max_tokens"] = limit
        if wanted := fields.take("format"):
            chat["response_format"] = schema_format(None if wanted == "json" else wanted)
        chat |= _effort(fields.take("think"))
        if fields.take("stream") is not False:  # as with Ollama
            chat["stream"] = True
        return ForeignRequest(chat, untranslated | options.rest() | fields.rest(), left_out)

    def _messages(self, fields: Fields) -> tuple[list[Json], dict[str, Json]]:
        messages: list[Json] = []
        untranslated: dict[str, Json] = {}
        ids = CallIds()
        for place, given in enumerate(fields.take("messages") or ()):
            message = Fields(given, f"messages[{place}]")
            role, text = message.take("role"), message.take("content") or ""
            if role == "assistant":
                messages.append(_assistant(message, text, ids))
            elif role == "tool":
                answered = ids.answered(message.take("tool_name") or message.take("name"), message.take("tool_call_id"))
                messages.append({"role": "tool", "tool_call_id": answered, "content": text})
            else:
                messages.append({"role": role, "content": text})
            untranslated |= message.rest()
        return messages, untranslated

    def prompted(self, body: Mapping[str, Json], changed: Changed) -> Mapping[str, Json] | None:
        """See `ForeignDialect`. Its system messages are those of a chat completion."""
        return changed(body)

    def completion(self, parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        """See `ForeignDialect`."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Json]] = []
        ids = CallIds()
        last: Mapping[str, Json] = {}
        for last in parts:
            message = self._said(last)
            texts.append(message.get("content") or "")
            thoughts.append(message.get("thinking") or "")
            calls += _calls(message.get("tool_calls"), ids)
        message = assistant_message("".join(texts), "".join(thoughts), calls)
        reason = last.get("done_reason") or ("stop" if last.get("done") else None)
        reason = "tool_calls" if calls and reason == "stop" else reason
        completion: dict[str, Json] = {"object": "chat.completion", "model": last.get("model")}
        completion["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        if usage := usage_of(last.get("prompt_eval_count"), last.get("eval_count")):
            completion["usage"] = usage
        return completion | ({"error": last["error"]} if "error" in last else {})

    def answer(self, completion: Mapping[str, Json], since_ns: int) -> Mapping[str, Json]:
        """See `ForeignDialect`."""
        message, reason = next(choices_of(completion), ({}, None))
        said = self._part(message.get("content") or "", thought_of(message), objects(message.get("tool_calls")))
        last = _last(reason, completion.get("usage") or {})
        return {**_head(completion), **said, **last, **_durations(since_ns, None)}

    def stream(self, since_ns: int) -> _OllamaLines:
        """See `ForeignDialect`."""
        return _OllamaLines(self, since_ns)

    def framed(self, event: Mapping[str, Json]) -> bytes:
        """See `ForeignDialect`."""
        return dumps(event) + b"\n"

    def error(self, status: int, message: str) -> Mapping[str, Json]:  # noqa: ARG002 - its errors are a text
        """See `ForeignDialect`."""
        return {"error": message}

    def _said(self, part: Mapping[str, Json]) -> Mapping[str, Json]:
        return part.get("message") or {}

    def _part(self, text: str, thought: str, calls: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        message: dict[str, Json] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [_own_call(call) for call in calls]
        return {"message": message}


class OllamaGenerate(OllamaChat):
    """``/api/generate``: one text."""

    path = "/api/generate"
    asks = "prompt"

    def _messages(self, fields: Fields) -> tuple[list[Json], dict[str, Json]]:
        system, prompt = fields.take("system"), fields.take("prompt") or ""
        told = [{"role": "system", "content": system}] if system else []
        return [*told, {"role": "user", "content": prompt}], {}

    def _said(self, part: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"content": part.get("response"), "thinking": part.get("thinking")}

    def _part(self, text: str, thought: str, calls: Sequence[Mapping[str, Json]]) -> dict[str, Json]:  # noqa: ARG002
        return {"response": text, **({"thinking": thought} if thought else {})}


class _OllamaLines:
    """The lines of a streamed answer."""

    def __init__(self, dialect: OllamaChat, since_ns: int) -> None:
        self._dialect = dialect
        self._since_ns, self._first_ns = since_ns, 0
        self._read = ChunkReader()

    def feed(self, chunk: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
        """See `AnswerStream`."""
        self._first_ns = self._first_ns or time.perf_counter_ns()
        for _, delta in self._read.take(chunk):
            text, thought = delta.get("content") or "", thought_of(delta)
            if text or thought:
                yield {**_head(self._read.head), **self._dialect._part(text, thought, ()), "done": False}

    def end(self) -> Iterator[Mapping[str, Json]]:
        """See `AnswerStream`."""
        head = _head(self._read.head)
        for choice in self._read.choices.values():
            if calls := choice.calls:
                yield {**head, **self._dialect._part("", "", calls), "done": False}
            if choice.finish_reason is not None:
                last = _last(choice.finish_reason, self._read.usage)
                times = _durations(self._since_ns, self._first_ns)
                yield {**head, **self._dialect._part("", "", ()), **last, **times}


def _head(completion: Mapping[str, Json]) -> dict[str, Json]:
    return {"model": completion.get("model"), "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _last(reason: Json, usage: Mapping[str, Json]) -> dict[str, Json]:
    counts = {"prompt_eval_count": usage.get("prompt_tokens"), "eval_count": usage.get("completion_tokens")}
    known = {name: count for name, count in counts.items() if count is not None}
    return {"done": True, "done_reason": "length" if reason == "length" else "stop", **known}


def _durations(since_ns: int, first_ns: int | None) -> dict[str, Json]:
    """Return how long an answer took here, in nanoseconds.

    For an answer that arrived as a whole, prompt and answer both get the total.
    """
    now_ns = time.perf_counter_ns()
    asked_ns, told_ns = (now_ns, since_ns) if first_ns is None else (first_ns, first_ns)
    return {
        "total_duration": now_ns - since_ns,
        "load_duration": 0,
        "prompt_eval_duration": max(asked_ns - since_ns, 1),  # programs divide by these two
        "eval_duration": max(now_ns - told_ns, 1),
    }


def _effort(think: Any) -> dict[str, Json]:
    if think is None:
        return {}
    return {"reasoning_effort": think if isinstance(think, str) else EFFORT if think else "none"}


def _assistant(message: Fields, text: str, ids: CallIds) -> dict[str, Json]:
    return assistant_message(text, message.take("thinking") or "", _calls(message.take("tool_calls"), ids))


def _calls(given: Any, ids: CallIds) -> list[dict[str, Json]]:
    calls = []
    for call in objects(given):
        function = call.get("function") or {}
        call_id = ids.called(str(function.get("name")), call.get("id"))
        calls.append(as_call(call_id, function.get("name"), function.get("arguments")))
    return calls


def _own_call(call: Mapping[str, Json]) -> dict[str, Json]:
    function = {"name": (call.get("function") or {}).get("name"), "arguments": arguments_of(call)}
    return {"id": call.get("id"), "function": function}

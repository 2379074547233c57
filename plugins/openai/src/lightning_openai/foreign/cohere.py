"""Cohere's own format: ``/v2/chat``, streamed as events of many types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_openai.foreign.chunks import ChunkReader
from lightning_openai.foreign.dialect import (
    EFFORT,
    Changed,
    Fields,
    ForeignRequest,
    as_call,
    assistant_message,
    choices_of,
    objects,
    schema_format,
    thought_of,
    usage_of,
    user_message,
)
from lightning_openai.json_text import to_json
from lightning_spans.chat.stream import Growing
from lightning_spans.schema.json import dumps
from lightning_spans.schema.spans import Json

_SAMPLING: Final = {
    "model": "model", "temperature": "temperature", "p": "top_p", "k": "top_k", "seed": "seed",
    "max_tokens": "max_tokens", "stop_sequences": "stop", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "tools": "tools",
}  # fmt: skip
_FINISHED: Final = {
    "COMPLETE": "stop", "STOP_SEQUENCE": "stop", "MAX_TOKENS": "length", "TOOL_CALL": "tool_calls", "ERROR": "error",
}  # fmt: skip
_OWN_FINISH: Final = {"length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}
_OFF: Final = ("OFF", "off", "NONE", None)


class Cohere:
    """Cohere's format."""

    provider = "cohere"
    content_type = "text/event-stream"

    def knows(self, path: str, body: Mapping[str, Json]) -> bool:
        """See `ForeignDialect`."""
        return path.endswith("/v2/chat") and isinstance(body.get("model"), str) and "messages" in body

    def read(self, path: str, body: Mapping[str, Json]) -> ForeignRequest:  # noqa: ARG002 - the path says nothing more
        """See `ForeignDialect`."""
        fields = Fields(body)
        left_out = fields.drop(["priority"])
        chat = fields.renamed(_SAMPLING)
        untranslated: dict[str, Json] = {}
        chat["messages"] = [
            message
            for place, given in enumerate(fields.take("messages") or ())
            for message in _messages(Fields(given, f"messages[{place}]"), untranslated)
        ]
        if (choice := fields.take("tool_choice")) is not None:
            chat["tool_choice"] = str(choice).lower()
        wanted = Fields(fields.take("response_format"), "response_format")
        if (kind := wanted.take("type")) == "json_object":
            schema = wanted.take("json_schema")
            chat["response_format"] = schema_format(wanted.take("schema") if schema is None else schema)
        elif kind not in {None, "text"}:
            untranslated["response_format.type"] = kind
        if (mode := fields.take("safety_mode")) not in _OFF:
            untranslated["safety_mode"] = mode
        citations = Fields(fields.take("citation_options"), "citation_options")
        if (mode := citations.take("mode")) not in _OFF:
            untranslated["citation_options.mode"] = mode
        thinking = Fields(fields.take("thinking"), "thinking")
        thinking.take("token_budget")  # a preference that no chat template supports
        if (kind := thinking.take("type")) is not None:
            chat["reasoning_effort"] = "none" if kind == "disabled" else EFFORT
        if fields.take("stream"):
            chat["stream"] = True
        for part in (wanted, citations, thinking, fields):
            untranslated |= part.rest()
        return ForeignRequest(chat, untranslated, left_out)

    def prompted(self, body: Mapping[str, Json], changed: Changed) -> Mapping[str, Json] | None:
        """See `ForeignDialect`. Its system messages are those of a chat completion."""
        return changed(body)

    def completion(self, parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        """See `ForeignDialect`."""
        if any("type" in part for part in parts):
            return _of_events(parts)
        return _of_answer(parts[0])

    def answer(self, completion: Mapping[str, Json], since_ns: int) -> Mapping[str, Json]:  # noqa: ARG002 - likewise
        """See `ForeignDialect`."""
        message, reason = next(choices_of(completion), ({}, None))
        written: dict[str, Json] = {"role": "assistant", "content": _content(message)}
        if calls := objects(message.get("tool_calls")):
            written["tool_calls"] = calls
        return {"id": completion.get("id"), "message": written, **_last(reason, completion.get("usage") or {})}

    def stream(self, since_ns: int) -> _CohereEvents:  # noqa: ARG002 - it tells no times
        """See `ForeignDialect`."""
        return _CohereEvents()

    def framed(self, event: Mapping[str, Json]) -> bytes:
        """See `ForeignDialect`."""
        return b"event: %b\ndata: %b\n\n" % (str(event.get("type")).encode(), dumps(event))

    def error(self, status: int, message: str) -> Mapping[str, Json]:  # noqa: ARG002 - its errors are a text
        """See `ForeignDialect`."""
        return {"message": message}


def _messages(given: Fields, untranslated: dict[str, Json]) -> Iterator[dict[str, Json]]:
    role = given.take("role")
    texts, thoughts = _texts(given, untranslated, of_tool=role == "tool")
    if role == "assistant":
        plan = given.take("tool_plan")
        calls = []
        for call in objects(given.take("tool_calls")):
            function = call.get("function") or {}
            calls.append(as_call(call.get("id"), function.get("name"), function.get("arguments")))
        given.take("citations")  # sources of an earlier answer
        yield assistant_message("".join([*([plan] if plan else ()), *texts]), "".join(thoughts), calls)
    elif role == "tool":
        yield {"role": "tool", "tool_call_id": given.take("tool_call_id"), "content": "\n".join(texts)}
    else:
        yield {**user_message(texts), "role": role}
    untranslated |= given.rest()


def _texts(message: Fields, untranslated: dict[str, Json], *, of_tool: bool) -> tuple[list[str], list[str]]:
    content = message.take("content")
    if isinstance(content, str) or content is None:
        return [content or ""], []
    texts: list[str] = []
    thoughts: list[str] = []
    for place, block in enumerate(content if isinstance(content, list) else [content]):
        fields = Fields(block, message.name(f"content[{place}]"))
        kind = fields.take("type")
        if kind == "text":
            texts.append(fields.take("text") or "")
        elif kind == "thinking":
            thoughts.append(fields.take("thinking") or "")
        elif kind == "document" and of_tool:  # the usual form of a tool's result
            texts.append(_document(fields.take("document")))
        untranslated |= fields.rest()
    return texts, thoughts


def _document(given: Any) -> str:
    data = given.get("data") if isinstance(given, Mapping) else given
    return data if isinstance(data, str) else to_json(data)


def _content(message: Mapping[str, Json]) -> list[dict[str, Json]]:
    content: list[dict[str, Json]] = []
    if thought := thought_of(message):
        content.append({"type": "thinking", "thinking": thought})
    if text := message.get("content"):
        content.append({"type": "text", "text": text})
    return content


def _last(reason: Json, usage: Mapping[str, Json]) -> dict[str, Json]:
    counts = {"input_tokens": usage.get("prompt_tokens"), "output_tokens": usage.get("completion_tokens")}
    used = {"usage": {"billed_units": counts, "tokens": counts}} if usage else {}
    return {"finish_reason": _OWN_FINISH.get(str(reason), "COMPLETE"), **used}


def _of_answer(answer: Mapping[str, Json]) -> dict[str, Json]:
    own = answer.get("message")
    if not isinstance(own, Mapping):
        return {"object": "chat.completion", "id": answer.get("id"), "choices": [], "error": own}
    blocks = objects(own.get("content"))
    texts = [own.get("tool_plan") or "", *(block.get("text") or "" for block in blocks)]
    thought = "".join(block.get("thinking") or "" for block in blocks)
    message = assistant_message("".join(texts), thought, objects(own.get("tool_calls")))
    return _completion(answer.get("id"), message, answer)


def _of_events(events: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    growing, calls = Growing(), Growing()
    response_id: Json = None
    ended: Mapping[str, Json] = {}
    for event in events:
        kind, delta = event.get("type"), event.get("delta") or {}
        response_id = event.get("id") or response_id
        message = delta.get("message") or {}
        if kind in {"content-start", "content-delta"}:
            content = message.get("content") or {}
            growing.add_text("content", content.get("text") or "")
            growing.add_text("thinking", content.get("thinking") or "")
        elif kind == "tool-plan-delta":
            growing.add_text("content", message.get("tool_plan") or "")
        elif kind in {"tool-call-start", "tool-call-delta"}:
            calls.add({"calls": [{"index": event.get("index") or 0, **(message.get("tool_calls") or {})}]})
        elif kind == "message-end":
            ended = delta
    whole = growing.whole()
    made = [{name: call[name] for name in call if name != "index"} for call in calls.whole().get("calls", ())]
    message = assistant_message(whole.get("content", ""), whole.get("thinking", ""), made)
    return _completion(response_id, message, ended)


def _completion(response_id: Json, message: dict[str, Json], ended: Mapping[str, Json]) -> dict[str, Json]:
    reason, usage = ended.get("finish_reason"), ended.get("usage") or {}
    tokens = usage.get("tokens") or usage.get("billed_units") or {}
    choice = {"index": 0, "message": message, "finish_reason": _FINISHED.get(str(reason), reason)}
    completion: dict[str, Json] = {"id": response_id, "object": "chat.completion", "choices": [choice]}
    if counts := usage_of(tokens.get("input_tokens"), tokens.get("output_tokens")):
        completion["usage"] = counts
    return completion


class _CohereEvents:
    """The events of a streamed answer."""

    def __init__(self) -> None:
        self._read = ChunkReader()
        self._begun = False
        self._block: str | None = None  # the type of the current block
        self._blocks = 0

    def feed(self, chunk: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
        """See `AnswerStream`."""
        deltas = self._read.take(chunk)
        if not self._begun:
            self._begun = True
            empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
            yield {"type": "message-start", "id": self._read.head.get("id"), "delta": {"message": empty}}
        for _, delta in deltas:
            yield from self._grow("thinking", thought_of(delta))
            yield from self._grow("text", delta.get("content") or "")

    def _grow(self, kind: str, text: str) -> Iterator[Mapping[str, Json]]:
        if not text:
            return
        if self._block != kind:
            yield from self._close()
            self._block = kind
            yield self._of_block("content-start", {"type": kind, kind: ""})
        yield self._of_block("content-delta", {kind: text})

    def _of_block(self, event: str, content: Json) -> Mapping[str, Json]:
        return {"type": event, "index": self._blocks, "delta": {"message": {"content": content}}}

    def _close(self) -> Iterator[Mapping[str, Json]]:
        if self._block is not None:
            yield {"type": "content-end", "index": self._blocks}
            self._block, self._blocks = None, self._blocks + 1

    def end(self) -> Iterator[Mapping[str, Json]]:
        """See `AnswerStream`."""
        yield from self._close()
        for choice in self._read.choices.values():
            for index, call in enumerate(choice.calls):
                function = call.get("function") or {}
                empty = {**call, "function": {"name": function.get("name"), "arguments": ""}}
                grown = {"function": {"arguments": function.get("arguments") or ""}}
                yield {"type": "tool-call-start", "index": index, "delta": {"message": {"tool_calls": empty}}}
                yield {"type": "tool-call-delta", "index": index, "delta": {"message": {"tool_calls": grown}}}
                yield {"type": "tool-call-end", "index": index}
            if choice.finish_reason is not None:
                last = _last(choice.finish_reason, self._read.usage)
                yield {"type": "message-end", "id": self._read.head.get("id"), "delta": last}

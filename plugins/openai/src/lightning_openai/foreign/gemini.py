"""Google's format: ``models/NAME:generateContent`` and ``:streamGenerateContent``, of the Gemini API and Vertex AI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
    objects,
    schema_format,
    thought_of,
    usage_of,
    user_message,
)
from lightning_openai.foreign.gemini_tools import camel, json_schema, read_tool_config, read_tools
from lightning_openai.json_text import to_json
from lightning_spans.schema.json import dumps
from lightning_spans.schema.spans import Json

_MODEL: Final = re.compile(r"/(?:models|tunedModels|endpoints)/([^/:]+):(generateContent|streamGenerateContent)$")
_SAMPLING: Final = {
    "temperature": "temperature", "topP": "top_p", "topK": "top_k", "candidateCount": "n", "seed": "seed",
    "maxOutputTokens": "max_tokens", "stopSequences": "stop", "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}  # fmt: skip
_BOOKKEEPING: Final = ("labels", "serviceTier", "store", "model")
_FILTERS_NOTHING: Final = frozenset({"BLOCK_NONE", "OFF"})
_FINISHED: Final = {"STOP": "stop", "MAX_TOKENS": "length"}
_BLOCKED: Final = frozenset({"SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII"})
_STATUS: Final = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip


class Gemini:
    """Google's format. Field names may be written ``systemInstruction`` or ``system_instruction``."""

    provider = "gcp.gen_ai"
    content_type = "text/event-stream"

    def knows(self, path: str, body: Mapping[str, Json]) -> bool:
        """See `ForeignDialect`."""
        return _MODEL.search(path) is not None and "contents" in body

    def read(self, path: str, body: Mapping[str, Json]) -> ForeignRequest:
        """See `ForeignDialect`."""
        found = _MODEL.search(path)
        chat: dict[str, Json] = {"model": found[1] if found else None}
        fields = Fields(body, spelt=camel)
        left_out = fields.drop(_BOOKKEEPING)
        untranslated: dict[str, Json] = {}
        chat["messages"] = [
            *_system(fields.take("systemInstruction"), untranslated),
            *_Contents(untranslated).messages(fields.take("contents")),
        ]
        chat |= read_tools(fields.take("tools"), untranslated)
        chat |= read_tool_config(fields.take("toolConfig"), untranslated, chat.get("tools") or [])
        config = Fields(fields.take("generationConfig"), "generationConfig", camel)
        thinking = Fields(config.take("thinkingConfig"), "generationConfig.thinkingConfig", camel)
        shown = bool(thinking.take("includeThoughts"))
        chat |= _config(config, thinking, untranslated)
        untranslated |= _filters(fields.take("safetySettings"))
        if found and found[2].startswith("stream"):
            chat["stream"] = True
        return ForeignRequest(chat, untranslated | fields.rest(), left_out, shows_reasoning=shown)

    def prompted(self, body: Mapping[str, Json], changed: Changed) -> Mapping[str, Json] | None:
        """See `ForeignDialect`."""
        field = next((name for name in body if camel(name) == "systemInstruction"), "systemInstruction")
        given = body.get(field)
        parts = given.get("parts") if isinstance(given, Mapping) else given
        prompted = changed({"system": [parts] if isinstance(parts, Mapping) else parts})
        if prompted is None:
            return None
        return {**body, field: {**(given if isinstance(given, Mapping) else {}), "parts": prompted["system"]}}

    def completion(self, parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        """See `ForeignDialect`."""
        choices: dict[int, _CandidateSoFar] = {}
        known: dict[str, Json] = {}
        for part in parts:
            known |= {name: value for name, value in part.items() if name != "candidates" and value is not None}
            for candidate in objects(part.get("candidates")):
                choices.setdefault(candidate.get("index") or 0, _CandidateSoFar()).add(candidate)
        completion: dict[str, Json] = {"object": "chat.completion", "model": known.get("modelVersion")}
        if (response_id := known.get("responseId")) is not None:
            completion["id"] = response_id
        completion["choices"] = [{"index": index, **choices[index].choice()} for index in sorted(choices)]
        counts = known.get("usageMetadata") or {}
        answered = [n for name in ("candidatesTokenCount", "thoughtsTokenCount") if (n := counts.get(name)) is not None]
        if usage := usage_of(counts.get("promptTokenCount"), sum(answered) if answered else None):
            completion["usage"] = usage
        return completion | {name: known[name] for name in ("promptFeedback", "error") if name in known}

    def answer(self, completion: Mapping[str, Json], since_ns: int) -> Mapping[str, Json]:  # noqa: ARG002 - likewise
        """See `ForeignDialect`."""
        candidates = []
        for choice in objects(completion.get("choices")):
            message = choice.get("message") or {}
            calls = objects(message.get("tool_calls"))
            parts = [*_text_parts(message), *_call_parts(calls)]
            candidates.append(_candidate(choice.get("index") or 0, parts, choice.get("finish_reason") or "stop"))
        return {"candidates": candidates, **_around(completion, completion.get("usage") or {})}

    def stream(self, since_ns: int) -> _GeminiEvents:  # noqa: ARG002 - it tells no times
        """See `ForeignDialect`."""
        return _GeminiEvents()

    def framed(self, event: Mapping[str, Json]) -> bytes:
        """See `ForeignDialect`."""
        return b"data: " + dumps(event) + b"\r\n\r\n"

    def error(self, status: int, message: str) -> Mapping[str, Json]:
        """See `ForeignDialect`."""
        word = _STATUS.get(status, "INTERNAL" if status >= 500 else "FAILED_PRECONDITION")
        return {"error": {"code": status, "message": message, "status": word}}


class _Contents:
    """Converts contents to messages. Consecutive contents of the model become one message."""

    def __init__(self, untranslated: dict[str, Json]) -> None:
        self._untranslated = untranslated
        self._ids = CallIds()
        self._messages: list[dict[str, Json]] = []
        self._said: list[str] = []  # the user's, not in a message yet
        self._answer: tuple[list[str], list[str], list[dict[str, Json]]] = ([], [], [])  # text, thoughts, calls
        self._answers = False  # whether the model is speaking

    def messages(self, given: Any) -> list[dict[str, Json]]:
        """Return the messages."""
        contents = given if isinstance(given, list) else [given]
        for place, content in enumerate(contents):
            where = f"contents[{place}]" if isinstance(given, list) else "contents"
            fields = Fields({"parts": [{"text": content}]} if isinstance(content, str) else content, where, camel)
            of_model = fields.take("role") == "model"
            if of_model != self._answers:
                self._flush()
                self._answers = of_model
            parts = fields.take("parts")
            for at, part in enumerate(parts if isinstance(parts, list) else [parts]):
                self._take(Fields(part, f"{where}.parts[{at}]", camel))
            if not of_model:
                self._flush()
            self._untranslated |= fields.rest()
        self._flush()
        return self._messages

    def _take(self, part: Fields) -> None:
        text, call, result = part.take("text"), part.take("functionCall"), part.take("functionResponse")
        thought, _ = part.take("thought"), part.take("thoughtSignature")  # opaque: only its own model reads it
        texts, thoughts, calls = self._answer
        if isinstance(text, str) and text:
            (thoughts if thought else texts if self._answers else self._said).append(text)
        if isinstance(call, Mapping):
            call_id = self._ids.called(str(call.get("name")), call.get("id"))
            calls.append(as_call(call_id, call.get("name"), call.get("args")))
        if isinstance(result, Mapping):
            self._flush_said()
            answered = self._ids.answered(result.get("name"), result.get("id"))
            content = to_json(result.get("response") or {})
            self._messages.append({"role": "tool", "tool_call_id": answered, "content": content})
            if media := result.get("parts"):
                self._untranslated[part.name("functionResponse.parts")] = media
        self._untranslated |= part.rest()

    def _flush(self) -> None:
        if self._answers:
            texts, thoughts, calls = self._answer
            self._messages.append(assistant_message("".join(texts), "".join(thoughts), calls))
            self._answer = ([], [], [])
        self._flush_said()

    def _flush_said(self) -> None:
        if self._said:
            self._messages.append(user_message(self._said))
            self._said = []


class _CandidateSoFar:
    """A candidate, as far as it has arrived."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Json]] = []
        self._others: list[Mapping[str, Json]] = []
        self._finish: str | None = None
        self._ids = CallIds()

    def add(self, candidate: Mapping[str, Json]) -> None:
        """Add one of its parts."""
        self._finish = candidate.get("finishReason") or self._finish
        for part in objects((candidate.get("content") or {}).get("parts")):
            call = part.get("functionCall")
            if isinstance(call, Mapping):
                call_id = self._ids.called(str(call.get("name")), call.get("id"))
                self._calls.append(as_call(call_id, call.get("name"), call.get("args")))
            elif isinstance(part.get("text"), str):
                (self._thoughts if part.get("thought") else self._texts).append(part["text"])
            else:
                self._others.append(part)

    def choice(self) -> dict[str, Json]:
        """Return it as a choice. Parts that a message cannot hold are kept under ``parts``."""
        message = assistant_message("".join(self._texts), "".join(self._thoughts), self._calls)
        if self._others:
            message["parts"] = self._others
        reason = self._finish
        if reason is not None:
            reason = "content_filter" if reason in _BLOCKED else _FINISHED.get(reason, reason.lower())
        return {"message": message, "finish_reason": "tool_calls" if self._calls and reason == "stop" else reason}


class _GeminiEvents:
    """The events of a streamed answer."""

    def __init__(self) -> None:
        self._read = ChunkReader()

    def feed(self, chunk: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
        """See `AnswerStream`."""
        for index, delta in self._read.take(chunk):
            if parts := _text_parts(delta):
                yield {"candidates": [_candidate(index, parts)], **_around(self._read.head, {})}

    def end(self) -> Iterator[Mapping[str, Json]]:
        """See `AnswerStream`."""
        candidates = [
            _candidate(index, _call_parts(choice.calls), choice.finish_reason)
            for index, choice in sorted(self._read.choices.items())
            if choice.finish_reason is not None or choice.calls
        ]
        if candidates:
            yield {"candidates": candidates, **_around(self._read.head, self._read.usage)}


def _candidate(index: int, parts: list[dict[str, Json]], reason: Json = None) -> dict[str, Json]:
    said = parts or [{"text": ""}]  # google-genai's chats do not keep an answer without parts in their history
    candidate: dict[str, Json] = {"content": {"role": "model", "parts": said}, "index": index}
    if reason is not None:
        words = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
        candidate["finishReason"] = words.get(reason, "STOP")
    return candidate


def _text_parts(message: Mapping[str, Json]) -> list[dict[str, Json]]:
    parts: list[dict[str, Json]] = []
    if thought := thought_of(message):
        parts.append({"text": thought, "thought": True})
    if text := message.get("content"):
        parts.append({"text": text})
    return parts


def _call_parts(calls: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    return [
        {"functionCall": {"id": call.get("id"), "name": call["function"].get("name"), "args": arguments_of(call)}}
        for call in calls
    ]


def _around(completion: Mapping[str, Json], usage: Mapping[str, Json]) -> dict[str, Json]:
    around = {"modelVersion": completion.get("model"), "responseId": completion.get("id")}
    if usage:
        counts = {"promptTokenCount": "prompt_tokens", "candidatesTokenCount": "completion_tokens"}
        around["usageMetadata"] = {
            **{own: usage.get(name) for own, name in counts.items()},
            "totalTokenCount": usage.get("total_tokens"),
        }
    return around


def _system(given: Any, untranslated: dict[str, Json]) -> Iterator[dict[str, Json]]:
    if isinstance(given, str):
        given = {"parts": [{"text": given}]}
    instruction = Fields(given, "systemInstruction", camel)
    instruction.take("role")
    parts = instruction.take("parts")
    texts = []
    for place, part in enumerate(parts if isinstance(parts, list) else [parts]):
        fields = Fields(part, f"systemInstruction.parts[{place}]", camel)
        texts.append(fields.take("text") or "")
        untranslated |= fields.rest()
    untranslated |= instruction.rest()
    if text := "\n".join(filter(None, texts)):
        yield {"role": "system", "content": text}


def _config(config: Fields, thinking: Fields, untranslated: dict[str, Json]) -> dict[str, Json]:
    chat = config.renamed(_SAMPLING)
    if isinstance(chat.get("top_k"), float):
        chat["top_k"] = int(chat["top_k"])
    schema, plain = config.take("responseJsonSchema"), config.take("responseSchema")
    kind = config.take("responseMimeType")
    if schema is None and plain is not None:
        schema = json_schema(plain)
    if kind == "application/json" or (schema is not None and kind is None):
        chat["response_format"] = schema_format(schema)
    elif kind not in {None, "text/plain"}:
        untranslated["generationConfig.responseMimeType"] = kind
    level, budget = thinking.take("thinkingLevel"), thinking.take("thinkingBudget")
    if level is not None or budget is not None:
        chat["reasoning_effort"] = level.lower() if isinstance(level, str) else "none" if budget == 0 else EFFORT
    if (modalities := config.take("responseModalities")) not in (None, [], ["TEXT"]):
        untranslated["generationConfig.responseModalities"] = modalities
    untranslated |= thinking.rest() | config.rest()
    return chat


def _filters(given: Any) -> dict[str, Json]:
    """Return the safety settings if one of them could block an answer."""
    settings = given if isinstance(given, list) else [given] if given else []
    free = all(isinstance(one, Mapping) and one.get("threshold") in _FILTERS_NOTHING for one in settings)
    return {} if free else {"safetySettings": given}

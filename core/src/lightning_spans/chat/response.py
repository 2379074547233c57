"""A model server's answer, read from a recorded body: choices, and tokens if the server sent them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.chat.body import tool_call
from lightning_spans.schema.calls import Choice
from lightning_spans.schema.json import dumps, read_json
from lightning_spans.schema.spans import Json

_STOPS: Final = {  # Anthropic's stop reasons, in the terms of chat completions
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one model call.

    Attributes:
        prompt_token_ids: (P,) ids given to the engine; None if not sent, or if choices answer several prompts.
        choices: all n of them; empty if there was no answer.
        response_id: the server's id; None if there was none.
        model: the model that answered; None if not reported.
    """

    prompt_token_ids: tuple[int, ...] | None = None
    choices: tuple[Choice, ...] = ()
    response_id: str | None = None
    model: str | None = None


NO_ANSWER: Final = Answer()


def read_answer(text: Json) -> Answer:
    """Read the body of a response of ``/chat/completions``, ``/completions``, ``/responses`` or Anthropic's messages.

    Tokens are read in vLLM's format: ``prompt_token_ids`` next to or inside ``choices``, ``choices[].token_ids``, and
    ``choices[].logprobs.content[].logprob``, in completions ``choices[].logprobs.token_logprobs[]``. Missing or
    malformed values count as not recorded. The text of a completion becomes a message, as in the gateway.

    Args:
        text: JSON text; anything else gives an empty answer.
    """
    try:
        body = read_json(text) if isinstance(text, str) else None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return NO_ANSWER
    response_id, model = body.get("id"), body.get("model")
    sent = body.get("choices")
    raw = [choice for choice in sent if isinstance(choice, dict)] if isinstance(sent, list) else []
    return Answer(
        _prompt(body, raw),
        tuple(_choice(place, choice) for place, choice in enumerate(raw)) or _output(body) or _blocks(body),
        response_id if isinstance(response_id, str) else None,
        model if isinstance(model, str) else None,
    )


def _prompt(body: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Return the ids of the prompt that all choices answer; None if none were sent, or those of several prompts."""
    first, *others = [ids for holder in (body, *choices) if (ids := holder.get("prompt_token_ids"))] or [None]
    return _token_ids(first) if all(ids == first for ids in others) else None


def _choice(place: int, choice: Mapping[str, Any]) -> Choice:
    index, finish_reason, message = choice.get("index"), choice.get("finish_reason"), choice.get("message")
    if message is None and isinstance(choice.get("text"), str):
        message = {"role": "assistant", "content": choice["text"]}
    return Choice(
        index if isinstance(index, int) else place,
        _token_ids(choice.get("token_ids")),
        _logprobs(choice.get("logprobs")),
        finish_reason if isinstance(finish_reason, str) else None,
        message if isinstance(message, dict) else {},
    )


def _output(body: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Make one choice of the items of a ``/responses`` body, which are kept unchanged."""
    output = body.get("output")
    if not isinstance(output, list):
        return ()
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    if reason is None and body.get("status") == "completed":
        reason = "stop"
    return (Choice(0, None, None, reason, {"role": "assistant", "output": output}),)


def _blocks(body: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Make one choice of an Anthropic message, in the format of chat completions."""
    content = body.get("content")
    if body.get("type") != "message" or not isinstance(content, list):
        return ()
    blocks = [block for block in content if isinstance(block, dict)]
    message: dict[str, Json] = {"role": "assistant", "content": _texts(blocks, "text") or None}
    if thought := _texts(blocks, "thinking"):
        message["reasoning_content"] = thought
    if calls := [_call_of(block) for block in blocks if block.get("type") == "tool_use"]:
        message["tool_calls"] = calls
    return (Choice(0, None, None, finish_of_message(body), message),)


def _texts(blocks: Sequence[Mapping[str, Any]], kind: str) -> str:
    return "".join(str(block.get(kind) or "") for block in blocks if block.get("type") == kind)


def _call_of(block: Mapping[str, Any]) -> dict[str, Json]:
    given = block.get("input")
    return tool_call(block.get("id"), block.get("name"), given if isinstance(given, str) else dumps(given).decode())


def finish_of_message(message: Mapping[str, Any]) -> str | None:
    """Return why an Anthropic message ended, in the terms of chat completions; None if not reported."""
    reason = message.get("stop_reason")
    return _STOPS.get(reason, reason) if isinstance(reason, str) else None


def _token_ids(value: Any) -> tuple[int, ...] | None:
    try:
        # Only integers have an integer sum: the fastest check there is, and long prompts pass here.
        return tuple(value) if isinstance(value, list) and type(sum(value)) is int else None
    except TypeError:
        return None


def _logprobs(value: Any) -> tuple[float, ...] | None:
    if not isinstance(value, dict):
        return None
    content, plain = value.get("content"), value.get("token_logprobs")
    try:
        if isinstance(content, list):
            return tuple([float(token["logprob"]) for token in content])
        return tuple([float(logprob) for logprob in plain]) if isinstance(plain, list) else None
    except (TypeError, ValueError, KeyError):
        return None

"""Attributes of a chat span besides the bodies: model, sampling parameters, id, finish reasons, usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_openai.reading.anthropic_stream import MESSAGES
from lightning_spans.chat.response import finish_of_message
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Json

_SAMPLING: Final = (
    ("temperature", names.REQUEST_TEMPERATURE),
    ("top_p", names.REQUEST_TOP_P),
    ("n", names.REQUEST_CHOICE_COUNT),
    ("max_tokens", names.REQUEST_MAX_TOKENS),
    ("max_completion_tokens", names.REQUEST_MAX_TOKENS),
    ("max_output_tokens", names.REQUEST_MAX_TOKENS),
)


def request_attributes(body: Mapping[str, Json]) -> dict[str, Json]:
    """Return the attributes in a request body: model and sampling parameters."""
    attributes: dict[str, Json] = {}
    if (model := body.get("model")) is not None:
        attributes[names.REQUEST_MODEL] = str(model)
    for key, name in _SAMPLING:
        if key in body and isinstance(body[key], (int, float)):
            attributes[name] = body[key]
    return attributes


def response_attributes(endpoint: str, response: Mapping[str, Json]) -> dict[str, Json]:
    """Return the attributes in a response: id, model, finish reasons, usage.

    Args:
        endpoint: ``/chat/completions``, ``/completions``, ``/responses`` or Anthropic's ``/messages``.
        response: the parsed body.
    """
    usage = response.get("usage") or {}
    attributes: dict[str, Json] = {}
    if (told := response.get("id")) is not None:
        attributes[names.RESPONSE_ID] = told
    if (told := response.get("model")) is not None:
        attributes[names.RESPONSE_MODEL] = told
    reasons = _finish_reasons(endpoint, response)
    if reasons:
        attributes[names.FINISH_REASONS] = reasons
    if (told := _either(usage, "prompt_tokens", "input_tokens")) is not None:
        attributes[names.INPUT_TOKENS] = told
    if (told := _either(usage, "completion_tokens", "output_tokens")) is not None:
        attributes[names.OUTPUT_TOKENS] = told
    return attributes


def _finish_reasons(endpoint: str, response: Mapping[str, Json]) -> list[str]:
    if endpoint == "/responses":
        return _finish_of_output(response)
    if endpoint == MESSAGES:
        return [reason] if (reason := finish_of_message(response)) is not None else []
    return _finish_of_choices(response)


def _finish_of_choices(response: Mapping[str, Json]) -> list[str]:
    choices = response.get("choices") or ()
    return [str(reason) for choice in choices if (reason := _get(choice, "finish_reason")) is not None]


def _finish_of_output(response: Mapping[str, Json]) -> list[str]:
    """Return why a response of /responses ended, as a finish reason of chat completions."""
    status = response.get("status")
    if status == "completed":
        calls = any(_get(item, "type") == "function_call" for item in response.get("output") or ())
        return ["tool_calls" if calls else "stop"]
    if status == "incomplete":
        reason = _get(response.get("incomplete_details"), "reason")
        return ["length" if reason == "max_output_tokens" else str(reason)]
    return []


def _either(thing: Any, one: str, other: str) -> Any:
    value = _get(thing, one)
    return _get(thing, other) if value is None else value


def _get(thing: Any, key: str) -> Any:
    return thing.get(key) if isinstance(thing, dict) else getattr(thing, key, None)

"""What a chat span says of a call beside its bodies: model, sampling parameters, id, finish reasons, usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_spans import spans as names
from lightning_spans.spans import Json

_SAMPLING: Final = (
    ("temperature", names.REQUEST_TEMPERATURE),
    ("top_p", names.REQUEST_TOP_P),
    ("n", names.REQUEST_CHOICE_COUNT),
    ("max_tokens", names.REQUEST_MAX_TOKENS),
    ("max_completion_tokens", names.REQUEST_MAX_TOKENS),
    ("max_output_tokens", names.REQUEST_MAX_TOKENS),
)


def request_facts(body: Mapping[str, Json]) -> dict[str, Json]:
    """Give the attributes that a request body tells: model and sampling parameters."""
    facts: dict[str, Json] = {}
    if (model := body.get("model")) is not None:
        facts[names.REQUEST_MODEL] = str(model)
    for key, name in _SAMPLING:
        if key in body and isinstance(body[key], (int, float)):
            facts[name] = body[key]
    return facts


def response_facts(endpoint: str, response: Mapping[str, Json]) -> dict[str, Json]:
    """Give the attributes that a response tells: id, model, finish reasons, usage.

    Args:
        endpoint: ``/chat/completions``, ``/completions`` or ``/responses``.
        response: the parsed body.
    """
    usage = response.get("usage") or {}
    reasons = _finish_of_output(response) if endpoint == "/responses" else _finish_of_choices(response)
    facts = {
        names.RESPONSE_ID: _get(response, "id"),
        names.RESPONSE_MODEL: _get(response, "model"),
        names.FINISH_REASONS: reasons or None,
        names.INPUT_TOKENS: _first(usage, "prompt_tokens", "input_tokens"),
        names.OUTPUT_TOKENS: _first(usage, "completion_tokens", "output_tokens"),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _finish_of_choices(response: Any) -> list[str]:
    choices = _get(response, "choices") or ()
    return [str(reason) for choice in choices if (reason := _get(choice, "finish_reason")) is not None]


def _finish_of_output(response: Any) -> list[str]:
    """Say in the words of chat completions why a response of /responses ended."""
    status = _get(response, "status")
    if status == "completed":
        calls = any(_get(item, "type") == "function_call" for item in _get(response, "output") or ())
        return ["tool_calls" if calls else "stop"]
    if status == "incomplete":
        reason = _get(_get(response, "incomplete_details"), "reason")
        return ["length" if reason == "max_output_tokens" else str(reason)]
    return []


def _first(thing: Any, *keys: str) -> Any:
    return next((value for key in keys if (value := _get(thing, key)) is not None), None)


def _get(thing: Any, key: str) -> Any:
    return thing.get(key) if isinstance(thing, dict) else getattr(thing, key, None)

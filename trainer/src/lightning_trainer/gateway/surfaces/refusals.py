"""Whether the gateway would accept a request that was recorded elsewhere, checked with its own parsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.chat_request import read_chat_request
from lightning_trainer.gateway.surfaces.messages_request import chat_of_messages, refuse_prefill
from lightning_trainer.gateway.surfaces.responses_request import is_reference, read_response


def refusal_of(endpoint: str, body: Mapping[str, Any]) -> str | None:
    """Return why the gateway would reject a request; None if it accepts it.

    Args:
        endpoint: how it was sent: ``/chat/completions``, ``/responses`` or ``/messages``; others are not checked.
        body: of the request.
    """
    try:
        if endpoint == "/chat/completions":
            read_chat_request(body)
        elif endpoint == "/responses":
            read_chat_request(read_response(_without_references(body), []).chat)
        elif endpoint == "/messages":
            asked, _ = chat_of_messages(body)
            refuse_prefill(asked)
            read_chat_request(asked)
    except Refusal as refusal:
        return refusal.message
    return None


def _without_references(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request of Responses without references to earlier items: the gateway knows those that it sent."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return {**body, "input": [item for item in items if not is_reference(item)]}

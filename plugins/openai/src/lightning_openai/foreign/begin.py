"""Find the format of an httpx request, and start recording it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_openai.call import PLUGIN
from lightning_openai.foreign.call import ForeignCall
from lightning_openai.foreign.known import dialect_of
from lightning_openai.httpx.calls import HttpxCall, endpoint_in
from lightning_spans.record.recorder import log_failure
from lightning_spans.record.unrecorded import is_model_call
from lightning_spans.schema.json import read_object

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


def unaskable_in(request: Any) -> list[str] | None:
    """Return the fields of a request that a policy does not support; None if it is not a readable model call.

    A readable call can be sent to a policy unless it has such fields.
    """
    path = request.url.path
    body = read_object(getattr(request, "_content", None)) if is_model_call(request.method, path) else None
    if body is None:
        return None
    if endpoint_in(request, body) is not None:
        return []
    dialect = dialect_of(path, body)
    return None if dialect is None else list(dialect.read(path.rstrip("/"), body).untranslated)


def begin_call(recorder: Recorder, client: Any, request: Any) -> HttpxCall | None:
    """Start the span of a request about to be sent; None if it is not a readable model call."""
    try:
        path = request.url.path
        body = read_object(getattr(request, "_content", None)) if is_model_call(request.method, path) else None
        if body is None:
            return None
        endpoint = endpoint_in(request, body)
        if endpoint is not None:
            return HttpxCall(recorder, client, request, endpoint, body)
        dialect = dialect_of(path, body)
        return None if dialect is None else ForeignCall(recorder, client, request, dialect, body)
    except Exception as error:  # noqa: BLE001 - logged
        log_failure(PLUGIN, error)
        return None

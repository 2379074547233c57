"""A gateway's answers to the tools of a replay, from the spans of an earlier run."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Span

Json: TypeAlias = Any

RUN: Final = {"do": "run"}


class RecordedTools:
    """Returns each recorded tool call once: of the same name and arguments, preferably of the same call id and agent.

    Args:
        spans: of the earlier run.
        otherwise: the answer to a call that is not among them; None: the replay ends.

    Attributes:
        asked: the requests so far, in order.
    """

    def __init__(self, spans: Sequence[Span], otherwise: Mapping[str, Json] | None = None) -> None:
        self._unused = [span for span in spans if span.operation == names.EXECUTE_TOOL]
        self._otherwise = otherwise
        self._lock = threading.Lock()
        self.asked: list[dict[str, Json]] = []

    def __call__(self, asked: dict[str, Json]) -> tuple[int, Json]:
        """Answer one request with an HTTP status and a body."""
        with self._lock:
            self.asked.append(asked)
            fits = [span for span in self._unused if _is_same(span, asked)]
            if not fits:
                return (200, self._otherwise) if self._otherwise is not None else (409, _missing_call(asked["name"]))
            span = max(fits, key=lambda span: (_call_id(span) == asked["call_id"], span.agent == asked["agent"]))
            self._unused.remove(span)
        return 200, _recorded_outcome(span)


def _call_id(span: Span) -> Json:
    return span.attributes.get(names.TOOL_CALL_ID)


def _is_same(span: Span, asked: Mapping[str, Json]) -> bool:
    arguments = span.attributes.get(names.TOOL_ARGUMENTS) or ""
    same = _data(arguments) == _data(asked["arguments"])
    return bool(same and span.attributes.get(names.TOOL_NAME) == asked["name"])


def _data(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _recorded_outcome(span: Span) -> dict[str, Json]:
    known = span.attributes
    return {
        "do": "give",
        "status": "error" if span.status == "error" else "ok",
        "result": known.get(names.TOOL_RESULT),
        "error": span.status_message,
        "error_type": known.get(names.ERROR_TYPE) or "",
        "returned": known.get(names.TOOL_RETURNED),
    }


def _missing_call(name: str) -> dict[str, Json]:
    return {"error": {"message": f"the recording has no such call of {name!r}", "code": "replay_differs"}}

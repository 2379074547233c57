"""A server that is busy is asked again when it says, within the time that there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest

from lightning_trainer import outgoing


def posted(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[httpx.Response], within_s: float = 60.0
) -> tuple[httpx.Response, list[float], int]:
    """Post to a server that answers so; return what came of it, the pauses, and the answers that are left."""
    left, pauses = list(answers), []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)  # others sleep on
    monkeypatch.setattr(outgoing, "time", clock)
    with httpx.Client(transport=httpx.MockTransport(lambda request: left.pop(0))) as client:
        return outgoing.post_json(client, "http://x/v1", {"a": 1}, within_s=within_s), pauses, len(left)


def busy(after: str | None, status: int = 429) -> httpx.Response:
    return httpx.Response(status, headers={} if after is None else {"retry-after": after.encode()}, content=b"busy")


@pytest.mark.parametrize("status", [429, 503])
def test_it_is_asked_again_after_as_many_seconds_as_it_says(monkeypatch, status):
    answers = [busy("7", status), busy("0", status), httpx.Response(200, content=b"{}")]
    answer, pauses, left = posted(monkeypatch, answers)
    assert (answer.status_code, pauses, left) == (200, [7.0, 0.1], 0)


def test_it_is_asked_again_at_the_date_that_it_says(monkeypatch):
    dates = [formatdate(time.time() + 20, usegmt=True), formatdate(time.time() - 20)]
    answer, pauses, _ = posted(monkeypatch, [*map(busy, dates), httpx.Response(200, content=b"{}")])
    assert answer.status_code == 200
    assert 10 < pauses[0] <= 20
    assert pauses[1] == 0.1


@pytest.mark.parametrize(
    "after", [None, "", "61", "9" * 5000, "-1", "1.5", "soon", "²", "Thu, 99 Foo 2026 00:00:00 GMT"]
)
def test_without_a_time_that_can_be_waited_for_the_answer_is_told(monkeypatch, after):
    answer, pauses, left = posted(monkeypatch, [busy(after), httpx.Response(200)])
    assert (answer.status_code, answer.text, pauses, left) == (429, "busy", [], 1)


def test_a_refusal_is_told_whatever_its_header_says(monkeypatch):
    answer, pauses, _ = posted(monkeypatch, [busy("1", 400)])
    assert (answer.status_code, pauses) == (400, [])

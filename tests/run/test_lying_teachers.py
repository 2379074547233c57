"""A teacher's server that lies, drips or breaks off: each thing is an error of one kind, and none is learned from."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.teaching import endpoint
from lightning_trainer.kits.teaching.endpoint import EndpointTeacher, TeacherError
from lightning_trainer.outgoing import at_once
from lightning_trainer.rl.algorithms.distil import distil_rows
from lightning_trainer.rl.rows import Row

IDS = [40, 41, 42]
ROW = Row(
    tokens=np.array(IDS, np.int32), mask=np.array([False, True, True]), logprobs=np.array([0.0, -1.0, -1.0], "f4"),
    advantages=np.zeros(3), lengths=(2,), agent="writer", attempt_id="a", rollout_id="r", group_id="g",
)  # fmt: skip


def told(*logprobs: Any, ids: list[int] | None = None) -> bytes:
    """What vLLM answers of a prompt: of its first token nothing, of each other its log-probability."""
    each = [{str(i): {"logprob": p}} for i, p in zip(ids or IDS[1:], logprobs, strict=False)]
    return json.dumps({"choices": [{"text": "x", "prompt_logprobs": [None, *each]}]}).encode()


class Body(httpx.SyncByteStream):
    """A body that comes piece by piece."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces

    def __iter__(self) -> Any:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


def asked(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], httpx.Response]) -> tuple[list[np.ndarray], int]:
    """Ask a teacher that answers so; return what it said, and how often it was asked."""
    monkeypatch.setattr(endpoint, "_PAUSE_S", 0.0)
    count = 0

    def handle(_: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        return answer(count)

    with closing(EndpointTeacher("big=http://127.0.0.1:9/v1")) as teacher:
        teacher._client = httpx.Client(transport=httpx.MockTransport(handle))
        return list(teacher.logprobs([ROW])), count


@pytest.mark.parametrize(
    "body",
    [
        told(None, -1.0),
        told(float("nan"), -1.0),
        told(0.5, -1.0),
        told("likely", -1.0),
        told([-1.0, -2.0], [-1.0, -2.0]),
        told([-1.0], [-2.0]),
        told({"value": -1.0}, -1.0),
        told(True, -1.0),
        told(-(10**400), -1.0),
        told(-1.0),
        told(-1.0, -1.0, -1.0, ids=[41, 42, 43]),
        told(-1.0, -1.0, ids=[41, 43]),
        json.dumps({"choices": [{"prompt_logprobs": None}]}).encode(),
        json.dumps({"choices": []}).encode(),
        json.dumps({"choices": [{"prompt_logprobs": {"0": None, "1": {}, "2": {}}}]}).encode(),
        b'{"choices": [{"prompt_logprobs": ' + b"[" * 100_000,
        b"<html>busy</html>",
        b"",
    ],
    ids=range(18),
)
def test_what_is_no_log_probability_of_each_token_is_none(monkeypatch, body):
    with pytest.raises(TeacherError):
        asked(monkeypatch, lambda count: httpx.Response(200, content=body))


def test_what_a_teacher_rules_out_weighs_as_much_as_documented(monkeypatch):
    body = told(float("-inf"), -9999.0)
    (found,), _ = asked(monkeypatch, lambda count: httpx.Response(200, content=body))
    (row,), _ = distil_rows([ROW], [found])
    assert row.advantages.tolist() == [0.0, -20.0, -20.0]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(monkeypatch, status):
    answers = lambda count: httpx.Response(200 if count == 3 else status, content=told(-1.0, -2.0))  # noqa: E731
    (found,), count = asked(monkeypatch, answers)
    assert (found.tolist(), count) == ([-1.0, -2.0], 3)
    with pytest.raises(TeacherError, match=str(status)):
        asked(monkeypatch, lambda count: httpx.Response(status, content=b"busy"))


def test_a_refusal_is_not_asked_for_twice(monkeypatch):
    seen: list[int] = []
    with pytest.raises(TeacherError, match="404"):
        asked(monkeypatch, lambda count: (seen.append(count), httpx.Response(404, content=b"no such model"))[1])
    assert seen == [1]


def test_an_answer_that_was_cut_is_asked_for_again(monkeypatch):
    cut = httpx.RemoteProtocolError("peer closed connection")

    def answer(count: int) -> httpx.Response:
        return httpx.Response(200, stream=Body(b'{"choi', cut) if count == 1 else Body(told(-1.0, -2.0)))

    (found,), count = asked(monkeypatch, answer)
    assert (found.tolist(), count) == ([-1.0, -2.0], 2)


def test_an_answer_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(endpoint, "_SILENCE_S", 0.0)
    blanks = 0

    class Blanks(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            nonlocal blanks
            while blanks < 10_000:
                blanks += 1
                yield b" "

    with pytest.raises(TeacherError, match="Timeout"):
        asked(monkeypatch, lambda count: httpx.Response(200, stream=Blanks()))
    assert blanks < 10_000


@pytest.mark.parametrize("url", ["http://[::1/v1", "http://h:99999/v1", "http://h:1\x00/v1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError):
        EndpointTeacher(f"big={url}")


def test_a_key_that_no_header_can_carry_is_refused(monkeypatch):
    monkeypatch.setenv("LIGHTNING_TEACHER_KEY", "\u00fcber")
    with pytest.raises(ConfigError, match="LIGHTNING_TEACHER_KEY"):
        EndpointTeacher("big=http://127.0.0.1:9/v1")


SLOW = """
import sys
from contextlib import closing
from test_lying_teachers import ROW
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.kits.teaching.endpoint import EndpointTeacher

def check():
    if sys.stdin.readline() == "stop\\n":
        raise SavedInterrupt

try:
    with closing(EndpointTeacher(sys.argv[1], check)) as teacher:
        teacher.logprobs([ROW] * 20)
except SavedInterrupt:
    print("stopped")
"""


def test_who_asks_to_stop_does_not_wait_for_a_slow_teacher() -> None:
    """It holds for the end of the program, too: an executor's threads would be waited for there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"big=http://127.0.0.1:{server.getsockname()[1]}/v1"
        told = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parent}
        with subprocess.Popen([sys.executable, "-c", SLOW, url], **told) as program:
            server.accept()[0].recv(1)  # it asks, and is never answered
            try:
                assert program.communicate("stop\n", timeout=60)[0] == "stopped\n"
            finally:
                program.kill()


def test_answers_come_in_the_order_of_what_was_asked_and_the_first_error_ends_it() -> None:
    first = threading.Event()

    def ask(number: int) -> int:
        if number == 0:
            first.wait()
        if number == 3:
            first.set()
        if number == 7:
            raise TeacherError("no")
        return 10 * number

    assert at_once(ask, range(7), 4) == [10 * number for number in range(7)]
    with pytest.raises(TeacherError, match="no"):
        at_once(ask, range(40), 4)
    assert at_once(ask, [], 4) == []

"""A model server that is not the run's own dies and returns: no attempt counts as a failure of the policy by that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.report import step_metrics
from lightning_trainer.rl.endings import Ending
from lightning_trainer.session.answers import AnswerSource
from support.training.ended_attempts import run_group

pytest.importorskip("openai")


class DyingServer:
    """A model server that fails the first call that says `wait`, then is down for the next one, then is up again."""

    def __init__(self, fail: Callable[[], Response]) -> None:
        self._fail, self._failures = fail, 0
        paths = {"/v1/chat/completions": self._answer, "/v1/completions": self._answer}
        routes = [Route(path, called, methods=["POST"]) for path, called in paths.items()]
        routes += [Route("/v1/models", self._models), Route("/health", self._health)]
        self.thread = ServerThread(Starlette(routes=routes))
        self.is_healthy = False  # while it fails

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.is_healthy else 503)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        if "wait" in json.dumps(body.get("messages")) and not self._failures:
            self._failures += 1
            return self._fail()
        message = {"role": "assistant", "content": "poor"}
        logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [5], "logprobs": logprobs}
        return JSONResponse({"id": "x", "choices": [choice], "prompt_token_ids": [1, 2]})


def breaks_off() -> Response:
    async def pieces() -> Any:
        yield b'{"id": "x", '
        raise ConnectionResetError

    return StreamingResponse(pieces(), media_type="application/json")


def fails() -> Response:
    return JSONResponse({"error": {"message": "EngineCore encountered an issue."}}, 500)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rolled(folder: Path, server: DyingServer, **options: Any) -> Any:
    try:
        upstream = Upstream("m", f"{server.thread.start()}/v1")
        return run_group(folder, "calm", AnswerSource(model="m", upstreams=[upstream]), 1, **options)
    finally:
        server.thread.stop()


@pytest.mark.parametrize("fail", [breaks_off, fails])
@pytest.mark.parametrize("tries", [1, 2])
def test_reward_without_an_answer_of_a_server_that_died_does_not_count(
    folder: Path, fail: Callable[[], Response], tries: int
) -> None:
    """The program catches the error and returns 0."""
    [outcome], _ = rolled(folder, DyingServer(fail), tries=tries)
    ended = [outcome.endings[attempt.attempt_id] for attempt in outcome.attempts]
    assert ended == [Ending.ENGINE_DOWN, Ending.SUCCEEDED][:tries]
    assert [reward.value for reward in outcome.rewards] == [1.0][: tries - 1]
    assert step_metrics.of_endings([outcome]) == {"infrastructure/engine_down": 1.0}
    assert (outcome.counts("lowest") is None) == (tries == 1)


def test_reward_counts_if_the_server_failed_this_request_alone(folder: Path) -> None:
    server = DyingServer(fails)
    server.is_healthy = True
    [outcome], _ = rolled(folder, server, tries=2)
    assert outcome.ending is Ending.SUCCEEDED
    assert [reward.value for reward in outcome.rewards] == [0.0]


def test_a_server_that_is_not_there_is_down(folder: Path) -> None:
    server = DyingServer(fails)
    url = server.thread.start()
    server.thread.stop()
    [outcome], _ = run_group(folder, "unanswered", AnswerSource(model="m", upstreams=[Upstream("m", f"{url}/v1")]), 1)
    assert outcome.ending is Ending.ENGINE_DOWN

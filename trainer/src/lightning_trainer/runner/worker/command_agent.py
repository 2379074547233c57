"""A command as an agent: its work folder, its changes there, and the reward of a second command."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from lightning_spans.errors import RewardError
from lightning_spans.record.delivery.http import Posts
from lightning_spans.record.delivery.otlp import PROTOBUF, encode
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.json import dumps
from lightning_spans.schema.spans import Json, Span, Status
from lightning_trainer.reasons.call_errors import SCORER_FAILED
from lightning_trainer.runner.sandbox.check import check_sandbox
from lightning_trainer.runner.sandbox.sandbox import Sandbox
from lightning_trainer.runner.target import Job, split_command
from lightning_trainer.runner.worker.command import (
    ENVIRONMENT_LIMIT,
    ProcessEnd,
    fill_fields,
    result_of,
    run_command,
    run_to_end,
    status_text,
    texts,
)
from lightning_trainer.runner.worker.command_rewards import RewardChannel, reward_of, reward_of_agent
from lightning_trainer.runner.worker.execution import Agent, ScorerError
from lightning_trainer.runner.worker.limits import parse_bytes
from lightning_trainer.runner.worker.trees import WorkFolderError
from lightning_trainer.runner.worker.workfolder import WorkFolder, check, remove_left_over, source_of
from lightning_trainer.work import Work

logger = logging.getLogger("lightning_trainer")

DIFF: Final = "lightning.workdir.diff"  # attribute of a span: what the agent changed
_NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})
OUTPUT: Final = "lightning.output"  # attribute of a span: the end of a program's output
_LOOK_S: Final = 2.0  # between checks of a folder's size
_NOT_RUN: Final = (126, 127)  # a shell's exit statuses for a program that cannot be run
_sending: Final[set[asyncio.Task[None]]] = set()


def command_agent(job: Job) -> Agent:
    """Return the agent of a job's command.

    Raises:
        ConfigError: its program, its folder or the program of its reward does not exist.
    """
    work = job.work
    place = {"folder": work.workdir, "image": work.sandbox_image}
    words = split_command(job.command or "", **place)
    reward = None if work.reward_command is None else split_command(work.reward_command, **place)
    most_bytes = parse_bytes(work.workdir_size)
    withheld = {Path(each).resolve() for each in (*job.withheld, os.environ.get("LIGHTNING_SPOOL")) if each}
    if work.sandbox is not None:
        check_sandbox(work, [each[0] for each in (words, reward) if each])
    if work.workdir is not None:
        check(work.workdir, withheld)
        remove_left_over()

    async def agent(task: dict[str, Any], attempt: Attempt) -> Any:
        if work.workdir is None:
            result = await _run_agent(job, words, Place(), task, attempt)
            return result if reward is None else await _reward(work, reward, Place(), task, attempt)
        folder = await asyncio.to_thread(WorkFolder, source_of(work.workdir, task), most_bytes, withheld)
        try:
            place = Place(folder.path, None if work.sandbox is None else Sandbox(work, folder.path, most_bytes))
            result = await _watch_folder(folder, _run_agent(job, words, place, task, attempt), attempt)
            if reward is None:
                return result
            await asyncio.to_thread(folder.restore, work.restore)
            return await _reward(work, reward, place, task, attempt)
        finally:
            await asyncio.to_thread(folder.remove)

    return agent


class Place(NamedTuple):
    """Where a command runs.

    Attributes:
        folder: its working folder; None: the current one.
        sandbox: the sandbox in which it runs; None: none.
    """

    folder: Path | None = None
    sandbox: Sandbox | None = None


async def _run_agent(job: Job, words: list[str], place: Place, task: dict[str, Any], attempt: Attempt) -> Any:
    """Run the agent; return its reward if it gives that itself, otherwise its result.

    Raises:
        RewardError: it gave no reward, and one is required.
        RewardRefusedError: its reward is outside the range.
    """
    where = place._asdict()
    if job.reward is not None or job.work.reward_command is not None:
        return result_of((await run_command(words, task, attempt, **where)).output)
    with RewardChannel(job.work, place.folder, texts(task)) as channel:
        given, descriptors = channel.environment, channel.descriptors
        ended = await run_command(words, task, attempt, more=given, descriptors=descriptors, **where)
        return reward_of_agent(channel, ended, needs_reward=job.needs_reward)


async def _watch_folder(folder: WorkFolder, work: Coroutine[Any, Any, Any], attempt: Attempt) -> Any:
    """Run `work` in a folder, and record what it changed there, however it ends.

    Raises:
        WorkFolderError: the folder has grown too large.
    """
    began = time.time_ns()
    running = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({running}, timeout=_LOOK_S))[0]:
            await asyncio.to_thread(folder.check_size)
        await asyncio.to_thread(folder.check_size, ended=True)
        return await running
    finally:
        running.cancel()
        await asyncio.wait({running})
        try:
            diff = await asyncio.to_thread(folder.diff)
            _keep(attempt, "workdir", _count_changes(diff), began, attributes={DIFF: diff})
        except WorkFolderError as error:
            _keep(attempt, "workdir", "not known", began, error=str(error))


def _count_changes(diff: str) -> str:
    """Return the numbers of changed files and lines, as text."""
    lines = diff.splitlines()
    files = sum(line.startswith("diff --git ") for line in lines)
    added = sum(line.startswith("+") and not line.startswith("+++ ") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("--- ") for line in lines)
    return f"{files} file{'' if files == 1 else 's'} changed, +{added} -{removed}"


async def _reward(work: Work, words: list[str], place: Place, task: dict[str, Any], attempt: Attempt) -> Any:
    """Return the reward that a command gives.

    Raises:
        RewardError: it cannot be run.
        ScorerError: its sandbox was not opened.
        RewardRefusedError: its reward is outside the range.
    """
    with RewardChannel(work, place.folder, texts(task)) as channel:
        ended = await _run_tests(channel, words, place, task, attempt)
        return 0.0 if ended is None else reward_of(channel, ended)


async def _run_tests(
    channel: RewardChannel, words: list[str], place: Place, task: dict[str, Any], attempt: Attempt
) -> ProcessEnd | None:
    """Run the reward command and record its output; return None if it took too long.

    Raises:
        RewardError: it cannot be run.
        ScorerError: its sandbox was not opened.
    """
    work = channel.work
    body = dumps(task).strip()
    given = {**channel.environment, **({"LIGHTNING_TASK": body.decode()} if len(body) <= ENVIRONMENT_LIMIT else {})}
    filled_words = [fill_fields(word, texts(task)) for word in words]
    began = time.time_ns()
    ended: ProcessEnd | None = None
    try:
        running = run_to_end(filled_words, body, given, place.folder, channel.descriptors, sandbox=place.sandbox)
        ended = await asyncio.wait_for(running, work.reward_timeout_s)
    except TimeoutError:  # which is also an OSError
        pass
    except OSError as error:
        raise RewardError(f"the reward command {work.reward_command!r} can't be run: {error}") from None
    limit = f"over {work.reward_timeout_s:g} s"
    if place.sandbox is not None and not place.sandbox.opened:
        why = limit if ended is None else f"{status_text(ended.status)}:\n{ended.told()}"
        raise ScorerError(f"{SCORER_FAILED}: {work.sandbox} did not start the reward command: {why}")
    if ended is None:
        _keep(attempt, "reward", work.reward_command or "", began, error=limit)
        return None
    if ended.status in _NOT_RUN:
        raise RewardError(f"the reward command ended with {status_text(ended.status)}:\n{ended.told()}")
    told = f"{ended.output}\n{ended.errors}".strip()[-20_000:]
    name = f"{work.reward_command}: {status_text(ended.status)}"
    kept = {OUTPUT: told, "lightning.exit_status": ended.status}
    _keep(attempt, "reward", name, began, attributes=kept)
    return ended


def _keep(
    attempt: Attempt,
    operation: str,
    name: str,
    began: int,
    *,
    attributes: Mapping[str, Json] = _NOTHING,
    error: str = "",
) -> None:
    """Begin to send a span of the attempt; `wait_for_spans` waits for it."""
    status: Status = "error" if error else "ok"
    span = Span(
        operation=operation,
        name=name,
        trace_id=os.urandom(16).hex(),
        span_id=os.urandom(8).hex(),
        start_ns=began,
        end_ns=max(began, time.time_ns()),
        status=status,
        status_message=error,
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        attributes=attributes,
    )
    sending = asyncio.create_task(_send_span(attempt, span))
    _sending.add(sending)
    sending.add_done_callback(_sending.discard)


async def wait_for_spans(timeout_s: float) -> bool:
    """Wait until the spans of commands so far are sent or refused; return False if the time ran out."""
    return not _sending or not (await asyncio.wait(_sending, timeout=timeout_s))[1]


async def _send_span(attempt: Attempt, span: Span) -> None:
    try:
        await asyncio.to_thread(_send, attempt, encode([span]))
    except Exception as problem:  # noqa: BLE001 - what became of the attempt does not hang on its record
        logger.warning("the span %s of attempt %s is not kept: %s", span.operation, attempt.attempt_id, problem)


def _send(attempt: Attempt, body: bytes) -> None:
    if attempt.endpoint is None:
        raise ValueError("there is no server")
    headers = {"content-type": PROTOBUF, "authorization": f"Bearer {attempt.key}"}
    answer = Posts(timeout_s=30.0)(f"{attempt.endpoint}/v1/traces", body, headers)
    if answer.status != 200:
        raise ValueError(f"{answer.status}: {answer.content[:500].decode(errors='replace')}")

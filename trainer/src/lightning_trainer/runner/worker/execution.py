"""One attempt inside a worker: the user's agent, then its reward. Every failure becomes part of the result."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning_spans.errors import RewardError
from lightning_spans.record.context import use_attempt
from lightning_spans.record.program.emit import collecting
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.rewards import Reward, as_rewards
from lightning_trainer.reasons.call_errors import SCORER_FAILED
from lightning_trainer.runner.worker.command import CommandKilledError
from lightning_trainer.runner.worker.watchdog import block_since

LATER = object()  # returned by a score if the reward comes after the attempt has ended, like a judge's
ERROR_LIMIT = 20_000  # characters kept from the end of a traceback, where the error is

_THREAD = "signal only works in main thread"  # the beginning of Python's own error
_ADVICE = " Signals work only in the main thread of a process: --isolate gives it to run and score."
_BLOCKED = (
    ". Meanwhile {where} blocked the event loop, which every rollout of this process shares. Await that call, or make"
    " run() synchronous: it then runs in a thread."
)
SCORE_AGAIN_S = (0.5, 1.0, 2.0)  # pauses before a failed scorer gets the same answer again

Agent = Callable[[dict[str, Any], Attempt], Awaitable[Any]]
Score = Callable[[dict[str, Any], Any], Awaitable[Any]]


class ScorerError(Exception):
    """The reward function gave no usable reward for an answer, each time it was called."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended.

    Attributes:
        status: ``cancelled`` if the runner cut it short, ``killed`` if something else killed its command.
        rewards: of the attempt; empty unless it succeeded.
        error: why it failed, with the traceback; None for one that succeeded.
    """

    status: Literal["succeeded", "failed", "cancelled", "killed"]
    rewards: tuple[Reward, ...] = field(default=())
    error: str | None = None


async def execute(
    agent: Agent,
    score: Score | None,
    task: Mapping[str, Any],
    attempt: Attempt,
    *,
    needs_reward: bool,
    on_score: Callable[[], None] = lambda: None,
) -> AttemptResult:
    """Run one attempt to its end. Never raises.

    Args:
        agent: returns the agent's result.
        score: returns the reward of (task, result); None: the result is the reward.
        task: the row of the user's data; the agent gets a copy.
        attempt: the attempt that root spans started inside belong to.
        needs_reward: whether an attempt without a reward has failed.
        on_score: called when the agent has answered and its reward begins.
    """
    began = time.monotonic()
    with use_attempt(attempt), collecting() as emitted:
        try:
            result = await agent(copy.deepcopy(dict(task)), attempt)
            if score is None:
                given = _rewards(result, attempt, "run", emitted, needs_reward)
            else:
                on_score()
                given = await _score_result(score, task, result, attempt, emitted)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                return AttemptResult("cancelled", error="the runner cancelled this attempt")
            return AttemptResult("failed", error=describe(error))  # it came from inside the agent
        except (CommandKilledError, ScorerError) as error:
            return AttemptResult("killed" if isinstance(error, CommandKilledError) else "failed", error=str(error))
        except RewardError as error:
            return AttemptResult("failed", error=f"RewardError: {error}")
        except BaseException as error:  # noqa: BLE001 - also SystemExit: an agent that calls sys.exit has failed
            return AttemptResult("failed", error=_why_late(describe(error), error, began))
        return AttemptResult("succeeded", rewards=(*emitted, *given))


async def _score_result(
    score: Score, task: Mapping[str, Any], result: Any, attempt: Attempt, emitted: list[Reward]
) -> tuple[Reward, ...]:
    """Return the reward of an answer; a scorer that fails gets the same answer again, after increasing pauses.

    What a failed try emitted does not count.

    Raises:
        ScorerError: it failed each time.
    """
    for pause_s in (*SCORE_AGAIN_S, None):
        try:
            with collecting() as own:
                value = await score(copy.deepcopy(dict(task)), result)
            return (*own, *_rewards(value, attempt, "score", [*emitted, *own], needs_reward=True))
        except BaseException as error:
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
                raise
            if pause_s is None:
                told = f"RewardError: {error}" if isinstance(error, RewardError) else describe(error)
                raise ScorerError(f"{SCORER_FAILED}, {len(SCORE_AGAIN_S) + 1} times on one answer:\n{told}") from None
            await asyncio.sleep(pause_s)
    raise AssertionError  # the last round returns or raises


def _rewards(
    value: object, attempt: Attempt, source: str, emitted: list[Reward], needs_reward: bool
) -> tuple[Reward, ...]:
    if value is LATER or (value is None and (emitted or (not needs_reward and source == "run"))):
        return ()  # a run that only observes the agent needs no reward yet; an invalid one is reported all the same
    values = as_rewards(value)
    given = partial(Reward, rollout_id=attempt.rollout_id, attempt_id=attempt.attempt_id, source=source)
    return tuple(given(value=number, agent=name) for name, number in values.items())


def describe(error: BaseException) -> str:
    """Return the traceback as text, without the frames of this package at its top; notes on the error come first.

    So the last line is the error's own: LangGraph notes on each the node it came from. An error of this package, about
    a command or its folder, is reported by its message alone: where we raised it helps nobody.
    """
    if type(error).__module__.startswith(f"{__package__}."):
        return str(error)[-ERROR_LIMIT:]
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__ and frames.tb_next:
        frames = frames.tb_next
    told = traceback.TracebackException(type(error), error, frames)
    notes, told.__notes__ = getattr(told, "__notes__", None) or (), None
    text = "\n".join([*map(str, notes), "".join(told.format()).rstrip()])
    if any(isinstance(each, ValueError) and str(each).startswith(_THREAD) for each in _chain(error)):
        text += _ADVICE
    return text if len(text) <= ERROR_LIMIT else f"...{text[-ERROR_LIMIT:]}"


def _why_late(text: str, error: BaseException, began: float) -> str:
    """Add to the text of an error what held the event loop, if a request of this attempt timed out meanwhile."""
    block = block_since(began) if any("Timeout" in type(each).__name__ for each in _chain(error)) else None
    return text if block is None else text.rstrip(".") + _BLOCKED.format(where=block.where)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and all errors that led to it."""
    chain: dict[int, BaseException] = {}
    left = [error]
    while left:
        each = left.pop()
        if id(each) not in chain:
            chain[id(each)] = each
            parts = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            left += [one for one in (each.__cause__, each.__context__, *parts) if one is not None]
    return list(chain.values())


def plain(text: str) -> str:
    """Return text that every store can contain: lone surrogates and zero characters become their escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def in_loop_or_thread(function: Callable[..., Any], threads: Executor) -> Callable[..., Awaitable[Any]]:
    """Make a function awaitable: an async one runs on the event loop, others in a thread with a copied context."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return function

    async def call(*args: Any) -> Any:
        result = await in_thread(function, args, threads)
        return await result if inspect.isawaitable(result) else result

    return call


async def in_thread(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    threads: Executor,
    *,
    on_cancel: Callable[[], None] = lambda: None,
) -> Any:
    """Call a function in a thread, with a copied context.

    Args:
        function: the user's.
        args: of the function.
        threads: executor that runs it.
        on_cancel: called when this is cancelled, to end what can be ended there.
    """

    def guarded() -> tuple[Any, BaseException | None]:
        # A future cannot carry StopIteration, and SystemExit would stop the event loop.
        try:
            return function(*args), None
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            return None, error

    future: Future[tuple[Any, BaseException | None]] = threads.submit(contextvars.copy_context().run, guarded)
    try:
        result, error = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # A thread cannot be stopped. The attempt ends when its thread does, and not before: the runner waits a little,
        # then ends the whole process.
        on_cancel()
        if not future.done():
            await asyncio.wait([asyncio.wrap_future(future)])
        raise
    if error is not None:
        raise error
    return result

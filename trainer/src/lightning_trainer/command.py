"""An agent that is a command: started once for each attempt, in any language."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from lightning_spans.context import Attempt
from lightning_spans.records import dumps

OUTPUT_LIMIT = 1 << 20  # bytes kept of each output stream: its end
ENVIRONMENT_LIMIT = 100_000  # Linux refuses to start a program with a variable above 128 KiB
KILL_AFTER_S = 2.0


class CommandError(Exception):
    """The command ended with another status than 0."""


async def run_command(words: Sequence[str], task: dict[str, Any], attempt: Attempt) -> Any:
    """Run the command on a task.

    It gets the task as JSON on stdin and, up to 100 kB, in ``LIGHTNING_TASK``. Where agents are trained,
    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` lead its model calls to the gateway. The ``LIGHTNING_*`` variables tell
    `attach()` the attempt.

    Returns:
        The last line of its standard output read as JSON, where it is JSON; else all of the output as text, None when
        there is none.

    Raises:
        CommandError: its exit status is not 0; the message has the end of its standard error.
    """
    body = dumps(task).strip()  # without the mark of numbers beyond 64 bits: other languages read this
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment(attempt, body)},
        start_new_session=True,  # so that all it starts can be ended with it
    )
    try:
        output, errors, _, status = await asyncio.gather(
            _tail(process.stdout), _tail(process.stderr), _feed(process.stdin, body), process.wait()
        )
    finally:
        await _end_all(process)
    if status != 0:
        end = errors.strip()[-4000:] or output.strip()[-4000:] or "it printed nothing"
        raise CommandError(f"the command ended with {status_text(status)}:\n{end}")
    return _result(output)


def environment(attempt: Attempt, body: bytes) -> dict[str, str]:
    """Give the variables that a command gets on top of the runner's own."""
    values = attempt.environment()
    if len(body) <= ENVIRONMENT_LIMIT:
        values["LIGHTNING_TASK"] = body.decode()
    if attempt.endpoint and attempt.agents:
        # OPENAI_API_BASE, the older name, goes before OPENAI_BASE_URL in LangChain.
        values["OPENAI_BASE_URL"] = values["OPENAI_API_BASE"] = f"{attempt.endpoint}/v1"
        values["OPENAI_API_KEY"] = attempt.key or "none"
    return values


def status_text(status: int) -> str:
    """Say what an exit status means: a number, or the signal's name."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _result(output: str) -> Any:
    text = output.strip()
    if not text:
        return None
    try:
        return json.loads(text.splitlines()[-1])
    except ValueError:
        return text


async def _tail(stream: asyncio.StreamReader | None) -> str:
    kept = b""
    while stream is not None and (piece := await stream.read(65_536)):
        kept = (kept + piece)[-OUTPUT_LIMIT:]
    return kept.decode(errors="replace")


async def _feed(stream: asyncio.StreamWriter | None, body: bytes) -> None:
    if stream is None:
        return
    with contextlib.suppress(ConnectionError):  # the command need not read its stdin
        stream.write(body)
        await stream.drain()
    stream.close()


async def _end_all(process: asyncio.subprocess.Process) -> None:
    """End the command and whatever it left running in its session."""
    _signal(process, signal.SIGTERM)
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_AFTER_S)
    _signal(process, signal.SIGKILL)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

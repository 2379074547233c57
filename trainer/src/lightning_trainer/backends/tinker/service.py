"""A Tinker server as this backend uses it: connecting, waiting with patience, explaining errors.

The only module that imports the SDK.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.tinker.errors import TinkerError, explain

NO_KEY: Final = "tml-none"  # the SDK requires a key of this form, even for servers that need none
_LOOK_S: Final = 5.0  # between checks whether a server that has not answered yet is alive


def sdk() -> Any:
    """Import the SDK.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("tinker") is None:
        raise ConfigError(
            'backend = tinker needs the SDK, not installed here. Run: pip install "lightning-trainer[torch,tinker]"'
        )
    os.environ.setdefault("TINKER_TELEMETRY", "0")  # otherwise the SDK sends telemetry to its maker
    import tinker

    return tinker


def sdk_version() -> str:
    """Return the version of the SDK, or that it is unknown."""
    try:
        return version("tinker")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a server.

    Attributes:
        down_s: seconds without any answer after which it counts as down.
        slow_s: seconds after which a request in progress is given up.
    """

    down_s: float = 60.0
    slow_s: float = 1800.0


@dataclass(slots=True, eq=False)
class Service:
    """A server.

    Attributes:
        url: its address.
        patience: how long to wait for it.
        check: called while waiting; raises if the program was asked to stop.
    """

    url: str
    patience: Patience = field(default_factory=Patience)
    check: Callable[[], None] = lambda: None
    _client: Any = None
    _lost: TinkerError | None = None

    @property
    def key(self) -> str:
        """The key: TINKER_API_KEY, or a placeholder."""
        return os.environ.get("TINKER_API_KEY") or NO_KEY

    @property
    def client(self) -> Any:
        """The SDK's client of this server. The first use checks that the server answers.

        Raises:
            ConfigError: the SDK is missing, or the URL is invalid.
            TinkerError: nothing answers.
        """
        if self._client is None:
            if urlsplit(self.url).scheme not in ("http", "https"):
                raise ConfigError(f"tinker_url {self.url!r} is not a URL. Write it as http://HOST:PORT.")
            client = sdk()
            if not self.answers():
                raise TinkerError(f"no Tinker server answers at {self.url}. Is it running, and is the URL right?")
            try:
                self._client = client.ServiceClient(base_url=self.url, api_key=self.key)
            except Exception as error:
                raise explain(error, "open a session", self.url) from error
        return self._client

    def answers(self) -> bool:
        """Whether the server answers at all, in three tries."""
        return any(self._healthy() for _ in range(3))

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/v1/healthz", timeout=_LOOK_S).status_code < 500
        except httpx.HTTPError:
            return False

    def wait(self, future: Any, doing: str) -> Any:
        """Wait for a future of the SDK. If the server is down, its first error is raised for all later requests.

        Raises:
            TinkerError: the request failed, the server is down, or it takes too long.
        """
        self.check_lost()
        began = seen = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                return future.result(timeout=_LOOK_S)
            except TimeoutError as error:
                if time.monotonic() - asked < _LOOK_S / 2:  # the SDK's own timeout
                    raise explain(error, doing, self.url) from error
                self.check()
                seen = time.monotonic() if self._healthy() else seen
                if (lost := self._given_up(began, seen, doing)) is not None:
                    raise lost from error
            except Exception as error:
                raise explain(error, doing, self.url) from error

    def check_lost(self) -> None:
        """Raise again the error that ended the server.

        Raises:
            TinkerError: it is down.
        """
        if self._lost is not None:
            raise self._lost

    async def arrive(self, future: Any, doing: str) -> Any:
        """Wait for a future as `wait` does, on an event loop."""
        wrapped = asyncio.ensure_future(_result(future))
        began = seen = time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({wrapped}, timeout=_LOOK_S)
                if done:
                    break
                seen = time.monotonic() if await asyncio.to_thread(self._healthy) else seen
                if (lost := self._given_up(began, seen, doing)) is not None:
                    raise lost
            return wrapped.result()
        except (TinkerError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise explain(error, doing, self.url) from error
        finally:
            wrapped.cancel()

    def _given_up(self, began: float, seen: float, doing: str) -> TinkerError | None:
        now = time.monotonic()
        if now - seen > self.patience.down_s:
            self._lost = TinkerError(
                f"the Tinker server {self.url} has not answered for {self.patience.down_s:g} s while it had to"
                f" {doing}. Everything after the last checkpoint is lost. Restart the server, then continue"
                " with --resume."
            )
            return self._lost
        if now - began > self.patience.slow_s:
            return TinkerError(
                f"the Tinker server {self.url} took longer than {self.patience.slow_s:g} s to {doing}. Give it more"
                " time with --backend-options slow_s=SECONDS."
            )
        return None

    def models(self) -> dict[str, int | None]:
        """Return the models that the server trains, with the longest context if it reports one."""
        found = self.call(lambda client: client.get_server_capabilities(), "say which models it has")
        return {each.model_name: each.max_context_length for each in found.supported_models if each.model_name}

    def adapter(self, base: str, rank: int, seed: int) -> Any:
        """Create an adapter without the head, which vLLM does not serve, and return the SDK's client of it."""
        return self.call(
            lambda client: client.create_lora_training_client(
                base_model=base, rank=rank, seed=seed, train_unembed=False
            ),
            f"create an adapter of rank {rank} over {base}",
        )

    def base_sampler(self, base: str) -> Any:
        """Return the SDK's client that samples from a model without adapters."""
        return self.call(lambda client: client.create_sampling_client(base_model=base), f"sample from {base}")

    def restored(self, path: str) -> Any:
        """Return the SDK's client of a new adapter with saved weights and optimiser."""
        return self.call(lambda client: client.create_training_client_from_state_with_optimizer(path), f"load {path}")

    def archive(self, path: str) -> bytes:
        """Download the archive of a sampler's checkpoint.

        Raises:
            TinkerError: the server has none, or sends none.
        """
        run, _, rest = path.removeprefix("tinker://").partition("/")
        try:
            url = f"{self.url}/api/v1/training_runs/{run}/checkpoints/{rest}/archive"
            reply = httpx.get(
                url, headers={"X-API-Key": self.key}, timeout=self.patience.slow_s, follow_redirects=False
            )
            if reply.status_code == httpx.codes.FOUND:
                target = httpx.URL(url).join(reply.headers["location"])
                own = target.host == urlsplit(self.url).hostname
                headers = {"X-API-Key": self.key} if own else {}  # file storage elsewhere gets no key
                reply = httpx.get(target, headers=headers, timeout=self.patience.slow_s, follow_redirects=True)
            reply.raise_for_status()
        except (httpx.HTTPError, KeyError) as error:
            raise explain(error, f"send the weights of {path}", self.url) from error
        return reply.content

    def unload(self, model_id: str) -> None:
        """Free an adapter's slot. A server that does not support this keeps it until the session has ended."""
        try:
            body = {"model_id": model_id, "type": "unload_model"}
            httpx.post(f"{self.url}/api/v1/unload_model", json=body, headers={"X-API-Key": self.key}, timeout=_LOOK_S)
        except httpx.HTTPError:
            return

    def call(self, ask: Callable[[Any], Any], doing: str) -> Any:
        """Run a blocking call of the SDK in a thread, which is abandoned if the server is given up."""
        client, future = self.client, Future[Any]()

        def run() -> None:
            try:
                future.set_result(ask(client))
            except BaseException as error:  # noqa: BLE001 - handed over
                future.set_exception(error)

        Thread(target=run, name="tinker", daemon=True).start()
        return self.wait(future, doing)


async def _result(future: Any) -> Any:
    """Await a future of the SDK, or of Python, on this event loop."""
    return await (asyncio.wrap_future(future) if not hasattr(future, "result_async") else future.result_async())


def tensor(values: Sequence[float] | Sequence[int], dtype: str) -> Any:
    """Return numbers in the SDK's format."""
    return sdk().types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])

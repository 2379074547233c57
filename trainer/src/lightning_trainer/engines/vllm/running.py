"""vLLM servers that others started and restart: `Servers`. What a run needs of them is checked before it begins."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import httpx

from lightning_spans.errors import ConfigError
from lightning_spans.record.stalls import waiting
from lightning_trainer.engines.contract import EngineError, HeldModel
from lightning_trainer.engines.vllm.pulse import Pulse
from lightning_trainer.gateway.upstream.adapters import AdapterServers

BASE_NAME: Final = "base"  # name of the frozen model on the servers
_START: Final = (
    f"Start it with --served-model-name {BASE_NAME} --logprobs-mode processed_logprobs --enable-lora, and"
    " VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
)
_BACK_S: Final = 600.0  # longest wait for a server that does not answer
_LOOK_S: Final = 0.5


class AdapterSource(Protocol):
    """What loads adapters into a server that was restarted.

    Attributes:
        held: the learner's model.
    """

    held: HeldModel

    @property
    def resident(self) -> Sequence[str]:
        """Names of the adapters that a server must have."""
        ...

    def reload(self, url: str) -> None:
        """Load those that a server does not have."""
        ...


class RunningServers:
    """Servers that are already running: `Servers`.

    One that does not answer is awaited, because others may be restarting it; it then gets its adapters again.

    Args:
        urls: base URLs, each with its ``/v1``.
        key: their bearer key; None: the variable VLLM_API_KEY, if it is set.
        places: number of adapters that may answer at once.
        short: most tokens with the short frequencies of longrope positions; None: the model has other positions.
    """

    sleeps = False

    def __init__(self, urls: Sequence[str], key: str | None, *, places: int, short: int | None = None) -> None:
        self.urls, self._places, self._short = tuple(urls), places, short
        self.pulse = Pulse()
        self.key = key or os.environ.get("VLLM_API_KEY")
        self._adapters: AdapterSource | None = None
        self._failure: EngineError | None = None
        self._doubted, self._asking = threading.Event(), threading.Lock()

    def start(self, adapters: AdapterSource) -> None:
        """Check that all servers have what the run needs.

        Raises:
            ConfigError: one does not; the message says how to start it.
            EngineError: one does not answer.
        """
        self._adapters = adapters
        for url in self.urls:
            _check_model(url, self._cards(url), adapters.held.max_model_len, self._short)
            self._check_logprobs(url)
        with AdapterServers(self.urls, self.key) as servers:
            servers.check_slots(BASE_NAME, self._places)

    async def ready(self) -> None:
        """Wait until the servers answer: `Servers.ready`."""
        while self._doubted.is_set():
            self.check()
            if self._asking.locked():
                await asyncio.sleep(_LOOK_S)
            else:
                await asyncio.to_thread(self.wait)

    def wait(self) -> None:
        """Wait until the servers answer, and have their adapters: `Servers.wait`.

        Raises:
            EngineError: one does not answer for ten minutes.
        """
        with self._asking, waiting("engine", f"vLLM at {', '.join(self.urls)}"):
            until = time.monotonic() + _BACK_S
            while self._doubted.is_set():
                self.check()
                try:
                    self._restore()
                    self._doubted.clear()
                except (EngineError, ConfigError) as error:
                    if time.monotonic() > until:
                        self._failure = EngineError(f"{error} Waited {_BACK_S:g} s. Start it again, and use --resume.")
                    time.sleep(_LOOK_S)

    def _restore(self) -> None:
        for url in self.urls:
            self._cards(url)
            if self._adapters is not None:
                self._adapters.reload(url)

    def suspect(self) -> None:
        """Look at the servers before the next request."""
        self._doubted.set()

    def ends(self, urls: Sequence[str]) -> bool:
        """Return whether a server does not answer, or lost an adapter: it was restarted, or will be."""
        wanted = set(self._adapters.resident) if self._adapters is not None else set()
        try:
            lost = any(wanted - {str(card.get("id")) for card in self._cards(url)} for url in urls)
        except EngineError:
            lost = True
        if lost:
            self.suspect()
        return lost

    async def ended(self, urls: Sequence[str]) -> bool:
        """Return whether a request failed because the server has ended: `ends`."""
        return await asyncio.to_thread(self.ends, urls)

    def settled(self) -> None:
        """Do nothing: others look after them."""

    def held(self) -> AbstractContextManager[None]:
        """Do nothing: they are not ours."""
        return nullcontext()

    def asleep(self) -> AbstractContextManager[None]:
        """Do nothing: they are not ours."""
        return nullcontext()

    def check(self) -> None:
        """Raise the error that ends the run.

        Raises:
            EngineError: a server did not come back.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Do nothing: they are not ours."""

    def _cards(self, url: str) -> list[Mapping[str, Any]]:
        """Return a server's description of its models.

        Raises:
            EngineError: it does not answer, or differently.
        """
        reply = self._request("GET", f"{url}/models")
        if reply.status_code in (401, 403):
            raise EngineError(f"vLLM at {url} does not accept the key. Set VLLM_API_KEY to the server's.")
        try:
            return [dict(card) for card in reply.json()["data"]]
        except (ValueError, KeyError, TypeError):
            told = f"{reply.status_code} {reply.text[:100]!r}"
            raise EngineError(
                f"{url}/models is not a list of models: {told}. Give vLLM's base URL, such as"
                " http://127.0.0.1:8000/v1, as engine_url."
            ) from None

    def _check_logprobs(self, url: str) -> None:
        """Check that log-probabilities are those at the temperature of the request."""
        body = {"model": BASE_NAME, "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 1, "seed": 1}
        best = []
        for temperature in (0.5, 2.0):
            reply = self._request("POST", f"{url}/completions", body | {"temperature": temperature})
            try:
                best.append(max(reply.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()))
            except (ValueError, LookupError, TypeError, AttributeError):
                raise EngineError(f"vLLM at {url} does not complete token ids: {reply.text[:300]}") from None
        if abs(best[0] - best[1]) < 1e-6:
            raise ConfigError(f"vLLM at {url} returns log-probabilities that ignore the temperature. {_START}")

    def _request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            return httpx.request(method, url, json=body, headers=headers, timeout=30.0)
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM at {url} does not answer: {error or type(error).__name__}.") from None


def _check_model(url: str, cards: Sequence[Mapping[str, Any]], context: int, short: int | None) -> None:
    known = {str(card.get("id")): card for card in cards}
    if BASE_NAME not in known:
        raise ConfigError(f"vLLM at {url} answers for {', '.join(known)}. {_START}")
    most = known[BASE_NAME].get("max_model_len")
    if isinstance(most, int) and most < context:
        raise ConfigError(
            f"vLLM at {url} takes {most} tokens of prompt and answer, and the run {context}. Start it with"
            f" --max-model-len {context}, or set max_model_len = {most}."
        )
    if isinstance(most, int) and short is not None and context <= short < most:
        raise ConfigError(
            f"vLLM at {url} takes {most} tokens, and the run {context}. The positions of this model (longrope) then"
            f" differ. Start it with --max-model-len {context}, or set max_model_len = {most}."
        )

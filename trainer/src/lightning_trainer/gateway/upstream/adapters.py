"""LoRA adapters on vLLM: loaded into running servers, each under a name that no other weights ever have.

vLLM reads an adapter from a path, so its servers must be able to see the adapter's folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.models.bases import NEEDED, ROUNDED, bits_in
from lightning_trainer.policies import ADAPTERS_NAME

_PEFT: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.*"
_LOADING_S: Final = 600.0
_START: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK"
_HASH: Final = 12  # hexadecimal digits of a content hash in a name
_SLOTS: Final = re.compile(r'vllm:lora_requests_info\{[^}]*max_lora="(\d+)"')


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter in a folder, as peft writes it.

    Attributes:
        name: of the policy.
        folder: its location.
        served: its name on the servers: the policy's name, and a hash of the folder's content.
        rank: of its matrices; None if its configuration does not say.
    """

    name: str
    folder: Path
    served: str
    rank: int | None


def adapters_in(checkpoint: Path) -> list[SavedAdapter]:
    """Read the adapters of a checkpoint, or of a run that has one.

    Raises:
        ConfigError: it contains no adapters, or one of them is missing.
    """
    path = checkpoint
    try:
        folder = checkpoint / "checkpoint" if (checkpoint / "checkpoint").exists() else checkpoint
        path = folder / ADAPTERS_NAME
        names = [str(name) for name in json.loads(path.read_text(encoding="utf-8"))["adapters"]]
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {ADAPTERS_NAME}, so it has no adapters. Give the checkpoint of a run with --policy."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Give another checkpoint.") from None
    return [_saved_adapter(folder, name) for name in names]


def _saved_adapter(checkpoint: Path, name: str) -> SavedAdapter:
    folder = checkpoint / name
    digest = hashlib.sha256()
    try:
        folder = folder.resolve()
        if not (folder / _PEFT).is_file():
            raise ConfigError(f"{checkpoint} names the adapter {name}, but {folder / _PEFT} is not there.")
        for path in (folder / _PEFT, *sorted(folder.glob(_WEIGHTS))):
            digest.update(path.read_bytes())
        rank = json.loads((folder / _PEFT).read_text(encoding="utf-8")).get("r")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the adapter {folder} can't be read: {error}. Give another checkpoint.") from None
    served = f"{name}@{digest.hexdigest()[:_HASH]}"
    return SavedAdapter(name, folder, served, rank if isinstance(rank, int) else None)


class AdapterServers:
    """vLLM servers that load and unload adapters while they run.

    Args:
        urls: base URLs, each with its ``/v1``.
        key: their bearer key; None: none.
        bits: to which they round the weights of their model themselves; None: they do not.
    """

    def __init__(self, urls: Sequence[str], key: str | None = None, bits: int | None = None) -> None:
        self._urls, self._bits = tuple(urls), bits
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=_LOADING_S)

    def __enter__(self) -> AdapterServers:
        """Close the connections after the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def load(self, served: str, folder: Path, rank: int | None = None) -> None:
        """Load an adapter into every server that does not have it yet.

        Raises:
            ConfigError: a server does not load it, or serves other weights than it was trained over; the message says
                what to change.
        """
        for url in self._urls:
            cards = self._cards(url)
            if self._bits is None:
                _check_bits(url, cards, folder)
            root = _adapters_of(cards).get(served)
            if root == str(folder):
                continue
            if root is not None:  # the same content in another place; vLLM may have to read it again from here
                self._post(url, "unload_lora_adapter", {"lora_name": served}, served)
            reply = self._post(url, "load_lora_adapter", {"lora_name": served, "lora_path": str(folder)}, served)
            if reply.status_code == 200:
                continue
            words = _error_of(reply)
            if words is None and reply.status_code in (404, 405):
                raise ConfigError(f"{url} does not load adapters while it runs. Start vLLM so: {_START}")
            said = words or f"status {reply.status_code}, {reply.text[:500]}"
            if "max_lora_rank" in said and rank is not None:
                raise ConfigError(
                    f"{url} did not load the adapter {served}, whose rank is {rank}: {said} Start vLLM with"
                    f" --max-lora-rank {vllm_rank(rank)}."
                )
            raise ConfigError(f"{url} did not load the adapter {served} from {folder}: {said}")

    def unload(self, served: str) -> None:
        """Unload an adapter from every server. A server without it is not an error.

        Raises:
            ConfigError: a server cannot be reached.
        """
        for url in self._urls:
            self._post(url, "unload_lora_adapter", {"lora_name": served}, served)

    def unload_others(self, kept: Iterable[SavedAdapter]) -> None:
        """Unload earlier contents of the same adapters. vLLM ends the calls that have begun with them.

        Raises:
            ConfigError: a server cannot be reached.
        """
        names = {each.name: each.served for each in kept}
        for url in self._urls:
            for served in _adapters_of(self._cards(url)):
                name, at, digest = served.rpartition("@")
                ours = at and len(digest) == _HASH and not digest.strip("0123456789abcdef")
                if ours and name in names and served != names[name]:
                    self._post(url, "unload_lora_adapter", {"lora_name": served}, served)

    def check_slots(self, served: str, needed: int) -> None:
        """Check that servers can generate with so many adapters at once, as far as their metrics tell.

        Args:
            served: name of a loaded adapter or of the model. It samples something: until then vLLM reports nothing.
            needed: number of adapters.

        Raises:
            ConfigError: they cannot; the message names the number needed.
        """
        for url in self._urls:
            # Its numbers appear once a step has ended, so two tokens are sampled.
            self._post(url, "completions", {"model": served, "prompt": "a", "max_tokens": 2}, served)
            told = _SLOTS.search(self._get(url, "/../metrics").text)
            if told and int(told[1]) < needed:
                raise ConfigError(
                    f"{url} generates with {told[1]} adapters at the same time, and {needed} are to be"
                    f" served. Start vLLM with --max-loras {needed}."
                )

    def _cards(self, url: str) -> list[dict[str, Any]]:
        """Return a server's description of its model and of the adapters that it has."""
        try:
            return [dict(card) for card in self._get(url, "/models").json()["data"]]
        except (ValueError, KeyError, TypeError):
            return []

    def _post(self, url: str, path: str, body: Mapping[str, Any], served: str) -> httpx.Response:
        try:
            return self._client.post(f"{url}/{path}", json=body)
        except httpx.TransportError as error:
            what = f"{url} did not answer about the adapter {served}"
            raise ConfigError(f"{what}: {error or type(error).__name__}.") from None

    def _get(self, url: str, path: str) -> httpx.Response:
        try:
            return self._client.get(f"{url}{path}")
        except httpx.TransportError as error:
            raise ConfigError(f"{url}{path} did not answer: {error or type(error).__name__}.") from None


def _adapters_of(cards: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the folders of the adapters that a server has, by name."""
    return {str(card.get("id")): str(card.get("root")) for card in cards if card.get("parent") is not None}


def _check_bits(url: str, cards: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Check that a server has the rounded weights that an adapter was trained over.

    Raises:
        ConfigError: it has others, or its weights are not visible from here.
    """
    bits = bits_in(folder / NEEDED)
    roots = [str(card.get("root")) for card in cards if card.get("parent") is None]
    if bits is not None and any(bits_in(Path(root) / ROUNDED) != bits for root in roots or ["no model"]):
        raise ConfigError(
            f"the adapter {folder} was trained over weights of {bits} bits, and {url} serves {', '.join(roots)}, which"
            f" is not known to have them. Write them with `lightning-rl dequantise {folder} FOLDER`, and start vLLM"
            " with that folder, which this machine must see under the same path."
        )


def load_adapters(checkpoint: Path, upstreams: Sequence[Upstream]) -> list[Upstream]:
    """Load a checkpoint's adapters into the servers of its base, and unload earlier contents of these adapters.

    Args:
        checkpoint: folder with the adapters.
        upstreams: the one whose servers answer for the base.

    Returns:
        An upstream for each adapter: the same servers under its name.

    Raises:
        ConfigError: there is not exactly one upstream, a name is in use, or a server does not load an adapter.
    """
    saved = adapters_in(checkpoint)
    if len(upstreams) != 1:
        raise ConfigError(
            f"--adapters needs one --upstream, that of their base: {len(upstreams)} are given. Give BASE=URL."
        )
    (base,) = upstreams
    if base.model in {each.name for each in saved}:
        raise ConfigError(f"the upstream {base.model} has the name of an adapter. Serve the base under another.")
    load_saved(saved, (base.url, *base.replicas), base.key, replaces=True)
    return [replace(base, model=each.name, served=each.served) for each in saved]


def load_saved(saved: Sequence[SavedAdapter], urls: Sequence[str], key: str | None, *, replaces: bool) -> None:
    """Load adapters into servers.

    Args:
        saved: the adapters.
        urls: of the servers.
        key: their bearer key.
        replaces: whether to unload what the servers have of these adapters from an earlier gateway.

    Raises:
        ConfigError: a server does not load one, or has too few slots.
    """
    with AdapterServers(urls, key) as servers:
        for each in saved:
            servers.load(each.served, each.folder, each.rank)
        servers.check_slots(saved[0].served, len(saved))
        if replaces:
            servers.unload_others(saved)


def vllm_rank(rank: int) -> int:
    """Return the smallest ``--max-lora-rank`` that vLLM accepts and that is enough for adapters of this rank.

    Raises:
        ConfigError: vLLM accepts none so large.
    """
    for most in (8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= most:
            return most
    raise ConfigError(f"vLLM takes adapters of rank 512 at most, and this one has {rank}. Train with a smaller rank.")


def _error_of(reply: httpx.Response) -> str | None:
    """Return vLLM's own message; None for a page that it does not have."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None

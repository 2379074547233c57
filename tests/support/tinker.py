"""A Tinker server without a server: the SDK's names over a bigram model whose gradients are exact.

Log-probabilities of a token depend on the token before, through a table of the base and one of the adapter. Servers
differ in what they divide a gradient by, in whether they clip, and in whether published weights stay as they are.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import tarfile
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

VOCABULARY = 259  # of the tiny model


class StatusError(Exception):
    """An HTTP error of the server."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


class Done:
    """A future that is done."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value

    async def result_async(self, timeout: float | None = None) -> Any:
        return self.result()


@dataclass
class Table:
    """Weights of an adapter, with the state of its optimiser."""

    weights: np.ndarray
    first: np.ndarray
    second: np.ndarray
    steps: int = 0

    @classmethod
    def new(cls) -> Table:
        return cls(*(np.zeros((VOCABULARY, VOCABULARY)) for _ in range(3)))

    def copy(self) -> Table:
        return Table(self.weights.copy(), self.first.copy(), self.second.copy(), self.steps)


@dataclass
class Server:
    """What the server is and did.

    Attributes:
        averages: nothing, step (SkyRL: tokens of a sequence and sequences of a step), request, request-tokens, or
            all-tokens of a step.
        clips: whether it clips gradients.
        snapshots: whether a sampler has weights of its own.
        models: it has.
        fail: what an operation raises, by its name.
        nonsense: whether log-probabilities are.
        gradients: of each optimiser step, by adapter.
        asked: names of the operations, in order.
    """

    averages: str = "nothing"
    clips: bool = True
    snapshots: bool = True
    models: list[str] = field(default_factory=list)
    fail: dict[str, BaseException] = field(default_factory=dict)
    nonsense: bool = False
    gradients: dict[str, list[np.ndarray]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    saved: dict[str, Table] = field(default_factory=dict)
    adapters: dict[str, Table] = field(default_factory=dict)
    seeds: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.base = np.random.default_rng(0).normal(0.0, 1.0, (VOCABULARY, VOCABULARY))

    def logprobs(self, table: np.ndarray, before: Any, after: Any) -> np.ndarray:
        scores = (self.base + table)[np.asarray(before, int)]
        scores = scores - scores.max(-1, keepdims=True)
        told = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        return np.take_along_axis(told, np.asarray(after, int)[:, None], 1)[:, 0]

    def did(self, what: str) -> None:
        self.asked.append(what)
        if what in self.fail:
            raise self.fail[what]


class TrainingClient:
    def __init__(self, server: Server, table: Table) -> None:
        self.server, self.table = server, table
        self.model_id = f"model-{next(server.seeds)}"
        server.adapters[self.model_id] = table
        self._sum = np.zeros((VOCABULARY, VOCABULARY))
        self._sequences = 0

    def forward(self, data: list[Any], loss: str) -> Done:
        return self._pass("forward", data)

    def forward_backward(self, data: list[Any], loss: str) -> Done:
        assert loss == "importance_sampling"
        found = self._pass("forward_backward", data)
        own = np.zeros_like(self._sum)
        predicted = sum(len(each.loss_fn_inputs["target_tokens"].data) for each in data)
        for each in data:
            inputs = {name: np.asarray(its.data) for name, its in each.loss_fn_inputs.items()}
            before, after = np.asarray(each.model_input, int), inputs["target_tokens"].astype(int)
            now = self.server.logprobs(self.table.weights, before, after)
            slope = np.exp(now - inputs["logprobs"]) * inputs["advantages"]
            scores = (self.server.base + self.table.weights)[before]
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            of = -slope[:, None] * (np.eye(VOCABULARY)[after] - shares)
            of /= len(after) if self.server.averages == "step" else 1
            np.add.at(own, before, of)
        own /= {"request": len(data), "request-tokens": predicted}.get(self.server.averages, 1)
        self._sum += own
        self._sequences += predicted if self.server.averages == "all-tokens" else len(data)
        return found

    def optim_step(self, params: Any) -> Done:
        try:
            self.server.did("optim_step")
        except BaseException as error:
            return Done(error)
        gradient = self._sum / (self._sequences if self.server.averages in ("step", "all-tokens") else 1)
        self.server.gradients.setdefault(self.model_id, []).append(gradient)
        norm = float(np.linalg.norm(gradient))
        if self.server.clips and params.grad_clip_norm and norm > params.grad_clip_norm:
            gradient = gradient * params.grad_clip_norm / norm
        table = self.table
        table.steps += 1
        table.first[:] = params.beta1 * table.first + (1 - params.beta1) * gradient
        table.second[:] = params.beta2 * table.second + (1 - params.beta2) * gradient**2
        mean = table.first / (1 - params.beta1**table.steps)
        deviation = np.sqrt(table.second / (1 - params.beta2**table.steps))
        table.weights -= params.learning_rate * mean / (deviation + params.eps)
        self._sum, self._sequences = np.zeros_like(self._sum), 0
        return Done(SimpleNamespace(metrics={"grad_norm": norm}))

    def save_state(self, name: str) -> Done:
        return self._saved("save_state", f"tinker://{self.model_id}/weights/{name}")

    def save_weights_for_sampler(self, name: str) -> Done:
        return self._saved("save_weights_for_sampler", f"tinker://{self.model_id}/{name}")

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        self.server.did("publish")
        return SamplingClient(self.server, self.table.copy().weights, self.table)

    def _saved(self, what: str, path: str) -> Done:
        try:
            self.server.did(what)
        except BaseException as error:
            return Done(error)
        self.server.saved[path] = self.table.copy()
        return Done(SimpleNamespace(path=path))

    def _pass(self, what: str, data: list[Any]) -> Done:
        try:
            self.server.did(what)
        except BaseException as error:
            return Done(error)
        told = [
            self.server.logprobs(self.table.weights, each.model_input, each.loss_fn_inputs["target_tokens"].data)
            for each in data
        ]
        if self.server.nonsense:
            told = [np.full_like(each, np.nan) for each in told]
        outputs = [{"logprobs": SimpleNamespace(data=each.tolist())} for each in told]
        return Done(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))


class SamplingClient:
    def __init__(self, server: Server, weights: np.ndarray, trained: Table | None) -> None:
        self.server, self._weights, self._trained = server, weights, trained

    def _own(self) -> np.ndarray:
        if not self.server.snapshots and self._trained is not None:
            self._trained.weights[:] = self._weights  # as SkyRL's JAX backend: loaded over what is trained
        return self._weights

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Done:
        try:
            self.server.did("sample")
        except BaseException as error:
            return Done(error)
        random, table = np.random.default_rng(sampling_params.seed), self._own()
        tokens: list[int] = []
        last = prompt[-1]
        while len(tokens) < sampling_params.max_tokens:
            told = self.server.logprobs(table, np.full(VOCABULARY, last), np.arange(VOCABULARY))
            last = int(random.choice(VOCABULARY, p=np.exp(told) / np.exp(told).sum()))
            tokens.append(last)
            if last in (getattr(sampling_params, "stop", None) or ()):
                break
        logprobs = self.server.logprobs(table, [prompt[-1], *tokens[:-1]], tokens).tolist()
        if self.server.nonsense:
            logprobs = logprobs[:-1]
        sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason="stop")
        return Done(SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0))

    def compute_logprobs(self, prompt: Any) -> Done:
        return Done([None, *self.server.logprobs(self._own(), prompt[:-1], prompt[1:]).tolist()])


class ServiceClient:
    def __init__(self, server: Server) -> None:
        self.server = server

    def get_server_capabilities(self) -> Any:
        models = [SimpleNamespace(model_name=name, max_context_length=None) for name in self.server.models]
        return SimpleNamespace(supported_models=models)

    def create_lora_training_client(self, base_model: str, rank: int, seed: int, **how: Any) -> TrainingClient:
        self.server.did("create")
        return TrainingClient(self.server, Table.new())

    def create_training_client_from_state_with_optimizer(self, path: str) -> TrainingClient:
        self.server.did("restore")
        if path not in self.server.saved:
            raise StatusError(404, f"{path} not found")
        return TrainingClient(self.server, self.server.saved[path].copy())

    def create_sampling_client(self, base_model: str) -> SamplingClient:
        return SamplingClient(self.server, np.zeros((VOCABULARY, VOCABULARY)), None)


def archive() -> bytes:
    """An adapter as SkyRL sends it: without the names of its modules."""
    tensors = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": [2, 2] for part in "AB"}
    header, offset = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + 16]}
        offset += 16
    text = json.dumps(header).encode()
    contents = {
        "adapter_config.json": json.dumps({"r": 2, "lora_alpha": 32, "peft_type": "LORA"}).encode(),
        "adapter_model.safetensors": len(text).to_bytes(8, "little") + text + bytes(offset),
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def install(monkeypatch: Any, server: Server) -> None:
    """Let this server stand behind every URL."""
    from lightning_trainer.backends.tinker.service import Service

    module = ModuleType("tinker")
    module.__spec__ = ModuleSpec("tinker", None)
    module.ServiceClient = lambda base_url, api_key: ServiceClient(server)  # type: ignore[attr-defined]
    module.types = SimpleNamespace(  # type: ignore[attr-defined]
        TensorData=SimpleNamespace,
        Datum=SimpleNamespace,
        ModelInput=SimpleNamespace(from_ints=list),
        SamplingParams=SimpleNamespace,
        AdamParams=lambda **given: SimpleNamespace(**{"grad_clip_norm": 0.0, "weight_decay": 0.0, **given}),
    )
    monkeypatch.setitem(sys.modules, "tinker", module)
    monkeypatch.setattr(Service, "answers", lambda self: True)
    monkeypatch.setattr(Service, "_healthy", lambda self: True)
    monkeypatch.setattr(Service, "unload", lambda self, model_id: server.asked.append(f"unload {model_id}"))
    monkeypatch.setattr(Service, "archive", lambda self, path: archive())

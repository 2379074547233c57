"""The learner of the backend named ``torch``: one policy in this process, generating and training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import checkpoint
from lightning_trainer.backends.torch.generate.engine import TorchEngine, served_name
from lightning_trainer.backends.torch.learn.adapters import (
    add_adapters,
    fill_copy,
    has_adapters,
    saved_shape,
    select,
    target_names,
)
from lightning_trainer.backends.torch.learn.agreement import DeliveryCheck, check_model, engine_gaps, without_older
from lightning_trainer.backends.torch.learn.candidates import likeliest
from lightning_trainer.backends.torch.learn.policy import TrainedWeights, copy_start, reference
from lightning_trainer.backends.torch.learn.reading import penalties, row_logprobs
from lightning_trainer.backends.torch.learn.several import by_adapter, combine_metrics
from lightning_trainer.backends.torch.learn.shares import gradient_shares
from lightning_trainer.backends.torch.learn.speed import flops_utilisation, peak_memory, release_memory
from lightning_trainer.backends.torch.learn.update import update
from lightning_trainer.backends.torch.model.load import LoadedModel, load
from lightning_trainer.backends.torch.model.quantised import write_dequantised
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.backends.torch.threads import use_threads
from lightning_trainer.engines.contract import EngineKind, EngineRequest, HeldModel, PolicyEngines, RestingEngines
from lightning_trainer.gateway.engine import Engine, set_tool_format
from lightning_trainer.models.bases import read_base
from lightning_trainer.report.learned_tokens import SeenTokens
from lightning_trainer.rl.rows import Row

Read = TypeVar("Read")

_READ: Final = 8  # rows of each policy on which an update measures the divergence from the model without adapter


class TorchLearner:
    """`Learner` with an embedded engine: one policy, or several adapters over one frozen model.

    Master weights and optimisers are created with the first update.
    """

    def __init__(
        self, model: Path | str, *, sampler: tuple[EngineKind, EngineRequest] | None = None, **options: Any
    ) -> None:
        """Load a model folder, or a checkpoint of several adapters.

        Args:
            model: the folder.
            sampler: the engine, and what it serves; None: the embedded one.
            options: fields of `TorchOptions`.

        Raises:
            ConfigError: an option is wrong, or the model cannot be loaded or run.
            EngineError: the engine does not start.
        """
        saved = checkpoint.saved_adapters(Path(model))
        if saved is not None:
            source, names = saved
            options = {
                "adapters": names,
                "lora_rank": saved_shape(Path(model) / names[0]).lora_rank,
            } | _without_defaults(options)
        options |= checkpoint.format_options(Path(model), options)
        self.options = make_options(model if saved is None else source, options)
        self._model = load(self.options, None if saved is None else Path(model))
        self._fingerprint = checkpoint.fingerprint(self._model)
        add_adapters(self._model, self.options, None if saved is None else Path(model))
        if self.options.base_bits is not None and not has_adapters(self._model):
            raise ConfigError("base_bits quantises the frozen model under adapters. Set lora_rank, or leave it out.")
        self._policies: dict[str | None, TrainedWeights] = {}
        self._seen: dict[Row, SeenTokens] = {}
        self._start = copy_start(self._model, self.options)
        self._engine: PolicyEngines = self._open(*sampler) if sampler else TorchEngine(self._model, self.options)
        self._check_model()

    def _open(self, kind: EngineKind, request: EngineRequest) -> PolicyEngines:
        """Open an engine and publish the current policies to it."""
        source, bits = read_base(self._model.source.resolve()).folder, self._model.base_bits
        held = HeldModel(
            name=served_name(self._model, self.options),
            tokenizer=self._model.tokenizer,
            max_model_len=self._model.max_model_len,
            loaded=self._model,
            write=partial(write_dequantised, self._model.causal, bits, source) if bits is not None else None,
            options=self.options,
            lora_targets=target_names(self._model),
        )
        dtype = str(self._model.shape.dtype).removeprefix("torch.")
        own = replace(request, model=source, dtype=dtype, policies=self.options.served)
        engine = kind.open(own, held)
        try:
            set_tool_format(engine.engines, own.tool_format)
            engine.publish({each.model: each.version for each in self._trained_engines(engine)}, self._write)
        except BaseException:
            engine.close()
            raise
        return engine

    def _check_model(self) -> None:
        """Check that the engine serves this model.

        Raises:
            EngineError: it serves another.
        """
        try:
            for each in self._trained_engines(self._engine)[:1]:
                check_model(self._engine, each.model, self._model.tokenizer, self.logprobs)
        except BaseException:
            self._engine.close()
            raise

    @property
    def engine(self) -> Any:
        """Generates with the newest weights; with several adapters, with the frozen model under them."""
        return self._engine.engines[0]

    @property
    def engines(self) -> tuple[Engine, ...]:
        """One for each served policy; with several adapters, the frozen model first."""
        return tuple(self._engine.engines)

    def _trained_engines(self, engine: PolicyEngines) -> Sequence[Engine]:
        """Return those whose weights differ from the model's: its adapters except copies, or its only policy."""
        count = len(self.options.adapters)
        return engine.engines[1 : 1 + count] if count else engine.engines

    def _write(self, policy: str, folder: Path) -> None:
        """Write the newest adapter of a policy in peft's format."""
        checkpoint.write_adapter(self._model, self._adapter(policy), folder)

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimiser step: `Learner.update`, with the metrics of `update.update`.

        With several adapters, each takes a step on the rows of its own calls, if these have a gradient. Metrics are
        then those of each with the suffix ``/NAME``, and over all: sums of counts and times, means by tokens. With rows
        of several agents, `gradient_share/AGENT` is each one's share of the squared norms of all gradients.

        Raises:
            ValueError: a row was answered by none of the adapters.
        """
        self._seen = {}
        with self._engine.still():
            threads = {"update_threads": float(use_threads(self.options.threads, self._model.shape.device.type))}
            known = {each.model: each.version for each in self._trained_engines(self._engine)}
            parts = by_adapter(rows, self.options) if self.options.adapters else {next(iter(known)): list(rows)}
            checks = [self._check_of(policy, own) for policy, own in parts.items()]
            departures = self._departures(parts)
            squares: dict[str, float] = {}
            with self._rest():
                found = {policy: self._step(self._adapter(policy), own, squares) for policy, own in parts.items()}
            began = time.perf_counter()
            self._engine.publish({policy: known[policy] + 1 for policy in found}, self._write)
        for check in filter(None, checks):
            check.confirm(self._engine, self.logprobs)
        weights_s = time.perf_counter() - began
        metrics = combine_metrics(found) if self.options.adapters else next(iter(found.values()))
        gaps, shares = engine_gaps(parts, self._seen, known), gradient_shares(squares, [row.agent for row in rows])
        return (
            without_older(metrics, parts, known)
            | gaps
            | shares
            | departures
            | threads
            | self._speed(metrics, weights_s)
        )

    @contextmanager
    def _rest(self) -> Iterator[None]:
        """Let the engine rest in the block, and give it the memory that the block no longer uses."""
        if not isinstance(self._engine, RestingEngines):
            yield
            return
        with self._engine.rest():
            yield
            release_memory(self._model.shape.device)

    def _speed(self, metrics: Mapping[str, float], weights_s: float) -> dict[str, float]:
        """Return seconds of sending weights, memory and, if it is known, utilisation of an update."""
        tokens = metrics.get("packed_tokens", 0.0) * self.options.update_epochs
        used = flops_utilisation(self._model, tokens, metrics.get("seconds", 0.0), frozen=self.options.lora_rank > 0)
        speed = {"weights_seconds": weights_s, **peak_memory(self._model.shape.device)}
        return speed if used is None else {**speed, "mfu": used}

    def _departures(self, parts: Mapping[str, Sequence[Row]]) -> dict[str, float]:
        """Return `kl_base/POLICY`, each adapter's divergence from the model without it, on about eight of its rows."""
        if not has_adapters(self._model):
            return {}
        plain = self.options.with_values(kl_coef=1.0, kl_estimator="k3")
        some = {policy: rows[:: max(1, len(rows) // _READ)] for policy, rows in parts.items() if rows}
        read = {policy: penalties(rows, plain, reference(self._model, None)) for policy, rows in some.items()}
        return {f"kl_base/{policy}": float(np.concatenate(its).mean()) for policy, its in read.items()}

    def _adapter(self, policy: str) -> str | None:
        return policy if self.options.adapters else None

    def _check_of(self, policy: str, rows: Sequence[Row]) -> DeliveryCheck | None:
        """Read some rows before an update, to compare the engine on them afterwards; None for the embedded engine."""
        return None if isinstance(self._engine, TorchEngine) else DeliveryCheck.of(policy, rows, self.logprobs)

    @property
    def seen(self) -> Mapping[Row, SeenTokens]:
        """The last update's view of its rows: `Learner.seen`."""
        return self._seen

    def penalties(self, rows: Sequence[Row]) -> list[NDArray[np.float64]]:
        """Return the divergence penalties on the rewards: `reading.penalties`.

        Raises:
            ValueError: a row belongs to no served adapter.
        """
        return self._by_adapter(
            rows, lambda places: penalties([rows[place] for place in places], self.options, self._reference())
        )

    def schedule(self, rise: int, steps: int) -> None:
        """Set the schedule of the learning rate: `Learner.schedule`.

        Raises:
            RuntimeError: the optimiser exists already.
        """
        if self._policies:
            raise RuntimeError("the schedule of an existing optimiser can't be changed")
        self.options = self.options.with_values(
            warmup_steps=rise, lr_schedule="linear", min_lr_ratio=0.1, total_steps=steps
        )

    def logprobs(
        self, rows: Sequence[Row], candidates: Sequence[NDArray[np.int64]] | None = None
    ) -> list[NDArray[np.float32]]:
        """Return log-probabilities of trained tokens: `Learner.logprobs`.

        Raises:
            ValueError: a row belongs to no served adapter.
        """
        return self._by_adapter(rows, lambda places: self._read(self._model, rows, places, candidates))

    def teacher_logprobs(
        self, rows: Sequence[Row], candidates: Sequence[NDArray[np.int64]] | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the same with the weights of the policy as its own teacher: `TeacherPolicy.teacher_logprobs`.

        Raises:
            ValueError: a row belongs to no served adapter.
        """
        kind = self.options.teacher_weights
        if kind == "base":
            return self._by_adapter(rows, lambda places: self._read_base(rows, places, candidates))
        if kind == "newest":
            return self.logprobs(rows, candidates)
        return self._by_adapter(rows, lambda places: self._read_average(rows, places, candidates))

    def _read_average(
        self, rows: Sequence[Row], places: Sequence[int], candidates: Sequence[NDArray[np.int64]] | None
    ) -> list[NDArray[np.float32]]:
        adapter = rows[places[0]].policy if self.options.adapters else None
        with self._weights_of(adapter).use_average():
            return self._read(self._model, rows, places, candidates)

    def _read_base(
        self, rows: Sequence[Row], places: Sequence[int], candidates: Sequence[NDArray[np.int64]] | None
    ) -> list[NDArray[np.float32]]:
        with reference(self._model, self._start) as base:
            return self._read(base, rows, places, candidates)

    def _read(
        self,
        model: LoadedModel,
        rows: Sequence[Row],
        places: Sequence[int],
        candidates: Sequence[NDArray[np.int64]] | None,
    ) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of the rows at these indices under a model."""
        asked = None if candidates is None else [candidates[place] for place in places]
        return row_logprobs(model, [rows[place] for place in places], self.options.micro_batch_tokens, asked)

    def likeliest(self, rows: Sequence[Row], count: int) -> list[NDArray[np.int64]]:
        """Return the most likely tokens at trained tokens: `Learner.likeliest`.

        Raises:
            ValueError: a row belongs to no served adapter.
        """
        most = self.options.micro_batch_tokens
        return self._by_adapter(
            rows, lambda places: likeliest(self._model, [rows[place] for place in places], count, most)
        )

    def _by_adapter(self, rows: Sequence[Row], read: Callable[[Sequence[int]], list[Read]]) -> list[Read]:
        """Read rows, each with its own adapter; `read` takes their indices in `rows`."""
        found: dict[int, Read] = {}
        with self._engine.still():
            use_threads(self.options.threads, self._model.shape.device.type)
            for adapter, places in self._places(rows).items():
                select(self._model, adapter)
                found |= zip(places, read(places), strict=True)
        return [found[place] for place in range(len(rows))]

    def save(self, folder: Path, *, resumable: bool = True) -> None:
        """Write a checkpoint: `checkpoint.save`."""
        with self._engine.still():
            checkpoint.save(folder, self._model, self._all(), self._engine, self._fingerprint, resumable=resumable)

    def strip(self, folder: Path) -> None:
        """Remove all but the weights of a checkpoint: `checkpoint.strip`."""
        checkpoint.strip(folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint, bit for bit: `checkpoint.restore`.

        Raises:
            ConfigError: it is a checkpoint of another model or kind, or incomplete.
        """
        with self._engine.still():
            version, versions = checkpoint.restore(folder, self._model, self._all(), self._engine, self._fingerprint)
            newest = versions if self.options.adapters else {self.engine.model: version}
            self._engine.publish(newest, self._write)

    def save_policy(self, policy: str, folder: Path) -> None:
        """Write the weights of one policy, as a model folder or an adapter, and its masters: `PolicyKeeper`."""
        with self._engine.still():
            self._write(policy, folder)
            self._model.tokenizer.save_pretrained(folder)
            save_file(self._weights_of(self._adapter(policy)).weights(), folder / checkpoint.TENSORS)

    def restore_policy(self, policy: str, folder: Path) -> None:
        """Restore one policy to what `save_policy` wrote, bit for bit: `PolicyKeeper`."""
        with self._engine.still():
            known = {each.model: each.version for each in self._trained_engines(self._engine)}
            self._weights_of(self._adapter(policy)).return_to(checkpoint.read_policy(folder))
            self._engine.publish({policy: known[policy] + 1}, self._write)

    def load_copy(self, copy: str, policy: str, folder: Path, version: int) -> None:
        """Load into a copy the weights of a policy that `save_policy` wrote, bit for bit: `CopyKeeper`."""
        with self._engine.still():
            fill_copy(self._model, copy, policy, checkpoint.read_policy(folder))
            self._engine.publish({copy: version}, self._write)

    def slow_policy(self, policy: str, factor: float) -> None:
        """Multiply the learning rate of one policy: `PolicyKeeper`."""
        self._weights_of(self._adapter(policy)).factor = factor

    def close(self) -> None:
        """Stop the engine and free memory."""
        self._engine.close()
        self._policies, self._start = {}, None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._model.end_tokens

    def _places(self, rows: Sequence[Row]) -> dict[str | None, list[int]]:
        """Return the indices of the rows of each adapter."""
        if not self.options.adapters:
            return {None: list(range(len(rows)))}
        found: dict[str | None, list[int]] = {}
        for place, row in enumerate(rows):
            if row.policy not in self.options.served:
                raise ValueError(
                    f"a row of {row.agent} belongs to {row.policy!r}, not to {', '.join(self.options.served)}"
                )
            found.setdefault(row.policy, []).append(place)
        return found

    def _step(self, adapter: str | None, rows: Sequence[Row], squares: dict[str, float]) -> dict[str, float]:
        select(self._model, adapter)
        policy, reference = self._weights_of(adapter), self._reference()
        return update(self._model, policy, rows, self.options, reference, kept=self._seen, squares=squares)

    def _all(self) -> dict[str | None, TrainedWeights]:
        return {adapter: self._weights_of(adapter) for adapter in self.options.adapters or (None,)}

    def _weights_of(self, adapter: str | None = None) -> TrainedWeights:
        if adapter not in self._policies:
            self._policies[adapter] = TrainedWeights(self._model, self.options, adapter)
        return self._policies[adapter]

    def _reference(self) -> Any:
        return reference(self._model, self._start) if self.options.kl_coef > 0 else None


def _without_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out options that choose nothing, so that a checkpoint's own adapters are used."""
    return {name: value for name, value in options.items() if not (name in {"adapters", "lora_rank"} and not value)}

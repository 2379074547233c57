"""The learner of the backend named ``tinker``: adapters on a server, one for each policy.

Axes: T tokens of a row, `_N` = T - 1 predicted tokens, K trained tokens.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.tinker import checkpoint
from lightning_trainer.backends.tinker.adapter import Adapter, Floats, prompt_logprobs
from lightning_trainer.backends.tinker.bill import Bill, TokenCount, unmerged_tokens
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.gradient import (
    Read,
    check_temperature,
    replace_trained,
    select_trained,
    spread,
    token_gradients,
    weigh_tokens,
)
from lightning_trainer.backends.tinker.options import TinkerOptions
from lightning_trainer.backends.tinker.probe import Findings, examine, prove_sampling
from lightning_trainer.backends.tinker.sampler import TinkerEngine
from lightning_trainer.backends.tinker.service import Service
from lightning_trainer.backends.tinker.text import load_text
from lightning_trainer.backends.torch.learn.agreement import engine_gaps
from lightning_trainer.backends.torch.learn.schedule import schedule
from lightning_trainer.backends.torch.learn.several import by_adapter, combine_metrics
from lightning_trainer.backends.torch.learn.update import minibatches
from lightning_trainer.engines.gate import Gate
from lightning_trainer.gateway.engine import Engine
from lightning_trainer.models import look
from lightning_trainer.policies import BASE
from lightning_trainer.report.learned_tokens import SeenTokens
from lightning_trainer.rl.losses import kl_divergence
from lightning_trainer.rl.rows import Row, token_weights
from lightning_trainer.rl.teams.agent_weights import weigh_agents

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Policy:
    """A policy: its adapter, and the number of its optimiser steps."""

    adapter: Adapter
    engine: TinkerEngine
    steps: int = 0


class TinkerLearner:
    """`Learner` with adapters on a server as its policies.

    Args:
        options: the server, and how it trains.

    Raises:
        ConfigError: the server lacks the model, or the SDK is missing.
        TinkerError: the server is down, refuses, or does not match the SDK.
    """

    def __init__(self, options: TinkerOptions) -> None:
        self.options, self.learner_options = options, options.learner
        self.service = Service(options.url, options.patience)
        self._gate, self._seen = Gate(), dict[Row, SeenTokens]()
        self._tag = secrets.token_hex(3)  # makes names unique on a server that other runs use, too
        self._held = load_text(self.learner_options, self._longest())
        self.bill = Bill(options.read_prices(), options.max_cost)
        self._policies: dict[str, _Policy] = {}
        names = options.learner.adapters or (options.learner.model.resolve().name,)
        self._base = self._engine(BASE) if options.learner.adapters else None
        try:
            self.findings: Findings = self._examine_server()
            for name in names:
                client = self.service.adapter(options.served_base, options.learner.lora_rank, self._seed(name))
                self._policies[name] = _Policy(Adapter(self.service, client), self._engine(name))
            self._publish(dict.fromkeys(names, 0))
            prove_sampling(self.service, {name: policy.engine.client for name, policy in self._policies.items()})
        except BaseException:
            self.close()
            raise
        for engine in self.engines:
            engine.waits_for_updates = not self.findings.snapshots
        if not self.findings.clips:
            logger.warning("this server does not clip gradients: max_grad_norm has no effect")

    def _examine_server(self) -> Findings:
        """Measure what the server does, on a temporary adapter."""
        options = self.learner_options
        adapter = Adapter(self.service, self.service.adapter(self.options.served_base, options.lora_rank, options.seed))
        try:
            return examine(adapter)
        finally:
            self.service.unload(adapter.model_id)

    def _longest(self) -> int | None:
        """Return the longest context that the server allows for the model; None if it does not report it.

        Raises:
            ConfigError: the server does not have the model.
        """
        models, base = self.service.models(), self.options.served_base
        if base not in models:
            raise ConfigError(
                f"the Tinker server {self.options.url} does not have the model {base!r}. It has"
                f" {', '.join(sorted(models)) or 'none'}. Name one with --backend-options base_model=NAME."
            )
        return models[base]

    def _seed(self, name: str) -> int:
        return self.learner_options.seed + (
            list(self.learner_options.adapters).index(name) if self.learner_options.adapters else 0
        )

    def _engine(self, name: str) -> TinkerEngine:
        engine = TinkerEngine(
            name, self._held, self.service, self.bill, gate=self._gate, seed=self.learner_options.seed
        )
        if name == BASE:
            engine.publish(self._frozen, 0)
        return engine

    @cached_property
    def _frozen(self) -> Any:
        """The SDK's client that samples from the model without adapter."""
        return self.service.base_sampler(self.options.served_base)

    @property
    def engines(self) -> tuple[TinkerEngine, ...]:
        """One engine for each policy; with several adapters, the frozen model first."""
        own = [policy.engine for policy in self._policies.values()]
        return tuple(own if self._base is None else [self._base, *own])

    @property
    def engine(self) -> Engine:
        """The first of `engines`."""
        return self.engines[0]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ends: frozenset[int] = self._held["end_tokens"]
        return ends

    @property
    def seen(self) -> Mapping[Row, SeenTokens]:
        """What the last update computed for its rows: `Learner.seen`. The server sends no entropies."""
        return self._seen

    def schedule(self, rise: int, steps: int) -> None:
        """Set the schedule of the learning rate: `Learner.schedule`."""
        self.learner_options = self.learner_options.with_values(
            warmup_steps=rise, lr_schedule="linear", min_lr_ratio=0.1, total_steps=steps
        )

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimiser step for each policy that answered rows with a gradient: `Learner.update`.

        Raises:
            ConfigError: rows were sampled at a temperature other than 1.
            BudgetSpentError: it would cost more than is left. Nothing was sent.
            TinkerError: the server failed. Only the state of the last checkpoint is valid then.
        """
        self._seen = {}
        check_temperature(rows)
        self.bill.check_update(sum(len(row.tokens) - 1 for row in self._learned(rows)), self.learner_options)
        names = self.learner_options.adapters
        parts = by_adapter(rows, self.learner_options) if names else {next(iter(self._policies)): list(rows)}
        with self._still():
            found = {name: self._step(self._policies[name], own) for name, own in parts.items()}
            known = {name: self._policies[name].engine.version for name in found}
            self._publish({name: version + 1 for name, version in known.items()})
        metrics = combine_metrics(found) if names else next(iter(found.values()))
        return metrics | engine_gaps(parts, self._seen, known) | self.bill.of_step()

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Hold answers back if the server samples from the weights being trained."""
        if self.findings.snapshots:
            yield
        else:
            with self._gate.shut():
                yield

    def _publish(self, versions: Mapping[str, int]) -> None:
        for name, version in versions.items():
            policy = self._policies[name]
            policy.engine.publish(policy.adapter.sampler(), version)

    def _step(self, policy: _Policy, rows: Sequence[Row]) -> dict[str, float]:
        """Take the optimiser steps of a batch, and return the metrics of `Learner.update`."""
        options, began, adapter = self.learner_options, time.monotonic(), policy.adapter
        read, trained = adapter.tokens_read, adapter.tokens_trained
        pieces = [self._piece(own) for own in minibatches(rows, options, policy.steps)]
        every = [part.row for piece in pieces for part in piece]
        now = dict(zip(every, select_trained(every, first := self._forward(adapter, every)), strict=True))
        whole = dict(zip(every, first, strict=True))
        pieces, corrected = weigh_tokens([self._add_old_logprobs(piece, now) for piece in pieces], options)
        self._seen |= {
            row: SeenTokens(its - row.logprobs[row.mask], np.full_like(its, np.nan)) for row, its in now.items()
        }
        sums: Counter[str] = Counter()
        norms: list[float] = []
        highest = 0.0
        for number, piece in enumerate(piece for _ in range(options.update_epochs) for piece in pieces if piece):
            own = [part.row for part in piece]
            predicted = [whole[row] for row in own] if number == 0 else self._forward(adapter, own)
            slopes, watched = token_gradients(piece, select_trained(own, predicted), options)
            highest = max(highest, watched.pop("ratio_max"))
            sums.update(watched)
            norms += self._optimise(policy, own, predicted, slopes)
        count, steps = sums["tokens"] or 1.0, max(1, options.update_epochs * sum(map(bool, pieces)))
        self._bill_update(adapter, rows, read, trained)
        return {
            "loss": sums["loss"] / steps,
            **({"grad_norm": sum(norms) / len(norms)} if norms else {}),
            **{name: sums[name] / count for name in ("clip_fraction", "kl", "logprob_gap")},
            "ratio_max": highest,
            "tokens": sums["tokens"] / options.update_epochs,
            "packed_tokens": float(sum(len(row.tokens) for row in every)),
            "skipped": 0.0,
            **corrected,
            "seconds": time.monotonic() - began,
        }

    def _piece(self, rows: Sequence[Row]) -> list[Read]:
        """Return the rows of an optimiser step that have a gradient. Weights are computed before, from all rows."""
        options = self.learner_options
        weights = weigh_agents(rows, token_weights(rows, options.loss_aggregation), options.agent_weight)
        return [
            Read(row=row, weights=its, old=row.logprobs[row.mask])
            for row, its in zip(rows, weights, strict=True)
            if row.has_gradient or options.learns_from_flat_rows
        ]

    def _add_old_logprobs(self, piece: Sequence[Read], now: Mapping[Row, Floats]) -> list[Read]:
        """Add the values for comparison: log-probabilities before the update, and those of the starting policy."""
        options = self.learner_options
        recomputed = options.old_logprobs == "recompute"
        known = self._reference([part.row for part in piece]) if options.kl_coef > 0 else [None] * len(piece)
        return [
            replace(part, old=now[part.row] if recomputed else part.old, reference=own)
            for part, own in zip(piece, known, strict=True)
        ]

    def _optimise(
        self, policy: _Policy, rows: Sequence[Row], predicted: Sequence[Floats], slopes: Sequence[Floats]
    ) -> list[float]:
        """Send a gradient and take a step; return the gradient norm if the server reports it."""
        options, adapter = self.learner_options, policy.adapter
        if not all(np.isfinite(each).all() for each in slopes):
            raise TinkerError("a gradient is not finite: log-probabilities of the rows are, so look at their rewards.")
        advantages = [spread(row, its) for row, its in zip(rows, slopes, strict=True)]
        tokens = [row.tokens for row in rows]
        adapter.gradient(tokens, [each[1:] for each in tokens], predicted, advantages, self.findings.scaling)
        clip = {"grad_clip_norm": options.max_grad_norm} if self.findings.clips else {}
        norm = adapter.step(
            learning_rate=options.learning_rate * schedule(options)(policy.steps), beta1=options.betas[0],
            beta2=options.betas[1], eps=1e-8, weight_decay=options.weight_decay, **clip,
        )  # fmt: skip
        policy.steps += 1
        return [] if norm is None else [norm]

    def _forward(self, adapter: Adapter, rows: Sequence[Row]) -> list[Floats]:
        return adapter.logprobs([row.tokens for row in rows])

    def _bill_update(self, adapter: Adapter, rows: Sequence[Row], read: int, trained: int) -> None:
        """Count what an update sent, and what it would have sent unmerged."""
        learned = self._learned(rows)
        sent = TokenCount(read=adapter.tokens_read - read, trained=adapter.tokens_trained - trained)
        once = sum(len(row.tokens) - 1 for row in learned) or 1
        self.bill.add(replace(sent, unmerged=(sent.read + sent.trained) * unmerged_tokens(learned) / once))

    def _learned(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row.has_gradient or self.learner_options.learns_from_flat_rows]

    def _reference(self, rows: Sequence[Row]) -> list[Floats]:
        """Return for each row (K,) log-probabilities under the model without adapter."""
        self.bill.add(TokenCount(prompt=sum(len(row.tokens) for row in rows)))
        return select_trained(rows, [prompt_logprobs(self.service, self._frozen, row.tokens) for row in rows])

    def penalties(self, rows: Sequence[Row]) -> list[NDArray[np.float64]]:
        """Return what the divergence subtracts from the rewards: `Learner.penalties`."""
        import torch

        options = self.learner_options
        return [
            options.kl_coef
            * kl_divergence(
                torch.from_numpy(row.logprobs[row.mask]), torch.from_numpy(its), options.kl_estimator
            ).double().numpy()
            for row, its in zip(rows, self._reference(rows), strict=True)
        ]  # fmt: skip

    def logprobs(
        self, rows: Sequence[Row], candidates: Sequence[NDArray[np.int64]] | None = None
    ) -> list[NDArray[np.float32]]:
        """Return log-probabilities of trained tokens: `Learner.logprobs`. Each candidate takes a separate pass."""
        check_temperature(rows)
        found: dict[int, NDArray[np.float32]] = {}
        for name, policy in self._policies.items():
            places = [n for n, row in enumerate(rows) if row.policy == name or not self.learner_options.adapters]
            own = [rows[n] for n in places]
            columns = 0 if candidates is None else max((candidates[n].shape[1] for n in places), default=0)
            if candidates is None:
                found |= zip(places, select_trained(own, self._forward(policy.adapter, own)), strict=True)
                continue
            tokens = [row.tokens for row in own]
            told = [
                policy.adapter.logprobs(tokens, [replace_trained(rows[n], candidates[n][:, column]) for n in places])
                for column in range(columns)
            ]
            for at, n in enumerate(places):
                found[n] = np.stack([select_trained([rows[n]], [each[at]])[0] for each in told], axis=1)
        if missing := [rows[n] for n in range(len(rows)) if n not in found]:
            raise ValueError(
                f"a row of {missing[0].agent} belongs to {missing[0].policy!r}, not to {', '.join(self._policies)}"
            )
        return [found[n] for n in range(len(rows))]

    def likeliest(self, rows: Sequence[Row], count: int) -> NoReturn:  # noqa: ARG002 - the protocol's
        """Refuse: a server does not send the likeliest tokens."""
        raise ConfigError("a Tinker server does not say which tokens are likeliest. Use backend = torch.")

    def save(self, folder: Path, *, resumable: bool = True) -> None:
        """Write the adapters in peft's format, and save weights and optimiser on the server: `Learner.save`.

        Raises:
            TinkerError: the server fails.
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        several, base = self.learner_options.adapters, str(self._source())
        self._held["tokenizer"].save_pretrained(folder)
        kept = {}
        for name, policy in self._policies.items():
            tag = f"{name}-{self._tag}-{policy.engine.version}"
            own = folder / name if several else folder
            checkpoint.unpack(policy.adapter.archive(tag), own, base)
            self._held["tokenizer"].save_pretrained(own)
            if resumable:
                kept[name] = {
                    "path": policy.adapter.save(tag), "version": policy.engine.version, "steps": policy.steps,
                    "random": policy.engine.random.getstate(),
                }  # fmt: skip
        if several:
            checkpoint.write_index(folder, base, several)
        if resumable:
            values = {"url": self.options.url, "base": self.options.served_base, "spent": self.bill.spent}
            checkpoint.write_state(folder, {**values, "policies": kept})

    def _source(self) -> Path | str:
        """Return the folder or name of the model that the adapters belong to."""
        folder = look(str(self.learner_options.model)).folder
        return folder.resolve() if folder is not None else str(self.learner_options.model)

    def strip(self, folder: Path) -> None:
        """Remove what only `load` needs from a checkpoint: `Learner.strip`."""
        (folder / checkpoint.STATE).unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint: `Learner.load`. The server must still have its part.

        Raises:
            ConfigError: it belongs to another server, model or set of adapters.
            TinkerError: the server no longer has it.
        """
        values = checkpoint.read_state(folder, self.options.url, self.options.served_base, list(self._policies))
        with self._still():
            for name, policy in self._policies.items():
                own = values["policies"][name]
                policy.adapter.load(own["path"])
                policy.steps = int(own["steps"])
                kind, numbers, gauss = own["random"]
                policy.engine.random.setstate((kind, tuple(numbers), gauss))
            self._publish({name: int(own["version"]) for name, own in values["policies"].items()})
        self.bill.before = float(values.get("spent", 0.0))

    def close(self) -> None:
        """Free the adapters' slots on the server."""
        for policy in self._policies.values():
            self.service.unload(policy.adapter.model_id)

"""One policy-gradient update: forward micro-batches of packed rows, backward, one optimiser step.

Axes: P trained tokens of a micro-batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.learn.activations import save_memory
from lightning_trainer.backends.torch.learn.candidates import Lesson, lesson
from lightning_trainer.backends.torch.learn.head import chosen_logprobs
from lightning_trainer.backends.torch.learn.policy import TrainedWeights
from lightning_trainer.backends.torch.learn.shares import AgentGradients, by_agent
from lightning_trainer.backends.torch.learn.tree import PackedMicroBatch, micro_batches
from lightning_trainer.backends.torch.learn.tree_plan import TreePlan
from lightning_trainer.backends.torch.learn.value import ValueHead
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.report.learned_tokens import SeenTokens
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.ppo import token_advantages
from lightning_trainer.rl.algorithms.protocol import Clip, TrainedTokens
from lightning_trainer.rl.losses import PolicyLoss, importance_weights, kl_divergence, value_loss
from lightning_trainer.rl.rows import Row, token_weights
from lightning_trainer.rl.teams.agent_weights import weigh_agents


@dataclass(frozen=True, slots=True, eq=False)
class _MicroBatch:
    """A micro-batch with the inputs of the loss for each trained token, all (P,) float32.

    `lengths` are those of its responses, in order; `lesson` is a teacher's; `values_P` and `targets_P` are of the value
    head.
    """

    packed: PackedMicroBatch
    lengths: tuple[int, ...]
    recorded_P: Tensor
    advantages_P: Tensor
    weights_P: Tensor
    lesson: Lesson | None = None
    values_P: Tensor | None = None
    targets_P: Tensor | None = None
    rows: tuple[Row, ...] = ()

    @property
    def agent(self) -> str:
        """The agent of its rows: no micro-batch has rows of two agents."""
        return self.rows[0].agent


class ForwardResult(NamedTuple):
    """The results of a forward pass over a micro-batch: (P,) each, and the hidden states (U, width) behind them.

    `asked` are the log-probabilities of other requested tokens.
    """

    logprobs_P: Tensor
    entropy_P: Tensor
    hidden_UH: Tensor
    place_P: Tensor
    asked: Tensor


def update(
    model: LoadedModel,
    policy: TrainedWeights,
    rows: Sequence[Row],
    options: TorchOptions,
    reference: AbstractContextManager[LoadedModel] | None = None,
    *,
    share: bool = True,
    kept: dict[Row, SeenTokens] | None = None,
    squares: dict[str, float] | None = None,
) -> dict[str, float]:
    """Take one or several optimiser steps on a batch of rows: `Learner.update`.

    Args:
        model: forwards the rows.
        policy: takes the step.
        rows: the whole batch; the loss is one sum over all its trained tokens, however they are packed.
        options: clip range, aggregation and the rest.
        reference: gives the frozen starting policy; needed if `kl_coef` is above 0.
        share: False forwards every row separately, for comparison.
        kept: receives what the first pass computed for each row's tokens.
        squares: receives the squared norm of each agent's gradient.

    Returns:
        The metrics of `Learner.update`: means over the forwarded tokens (rows without gradient are not forwarded), with
            `kl` from the reference, or from the sampling policy if there is none. Also `ratio_max`, `packed_tokens`
            (tokens forwarded) and `skipped` (steps that changed nothing, because a gradient was not finite); with a
            value head `value_loss` and `value_mean`; if rows have a teacher's targets, `teacher_kl` (mean divergence of
            the taught tokens) and `taught_tokens`. With importance weights, the shares of the tokens with weight 0
            (`importance_masked`) and with the maximum weight (`importance_capped`).
    """
    started = time.perf_counter()
    pieces = [_parts(model, own, options, share=share) for own in minibatches(rows, options, policy.steps)]
    parts = [part for piece in pieces for part in piece]
    references: list[Tensor] | None = None
    if reference is not None:
        with reference as frozen:
            references = [token_logprobs(frozen, part.packed)[0] for part in parts]
    old = [part.recorded_P for part in parts]
    corrected: dict[str, float] = {}
    if options.old_logprobs == "recompute":
        old = [token_logprobs(model, part.packed)[0] for part in parts]
        parts, corrected = _weigh_tokens(parts, old, options)
    if policy.value is not None:
        parts = _compare_tokens(model, policy.value, parts, references, options)
    passes = _Passes(AgentGradients(policy.masters.values()))
    for piece in [piece for _ in range(options.update_epochs) for piece in pieces if piece]:
        for number, part in enumerate(piece, passes.first):
            known = references[number] if references else None
            passes.add(_backward(model, parts[number], old[number], known, options, value=policy.value, kept=kept))
            last = part is piece[-1]
            if last or piece[number - passes.first + 1].agent != part.agent:
                passes.gradients.take(part.agent, last=last)
        passes.end_step(*policy.step())
        passes.first = (passes.first + len(piece)) % len(parts)
    if squares is not None:
        squares |= {agent: square + squares.get(agent, 0.0) for agent, square in passes.gradients.squares.items()}
    packed = sum(len(part.packed.tokens_N) for part in parts)
    found = _metrics(passes, packed, options, valued=policy.value is not None)
    return {**found, **corrected, "seconds": time.perf_counter() - started}


@dataclass(slots=True)
class _Passes:
    """Totals of the passes over a batch so far.

    Attributes:
        gradients: of each agent.
        sums: over tokens, by metric.
        ratio_max: the largest probability ratio.
        norms: of the gradient of each step.
        skipped: steps whose gradient was not finite.
        first: index of the first part of the current minibatch.
    """

    gradients: AgentGradients
    sums: Counter[str] = field(default_factory=Counter)
    ratio_max: float = 0.0
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    first: int = 0

    def add(self, seen: dict[str, float]) -> None:
        """Add the sums of a backward pass."""
        self.ratio_max = max(self.ratio_max, seen.pop("ratio_max"))
        self.sums.update(seen)

    def end_step(self, norm: float, taken: bool) -> None:
        """Record a step, and whether it was taken."""
        self.gradients.end_step(norm, taken=taken)
        self.norms.append(norm)
        self.skipped += not taken


def _metrics(passes: _Passes, packed: int, options: TorchOptions, *, valued: bool) -> dict[str, float]:
    """Return the metrics of `update`, from sums over the tokens of all passes and the gradients' norms."""
    sums, norms = passes.sums, passes.norms
    steps, taught, count = len(norms) or 1, sums["taught_tokens"], sums["tokens"] or 1.0
    watched = ("clip_fraction", "kl", "entropy", "logprob_gap", *(("value_mean",) if valued else ()))
    means = {name: sums[name] / count for name in watched}
    if valued:
        means["value_loss"] = float(sums["value_loss"]) / steps
    found = {
        "loss": float(sums["loss"]) / steps,
        "grad_norm": sum(norms) / steps,
        **means,
        "ratio_max": passes.ratio_max,
        "tokens": float(sums["tokens"]) / options.update_epochs,
        "packed_tokens": float(packed),
        "skipped": float(passes.skipped),
    }
    if taught:
        found |= {"teacher_kl": sums["teacher_kl"] / taught, "taught_tokens": taught / options.update_epochs}
    return found


def minibatches(rows: Sequence[Row], options: TorchOptions, steps: int) -> list[list[Row]]:
    """Split a batch into random pieces of whole rows, from the seed and the number of earlier steps."""
    if options.minibatches == 1:
        return [list(rows)]
    order = np.random.default_rng([options.seed, steps]).permutation(len(rows))
    return [[rows[r] for r in sorted(own)] for own in np.array_split(order, min(options.minibatches, len(rows) or 1))]


def _weigh_tokens(
    parts: Sequence[_MicroBatch], old: Sequence[Tensor], options: TorchOptions
) -> tuple[list[_MicroBatch], dict[str, float]]:
    """Weight tokens by the trainer's probability over the recorded one: `losses.importance_weights`."""
    if not parts:
        return [], {}
    gap_T = torch.cat([old_P - part.recorded_P for part, old_P in zip(parts, old, strict=True)])
    factor_T, told = token_factors(gap_T, options)
    factors = torch.split(factor_T, [len(part.recorded_P) for part in parts])
    return [replace(p, weights_P=p.weights_P * own_P) for p, own_P in zip(parts, factors, strict=True)], told


def token_factors(gap_T: Tensor, options: TorchOptions) -> tuple[Tensor, dict[str, float]]:
    """Return the importance weights of a batch's tokens, and the shares of those masked and capped.

    Args:
        gap_T: (T,) log-probability under the weights before the update, minus the recorded one.
        options: cap, mask and moment.
    """
    cap, mask, moment = options.importance_cap, options.importance_mask, options.importance_moment
    if (cap, mask, moment) == (None, None, None):
        return torch.ones_like(gap_T), {}
    factor_T = importance_weights(gap_T, cap=cap, mask=mask, moment=moment)
    told = {"importance_masked": float((factor_T == 0).float().mean())}
    if cap is not None:
        told["importance_capped"] = float((factor_T >= cap).float().mean())
    return factor_T, told


def token_logprobs(model: LoadedModel, packed: PackedMicroBatch) -> tuple[Tensor, Tensor]:
    """Return (P,) log-probabilities of the trained tokens and (P,) entropies at their places, without gradient."""
    with torch.no_grad():
        found = forward(model, packed)
    return found.logprobs_P, found.entropy_P


def forward(
    model: LoadedModel,
    packed: PackedMicroBatch,
    asked: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    options: TorchOptions | None = None,
) -> ForwardResult:
    """Forward a micro-batch.

    Args:
        model: forwards it.
        packed: the micro-batch.
        asked: places (indices into `predicts_U`) and tokens of further requested log-probabilities.
        options: how a pass with gradient saves memory.
    """
    device = model.shape.device
    plan = TreePlan(packed, model.shape.dtype, device)
    tokens_N, positions_N = (torch.from_numpy(each).to(device) for each in (packed.tokens_N, packed.positions_N))
    with nullcontext() if options is None else save_memory(model, options, plan, len(tokens_N)):
        hidden = model.hidden(tokens_N, positions_N, plan)
    hidden_UH = hidden[torch.from_numpy(packed.predicts_U).to(device)]
    places, targets = (
        (packed.place_P, packed.target_P)
        if asked is None
        else (
            np.concatenate([packed.place_P, asked[0]]),
            np.concatenate([packed.target_P, asked[1]]),
        )
    )
    logprobs, entropy_U = chosen_logprobs(
        model.head, hidden_UH, torch.from_numpy(packed.temperature_U).to(device), places, targets
    )
    place_P = torch.from_numpy(packed.place_P).to(device)
    count = len(packed.place_P)
    return ForwardResult(logprobs[:count], entropy_U[place_P], hidden_UH, place_P, logprobs[count:])


def _parts(model: LoadedModel, rows: Sequence[Row], options: TorchOptions, *, share: bool) -> list[_MicroBatch]:
    """Pack the rows that have a gradient, separately for each agent. Weights are computed first, from all rows."""
    weights = weigh_agents(rows, token_weights(rows, options.loss_aggregation), options.agent_weight)
    kept = [r for r, row in enumerate(rows) if row.has_gradient or options.learns_from_flat_rows]
    packs = [
        (theirs, packed)
        for theirs in by_agent(rows, kept)
        for packed in micro_batches([rows[r] for r in theirs], options.micro_batch_tokens, share=share)
    ]
    parts = []
    for theirs, packed in packs:
        own = [theirs[r] for r in packed.rows]

        def gather(arrays: list[NDArray[np.floating]]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(model.shape.device)

        weights_P = gather([weights[r] for r in own])
        parts.append(
            _MicroBatch(
                packed=packed,
                rows=tuple(rows[r] for r in own),
                lengths=tuple(length for r in own for length in rows[r].lengths),
                recorded_P=gather([rows[r].logprobs[rows[r].mask] for r in own]),
                advantages_P=gather([rows[r].advantages[rows[r].mask] for r in own]),
                weights_P=weights_P,
                lesson=lesson(packed, [rows[r] for r in own], weights_P),
            )
        )
    return parts


def _compare_tokens(
    model: LoadedModel,
    value: ValueHead,
    parts: list[_MicroBatch],
    references: list[Tensor] | None,
    options: TorchOptions,
) -> list[_MicroBatch]:
    """Replace the credit of calls by advantages of tokens, which are compared over the whole batch."""
    if not parts:
        return parts
    values, taken_off = [], []
    for number, part in enumerate(parts):
        with torch.no_grad():
            found = forward(model, part.packed)
            values.append(value.values(found.hidden_UH, found.place_P))
        off_P = torch.zeros_like(part.recorded_P)
        if references is not None and options.kl_in == "reward":
            off_P = options.kl_coef * kl_divergence(part.recorded_P, references[number], options.kl_estimator)
        taken_off.append(off_P)
    lengths = [length for part in parts for length in part.lengths]
    credit, now, off = (
        torch.cat(each).double().cpu().numpy() for each in ([part.advantages_P for part in parts], values, taken_off)
    )
    columns = token_advantages(credit, now, off, lengths, options.gae_lambda)
    sizes, device = [len(part.recorded_P) for part in parts], model.shape.device
    advantages, targets = (torch.split(torch.from_numpy(column).to(device), sizes) for column in columns)
    return [
        replace(part, advantages_P=own, values_P=value_P, targets_P=target)
        for part, own, value_P, target in zip(parts, advantages, values, targets, strict=True)
    ]


def _backward(
    model: LoadedModel,
    part: _MicroBatch,
    old_P: Tensor,
    reference_P: Tensor | None,
    options: TorchOptions,
    *,
    value: ValueHead | None,
    kept: dict[Row, SeenTokens] | None,
) -> dict[str, float]:
    """Run one micro-batch forward and backward, and return the sums of its metrics."""
    found = forward(model, part.packed, None if part.lesson is None else part.lesson.asked, options)
    result = _policy_loss(found.logprobs_P, old_P, part, options)
    loss = result.loss
    in_loss = reference_P is not None and options.kl_in == "loss"
    base_P = part.recorded_P if reference_P is None else reference_P
    kl_P = kl_divergence(found.logprobs_P, base_P, options.kl_estimator if in_loss else "k3")
    if in_loss:
        loss = loss + options.kl_coef * (part.weights_P * kl_P).sum()
    if options.entropy_coef > 0:
        loss = loss - options.entropy_coef * (part.weights_P * found.entropy_P).sum()
    seen = {"loss": float(result.loss.detach())}
    if value is not None and part.values_P is not None and part.targets_P is not None:
        values_P = value.values(found.hidden_UH, found.place_P)
        error = value_loss(values_P, part.values_P, part.targets_P, part.weights_P, clip=options.value_clip)
        seen |= {"value_loss": float(error.detach()), "value_mean": float(part.values_P.sum())}
        loss = loss + error
    if part.lesson is not None:
        lost, divergence_Q = part.lesson.loss(found.asked, options.divergence)
        seen |= {"teacher_kl": float(divergence_Q.sum()), "taught_tokens": float(len(divergence_Q))}
        loss = loss + lost
    loss.backward()  # type: ignore[no-untyped-call]
    now_P = found.logprobs_P.detach()
    if kept is not None:
        _keep(kept, part, now_P - part.recorded_P, found.entropy_P.detach())
    return {
        **seen,
        "clip_fraction": float(result.clipped.sum()),
        "kl": float(kl_P.detach().sum()),
        "entropy": float(found.entropy_P.detach().sum()),
        "logprob_gap": float((now_P - part.recorded_P).abs().sum()),
        "tokens": float(len(now_P)),
        "ratio_max": float(result.ratios.max()),
    }


def _keep(kept: dict[Row, SeenTokens], part: _MicroBatch, gap_P: Tensor, entropy_P: Tensor) -> None:
    """Store what the first pass over a micro-batch computed, by row. Later passes have changed weights."""
    if part.rows[0] in kept:
        return
    columns = torch.stack([gap_P.float(), entropy_P.float()]).half().cpu().numpy()
    ends = np.cumsum([sum(row.lengths) for row in part.rows])
    kept |= zip(part.rows, (SeenTokens(*own) for own in np.split(columns, ends[:-1], axis=1)), strict=True)


def _policy_loss(logprobs_P: Tensor, old_P: Tensor, part: _MicroBatch, options: TorchOptions) -> PolicyLoss:
    lengths = torch.tensor(part.lengths)
    response_P = torch.arange(len(lengths)).repeat_interleave(lengths).to(logprobs_P.device)
    tokens = TrainedTokens(logprobs_P, old_P, part.advantages_P, part.weights_P, response_P)
    return algorithm_by_name(options.algorithm).policy_loss(
        tokens, Clip(options.clip_low, options.clip_high, options.clip_dual)
    )

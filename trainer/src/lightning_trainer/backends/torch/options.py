"""Options of the embedded backend, checked when they are made. No torch here: a wrong option is refused at once."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, get_args

from lightning_spans.errors import ConfigError
from lightning_trainer.choices import AgentWeight, Aggregation, Divergence, KlEstimator, Schedule, TeacherWeights
from lightning_trainer.rl.algorithms import algorithm_by_name

_DEVICE: Final = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """How the embedded backend holds, generates with and updates one policy.

    Attributes:
        model: folder of the model to start from.
        name: name under which the policy is served; the folder's by default.
        dtype: number format of the weights that generate and go forward; ``auto`` takes the model's own, with float16
            turned into bfloat16, but float32 on a processor that is slower at bfloat16, as measured. Master weights and
            moments are always float32.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        chat_template: Jinja text or file that replaces the tokenizer's template, or ``hermes`` for ours.
        seed: of everything random: samples without a seed of their own, and the start of LoRA adapters.
        slots: most requests that generate at once; more wait.
        system_messages: ``merge`` joins messages that strict chat templates refuse; see `models.merged_messages`.
        tool_format: how the model writes tool calls; None: as its chat template does.
        max_model_len: most tokens of prompt and answer; None: the model's own limit.
        threads: threads of the update on a CPU; None: one for each core; ``auto``: as many as cores are free when it
            begins, so that the rounding of its sums depends on what else runs.
        generate_threads: cores that generation uses; None: as many as suit the model's size.
        lora_rank: rank of LoRA adapters; 0 trains all weights.
        lora_alpha: scale of the adapters; None: twice the rank.
        adapters: names of LoRA adapters that are trained side by side over the frozen model, each a policy of its own;
            empty: one policy.
        fixed: those of them that the model's folder must hold, and that are served but not trained.
        lora_targets: names of the modules that get adapters; None: all linear ones but the head.
        learning_rate: step size of AdamW.
        betas: decay of AdamW's moments.
        weight_decay: AdamW's decoupled decay.
        max_grad_norm: gradients are scaled down to this norm.
        clip_low, clip_high, clip_dual: of `losses.policy_loss`.
        loss_aggregation: of `rows.token_weights`.
        agent_weight: of `agent_weights.weigh_agents`.
        algorithm: whose loss it is, by name.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the divergence from the starting policy; above 0 loads a frozen copy of it (none with LoRA,
            where the adapters are switched off instead).
        kl_in: whether the divergence is taken off in the loss, or in the reward.
        kl_estimator: of `losses.kl_divergence`.
        gae_lambda: decay of generalised advantage estimation.
        value_learning_rate: step size of the value head.
        value_clip: of `losses.value_loss`.
        divergence: from a teacher's targets, where rows have some: `losses.candidate_divergence`.
        teacher_weights: weights of the policy as its own teacher: the newest, those that it started from (``base``, of
            which all weights need a frozen copy), or an average over the steps (``ema``, a second copy of the masters).
        ema_decay: share of that average that stays in each step.
        old_logprobs: what ratios compare with: what the engine recorded, or the trainer's own before the update.
        update_epochs: passes over a batch.
        minibatches: pieces of a batch, each with an optimiser step of its own.
        warmup_steps: optimiser steps over which the learning rate rises.
        lr_schedule: of the learning rate after the warm-up.
        min_lr_ratio: final learning rate as a share of `learning_rate`, unless it is constant.
        total_steps: optimiser steps of the whole run, at which the schedule ends; None: not known.
        importance_cap: most that a token weighs for the trainer's probability being larger than the engine's; None:
            tokens weigh the same.
        importance_mask: factor of the two beyond which a token is left out of the loss; None: none is.
        importance_moment: most that the mean of their squared log-ratios may be, for which tokens are left out; the
            others weigh the ratio. None: any.
        activation_checkpointing: keep only the inputs of each layer for the backward pass, and compute the rest again:
            one more forward pass, with much less memory. ``auto``: on a GPU, if the activations would not fit.
        micro_batch_tokens: most tokens in one forward pass of the update, shared prefixes counted once; a longer row
            goes alone.

    Raises:
        ConfigError: a value is out of range.
    """

    model: Path
    name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    chat_template: str | Path | None = None
    system_messages: Literal["as-sent", "merge"] = "as-sent"
    tool_format: str | None = None
    seed: int = 0
    slots: int = 64
    max_model_len: int | None = None
    threads: int | Literal["auto"] | None = None
    generate_threads: int | None = None
    lora_rank: int = 0
    lora_alpha: float | None = None
    adapters: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] | None = None
    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = None
    loss_aggregation: Aggregation = "token-mean"
    agent_weight: AgentWeight = field(default_factory=dict)
    algorithm: str = "grpo"
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KlEstimator = "k3"
    gae_lambda: float = 1.0
    value_learning_rate: float = 1e-3
    value_clip: float | None = None
    divergence: Divergence = "reverse"
    teacher_weights: TeacherWeights = "newest"
    ema_decay: float = 0.99
    old_logprobs: Literal["engine", "recompute"] = "engine"
    update_epochs: int = 1
    minibatches: int = 1
    warmup_steps: int = 0
    lr_schedule: Schedule = "constant"
    min_lr_ratio: float = 0.0
    total_steps: int | None = None
    importance_cap: float | None = None
    importance_mask: float | None = None
    importance_moment: float | None = None
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    micro_batch_tokens: int = 2048

    def __post_init__(self) -> None:
        algorithm = algorithm_by_name(self.algorithm)
        checks = {
            "dtype must be auto, float32 or bfloat16; float16 has too little range for gradients": self.dtype
            in ("auto", "float32", "bfloat16"),
            "slots must be at least 1": self.slots >= 1,
            "max_model_len must be at least 2": self.max_model_len is None or self.max_model_len >= 2,
            "threads must be auto or a number from 1": self.threads in (None, "auto")
            or (isinstance(self.threads, int) and self.threads >= 1),
            "generate_threads must be at least 1": self.generate_threads is None or self.generate_threads >= 1,
            "lora_rank must be 0 (all weights) or more": self.lora_rank >= 0,
            "lora_alpha needs lora_rank, and must be above 0": self.lora_alpha is None
            or (self.lora_rank > 0 and self.lora_alpha > 0),
            "adapters need lora_rank": not self.adapters or self.lora_rank > 0,
            "fixed adapters must be among the adapters": set(self.fixed) <= set(self.adapters),
            "adapters have names of their own: leave name out": not self.adapters or self.name is None,
            "lora_targets needs lora_rank": self.lora_targets is None or self.lora_rank > 0,
            "learning_rate must be above 0": 0 < self.learning_rate < math.inf,
            "betas must lie in [0, 1)": all(0 <= beta < 1 for beta in self.betas),
            "weight_decay must be 0 or more": 0 <= self.weight_decay < math.inf,
            "max_grad_norm must be above 0": self.max_grad_norm > 0,
            "clip_low must be above 0; 1 or more bounds nothing": self.clip_low > 0,
            "clip_high must be above 0": self.clip_high > 0,
            "clip_dual must be above 1": self.clip_dual is None or self.clip_dual > 1,
            f"loss_aggregation must be one of {', '.join(get_args(Aggregation))}": self.loss_aggregation
            in get_args(Aggregation),
            "agent_weight must be equal, or a number above 0 for each agent that it names": self.agent_weight == "equal"
            or (isinstance(self.agent_weight, Mapping) and all(0 < w < math.inf for w in self.agent_weight.values())),
            f"algorithm = {self.algorithm} has no dual clip: leave clip_dual out": self.clip_dual is None
            or algorithm.dual_clip,
            "entropy_coef must be 0 or more": 0 <= self.entropy_coef < math.inf,
            "kl_in must be loss or reward": self.kl_in in ("loss", "reward"),
            f"kl_estimator must be one of {', '.join(get_args(KlEstimator))}": self.kl_estimator
            in get_args(KlEstimator),
            "gae_lambda must lie in [0, 1]": 0 <= self.gae_lambda <= 1,
            "value_learning_rate must be above 0": 0 < self.value_learning_rate < math.inf,
            "value_clip must be above 0": self.value_clip is None or self.value_clip > 0,
            "kl_coef must be 0 or more": 0 <= self.kl_coef < math.inf,
            **self._teacher_checks(),
            "old_logprobs must be engine or recompute": self.old_logprobs in ("engine", "recompute"),
            "update_epochs and minibatches must be at least 1": min(self.update_epochs, self.minibatches) >= 1,
            "warmup_steps must be 0 or more": self.warmup_steps >= 0,
            f"lr_schedule must be one of {', '.join(get_args(Schedule))}": self.lr_schedule in get_args(Schedule),
            "min_lr_ratio must lie in [0, 1)": 0 <= self.min_lr_ratio < 1,
            "a falling lr_schedule needs total_steps, the optimiser steps of the whole run": self.lr_schedule
            == "constant"
            or self.total_steps is not None,
            "total_steps must be more than warmup_steps": self.total_steps is None
            or self.total_steps > self.warmup_steps,
            **self._correction_checks(),
            "activation_checkpointing must be auto, on or off": self.activation_checkpointing in ("auto", "on", "off"),
            "micro_batch_tokens must be at least 1": self.micro_batch_tokens >= 1,
        }
        for message, fine in checks.items():
            if not fine:
                raise ConfigError(f"{message}.")

    def _correction_checks(self) -> dict[str, bool]:
        """Return whether the correction for the engine's probabilities is in order, by what it must be."""
        return {
            "importance_cap must be above 0, importance_mask above 1": (self.importance_cap or 1.0) > 0
            and (self.importance_mask or 2.0) > 1,
            "importance_moment must be above 0": self.importance_moment is None or self.importance_moment > 0,
            "importance_cap, importance_mask and importance_moment need old_logprobs = recompute": self.old_logprobs
            == "recompute"
            or (self.importance_cap, self.importance_mask, self.importance_moment) == (None, None, None),
        }

    def _teacher_checks(self) -> dict[str, bool]:
        """Return whether what is learned from a teacher is in order, by what it must be."""
        return {
            f"teacher_weights must be one of {', '.join(get_args(TeacherWeights))}": self.teacher_weights
            in get_args(TeacherWeights),
            "ema_decay must be above 0 and below 1": 0 < self.ema_decay < 1,
            f"divergence must be one of {', '.join(get_args(Divergence))}": self.divergence in get_args(Divergence),
        }

    @property
    def critic(self) -> bool:
        """Whether rows hold the credit of calls, and a value head makes advantages of it."""
        return algorithm_by_name(self.algorithm).critic

    @property
    def learns_from_flat_rows(self) -> bool:
        """Whether a row whose advantages are all 0 has a gradient all the same."""
        return self.critic or self.entropy_coef > 0 or (self.kl_coef > 0 and self.kl_in == "loss")


def make_options(model: Path | str, values: Mapping[str, Any]) -> TorchOptions:
    """Make options from keyword arguments.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    known = {field.name for field in fields(TorchOptions)}
    unknown = sorted(set(values) - known)
    if unknown:
        near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
        told = [f"{name}{f' (did you mean {near[name][0]!r}?)' if near[name] else ''}" for name in unknown]
        raise ConfigError(f"unknown option of the torch backend: {', '.join(told)}. Known: {', '.join(sorted(known))}.")
    return TorchOptions(model=Path(model), **values)


def check_device(device: str) -> None:
    """Refuse a device that torch can't have, as far as its name and torch's version tell: importing it takes seconds.

    Raises:
        ConfigError: it is none, or it is CUDA's, and this torch was built for processors alone.
    """
    if not _DEVICE.fullmatch(device):
        raise unknown_device(device)
    with contextlib.suppress(PackageNotFoundError):
        if device.startswith("cuda") and version("torch").endswith("+cpu"):
            raise no_cuda(device)


def unknown_device(device: str) -> ConfigError:
    """Return the error of a device that there is not."""
    return ConfigError(f"device {device!r} is not known. Use auto, cpu, cuda or cuda:1.")


def no_cuda(device: str) -> ConfigError:
    """Return the error of a device that is CUDA's where there is none."""
    return ConfigError(f"device {device!r}: this torch finds no CUDA. Use --device cpu, or install torch with CUDA.")

"""Options of the embedded backend, checked when they are made. No torch here, so a wrong option is refused at once."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from pydantic import Field, SkipValidation, model_validator

from lightning_spans.errors import ConfigError
from lightning_trainer.choices import Divergence, TeacherWeights
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.options.learning import (
    AdapterOptions,
    AlgorithmOptions,
    LossOptions,
    OptimizerOptions,
    RateOptions,
)
from lightning_trainer.options.model import MessageOptions, PrecisionOptions
from lightning_trainer.options.sampling import ContextOptions, SeedOptions
from lightning_trainer.rl.algorithms import algorithm_by_name

_DEVICE: Final = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")


class TorchOptions(
    LossOptions,
    OptimizerOptions,
    RateOptions,
    AlgorithmOptions,
    AdapterOptions,
    ContextOptions,
    SeedOptions,
    PrecisionOptions,
    MessageOptions,
    CheckedRecord,
):
    """How the embedded backend loads, generates with and updates one policy. Options that a run has too are inherited.

    With ``dtype`` = auto, float16 becomes bfloat16. Master weights and moments are always float32. A ``kl_coef`` above
    0 loads a frozen copy of the starting policy; with LoRA only its adapters are copied.

    Attributes:
        model: folder of the model to start from.
        name: name under which the policy is served; the folder's by default.
        slots: most requests that generate at once; more wait.
        threads: threads of the update on a CPU; None: one for each core; ``auto``: as many as cores are free when it
            begins, so that the rounding of its sums depends on other programs.
        generate_threads: cores that generation uses; None: as many as suit the model's size.
        adapters: names of LoRA adapters that are trained together over the frozen model, each a separate policy; empty:
            one policy.
        fixed: those of them that the model's folder must contain, and that are served but not trained.
        copies: names of further adapters that are served: frozen copies of earlier weights, in no checkpoint.
        lora_targets: names of the modules that get adapters; None: all linear ones except the head.
        betas: decay of AdamW's moments.
        clip_dual: of `losses.policy_loss`.
        old_logprobs: log-probabilities in the denominator of the ratio: the engine's, or recomputed before the update.
        gae_lambda: decay of generalised advantage estimation, with ``algorithm`` = ppo.
        value_learning_rate: step size of the value head.
        divergence: from a teacher's targets, if rows have some: `losses.candidate_divergence`.
        teacher_weights: weights of the policy as its own teacher: the newest, the starting weights (``base``, a frozen
            copy if all weights are trained), or an average over the steps (``ema``, a second copy of the masters).
        ema_decay: share of that average that remains in each step.
        total_steps: optimiser steps of the whole run, at which the schedule ends; None: unknown.
        activation_checkpointing: keep only the inputs of each layer for the backward pass, and recompute the rest: one
            more forward pass, with much less memory. ``auto``: on a GPU, if the activations would not fit.
        micro_batch_tokens: most tokens in one forward pass of the update, shared prefixes counted once; a longer row
            goes alone.

    Raises:
        ConfigError: a value is out of range.
    """

    model: Path
    name: str | None = None
    slots: SkipValidation[int] = 64
    threads: SkipValidation[int | Literal["auto"] | None] = None
    generate_threads: SkipValidation[int | None] = None
    adapters: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    clip_dual: SkipValidation[float | None] = None
    old_logprobs: Literal["engine", "recompute"] = "engine"
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    value_learning_rate: float = Field(default=1e-3, gt=0)
    divergence: SkipValidation[Divergence] = "reverse"
    teacher_weights: SkipValidation[TeacherWeights] = "newest"
    ema_decay: SkipValidation[float] = 0.99
    total_steps: int | None = None
    activation_checkpointing: SkipValidation[Literal["auto", "on", "off"]] = "auto"
    micro_batch_tokens: SkipValidation[int] = 2048

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        checks = {**self._own_checks(), **self._learning_checks(), **self._teacher_checks()}
        refuse({f"{message}.": not fine for message, fine in checks.items()})
        return self

    def _own_checks(self) -> dict[str, bool]:
        """Return the checks of the learner's own options, by error message."""
        return {
            "slots must be at least 1": self.slots >= 1,
            "threads must be auto or a number from 1": self.threads in (None, "auto")
            or (isinstance(self.threads, int) and self.threads >= 1),
            "generate_threads must be at least 1": self.generate_threads is None or self.generate_threads >= 1,
            "lora_alpha needs lora_rank, and must be above 0": self.lora_alpha is None or self.lora_rank > 0,
            "adapters need lora_rank": not self.adapters or self.lora_rank > 0,
            "fixed adapters must be among the adapters": set(self.fixed) <= set(self.adapters),
            "copies need adapters, and names of their own": not self.copies
            or (bool(self.adapters) and not set(self.copies) & set(self.adapters)),
            "adapters have names of their own: leave name out": not self.adapters or self.name is None,
            "lora_targets needs lora_rank": self.lora_targets is None or self.lora_rank > 0,
            "base_bits must be 4 or 8": self.base_bits in (None, 4, 8),
            "betas must lie in [0, 1)": all(0 <= beta < 1 for beta in self.betas),
            "activation_checkpointing must be auto, on or off": self.activation_checkpointing in ("auto", "on", "off"),
            "micro_batch_tokens must be at least 1": self.micro_batch_tokens >= 1,
        }

    def _learning_checks(self) -> dict[str, bool]:
        """Return the checks of the loss options, by error message."""
        algorithm = algorithm_by_name(self.algorithm)
        corrections = (self.importance_cap, self.importance_mask, self.importance_moment)
        return {
            "clip_dual must be above 1": self.clip_dual is None or self.clip_dual > 1,
            f"algorithm = {self.algorithm} has no dual clip: leave clip_dual out": self.clip_dual is None
            or algorithm.dual_clip,
            "agent_weight must be equal, or a number above 0 for each agent that it names": self.agent_weight == "equal"
            or all(0 < weight < math.inf for weight in self.agent_weight.values()),
            "a falling lr_schedule needs total_steps, the optimiser steps of the whole run": self.lr_schedule
            == "constant"
            or self.total_steps is not None,
            "total_steps must be more than warmup_steps": self.total_steps is None
            or self.total_steps > self.warmup_steps,
            "importance_cap, importance_mask and importance_moment need old_logprobs = recompute": self.old_logprobs
            == "recompute"
            or corrections == (None, None, None),
        }

    def _teacher_checks(self) -> dict[str, bool]:
        """Return the checks of the options for a teacher, by error message."""
        return {
            f"teacher_weights must be one of {', '.join(get_args(TeacherWeights))}": self.teacher_weights
            in get_args(TeacherWeights),
            "ema_decay must be above 0 and below 1": 0 < self.ema_decay < 1,
            f"divergence must be one of {', '.join(get_args(Divergence))}": self.divergence in get_args(Divergence),
        }

    @property
    def served(self) -> tuple[str, ...]:
        """Names of all served adapters."""
        return (*self.adapters, *self.copies)

    @property
    def critic(self) -> bool:
        """Whether rows contain the credit of calls, from which a value head makes advantages."""
        return algorithm_by_name(self.algorithm).critic

    @property
    def learns_from_flat_rows(self) -> bool:
        """Whether a row whose advantages are all 0 still has a gradient."""
        return self.critic or self.entropy_coef > 0 or (self.kl_coef > 0 and self.kl_in == "loss")


def make_options(model: Path | str, values: Mapping[str, Any]) -> TorchOptions:
    """Make options from keyword arguments.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    known = TorchOptions.model_fields.keys()
    unknown = sorted(values.keys() - known)
    if unknown:
        near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
        told = [f"{name}{f' (did you mean {near[name][0]!r}?)' if near[name] else ''}" for name in unknown]
        raise ConfigError(f"unknown option of the torch backend: {', '.join(told)}. Known: {', '.join(sorted(known))}.")
    return TorchOptions(model=Path(model), **values)


def check_device(device: str) -> None:
    """Refuse an impossible device, from its name and torch's version only, because importing torch takes seconds.

    Raises:
        ConfigError: the name is invalid, or it is a CUDA device and this torch was built for processors only.
    """
    if not _DEVICE.fullmatch(device):
        raise unknown_device(device)
    with contextlib.suppress(PackageNotFoundError):
        if device.startswith("cuda") and version("torch").endswith("+cpu"):
            raise no_cuda(device)


def unknown_device(device: str) -> ConfigError:
    """Return the error for an unknown device."""
    return ConfigError(f"device {device!r} is not known. Use auto, cpu, cuda or cuda:1.")


def no_cuda(device: str) -> ConfigError:
    """Return the error for a CUDA device if there is no CUDA."""
    return ConfigError(f"device {device!r}: this torch finds no CUDA. Use --device cpu, or install torch with CUDA.")

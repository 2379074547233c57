"""The trained weights: a float32 master copy, and AdamW.

The working copy is used for generation and in the forward pass. Each step changes the masters and rounds them into the
working copy, so steps smaller than bfloat16's resolution are not lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_trainer.backends.torch.learn.adapters import has_adapters
from lightning_trainer.backends.torch.learn.schedule import schedule
from lightning_trainer.backends.torch.learn.value import ValueHead
from lightning_trainer.backends.torch.model.load import LoadedModel, load
from lightning_trainer.backends.torch.options import TorchOptions


class TrainedWeights:
    """Masters, gradients and optimiser of the trained parameters: all, those of adapters, or those of one adapter."""

    def __init__(self, model: LoadedModel, options: TorchOptions, adapter: str | None = None) -> None:
        self._options = options
        wanted = re.compile("" if not has_adapters(model) else r"\.lora_" if adapter is None else _of(adapter))
        self.working: dict[str, Tensor] = {n: p for n, p in model.causal.named_parameters() if wanted.search(n)}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.working.items():
            parameter.requires_grad_()
            same = parameter.dtype is torch.float32
            self.masters[name] = parameter if same else parameter.detach().float()
            if not same:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _into(self.masters[name])
                )
        self.optimiser = torch.optim.AdamW(
            self.masters.values(),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._steps_before = torch.tensor(0)  # taken before the last return to the best weights
        self._schedule = schedule(options)
        self.factor = 1.0  # of the learning rate, in addition to the schedule's
        self.value = ValueHead(model, options) if options.critic else None
        averaging = options.teacher_weights == "ema"
        self.average = {name: master.detach().clone() for name, master in self.masters.items()} if averaging else {}

    def step(self) -> tuple[float, bool]:
        """Take an optimiser step with the accumulated gradients, and round the masters into the working copy.

        Returns:
            The norm of the gradients before clipping, and whether the step was taken: if a gradient is not finite,
                nothing changes.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self._options.max_grad_norm)
        taken = bool(torch.isfinite(norm))
        if taken:
            self._set_learning_rate()
            self.optimiser.step()
            self._average_in()
            self.publish()
        self.optimiser.zero_grad(set_to_none=True)
        if self.value is not None:
            self.value.step(taken=taken)
        return float(norm), taken

    @torch.no_grad()
    def _average_in(self) -> None:
        """Update the average with the newest masters: average = decay * average + (1 - decay) * masters."""
        for name, average in self.average.items():
            average.lerp_(self.masters[name].detach(), 1.0 - self._options.ema_decay)

    def use_average(self) -> AbstractContextManager[None]:
        """Let the model compute with the average until the block ends: `_use`."""
        return _use(self.average, self.working)

    @property
    def steps(self) -> int:
        """Number of optimiser steps so far, including those before a checkpoint or a return to the best weights."""
        counted = max((int(state["step"]) for state in self.optimiser.state.values()), default=0)
        return int(self._steps_before) + counted

    def _set_learning_rate(self) -> None:
        """Set the learning rate of the next step from the number of steps, which a checkpoint contains."""
        for group in self.optimiser.param_groups:
            group["lr"] = self._options.learning_rate * self._schedule(self.steps) * self.factor

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by name: what `set_state` needs to resume exactly."""
        tensors = self.weights()
        for name, master in self.masters.items():
            tensors |= {f"{key}.{name}": value for key, value in self.optimiser.state.get(master, {}).items()}
        tensors |= {f"average.{name}": average for name, average in self.average.items()}
        tensors["steps_before"] = self._steps_before
        return tensors if self.value is None else {**tensors, **self.value.state()}

    @torch.no_grad()
    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Load masters and moments, and publish the weights.

        Raises:
            KeyError: a master is missing.
            ValueError: one has another shape.
        """
        for name, master in self.masters.items():
            if tensors[f"master.{name}"].shape != master.shape:
                raise ValueError(f"{name} is {tuple(tensors[f'master.{name}'].shape)}, here {tuple(master.shape)}")
        for name, master in self.masters.items():
            master.copy_(tensors[f"master.{name}"])
            moments = {key: tensors.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimiser.state.pop(master, None)
            if moments["step"] is not None:
                self.optimiser.state[master] = {
                    key: value.to(master.device, copy=True) for key, value in moments.items() if value is not None
                }
        if "steps_before" in tensors:  # checkpoints of earlier versions lack it, and count all steps in AdamW's
            self._steps_before.copy_(tensors["steps_before"])
        for name, average in self.average.items():  # a run that had no such teacher starts its average here
            average.copy_(tensors.get(f"average.{name}", self.masters[name]))
        if self.value is not None:
            self.value.set_state(tensors)
        self.publish()

    def weights(self) -> dict[str, Tensor]:
        """Return the masters by name, as `state` does."""
        return {f"master.{name}": master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def return_to(self, weights: dict[str, Tensor]) -> None:
        """Load masters, start a new optimiser, and publish the weights. The schedule continues unchanged.

        AdamW corrects the bias of new moments by the number of its steps, so these are counted from 0 again.

        Raises:
            KeyError: a master is missing.
        """
        for name, master in self.masters.items():
            master.copy_(weights[f"master.{name}"])
        for name, average in self.average.items():
            average.copy_(self.masters[name])
        self._steps_before.fill_(self.steps)
        self.optimiser.state.clear()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the working copy, in place, so that all users of a parameter have the new weights."""
        for name, parameter in self.working.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])


def _of(adapter: str) -> str:
    """Return a pattern for the names of one adapter's parameters: ``...q_proj.lora_A.NAME.weight``."""
    return rf"\.lora_\w+\.{re.escape(adapter)}\."


def _into(master: Tensor) -> Any:
    """Return a hook that adds a working copy's gradient to its master's, in float32, and frees it."""

    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)

    return add


@contextmanager
def _use(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Let parameters have the values of these tensors until the block ends. Their own are restored bit for bit."""
    kept = _copies(parameters)
    try:
        _write(tensors, parameters)
        yield
    finally:
        _write(kept, parameters)


@torch.no_grad()
def _write(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def copy_start(model: LoadedModel, options: TorchOptions) -> LoadedModel | dict[str, Tensor] | None:
    """Return a frozen copy of the policy that a run starts from, for `reference`; None if the options need none.

    With adapters these are the weights of the adapters alone.
    """
    if options.kl_coef == 0 and options.teacher_weights != "base":
        return None
    return _copies(_adapters_of(model)) if has_adapters(model) else load(options)


def _adapters_of(model: LoadedModel) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.causal.named_parameters() if ".lora_" in name}


@contextmanager
def reference(model: LoadedModel, start: LoadedModel | Mapping[str, Tensor] | None) -> Iterator[LoadedModel]:
    """Yield the model that the policy started from.

    Args:
        model: the policy's.
        start: see `copy_start`; None: the model with its adapters disabled.
    """
    if isinstance(start, LoadedModel):
        yield start
        return
    if start is not None:
        with _use(start, _adapters_of(model)):
            yield model
        return
    model.causal.disable_adapters()
    try:
        yield model
    finally:
        model.causal.enable_adapters()

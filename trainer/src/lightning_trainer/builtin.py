"""The trainer's built-in parts, registered through the same hooks that plugins use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl


@hookimpl
def lightning_register_credit(register: Callable[[str, Any], None]) -> None:
    """Register the credit assigners."""
    from lightning_trainer.rl.credit.assigners import discounted, identical, last, per_agent
    from lightning_trainer.rl.credit.counterfactual import counterfactual
    from lightning_trainer.rl.credit.levels import gigpo, turn
    from lightning_trainer.rl.credit.played import AcrossAttempts

    register("identical", identical)
    register("discounted", discounted)
    register("last", last)
    register("per-agent", per_agent)
    register("turn", turn)
    register("gigpo", gigpo)
    register("counterfactual", AcrossAttempts(counterfactual))


@hookimpl
def lightning_register_algorithms(register: Callable[[str, Any], None]) -> None:
    """Register the algorithms."""
    from lightning_trainer.rl.algorithms import distil, grpo, likelihood, ppo, reinforce

    for family in (grpo, reinforce, ppo, likelihood, distil):
        for name, algorithm in family.VARIANTS.items():
            register(name, algorithm)


@hookimpl
def lightning_register_backends(register: Callable[[str, Any], None]) -> None:
    """Register the backends."""
    from lightning_trainer.backends.tinker import backend as tinker
    from lightning_trainer.backends.torch import backend as torch
    from lightning_trainer.backends.verl import backend as verl

    register("torch", torch.backend())
    register("verl", verl.VerlBackend())
    register("tinker", tinker.TinkerBackend())


@hookimpl
def lightning_register_formats(register: Callable[[str, Any], None]) -> None:
    """Register the formats of tool calls."""
    from lightning_trainer.gateway.formats.table import FORMATS

    for each in FORMATS:
        register(each.name, each)


@hookimpl
def lightning_register_alarms(register: Callable[[str, Any], None]) -> None:
    """Register the alarms of a run."""
    from lightning_trainer.report.alarms import CHECKS, rewards, teams

    for check in (*CHECKS, *rewards.CHECKS, *teams.CHECKS):
        register(check.__name__, check)


@hookimpl
def lightning_register_engines(register: Callable[[str, Any], None]) -> None:
    """Register the engines."""
    from lightning_trainer.backends.torch import sampler
    from lightning_trainer.engines.vllm import kind as vllm

    register("embedded", sampler.EmbeddedKind())
    register("vllm", vllm.VllmKind())

"""Options of the agents, the model that they start from, and the weights that each gets."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class NameRuleOptions(OptionRecord):
    """How agents are named if their calls do not say it."""

    name_by: tuple[str, ...] = ()
    """Rule that names the agents of calls without an agent header: `[NAME=]WHERE[:REGEX]`. WHERE is `system` (the
    system prompt), `model` (the requested model) or `header:FIELD`. The first match counts."""


class PolicyOptions(OptionRecord):
    """The agents to train, and the weights that each gets."""

    agents: tuple[str, ...] | None = None
    """Names or globs of the agents to train. Default: all agents that have a name."""
    policies: dict[str, str] = Field(default_factory=dict)
    """Adapters of agents over one frozen model, separated by commas: AGENT=lora (its own adapter), AGENT=lora:NAME (an
    adapter shared by all agents with that NAME), AGENT=fixed (the adapter in the checkpoint given as model, not
    trained), AGENT=base (no adapter). Agents to train that are not listed share one adapter."""


class StartOptions(OptionRecord):
    """The model that training starts from, and the backend."""

    model: str
    """Model to start from: a model folder, a run's folder or checkpoint, a hub id (owner/model or
    owner/model@revision), or smollm2-135m."""
    backend: str = "torch"
    """Backend that generates and updates: `torch`, `verl`, `tinker` (a server that speaks the Tinker API), or one that
    a plugin registers."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend, such as slots or micro_batch_tokens of torch."""


class EndpointOptions(OptionRecord):
    """A server that answers agents."""

    endpoint: str | None = None
    """URL of an OpenAI-compatible server."""

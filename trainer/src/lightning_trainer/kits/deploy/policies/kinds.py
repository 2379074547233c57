"""How each kind of policy is loaded, served and unloaded. A policy's name says its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.calls.models import ServedModel, ServedModels
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.upstream.adapters import AdapterServers
from lightning_trainer.gateway.upstream.upstream import UpstreamPolicy
from lightning_trainer.kits.deploy.policies.prompted import is_prompt, serve_prompt
from lightning_trainer.kits.deploy.transitions import Policy

logger = masking_logger(__name__)


class PolicyKind(Protocol):
    """A kind of policy that is not one of the server's own models."""

    def load(self, policy: Policy, models: ServedModels) -> None:
        """Load the policy where it is missing. Called again and again, because servers restart.

        Raises:
            ConfigError: it cannot be loaded.
        """
        ...

    def serve(self, policy: Policy, models: ServedModels) -> ServedModel:
        """Return the model that answers for a loaded policy.

        Raises:
            ConfigError: the policy cannot be served.
        """
        ...

    def is_idle(self, served: ServedModel) -> bool:
        """Whether no call is in progress."""
        ...

    def unload(self, name: str, served: ServedModel) -> None:
        """Unload a policy that no longer answers."""
        ...


class AdapterKind:
    """A LoRA adapter that the vLLM servers of its base load."""

    def load(self, policy: Policy, models: ServedModels) -> None:
        """Load the adapter into the servers of its base."""
        with _servers(_upstream(policy, models)) as servers:
            servers.load(policy.name, Path(str(policy.checkpoint)))

    def serve(self, policy: Policy, models: ServedModels) -> ServedModel:
        """Return the base under the adapter's name."""
        return _upstream(policy, models).under_name(policy.name)

    def is_idle(self, served: ServedModel) -> bool:
        """Whether no call is in progress."""
        return not (isinstance(served, UpstreamPolicy) and served.describe()["in_flight"])

    def unload(self, name: str, served: ServedModel) -> None:
        """Unload the adapter from the servers of its base."""
        if not isinstance(served, UpstreamPolicy):
            return
        try:
            with _servers(served) as servers:
                servers.unload(name)
        except ConfigError as error:
            logger.warning("the adapter %s, which no longer answers, was not unloaded: %s", name, error)


class PromptKind:
    """A prompt for a model of the server; nothing has to be loaded."""

    def load(self, policy: Policy, models: ServedModels) -> None:
        """Load nothing."""

    def serve(self, policy: Policy, models: ServedModels) -> ServedModel:
        """Return the base with the other prompt."""
        base = models.by_name().get(str(policy.base))
        if base is None:
            raise ConfigError(f"there is no model {policy.base!r} here. Give the server --upstream {policy.base}=URL.")
        return serve_prompt(policy, base)

    def is_idle(self, served: ServedModel) -> bool:  # noqa: ARG002 - a running call keeps what it needs
        """Return True: a running call is not disturbed."""
        return True

    def unload(self, name: str, served: ServedModel) -> None:
        """Unload nothing."""


_ADAPTER: Final[PolicyKind] = AdapterKind()
_PROMPT: Final[PolicyKind] = PromptKind()


def kind_of(name: str) -> PolicyKind:
    """Return the kind of a policy with a checkpoint."""
    return _PROMPT if is_prompt(name) else _ADAPTER


def _upstream(policy: Policy, models: ServedModels) -> UpstreamPolicy:
    base = models.by_name().get(str(policy.base))
    if not isinstance(base, UpstreamPolicy):
        raise ConfigError(f"there is no upstream {policy.base!r} here. Give the server --upstream {policy.base}=URL.")
    return base


def _servers(base: UpstreamPolicy) -> AdapterServers:
    return AdapterServers((base.upstream.url, *base.upstream.replicas), base.upstream.key)

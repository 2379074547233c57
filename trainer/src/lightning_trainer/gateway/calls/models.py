"""The models that answer here, and the choice of the model for a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import selects
from lightning_trainer.gateway.calls.answers import Record
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing

NO_EMBEDDINGS: Final = (
    "Give the program's embeddings client a base_url and an api_key of its own, or let `lightning-rl server` serve the"
    " embeddings model with --upstream MODEL=URL."
)


class ServedModel(Protocol):
    """A model that answers calls: the embedded engine or an upstream."""

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together; None if only the upstream knows."""
        ...

    async def answer(self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing) -> None:
        """Answer one request; see `EmbeddedEngine.answer`."""
        ...

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty if it is unknown."""
        ...

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt."""
        ...

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:
        """Answer ``POST /v1/embeddings``."""
        ...

    def forget(self, attempt_id: str) -> None:
        """Drop what is kept for an attempt that has ended."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class ServedModels:
    """Finds the model that answers a call.

    Args:
        served: models by name.
        provider: answers attempts' calls of agents that are not trained; None: they are answered like the others.
        records_provider: whether the calls that the provider answers are recorded.
    """

    def __init__(
        self, served: Mapping[str, ServedModel], provider: ServedModel | None = None, *, records_provider: bool = True
    ) -> None:
        self._served = dict(served)
        self._removed: list[ServedModel] = []
        self._provider = provider
        self._records_provider = records_provider

    def add(self, name: str, model: ServedModel) -> None:
        """Serve another model from now on. May be called from any thread.

        Raises:
            ConfigError: the name is in use.
        """
        if name in self._served:
            raise ConfigError(f"a model {name!r} is already served. Give this one another name.")
        self._served = {**self._served, name: model}

    def remove(self, name: str) -> None:
        """Stop serving a model. Its running calls continue to their end."""
        self._removed += [each for known, each in self._served.items() if known == name]
        self._served = {known: each for known, each in self._served.items() if known != name}

    def by_name(self) -> Mapping[str, ServedModel]:
        """Return the current models by name."""
        return self._served

    async def close(self) -> None:
        """Close the connections of all models."""
        for model in (*self._served.values(), *self._removed, *filter(None, [self._provider])):
            await model.close()

    def describe(self) -> list[dict[str, Any]]:
        """Return all models in a format for OpenAI's and Anthropic's clients."""
        return [_describe(name, policy) for name, policy in self._served.items()]

    def describe_one(self, name: str) -> dict[str, Any]:
        """Return one model in a format for OpenAI's and Anthropic's clients.

        Raises:
            Refusal: there is no such model.
        """
        if name not in self._served:
            raise _unknown(name, self._served)
        return _describe(name, self._served[name])

    def samples(self, agent: str | None, routing: Routing) -> bool:
        """Whether an agent's calls are answered here if no decider chooses otherwise."""
        return self._provider is not None or routing.policies.of(agent) is not None or selects(routing.agents, agent)

    def records(self, policy: ServedModel) -> bool:
        """Whether the calls that a model answers are recorded."""
        return policy is not self._provider or self._records_provider

    def embedder(self, name: str, *, of_attempt: bool) -> ServedModel:
        """Return the model that answers ``POST /v1/embeddings``: the requested one, whichever agent requests it.

        Args:
            name: of the requested model.
            of_attempt: whether an attempt requests it; then the provider answers for models that are not served here.

        Raises:
            Refusal: there is no such model.
        """
        elsewhere = self._provider if of_attempt else None
        model = self._served.get(name, elsewhere)
        if model is None:
            raise _unknown(name, self._served, f". {NO_EMBEDDINGS}")
        return model

    def route(self, pending: PendingCall, routing: Routing, instead: str | None = None) -> ServedModel:
        """Return the model that answers a call, and store its name.

        Args:
            pending: the call.
            routing: as it was when the request arrived.
            instead: the model that a decider chose; None: the agent's.

        Raises:
            Refusal: there is no such model.
        """
        policy_name = pending.routed.policy
        if instead is not None:
            policy_name = instead
        elif pending.requested.grant.attempt_id is not None:
            own = routing.policies_of(pending.requested.grant.rollout_id).of(pending.requested.agent)
            untrained = (
                own is None
                and pending.requested.agent is not None
                and not selects(routing.agents, pending.requested.agent)
            )
            if untrained and self._provider is not None:
                return self._provider
            if own is not None:
                policy_name = own
            elif policy_name not in self._served:
                policy_name = routing.model  # an unchanged program requests its usual model
        if policy_name != pending.routed.policy:
            pending.routed = replace(pending.routed, policy=policy_name)
        policy = self._served.get(policy_name)
        if policy is None:
            nameless = (
                pending.requested.grant.attempt_id is not None
                and routing.policies.by_agent
                and pending.requested.agent is None
            )
            hint = (
                "This call names no agent: send x-lightning-agent, or request one of these models"
                if nameless
                else f"Request one of these. `lightning-rl serve --name {policy_name}` serves a model under that name"
            )
            raise _unknown(policy_name, self._served, f". {hint}")
        return policy


def _unknown(name: str, known: Iterable[str], hint: str = "") -> Refusal:
    listed = ", ".join(known) or "none"
    return Refusal(404, f"no model {name!r} here. Models: {listed}{hint}", code="model_not_found")


def _describe(name: str, policy: ServedModel) -> dict[str, Any]:
    longest = policy.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "lightning",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        **({} if longest is None else {"max_model_len": longest}),  # vLLM's name for it
    }

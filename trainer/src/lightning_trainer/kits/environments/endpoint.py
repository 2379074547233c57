"""The endpoint of an environment's agents: the gateway of their attempt, otherwise the user's endpoint."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from lightning_spans.errors import ConfigError
from lightning_spans.record.context import current_attempt

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AGENT: Final = "agent"  # for environments with one unnamed agent


@dataclass(frozen=True, slots=True)
class AttemptEndpoint:
    """An OpenAI-compatible endpoint, for one agent in one attempt.

    Attributes:
        url: base URL, with ``/v1``.
        model: model name of the requests.
        key: bearer key.
        headers: sent with every call; they name the agent.
    """

    url: str
    model: str
    key: str = field(repr=False)
    headers: dict[str, str] = field(default_factory=dict)

    def client(self) -> AsyncOpenAI:
        """Return an OpenAI client for this endpoint."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.url, api_key=self.key, default_headers=self.headers)

    @contextmanager
    def key_in_environment(self) -> Iterator[str]:
        """Set a new environment variable to the key inside the block, for libraries that only read keys from there.

        Yields:
            The variable's name. Attempts in one process have different ones, because each has its own key.
        """
        name = f"LIGHTNING_KEY_{uuid.uuid4().hex}"
        os.environ[name] = self.key
        try:
            yield name
        finally:
            del os.environ[name]


def endpoint(agent: str = AGENT) -> AttemptEndpoint:
    """Return the endpoint of this agent in the current attempt.

    Raises:
        ConfigError: no gateway takes its calls, and the environment variables name no endpoint.
    """
    attempt = current_attempt()
    if attempt is not None and attempt.reroutes(agent):
        headers = {"x-lightning-agent": quote(agent, safe="")}
        return AttemptEndpoint(f"{attempt.endpoint}/v1", attempt.model, attempt.key or "none", headers)
    url, model = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_MODEL")
    if not (url and model):
        raise ConfigError(
            f"no model or endpoint is given for the environment's agent {agent!r}, which is not trained here. Set"
            " OPENAI_BASE_URL, OPENAI_MODEL and OPENAI_API_KEY to its endpoint, or choose it with --agents."
        )
    return AttemptEndpoint(url, model, os.environ.get("OPENAI_API_KEY") or "none")

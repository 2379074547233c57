"""`child_environment()`: variables that make the model calls of a process that an agent starts part of the attempt."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import quote

from lightning_spans.record.context import AGENT_VARIABLE, current_agent, current_attempt, given_attempt, settled
from lightning_spans.record.delivery.outbox import default_spool
from lightning_spans.schema.attempts import Attempt

# codex and Claude Code take a key of the environment from their own variables.
_KEYS: Final = ("OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY")


def child_environment(agent: str | None = None) -> dict[str, str]:
    """Return the variables that a process needs, on top of your own, to take part in this attempt.

    For whatever starts a command and is given its environment, such as the Claude Agent SDK or codex:
    ``ClaudeAgentOptions(env=child_environment(agent="coder"))``. A program that is attached finds its attempt in them.
    Where calls of the agent go to the gateway, ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL`` and their keys lead those of
    any other program there. Outside of an attempt there are none.

    Args:
        agent: whose calls they are; by default the agent at work.
    """
    attempt = current_attempt()
    name = current_agent() if agent is None else agent
    if attempt is None:
        return {} if name is None else {AGENT_VARIABLE: name}
    values = variables_of(attempt, name)
    if attempt.replay is not None or attempt.reroutes(name):
        values |= gateway_variables(attempt, name)
    return values


def attempt_variables() -> dict[str, str]:
    """Return what a process that is started here needs; empty outside of attempts, and where it inherits them."""
    context = settled()
    attempt = given_attempt(context)
    return {} if attempt is None else variables_of(attempt, current_agent(context))


def variables_of(attempt: Attempt, agent: str | None) -> dict[str, str]:
    """Return the variables by which an attached program finds its attempt. What an outer one had set is emptied."""
    values = {name: "" for name in _ATTEMPT if os.environ.get(name)}
    values |= {"LIGHTNING_SPOOL": str(default_spool().absolute()), **attempt.environment()}
    return values | ({AGENT_VARIABLE: agent} if agent is not None else {})


_ATTEMPT: Final = ("LIGHTNING_ENDPOINT", "LIGHTNING_KEY", "LIGHTNING_AGENTS", "LIGHTNING_PROMPTS", "LIGHTNING_REPLAY")


def gateway_variables(attempt: Attempt, agent: str | None = None) -> dict[str, str]:
    """Return the variables by which programs in any language find the gateway; empty where there is none."""
    if not attempt.endpoint:
        return {}
    values = dict.fromkeys(_KEYS, attempt.key or "none")
    # OPENAI_API_BASE, the older name, goes before OPENAI_BASE_URL in LangChain.
    values["OPENAI_BASE_URL"] = values["OPENAI_API_BASE"] = f"{attempt.endpoint}/v1"
    values["ANTHROPIC_BASE_URL"] = attempt.endpoint
    values["ANTHROPIC_AUTH_TOKEN"] = ""  # it would go before the key
    if agent is not None:
        header = f"x-lightning-agent: {quote(agent, safe='')}"
        values["ANTHROPIC_CUSTOM_HEADERS"] = values["OPENAI_CUSTOM_HEADERS"] = header  # so that the gateway knows it
    return values

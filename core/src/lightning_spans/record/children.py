"""`child_environment()`: variables that make the model calls of a child process part of the attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from opentelemetry.context import Context

from lightning_spans.record.context import AGENT_VARIABLE, current_agent, current_attempt, given_attempt, settle_context
from lightning_spans.record.delivery.outbox import default_spool
from lightning_spans.schema.attempts import Attempt

# codex and Claude Code read their keys from their own variables.
_KEYS: Final = ("OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY")


def child_environment(agent: str | None = None) -> dict[str, str]:
    """Return the variables that a child process needs, in addition to your own, to take part in this attempt.

    For code that starts a command with a given environment, such as the Claude Agent SDK or codex:
    ``ClaudeAgentOptions(env=child_environment(agent="coder"))``. An attached program finds its attempt in them. If the
    agent's calls go to the gateway, ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL`` and their keys send the calls of any
    other program there too. Outside an attempt the result is empty.

    Args:
        agent: the agent that makes the calls; by default the current agent.
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
    """Return what a child process started here needs; empty outside attempts, and if the child inherits it."""
    context = settle_context()
    attempt = given_attempt(context)
    return {} if attempt is None else variables_of(attempt, current_agent(context))


def variables_of(attempt: Attempt, agent: str | None) -> dict[str, str]:
    """Return the variables by which an attached program finds its attempt.

    Variables of an outer attempt are emptied.
    """
    values = {name: "" for name in _OPTIONAL if os.environ.get(name)}
    values |= {"LIGHTNING_SPOOL": str(default_spool().absolute()), **attempt.environment()}
    return values | ({AGENT_VARIABLE: agent} if agent is not None else {})


_OPTIONAL: Final = ("LIGHTNING_ENDPOINT", "LIGHTNING_KEY", "LIGHTNING_AGENTS", "LIGHTNING_PROMPTS", "LIGHTNING_REPLAY")
_ATTEMPT: Final = ("LIGHTNING_ROLLOUT_ID", "LIGHTNING_ATTEMPT_ID", "LIGHTNING_MODEL", *_OPTIONAL)


def task_variables(context: Context) -> dict[str, str]:
    """Return the attempt and agent of this context as variables, also those that this process inherited."""
    attempt, agent = current_attempt(context), current_agent(context)
    values = {} if attempt is None else attempt.environment()
    return values | ({AGENT_VARIABLE: agent} if agent is not None else {})


def replace_variables(values: Mapping[str, str]) -> None:
    """Give this process another attempt and agent, or none, instead of those with which it was started."""
    for name in (*_ATTEMPT, AGENT_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(values)


def gateway_variables(attempt: Attempt, agent: str | None = None) -> dict[str, str]:
    """Return the variables by which programs in any language find the gateway; empty if there is none."""
    if not attempt.endpoint:
        return {}
    values = dict.fromkeys(_KEYS, attempt.key or "none")
    # LangChain prefers OPENAI_API_BASE, the older name, to OPENAI_BASE_URL.
    values["OPENAI_BASE_URL"] = values["OPENAI_API_BASE"] = f"{attempt.endpoint}/v1"
    values["ANTHROPIC_BASE_URL"] = attempt.endpoint
    values["ANTHROPIC_AUTH_TOKEN"] = ""  # it would have priority over the key
    if agent is not None:
        header = f"x-lightning-agent: {quote(agent, safe='')}"
        # so that the gateway knows the agent
        values["ANTHROPIC_CUSTOM_HEADERS"] = values["OPENAI_CUSTOM_HEADERS"] = header
    return values

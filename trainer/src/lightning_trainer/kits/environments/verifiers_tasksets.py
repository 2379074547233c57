"""Environments of verifiers from 0.4 on: a taskset, and agents that play it, each by a harness in a runtime.

Calls go through verifiers' own interception server and from there to the gateway. Unless the environment or an option
sets them, an agent is played by the `null` harness (a chat loop with the taskset's tools, which executes no code) in a
process of this machine; the default of verifiers is its `bash` harness in a cloud sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.schema.spans import Json
from lightning_trainer.kits.environments.endpoint import endpoint


def tasks(
    name: str, options: Mapping[str, Any], count: int, held_out: int
) -> tuple[Sequence[dict[str, Json]], Sequence[dict[str, Json]]]:
    """Return the taskset's first tasks; the last of them are held out."""
    from verifiers.v1.utils.loaders import load_environment

    taskset = load_environment(_config(name, options)).taskset
    rows = [task.data.model_dump(mode="json", exclude_none=True) for task in islice(taskset, count + held_out)]
    cut = max(0, len(rows) - held_out)
    return rows[:cut], rows[cut:]


async def play(name: str, options: Mapping[str, Any], task: Mapping[str, Any]) -> float | dict[str, float]:
    """Run one episode, and return its reward, by agent if there are several.

    Raises:
        AgentFailedError: the episode failed.
    """
    from verifiers.v1 import ModelContext
    from verifiers.v1.utils.loaders import load_environment

    with ExitStack() as stack:
        config, agents = _at_their_endpoints(_config(name, options), stack)
        environment = load_environment(config)
        kind = type(environment.taskset).task_type()
        (slot,) = environment.slots(kind(kind.data_type().model_validate(task), config.taskset.task))
        context = ModelContext(model=agents[0].model, client=agents[0].client)
        async with environment.serving():
            episode = await environment.run_slot(slot, context)
    failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if failures:
        raise AgentFailedError(f"environment {name}: {failures[0].type}: {failures[0].message}")
    return _rewards(episode.traces, several=len(agents) > 1)


def _rewards(traces: Sequence[Any], *, several: bool) -> float | dict[str, float]:
    """Return the mean reward of each agent's runs."""
    by_agent: dict[str, list[float]] = {}
    for trace in traces:
        by_agent.setdefault(trace.agent.name or "", []).append(float(trace.reward))
    means = {name: sum(values) / len(values) for name, values in by_agent.items()}
    return means if several else next(iter(means.values()))


def _config(name: str, options: Mapping[str, Any]) -> Any:
    """Return the environment's configuration: options override the author's values, which override our defaults."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    given = _nest_options(options)
    ident = given.get("id", "")
    raw: dict[str, Any] = {**given, "taskset": {**given.get("taskset", {}), "id": name}}
    for role, field in env_config_type(name, ident).model_fields.items():
        if isinstance(field.default, AgentConfig):
            own = dict(raw.get(role) or {})
            if "runtime" not in field.default.model_fields_set:
                own.setdefault("runtime", {"type": "subprocess"})
            if field.default.harness is None and default_harness_id(name) == "bash":
                own.setdefault("harness", {"id": "null"})
            raw[role] = own
    return resolve_env_config(raw)


def _nest_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted options as nested tables.

    Raises:
        ConfigError: an option is both a value and a table.
    """
    nested: dict[str, Any] = {}
    for path, value in options.items():
        *tables, last = path.split(".")
        place = nested
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"option {path} of the environment: {table} has a value already.")
        place[last] = value
    return nested


def _at_their_endpoints(config: Any, stack: ExitStack) -> tuple[Any, list[Any]]:
    """Set the endpoint of each agent that has neither an endpoint nor a model.

    Returns:
        The configuration, and the agents in it.
    """
    from verifiers.v1 import EvalClientConfig
    from verifiers.v1.configs.agent import agent_config_fields

    agents = dict(agent_config_fields(config))
    for role, agent in agents.items():
        if agent.client is None and agent.model is None:
            there = endpoint(role)
            client = EvalClientConfig(
                base_url=there.url,
                api_key_var=stack.enter_context(there.key_in_environment()),
                headers=there.headers,
            )
            agents[role] = agent.model_copy(update={"client": client, "model": there.model})
    return config.model_copy(update=agents), list(agents.values())

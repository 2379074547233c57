"""OpenEnv servers, by URL. A server gives observations and takes actions; the loop with a model is here.

Its tasks are arguments of `reset`: the indices of a split if the server lists its splits, otherwise seeds, from 0. An
action is a call of one of its tools if the server has tools (MCP); otherwise it is JSON in the model's answer, or the
bare answer if the action has one required field. An episode ends when the server reports that it is done, when the
model calls no tool, or after ``max_turns`` calls. Its reward is the sum of the steps' rewards.

Options: ``split`` and ``val_split`` (default: train, and test or validation if the server has them), ``max_turns``
(20), ``system`` (a system prompt instead of ours), and ``reset``, a table of further arguments of every reset.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import httpx

from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import Json
from lightning_trainer.kits.environments.endpoint import AttemptEndpoint, endpoint

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_OPTIONS: Final = frozenset({"split", "val_split", "max_turns", "system", "reset"})
_MAX_TURNS: Final = 20
_TIMEOUT_S: Final = 30.0
_CALLS_TOOLS: Final = frozenset({"Action", "CallToolAction", "ListToolsAction"})  # schemas of servers with MCP tools
_HELD_OUT: Final = ("test", "validation", "val", "eval", "dev")


def tasks(
    name: str, options: Mapping[str, Any], count: int, held_out: int
) -> tuple[Sequence[dict[str, Json]], Sequence[dict[str, Json]]]:
    """Return the arguments of the server's reset for the training tasks and for the held-out ones.

    Raises:
        ConfigError: openenv is not installed, no server answers at the URL, or an option is unknown.
    """
    _require_openenv()
    if unknown := sorted(set(options) - _OPTIONS):
        raise ConfigError(f"OpenEnv has no option {', '.join(unknown)}. There are: {', '.join(sorted(_OPTIONS))}.")
    try:
        with httpx.Client(base_url=_http(name), timeout=_TIMEOUT_S) as http:
            http.get("/schema").raise_for_status()
            splits = _splits(http)
    except httpx.HTTPError as error:
        raise ConfigError(f"no OpenEnv server answers at {name}: {error}. Start it, or check the URL.") from None
    if not splits:
        if wrong := sorted({"split", "val_split"} & set(options)):
            raise ConfigError(f"the OpenEnv server {name} has no splits: leave out {', '.join(wrong)}.")
        return [{"seed": seed} for seed in range(count)], [{"seed": count + seed} for seed in range(held_out)]
    split = _choose_split(options.get("split"), splits, ("train",)) or next(iter(splits))
    val_split = _choose_split(options.get("val_split"), splits, _HELD_OUT) or split
    if val_split != split:
        return _rows(split, range(min(count, splits[split]))), _rows(val_split, range(min(held_out, splits[val_split])))
    cut = max(0, min(count, splits[split] - held_out))
    return _rows(split, range(cut)), _rows(split, range(cut, min(cut + held_out, splits[split])))


async def run(task: dict[str, Any]) -> float:
    """Play one episode: reset, then the model's actions, until it is over.

    Returns:
        The sum of the steps' rewards.
    """
    # in a thread because the import takes seconds, and other attempts run meanwhile
    await asyncio.to_thread(_require_openenv)
    from openenv.core import GenericEnvClient

    name, options = task["environment"], task["options"]
    async with httpx.AsyncClient(base_url=_http(name), timeout=_TIMEOUT_S) as http:
        schema = (await http.get("/schema")).raise_for_status().json()["action"]
    there = endpoint()
    async with there.client() as client, GenericEnvClient(base_url=_http(name)) as server:
        begun = await server.reset(**{**options.get("reset", {}), **task["task"]})
        loop = _Tools if schema.get("title") in _CALLS_TOOLS else _Answers
        return await loop(server, client, there, schema, options).play(begun)


class _Loop(ABC):
    """The turns of an episode.

    Args:
        server: client of the OpenEnv server, connected.
        client: client of the model's endpoint.
        there: the model's endpoint.
        schema: of the server's actions.
        options: of the environment.
    """

    def __init__(
        self,
        server: Any,
        client: AsyncOpenAI,
        there: AttemptEndpoint,
        schema: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._server = server
        self._client = client
        self._there = there
        self._schema = schema
        self._options = options
        self._messages: list[Any] = []
        self._tools: list[Any] = []
        self._total = 0.0

    async def play(self, begun: Any) -> float:
        """Play the episode from its first observation. Returns the sum of the rewards."""
        await self._begin(begun)
        done = begun.done
        for _ in range(self._options.get("max_turns", _MAX_TURNS)):
            if done:
                break
            given: dict[str, Any] = {"tools": self._tools} if self._tools else {}
            answer = await self._client.chat.completions.create(
                model=self._there.model, messages=self._messages, **given
            )
            message = answer.choices[0].message
            self._messages.append(message.model_dump(exclude_none=True))
            done = await self._act(message)
        return self._total

    @abstractmethod
    async def _begin(self, begun: Any) -> None:
        """Open the conversation with the first observation."""

    @abstractmethod
    async def _act(self, message: Any) -> bool:
        """Carry out the actions of an answer, and return whether the episode is over."""

    async def _step(self, action: Mapping[str, Any]) -> tuple[str, bool]:
        """Take a step, and return the text for the model, and whether the episode is over.

        An action that the server rejects is not a step: the model gets the reason.
        """
        try:
            result = await self._server.step(dict(action))
        except RuntimeError as error:  # the only error class that openenv has
            if "VALIDATION_ERROR" not in str(error):
                raise
            return f"This is not a valid action. Its fields: {self._fields()}", False
        self._total += float(result.reward or 0.0)
        return _text(result.observation), bool(result.done)

    def _fields(self) -> str:
        return json.dumps(self._schema.get("properties", {}), ensure_ascii=False)

    def _open(self, system: str, begun: Any) -> None:
        self._messages = [
            {"role": "system", "content": self._options.get("system", system)},
            {"role": "user", "content": _text(begun.observation)},
        ]


class _Answers(_Loop):
    """The loop in which each answer of the model is an action."""

    async def _begin(self, begun: Any) -> None:
        how = (
            f"with the {self._only()} alone, and nothing else"
            if self._only()
            else f"with a JSON object and nothing else. Its fields: {self._fields()}"
        )
        self._open(f"You act in an environment. Answer each observation {how}.", begun)

    def _only(self) -> str | None:
        required = self._schema.get("required", [])
        return required[0] if len(required) == 1 else None

    async def _act(self, message: Any) -> bool:
        action = self._action((message.content or "").strip())
        if isinstance(action, str):
            self._messages.append({"role": "user", "content": action})
            return False
        text, done = await self._step(action)
        self._messages.append({"role": "user", "content": text})
        return done

    def _action(self, text: str) -> dict[str, Any] | str:
        """Return the action in an answer, or a text that says what is wrong with it."""
        if text.startswith("```") and text.endswith("```"):
            text = "\n".join(text.splitlines()[1:-1]).strip()
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if isinstance(value, dict):
            return value
        only = self._only()
        if only is None:
            return "This is not a JSON object. Answer with one."
        of_text = self._schema.get("properties", {}).get(only, {}).get("type") == "string"
        return {only: text if of_text else value}


class _Tools(_Loop):
    """The loop in which the model calls the server's tools through the tool calls of the API."""

    async def _begin(self, begun: Any) -> None:
        listed = await self._server.step({"type": "list_tools"})
        self._tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
                },
            }
            for tool in listed.observation["tools"]
        ]
        self._open("You act in an environment by calling its tools. Answer without a call when you are done.", begun)

    async def _act(self, message: Any) -> bool:
        done = not message.tool_calls
        for call in message.tool_calls or ():
            text, over = await self._call(call.function.name, call.function.arguments)
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            done = done or over
        return done

    async def _call(self, name: str, arguments: str) -> tuple[str, bool]:
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return "These arguments are no JSON object.", False
        return await self._step({"type": "call_tool", "tool_name": name, "arguments": given})


def _text(observation: Any) -> str:
    """Return an observation as text for a model: its only text, otherwise JSON, without done, reward and metadata.

    Tool environments have no other fields, and give the task in the metadata: then the metadata are used.
    """
    said = {
        name: value
        for name, value in observation.items()
        if name not in {"done", "reward", "metadata"} and value is not None
    }
    said = said or observation.get("metadata") or {}
    if len(said) == 1 and isinstance(only := next(iter(said.values())), str):
        return only
    return json.dumps(said, ensure_ascii=False)


def _rows(split: str, indices: range) -> list[dict[str, Json]]:
    return [{"split": split, "index": index} for index in indices]


def _choose_split(named: Any, splits: Mapping[str, int], usual: Sequence[str]) -> str | None:
    if named is not None and named not in splits:
        raise ConfigError(f"the OpenEnv server has no split {named!r}. It has: {', '.join(splits)}.")
    return named or next((split for split in usual if split in splits), None)


def _splits(http: httpx.Client) -> dict[str, int]:
    """Return the number of tasks by split; empty if the server lists no tasks (older ones have no such routes)."""
    listed = http.get("/list_environments")
    if listed.status_code != httpx.codes.OK:
        return {}
    for name in listed.json():
        told = http.get(f"/{name}/splits")
        if told.status_code == httpx.codes.OK:
            return {split["name"]: _count(http, name, split["name"]) for split in told.json()}
    return {}


def _count(http: httpx.Client, name: str, split: str) -> int:
    return int(http.post(f"/{name}/num_tasks", json={"split": split}).raise_for_status().json()["num_tasks"])


def _http(url: str) -> str:
    return url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)


def _require_openenv() -> None:
    try:
        import openai  # noqa: F401
        import openenv.core  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'The client of OpenEnv cannot be imported: {error}. Run: pip install "lightning-trainer[openenv]"'
        ) from None

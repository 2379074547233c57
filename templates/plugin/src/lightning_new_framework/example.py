"""A one-page framework in place of yours, so that every test passes before you begin.

Replace it step by step: import your framework in `agents.py` and `tools.py`, write the tests' programs in it, then
delete this file.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from openai import AsyncOpenAI


class Agent:
    """Calls a model until it asks for no more tools.

    Attributes:
        name: the agent's name.
        observers: the user's functions, called with each event in order.
        request_options: added to every request.
    """

    def __init__(
        self, name: str, instructions: str, client: AsyncOpenAI, model: str, tools: Sequence[Callable[..., Any]] = ()
    ) -> None:
        self.name = name
        self.observers: list[Callable[[str], None]] = []
        self.request_options: dict[str, Any] = {}
        self._instructions = instructions
        self._client = client
        self._model = model
        self._tools = {tool.__name__: tool for tool in tools}

    async def run(self, prompt: str) -> str:
        """Return the answer to a prompt."""
        messages = self._begin(prompt)
        while True:
            reply = await self._client.chat.completions.create(**self._request(messages))
            message = reply.choices[0].message
            if not message.tool_calls:
                self._observe("answer")
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            messages += await asyncio.gather(*(self._result_of(call) for call in message.tool_calls))

    async def stream(self, prompt: str) -> AsyncGenerator[str, None]:
        """Return the answer part by part, without tools."""
        chunks = await self._client.chat.completions.create(**self._request(self._begin(prompt)), stream=True)
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    async def call_tool(self, name: str, arguments: str, call_id: str) -> str:
        """Return a tool's result as text."""
        self._observe(f"{name} {call_id}")
        result = self._tools[name](**json.loads(arguments))
        return str(await result if inspect.isawaitable(result) else result)

    async def _result_of(self, call: Any) -> dict[str, Any]:
        try:
            result = await self.call_tool(call.function.name, call.function.arguments, call.id)
        except Exception as error:  # noqa: BLE001 - the model is told, as frameworks do
            result = f"failed: {error}"
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    def _begin(self, prompt: str) -> list[dict[str, Any]]:
        self._observe("question")
        return [{"role": "system", "content": self._instructions}, {"role": "user", "content": prompt}]

    def _request(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        request = {"model": self._model, "messages": messages, **self.request_options}
        if self._tools:
            request["tools"] = [{"type": "function", "function": {"name": name}} for name in self._tools]
        return request

    def _observe(self, what: str) -> None:
        for observer in self.observers:
            observer(f"{self.name}: {what}")

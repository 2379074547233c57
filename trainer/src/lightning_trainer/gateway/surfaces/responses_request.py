"""A request of OpenAI's Responses as a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.chat.body import tool_call
from lightning_trainer.gateway.http.errors import bad_request
from lightning_trainer.gateway.request.effort import known_effort
from lightning_trainer.gateway.request.fields import flag, read_list, refuse_several_answers, wrong
from lightning_trainer.gateway.surfaces.response_tools import OwnTool, ResponseTools, free_text_arguments

_TRANSLATED: Final = frozenset({
    "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "reasoning", "include", "truncation",
    "previous_response_id", "conversation", "background", "prompt", "store", "stream", "stream_options", "metadata",
    "max_tool_calls", "top_logprobs", "context_management",
    "client_metadata",  # bookkeeping, as metadata is
})  # fmt: skip
_REFUSED: Final = ("conversation", "background", "prompt", "max_tool_calls")
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = frozenset({_LOGPROBS, "reasoning.encrypted_content"})  # the latter: there is none to send


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """A parsed request of Responses.

    Attributes:
        chat: as a chat completion.
        tools: its tools as the client knows them.
        left_out: the parts that are not requested, as they were given.
    """

    chat: dict[str, Any]
    tools: ResponseTools
    left_out: dict[str, Any]


def read_response(body: Mapping[str, Any], before: list[dict[str, Any]]) -> ReadResponse:
    """Translate a request.

    Args:
        body: as received.
        before: the messages of the response that it continues.

    Raises:
        Refusal: it is malformed, or requests what no chat completion supports.
    """
    for name in _REFUSED:
        if body.get(name):
            raise bad_request(f"{name} is not supported. Leave it out.", "unsupported_parameter")
    if body.get("truncation") not in (None, "disabled"):
        raise bad_request("truncation is not supported: too long a context is an error.", "unsupported_parameter")
    refuse_several_answers(body)
    chat = {name: value for name, value in body.items() if name not in _TRANSLATED}
    items = Items(body.get("input"))
    tools = ResponseTools([*read_list("tools", body.get("tools") or []), *items.tools], body.get("tool_choice"))
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *before, *items.messages]
    if tools.chat:
        chat["tools"] = tools.chat
    if tools.choice is not None:
        chat["tool_choice"] = tools.choice
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if flag(body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    asked = _effort({"reasoning": items.reasoning or body.get("reasoning")})
    effort = {} if asked is None else {"reasoning_effort": known_effort(asked)}
    left_out = {"tools": tools.left_out} if tools.left_out else {}
    left_out |= {} if known_effort(asked) == asked else {"reasoning_effort": asked}
    left_out |= _compaction(body.get("context_management"))
    return ReadResponse(chat | effort | _format(body.get("text")) | _logprobs(body), tools, left_out)


def _compaction(value: Any) -> dict[str, Any]:
    """Return what is left out of the settings for keeping a context short: compaction, which begins only near its end.

    Raises:
        Refusal: it is something else, which would change the prompt.
    """
    if not value:
        return {}
    for edit in read_list("context_management", value):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if kind != "compaction":
            raise bad_request(f"context_management: {kind!r} is not supported here.", "unsupported_parameter")
    return {"context_management": value}


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    included = body.get("include") or []
    for name in read_list("include", included):
        if name not in tuple(_INCLUDED):
            raise bad_request(f"include {name!r} is not supported. Use one of: {', '.join(sorted(_INCLUDED))}.")
    chat: dict[str, Any] = {"logprobs": True} if _LOGPROBS in included else {}
    return chat | ({"top_logprobs": body["top_logprobs"]} if body.get("top_logprobs") else {})


def _effort(settings: Mapping[str, Any]) -> Any:
    """Return the effort. A summary is never made here, and requesting one changes no answer."""
    value = settings.get("reasoning")
    return value.get("effort") if isinstance(value, dict) else None


def _format(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("text", value, "an object")
    chat = {"verbosity": value["verbosity"]} if value.get("verbosity") is not None else {}
    wanted = value.get("format")
    if wanted is None or wanted == {"type": "text"}:
        return chat
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        described = {name: part for name, part in wanted.items() if name != "type"}
        return {**chat, "response_format": {"type": "json_schema", "json_schema": described}}
    return {**chat, "response_format": wanted}


def is_reference(item: Any) -> bool:
    """Whether an item of an input is the id of an item of an earlier response."""
    return isinstance(item, dict) and item.get("type") == "item_reference"


class Items:
    """An input: a text, or a list of items.

    An answer comes back as several items (reasoning, text, calls), which together are one message of the assistant.
    Tools and settings may be among them.

    Raises:
        Refusal: an item is malformed, or of an unsupported kind.
    """

    def __init__(self, value: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] = []
        self.reasoning: Mapping[str, Any] | None = None
        self._thought = ""
        if isinstance(value, str):
            self.messages.append({"role": "user", "content": value})
        else:
            for at, item in enumerate(read_list("input", value)):
                self._take(item, f"input[{at}]")
        if not self.messages:
            raise wrong("input", value, "a string or a list with at least one message")

    def _take(self, item: Any, where: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            self._thought = "".join(_thoughts(item, where))
        elif kind == "additional_tools":
            self.tools += read_list(f"{where}.tools", item.get("tools"))
        elif kind == "configuration_update":
            self._configure(item, where)
        else:
            self._say(kind, item, where)

    def _configure(self, item: Mapping[str, Any], where: str) -> None:
        if item.keys() - {"type", "id", "role", "reasoning"}:
            raise bad_request(f"{where}: only reasoning is supported in a configuration_update.")
        self.reasoning = item.get("reasoning")

    def _say(self, kind: Any, item: Mapping[str, Any], where: str) -> None:
        if kind == "message":
            self.messages.append(_message(item, where))
        elif str(kind) in {"function_call", "custom_tool_call"}:
            _add_call(self.messages, item, self._thought)
        elif str(kind) in {"function_call_output", "custom_tool_call_output"}:
            content = _content(item.get("output"), where)
            self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise bad_request(f"{where}: an item of type {kind!r} is not taken.", "unsupported_content")
        if self._thought:
            if self.messages[-1]["role"] == "assistant":
                self.messages[-1].setdefault("reasoning_content", self._thought)
            self._thought = ""


def messages_of_input(value: Any) -> list[dict[str, Any]]:
    """Return the messages of an input; see `Items`."""
    return Items(value).messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], thought: str) -> None:
    custom = item["type"] == "custom_tool_call"
    if not isinstance(item.get("name"), str):
        raise wrong(f"input: name of a {item['type']}", item.get("name"), "a text")
    own = OwnTool("custom" if custom else "function", item["name"], item.get("namespace"))
    arguments = free_text_arguments(item.get("input")) if custom else item.get("arguments") or "{}"
    call = tool_call(item.get("call_id"), own.chat_name, arguments)
    if thought or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _thoughts(item: Mapping[str, Any], where: str) -> Iterator[str]:
    for part in read_list(f"{where}: content or summary", item.get("content") or item.get("summary") or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"role": item.get("role"), "content": _content(item.get("content"), where)}


def _content(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    parts = [_part(part, where) for part in read_list(where, value)]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = {} if part.get("detail") is None else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    raise bad_request(f"{where}: content of type {kind!r} is not taken.", "unsupported_content")

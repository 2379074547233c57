"""Tools of a Responses request as functions of a chat completion, and the way back to the client's own names.

A chat completion has only functions. A namespace becomes a prefix of its functions' names. A custom tool, which takes
free text, becomes a function with one text argument. Tools that run at OpenAI are left out if there are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lightning_spans.schema.json import dumps, read_json
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.request.fields import read_list, wrong

_DEFAULT: Final = "functions"  # OpenAI's name of the namespace for tools without one
_HOSTED: Final = (  # prefixes of the dated names of tools that run at OpenAI
    "web_search", "file_search", "code_interpreter", "image_generation", "computer_use", "mcp",
)  # fmt: skip
_FREE_TEXT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class OwnTool:
    """A tool as the client knows it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """Its name in a chat completion."""
        return self.name if self.namespace in (None, _DEFAULT) else f"{self.namespace}__{self.name}"


class ResponseTools:
    """The tools of one request.

    Args:
        given: its tools, including those among its input.
        choice: its ``tool_choice``.

    Raises:
        Refusal: one is malformed, or can neither be supported here nor left out.
    """

    def __init__(self, given: Sequence[Any], choice: Any) -> None:
        self.chat: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._own: dict[str, OwnTool] = {}
        for tool in given:
            self._add(tool, None)
        if self.left_out and not self.chat:
            raise _hosted_tool_refusal(self.left_out[0])
        self.choice = None if choice is None else self._choice(choice)

    def own(self, chat_name: str) -> OwnTool:
        """Return the tool that the model called. An unknown name was made up by the model."""
        return self._own.get(chat_name) or OwnTool("function", chat_name)

    def _add(self, tool: Any, namespace: str | None) -> None:
        kind: Any = str(tool.get("type")) if isinstance(tool, dict) else tool
        if kind == "namespace" and namespace is None:
            for each in read_list("tools", tool.get("tools")):
                self._add(each, str(tool.get("name")))
        elif kind in {"function", "custom"}:
            own = OwnTool(kind, str(tool.get("name")), namespace)
            if self._own.setdefault(own.chat_name, own) != own:
                raise bad_request(f"tools: {own.chat_name!r} is there twice. Give each tool another name.")
            self.chat.append({"type": "function", "function": _function(tool, own)})
        elif isinstance(kind, str) and kind.startswith(_HOSTED):
            self.left_out.append(kind)
        else:
            raise bad_request(
                f"tool {kind!r} is unknown. Give tools of type function, custom or namespace.",
                "unsupported_tool",
            )

    def _choice(self, choice: Any) -> Any:
        if isinstance(choice, str):
            return choice
        if isinstance(choice, dict) and str(choice.get("type")) in {"function", "custom"}:
            own = OwnTool(choice["type"], str(choice.get("name")), choice.get("namespace"))
            return {"type": "function", "function": {"name": own.chat_name}}
        raise wrong("tool_choice", choice, 'auto, none, required or {"type": "function", "name": ...}')


def _function(tool: Mapping[str, Any], own: OwnTool) -> dict[str, Any]:
    if own.kind == "custom":
        return {"name": own.chat_name, "description": "\n\n".join(_describe_tool(tool)), "parameters": _FREE_TEXT}
    kept = {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
    return {"name": own.chat_name if tool.get("name") is not None else None, **kept}


def _describe_tool(tool: Mapping[str, Any]) -> Iterator[str]:
    """Describe a custom tool. Its grammar is described, not enforced: the model writes JSON around the text."""
    if tool.get("description"):
        yield str(tool["description"])
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        yield f"The text follows this grammar ({form.get('syntax')}):\n{form.get('definition')}"


def _hosted_tool_refusal(kind: str) -> Refusal:
    return bad_request(f"tool {kind!r} runs at OpenAI only. Give function tools.", "unsupported_tool")


def free_text(arguments: str) -> str:
    """Return the text with which a custom tool is called. Other arguments are returned unchanged."""
    try:
        data = read_json(arguments)
    except ValueError:
        return arguments
    return data["input"] if isinstance(data, dict) and isinstance(data.get("input"), str) else arguments


def free_text_arguments(text: Any) -> str:
    """Return the arguments of a function with one text argument."""
    return dumps({"input": text}).decode()

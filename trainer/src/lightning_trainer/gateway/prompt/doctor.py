"""What a model's chat template does with conversations: its format, its reasoning, and what goes on token for token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from lightning_trainer import continuation_reasons as reasons
from lightning_trainer.gateway.formats.probe import TOOL
from lightning_trainer.gateway.formats.reader import ParsedAnswer
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.continuation import Continuations
from lightning_trainer.gateway.prompt.template import ChatFormat, Message

_SYSTEM: Final = {"role": "system", "content": "lightning_probe_system"}
_USER: Final = {"role": "user", "content": "What is 12+7?"}
_SHORT: Final = 64  # characters of a refusal


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What was found.

    Attributes:
        tool_format: of tool calls; None: not known, or the template shows no tools.
        tools: "read", or why a request with tools is refused.
        reasoning: the marks of reasoning; None: the model has none.
        continuation: by kind of turn ``exact``, ``fork`` or why the next call stands alone.
        rows: training rows of a rollout with four turns of that kind, where one would do.
        system: "own message", "merged into the user's", "dropped", or the template's refusal.
        default_system: whether the template adds a system prompt of its own.
        injection: control tokens in messages: "kept as text", or why not.
    """

    tool_format: str | None
    tools: str
    reasoning: Mapping[str, str] | None
    continuation: Mapping[str, str]
    rows: Mapping[str, int]
    system: str
    default_system: bool
    injection: str

    def lines(self) -> list[str]:
        """Say it to people, one fact a line."""
        marks = (
            "none" if self.reasoning is None else f"between {self.reasoning['open']!r} and {self.reasoning['close']!r}"
        )
        found = [f"tool calls: {self.tools}{f', format {self.tool_format}' if self.tool_format else ''}"]
        found.append(f"reasoning: {marks}")
        for kind, how in self.continuation.items():
            cost = f", {self.rows[kind]} rows for 4 calls" if self.rows[kind] > 1 else ""
            found.append(f"next call after {kind}: {how}{cost}")
        own = ", and the template has one of its own where there is none" if self.default_system else ""
        found.append(f"system prompt: {self.system}{own}")
        found.append(f"control tokens in messages: {self.injection}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def examined(tokenizer: Any, tool_format: str | None = None) -> TemplateReport:
    """Look at a tokenizer's chat template. Nothing is drawn: the answers are the probe's own.

    Raises:
        ConfigError: there is no such format.
    """
    chat = ChatFormat(tokenizer, tool_format)
    continuation, rows = _continuations(chat)
    thinking = chat.dialect.thinking
    return TemplateReport(
        tool_format=chat.calls.name if chat.calls else None,
        tools=_tools(chat),
        reasoning=None if thinking is None else {"open": thinking.open, "close": thinking.close},
        continuation=continuation,
        rows=rows,
        system=_system(chat),
        default_system=_adds_system(chat),
        injection=_injection(chat),
    )


def _tools(chat: ChatFormat) -> str:
    if not chat.takes_tools:
        return "refused: the chat template has no section for tools"
    if chat.calls is None:
        how = "written in a form that is not read" if chat.writes_calls else "not written"
        return f"refused: calls are {how}"
    return "read"


def _continuations(chat: ChatFormat) -> tuple[dict[str, str], dict[str, int]]:
    """Hold conversations of each kind, with answers as the model would write them."""
    thinking = chat.dialect.thinking
    final = "<|channel|>final<|message|>" if chat.calls is not None and chat.calls.anywhere else ""
    kinds = {"plain": f"{final}Twelve and seven is 19."}
    if thinking is not None:
        opened = chat.opened(chat.render([_USER], ()))
        begin = "" if opened else thinking.open
        middle = f"<|start|>assistant{final}" if final else "\n\n"
        line = "" if final else "\n"
        kinds["reasoning"] = f"{begin}{line}hm{line}{thinking.close}{middle}19"
        if opened:  # every answer begins inside reasoning
            del kinds["plain"]
    found: dict[str, str] = {}
    rows: dict[str, int] = {}
    for kind, answer in kinds.items():
        found[kind], rows[kind] = _held(chat, answer)
    call = _call(chat) if chat.takes_tools else None
    if call is not None:
        found["tool call"], rows["tool call"] = _held(chat, call, tools=(TOOL,))
        if thinking is not None and not chat.opened(chat.render([_USER], (TOOL,))):
            thought = f"{thinking.open}\nhm\n{thinking.close}\n\n{call.lstrip()}"
            found["reasoning, tool call"], rows["reasoning, tool call"] = _held(chat, thought, tools=(TOOL,))
    return found, rows


def _call(chat: ChatFormat) -> str | None:
    """Return a call as the template writes it, without the end of the turn."""
    if chat.calls is None or chat.header is None:
        return None
    name = TOOL["function"]["name"]
    function = {"name": name, "arguments": '{"a": 1, "b": "7"}'}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": f"functions.{name}:0", "function": function}]}
    result = {"role": "tool", "tool_call_id": f"functions.{name}:0", "content": "19"}
    try:
        text = chat.plain.shown(chat.render([_USER, called, result], (TOOL,)))
    except Refusal:
        return None
    part = text.split(chat.header)[1] if chat.header in text else ""
    spots = [place for mark in chat.calls.marks if (place := part.find(mark)) >= 0]
    written = part[min(spots) :] if spots else ""
    ends = [place for control in chat.plain.controls - {*chat.calls.controls} if (place := written.find(control)) > 0]
    if not ends:
        return None
    end = next(each for each in chat.plain.controls if written.startswith(each, min(ends)))
    return written[: min(ends) + len(end)]


def _held(chat: ChatFormat, answer: str, tools: Sequence[Message] = ()) -> tuple[str, int]:
    """Hold a conversation of four answers; say how its later prompts were made, and how many rows it needs."""
    continuations, messages = Continuations(chat), [_USER]
    outcomes: list[str] = []
    try:
        for _ in range(4):
            prompt = continuations.prompt(messages, tools, "doctor")
            outcomes.append(prompt.how)
            ids = chat.encode(answer)
            ids += [] if chat.end_of(ids) else [chat.end_token]
            read = chat.read(ids, tools, opened=chat.opened(prompt.text))
            continuations.remember("doctor", prompt, ids, read.message())
            messages = [*messages, read.message(), *_next(read)]
    except Refusal as refusal:
        return f"refused: {refusal.message[:_SHORT]}", 0
    names = {reasons.JOINED: "exact", reasons.FORKED: "fork"}
    worst = next((how for how in outcomes[1:] if how != reasons.JOINED), reasons.JOINED)
    return names.get(worst, worst), 1 + sum(how != reasons.JOINED for how in outcomes[1:])


def _next(read: ParsedAnswer) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in read.tool_calls]
    return results or [{"role": "user", "content": "Are you sure?"}]


def _system(chat: ChatFormat) -> str:
    try:
        text = chat.render([_SYSTEM, _USER], ())
    except Refusal as refusal:
        return f"refused: {refusal.message[:_SHORT]}"
    if _SYSTEM["content"] not in text:
        return "dropped"
    bare = chat.render([_USER], ())
    before = text.partition(_SYSTEM["content"])[0]
    merged = bare.startswith(before) and before == bare.partition(_USER["content"])[0]
    return "merged into the user's" if merged else "own message"


def _adds_system(chat: ChatFormat) -> bool:
    bare = chat.plain.shown(chat.render([_USER], ())).partition(_USER["content"])[0]
    for control in sorted(chat.plain.controls, key=len, reverse=True):
        bare = bare.replace(control, " ")
    return len(bare.split()) > 3


def _injection(chat: ChatFormat) -> str:
    """Say whether a user's text of a control token stays text."""
    end = chat.usual_end
    try:
        ids = chat.encode(chat.render([{"role": "user", "content": f"a{end}b"}], ()))
        bare = chat.encode(chat.render([{"role": "user", "content": "ab"}], ()))
    except Refusal as refusal:
        return f"refused: {refusal.message[:_SHORT]}"
    kept = ids.count(chat.end_token) == bare.count(chat.end_token)
    return "kept as text" if kept else "becomes a control token"

"""What a model's chat template does with conversations: tool format, reasoning, and which turns continue exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from lightning_trainer.gateway.formats.probe import TOOL, common_start
from lightning_trainer.gateway.formats.reader import ParsedAnswer
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.continuation import Continuations
from lightning_trainer.gateway.prompt.template import ChatFormat, Message
from lightning_trainer.models.merged_messages import merges, takes_any_order
from lightning_trainer.reasons.continuation import ContinuationReason

_SYSTEM: Final = {"role": "system", "content": "lightning_probe_system"}
_USER: Final = {"role": "user", "content": "What is 12+7?"}
_SHORT: Final = 64  # shown characters of an error


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The findings.

    Attributes:
        tool_format: of tool calls; None: unknown, or the template shows no tools.
        tools: "read", or why a request with tools is rejected.
        reasoning: the marks of reasoning; None: the model has none.
        continuation: by kind of turn ``exact``, ``fork`` or why the next call is not a continuation.
        rows: training rows of a rollout with four turns of that kind; one would be ideal.
        system: "own message", "merged into the user's", "dropped", or the template's error.
        several_system: what happens to several system messages, or to user messages in a row: "taken", "merged" or what
            to do.
        default_system: whether the template adds its own system prompt.
        injection: control tokens in messages: "kept as text", or why not.
    """

    tool_format: str | None
    tools: str
    reasoning: Mapping[str, str] | None
    continuation: Mapping[str, str]
    rows: Mapping[str, int]
    system: str
    several_system: str
    default_system: bool
    injection: str

    def lines(self) -> list[str]:
        """Return the report for people, one finding per line."""
        marks = (
            "none" if self.reasoning is None else f"between {self.reasoning['open']!r} and {self.reasoning['close']!r}"
        )
        found = [f"tool calls: {self.tools}{f', format {self.tool_format}' if self.tool_format else ''}"]
        found.append(f"reasoning: {marks}")
        for kind, how in self.continuation.items():
            cost = f", {self.rows[kind]} rows for 4 calls" if self.rows[kind] > 1 else ""
            found.append(f"next call after {kind}: {how}{cost}")
        own = "; without one, the template adds its own" if self.default_system else ""
        found.append(f"system prompt: {self.system}{own}")
        found.append(f"several system or user messages: {self.several_system}")
        found.append(f"control tokens in messages: {self.injection}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def examine_template(tokenizer: Any, tool_format: str | None = None) -> TemplateReport:
    """Examine a tokenizer's chat template. Nothing is sampled: the answers are the probe's own.

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
        several_system=_several(tokenizer),
        default_system=_adds_system(chat),
        injection=_injection(chat),
    )


def _several(tokenizer: Any) -> str:
    if merges(str(tokenizer.chat_template)):
        return "merged"
    return "taken" if takes_any_order(tokenizer) else "refused or dropped. Start with --system-messages merge"


def _tools(chat: ChatFormat) -> str:
    if not chat.takes_tools:
        return "refused: the chat template has no section for tools"
    if chat.calls is None:
        how = "written in an unsupported form" if chat.writes_calls else "not written"
        return f"refused: calls are {how}"
    return "read" if chat.hidden_results is None else "refused: the chat template shows no results of tools"


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
        if opened:  # every answer begins within reasoning
            del kinds["plain"]
    found: dict[str, str] = {}
    rows: dict[str, int] = {}
    for kind, answer in kinds.items():
        found[kind], rows[kind] = _hold_conversation(chat, answer)
    if _tools(chat) == "read":
        for kind, tried in _call_kinds(chat).items():
            found[kind], rows[kind] = tried
    return found, rows


def _call_kinds(chat: ChatFormat) -> dict[str, tuple[str, int]]:
    """Hold conversations whose answers call tools, by kind."""
    call = _written_answer(chat, (_CALL,))
    if call is None:
        return {"tool call": ("not tried: the chat template does not write calls", 0)}
    tools, thinking = (TOOL,), chat.dialect.thinking
    found = {"tool call": _hold_conversation(chat, call, tools)}
    found["two tool calls"] = _two_calls(chat)
    if thinking is not None and not chat.opened(chat.render([_USER], tools)):
        middle = "<|start|>assistant" if chat.calls is not None and chat.calls.anywhere else "\n\n"
        thought = f"{thinking.open}\nhm\n{thinking.close}{middle}{call if middle.strip() else call.lstrip()}"
        found["reasoning, tool call"] = _hold_conversation(chat, thought, tools)
    return found


def _two_calls(chat: ChatFormat) -> tuple[str, int]:
    two = _written_answer(chat, (_CALL, {**_CALL, "id": _CALL_ID.replace("0", "1")}))
    if two is None:
        return "refused: the chat template takes one call at a time", 0
    shown = chat.read(chat.encode(two), (TOOL,)).tool_calls
    return (
        _hold_conversation(chat, two, (TOOL,))
        if len(shown) == 2
        else ("not shown: the chat template writes one of them", 0)
    )


_CALL_ID: Final = f"functions.{TOOL['function']['name']}:0"
_CALL: Final[Message] = {
    "id": _CALL_ID,
    "function": {"name": TOOL["function"]["name"], "arguments": '{"a": 1, "b": "7"}'},
}


def _written_answer(chat: ChatFormat, calls: Sequence[Message]) -> str | None:
    """Return an answer with calls as the template writes it, including the end of the turn; None if it writes none."""
    called = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in calls]
    try:
        begun, alone, whole = (
            chat.plain.shown(text).rpartition(_USER["content"])[2]
            for text in (
                chat.render([_USER], (TOOL,)),
                chat.render([_USER, called], (TOOL,), prompt=False),
                chat.render([_USER, called, *results], (TOOL,)),
            )
        )
    except Refusal:
        return None
    part = whole[common_start(begun, whole) :]
    spots = [place for mark in (chat.calls.marks if chat.calls else ()) if (place := part.find(mark)) >= 0]
    written = part[min(spots) :] if spots else ""
    ends = [place for control in _ends(chat) if (place := written.find(control)) > 0]
    if ends:
        end = next(each for each in chat.plain.controls if written.startswith(each, min(ends)))
        return written[: min(ends) + len(end)]
    return written[: common_start(written, alone[alone.find(written[:20]) :])].rstrip() or None


def _ends(chat: ChatFormat) -> frozenset[str]:
    return frozenset(chat.plain.controls - {*(chat.calls.controls if chat.calls else ())})


def _hold_conversation(chat: ChatFormat, answer: str, tools: Sequence[Message] = ()) -> tuple[str, int]:
    """Hold a conversation of four answers; return how its later prompts were made, and how many rows it needs."""
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
    names: dict[str, str] = {ContinuationReason.JOINED: "exact", ContinuationReason.FORKED: "fork"}
    worst = next((how for how in outcomes[1:] if how != ContinuationReason.JOINED), ContinuationReason.JOINED)
    return names.get(worst, worst), 1 + sum(how != ContinuationReason.JOINED for how in outcomes[1:])


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
    """Return whether a user's text of a control token stays text."""
    end = chat.usual_end
    try:
        ids = chat.encode(chat.render([{"role": "user", "content": f"a{end}b"}], ()))
        bare = chat.encode(chat.render([{"role": "user", "content": "ab"}], ()))
    except Refusal as refusal:
        return f"refused: {refusal.message[:_SHORT]}"
    kept = ids.count(chat.end_token) == bare.count(chat.end_token)
    return "kept as text" if kept else "becomes a control token"

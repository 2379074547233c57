"""Whether an upstream can be sent token ids instead of messages, detected once for each replica.

They are used only if nothing is lost by it: if the server makes the same tokens from the same messages as the tokenizer
that was named for it. Reasoning and tool calls are parsed from its tokens here, whatever parsers it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from lightning_spans.schema.json import read_json
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.gateway.request.constraints import FORMS, Constraint, Form
from lightning_trainer.gateway.upstream.connection import Connection
from lightning_trainer.gateway.upstream.replicas import Replica
from lightning_trainer.gateway.upstream.token_protocols import CompletionsProtocol, SglangProtocol, TokenServer
from lightning_trainer.reasons.continuation import ContinuationReason

logger = masking_logger(__name__)
_TALK: Final = (
    {"role": "user", "content": "Na\u00efve \u03a9 <b>12 + 7</b>?\n\n  1234567"},
    {"role": "assistant", "content": "19, I'd say."},
    {"role": "user", "content": "Are you sure?"},
)
_ANY: Final = Constraint({"type": "object"}, ({"function": {"name": "a"}},), one_call=False)


async def token_server(
    http: Connection, replica: Replica, model: str, chat: ChatFormat, tokenizer: Any
) -> TokenServer | str:
    """Detect how a replica is sent token ids; or return why it is sent messages.

    Raises:
        BrokenError: it cannot be reached.
    """
    dialect = await http.dialect(replica)
    cards = _cards(await http.models(replica))
    context = max((card["max_model_len"] for card in cards if isinstance(card.get("max_model_len"), int)), default=None)
    if dialect == "plain" or context is None:
        return _warn_once(replica, ContinuationReason.UNKNOWN_SERVER)
    if dialect == "lightning":
        return TokenServer(CompletionsProtocol(grammars=False), context)
    if await _tokens_of(http, replica, model, chat) != chat.encode(chat.render(_TALK, ())):
        return _warn_once(replica, ContinuationReason.OTHER_TOKENS)
    if dialect == "vllm":
        return TokenServer(CompletionsProtocol(grammars=True), context)
    adapters = {card["id"] for card in cards if card.get("parent") is not None}
    adapter = model if model in adapters else model.partition(":")[2] or None
    return TokenServer(SglangProtocol(tokenizer, adapter), context)


async def form_of(http: Connection, replica: Replica, model: str) -> Form | Literal["none"]:
    """Detect a vLLM server's format for an answer's required form.

    Its backend never changes: that of its settings, or with ``auto``, the default, that of its first structured
    request, which may be this one. Nothing reports which; the other backend rejects a format that is not its own.

    Raises:
        BrokenError: it cannot be reached.
    """
    for form in FORMS:
        asked = {"model": model, "prompt": "a", "max_tokens": 1, "structured_outputs": _ANY.structured_outputs(form)}
        if await _told_by(http, replica, "/completions", asked) is not None:
            return form
    _warn_once(replica, ContinuationReason.NO_FORM)
    return "none"


def _warn_once(replica: Replica, why: str) -> str:
    logger.warning("%s gets messages although its tokenizer is named. %s.", replica.url, why)
    return why


def _cards(listed: bytes | None) -> list[dict[str, Any]]:
    """Return the models that a server lists.

    Its kind is known, so a well-behaved server's list has the right format.
    """
    try:
        data = read_json(listed or b"{}").get("data")
    except (ValueError, AttributeError):
        return []
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


async def _tokens_of(http: Connection, replica: Replica, model: str, chat: ChatFormat) -> Any:
    """Ask a server for the tokens of a conversation. SGLang's path takes a text, so it gets the rendered one."""
    if replica.dialect == "vllm":
        asked: dict[str, Any] = {"model": model, "messages": list(_TALK), "add_generation_prompt": True}
    else:
        asked = {"model": model, "prompt": chat.render(_TALK, ()), "add_special_tokens": False}
    told = await _told_by(http, replica, "/../tokenize", asked)
    return None if told is None else told.get("tokens")


async def _told_by(http: Connection, replica: Replica, path: str, asked: Any = None) -> Mapping[str, Any] | None:
    """Return a server's response on a path; None if it has no such path, or rejects the request."""
    try:
        told = await http.page(replica, path, asked)
    except Refusal:
        return None
    try:
        data = read_json(told)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None

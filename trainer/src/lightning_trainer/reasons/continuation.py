"""How the prompt of a call was made: the gateway writes it beside the call's sampling, and the account counts it."""

from __future__ import annotations

from typing import Final

CONTINUATION: Final = "continuation"  # the name that it is written under
UNREAD: Final = "unread_calls"
"""With it: by choice, the format that an answer without calls looks like, though the request had tools."""
OTHER: Final = "other"  # as such a format: one that is in no table
MALFORMED: Final = "malformed"  # as such a format: the one that is read, with a fault in it
BEGINS: Final = "begins a conversation"
JOINED: Final = "joined"  # the prompt is an earlier call's own tokens, and new ones
FORKED: Final = "forked: the chat template leaves earlier reasoning out, and all else keeps its own tokens"
# Why a prompt that goes on from an earlier call does not hold that call's own tokens.
REWRITTEN: Final = "history rewritten: the chat template shows an earlier answer otherwise, as without its thinking"
HIDDEN: Final = "answer not shown whole: the tokens sampled say more than the message that the agent got and sent back"
TOOLS_CHANGED: Final = "tools changed"
SYSTEM_CHANGED: Final = "system prompt changed"
EDITED: Final = "history edited: messages were changed, left out or put in another order"
COMPACTED: Final = "history compacted: earlier messages were replaced, as by a summary, and later answers kept"
WINDOW: Final = "history cut: the oldest messages were left out, as by a sliding window"
FORGOTTEN: Final = "earlier calls forgotten: the gateway keeps a bounded number"
UNFAITHFUL: Final = "tokenizer reads the new part otherwise than in its place"
ONLY_MESSAGES: Final = "upstream was sent messages: only a server whose tokenizer is named is sent token ids"
# Why an upstream whose tokenizer is named was sent messages all the same.
UNKNOWN_SERVER: Final = "upstream takes no token ids: it is not vLLM, SGLang or a gateway with known context"
OTHER_TOKENS: Final = "upstream makes other tokens than the tokenizer named, or can't tell: it was sent messages"
OTHER_CALLS: Final = "chat template writes tool calls in a form that is not read here: upstream was sent messages"
ONLY_UPSTREAM_READS: Final = "request has what only the upstream reads, such as images: it was sent messages"
NO_FORM: Final = "upstream's structured output takes no form that is written here: it was sent messages"
AFTER_MESSAGES: Final = "earlier call was sent as messages"


def continued_share(continued: int, not_continued: int) -> float | None:
    """Share of joined calls among those that go on from an earlier one; None where there are none."""
    return continued / (continued + not_continued) if continued + not_continued else None


def slug(reason: str) -> str:
    """Return a reason's name for metrics: what stands before its colon."""
    return reason.split(":", maxsplit=1)[0].replace(" ", "_")

"""How the prompt of a call was made. The gateway records it with the call's sampling, and the account counts it."""

from __future__ import annotations

from typing import Final

from lightning_trainer.reasons.reason import Reason

CONTINUATION: Final = "continuation"  # its key in the sampling
UNREAD: Final = "unread_calls"
"""With it: by choice, the format that an answer without calls looks like, though the request had tools."""
OTHER: Final = "other"  # such a format that is in no table
MALFORMED: Final = "malformed"  # such a format: the one that is read, but malformed


class ContinuationReason(Reason):
    """How a prompt continues an earlier call of its attempt, or why it does not."""

    BEGINS = "begins a conversation"
    JOINED = "joined"  # the prompt is an earlier call's own tokens followed by new ones
    FORKED = "forked: the chat template leaves earlier reasoning out, and everything else keeps its own tokens"
    # Why a prompt that continues an earlier call does not contain that call's own tokens.
    REWRITTEN = (
        "history rewritten: the chat template shows an earlier answer differently, for example without its thinking"
    )
    HIDDEN = (
        "answer shown incompletely: the sampled tokens contain more than the message that the agent got and sent back"
    )
    TOOLS_CHANGED = "tools changed"
    SYSTEM_CHANGED = "system prompt changed"
    EDITED = "history edited: messages were changed, left out or put in another order"
    COMPACTED = "history compacted: earlier messages were replaced, for example by a summary, and later answers kept"
    WINDOW = "history cut: the oldest messages were left out, for example by a sliding window"
    FORGOTTEN = "earlier calls dropped: the gateway keeps a limited number"
    UNFAITHFUL = "the tokenizer encodes the new part differently out of its context"
    ONLY_MESSAGES = "upstream was sent messages: only a server whose tokenizer is named is sent token ids"
    # Why messages were sent to an upstream although its tokenizer is named.
    UNKNOWN_SERVER = "upstream takes no token ids: it is not vLLM, SGLang or a gateway with known context"
    OTHER_TOKENS = "upstream makes other tokens than the tokenizer named, or can't tell: it was sent messages"
    OTHER_CALLS = "chat template writes tool calls in a form that is not read here: upstream was sent messages"
    ONLY_UPSTREAM_READS = "request has what only the upstream reads, such as images: it was sent messages"
    NO_FORM = "upstream's structured output takes no form that is written here: it was sent messages"
    AFTER_MESSAGES = "earlier call was sent as messages"


def continued_share(continued: int, not_continued: int) -> float | None:
    """Return the share of joined calls among those that continue an earlier one; None if there are none."""
    return continued / (continued + not_continued) if continued + not_continued else None

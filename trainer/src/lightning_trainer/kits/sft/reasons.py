"""Why a conversation is not learned."""

from __future__ import annotations

from lightning_trainer.reasons.reason import Reason


class UnlearnedReason(Reason):
    """Why a conversation, or a pair, is left out; in addition to `UntrainedReason` and `UnexportedReason`."""

    SILENT = "the assistant says nothing in it"
    OTHER_TOKENIZER = "tokens of another tokenizer, and no messages to tokenise again"
    REFUSED = "the model's chat template refuses it"
    UNREAD_CALLS = "the model's chat template does not write its tool calls in the format of --tool-format"
    NO_ANSWER = "it has no token to learn from"
    NO_ADAPTER = "its agent has no adapter that is trained"
    NOT_BETTER = "earned no more than the worst of the round"
    ONE_LEFT_OUT = "the other answer of the pair is left out"
    SAME_ANSWERS = "both answers of the pair are the same"

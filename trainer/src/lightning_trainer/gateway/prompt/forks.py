"""Prompts of templates that leave out the reasoning of earlier answers.

Such a prompt cannot contain an earlier call's tokens completely, so it begins another training row. But the remaining
parts of the answers were sampled tokens, and they stay: only the reasoning is cut out.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_trainer.gateway.formats.reader import ParsedAnswer
from lightning_trainer.gateway.prompt.equality import same_answer
from lightning_trainer.gateway.prompt.template import ChatFormat, Message


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer that was sampled here.

    Attributes:
        ids: as sampled, including the end of turn.
        read: the same, split into parts.
        opened: whether its prompt ended within reasoning.
    """

    ids: Sequence[int]
    read: ParsedAnswer
    opened: bool


def fork_tokens(
    chat: ChatFormat, text: str, answers: Sequence[SampledAnswer | None], tools: Sequence[Message]
) -> tuple[int, ...] | None:
    """Return a prompt's tokens.

    Args:
        chat: of the model.
        text: the prompt, as the template renders it.
        answers: those in it, in order; None: one that was not sampled here.
        tools: of the request.

    Returns:
        None if no reasoning is left out, the answers cannot be found in the text, or one of them differs.
    """
    header = chat.header
    if header is None:
        return None
    first, *parts = text.split(header)
    if len(parts) != len(answers) + 1:  # the last one is to be sampled
        return None
    ids: list[int] = []
    pending, lost = first, False
    for part, known in zip(parts, [*answers, None], strict=True):
        pending += header
        if known is None:
            pending += part
            continue
        found = _shown_part(chat, part, known, tools)
        if found is None:
            return None
        lead, kept, rest = found
        lost = lost or known.opened or len(kept) < len(known.ids)
        if not _faithful(chat, pending + lead, ids):
            return None
        ids += kept
        pending = rest
    return tuple(ids) if _faithful(chat, pending, ids) and lost else None


def _faithful(chat: ChatFormat, text: str, ids: list[int]) -> bool:
    """Add the tokens of a text, if they convert back to it."""
    found = chat.encode(text)
    ids += found
    return chat.decode(found) == chat.normal(text)


def _shown_part(
    chat: ChatFormat, part: str, known: SampledAnswer, tools: Sequence[Message]
) -> tuple[str, Sequence[int], str] | None:
    """Return the template's text before an answer, the answer's tokens that it shows, and its text after the answer."""
    end = chat.end_of(known.ids)
    ends = [each for each in (end, chat.usual_end, "<|end|>") if each and each in part]
    if not ends:
        return None
    before, _, after = part.partition(ends[0])
    shown = chat.plain.shown(before)
    written = chat.parse(shown, tools, opened=known.opened and not _closes(chat, shown))
    if not same_answer(known.read, written):
        return None
    ids = known.ids[: len(known.ids) - bool(end)]
    if written.reasoning != known.read.reasoning:
        ids = () if written.reasoning is not None else _after_reasoning(chat, ids)
    lead = _lead(chat, shown, ids) if ids else None
    if lead is None:
        return None
    if ends[0] == end:
        return lead, known.ids[len(known.ids) - 1 - len(ids) :], after
    return lead, ids, ends[0] + after


def _closes(chat: ChatFormat, shown: str) -> bool:
    """Whether a template shows an answer whose reasoning has ended, or that has none."""
    thinking = chat.dialect.thinking
    return thinking is None or thinking.close in shown or thinking.open not in shown


def _lead(chat: ChatFormat, shown: str, ids: Sequence[int]) -> str | None:
    """Return the template's text before an answer's own text: line breaks, and reasoning that is empty or opened."""
    begin = chat.decode(ids)[:1]
    thinking = chat.dialect.thinking
    patterns = ["", r"\s*"]
    if thinking is not None:
        opened = rf"\s*{re.escape(thinking.open)}\s*"
        patterns += [rf"{opened}{re.escape(thinking.close)}\s*", rf"\s*{re.escape(thinking.close)}\s*", opened]
    for pattern in patterns:
        found = re.match(pattern, shown)
        if found is not None and shown[found.end() : found.end() + 1] == begin:
            return found[0]
    return None


def _after_reasoning(chat: ChatFormat, ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens of an answer without its reasoning.

    Empty if no token begins with what follows the reasoning.
    """
    thinking = chat.dialect.thinking
    wanted = chat.decode(ids).partition(thinking.close)[2].lstrip() if thinking is not None else ""
    if not wanted:
        return ()
    place = bisect.bisect_left(range(len(ids)), -len(wanted), key=lambda at: -len(chat.decode(ids[at:])))
    return ids[place:] if chat.decode(ids[place:]) == wanted else ()

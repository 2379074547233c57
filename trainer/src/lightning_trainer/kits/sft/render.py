"""Conversations as tokens: recorded tokens if this tokenizer made them, otherwise the chat template's output.

Only the agent's answers are learned, including their end-of-turn token. What follows that token until the next turn is
written by the template, never by the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_trainer.backend_protocol import Learner
from lightning_trainer.gateway.engine import tool_format
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.kits.export.chat import is_text
from lightning_trainer.kits.export.wanted import UnexportedReason
from lightning_trainer.kits.sft.data import Example
from lightning_trainer.kits.sft.reasons import UnlearnedReason


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """Tokens to learn from.

    Attributes:
        ids: (T,) token ids.
        learned: (T,) True if the token is learned; never the first.
        recorded: whether an engine recorded these tokens.
    """

    ids: list[int]
    learned: list[bool]
    recorded: bool = False


class UnrenderableError(Exception):
    """A conversation cannot be rendered for this model; the text is the reason."""


class Renderer:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: with its chat template.
        end_tokens: tokens that end an answer.
        tool_format: name of the format of the model's tool calls; None: the one in which the chat template writes them.
    """

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int], tool_format: str | None = None) -> None:
        self._format = ChatFormat(tokenizer, tool_format)
        self._chosen = tool_format is not None
        self._size = len(tokenizer)
        self._end_texts = [self._format.decode([token]) for token in end_tokens]
        self._close = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(end_tokens)

    @classmethod
    def of(cls, learner: Learner) -> Renderer:
        """Return the renderer for a learner's model."""
        return cls(learner.engine.tokenizer, learner.end_tokens, tool_format(learner.engine))

    def render(self, said: Example) -> list[RenderedExample]:
        """Return the tokens of a conversation: several sequences if its template rewrites earlier turns.

        Raises:
            UnrenderableError: with the reason.
        """
        if said.ids is not None and said.labels is not None and self._is_ours(said):
            learned = [label >= 0 for label in said.labels]
            if not any(learned[1:]):
                raise UnrenderableError(UnlearnedReason.NO_ANSWER)
            return [RenderedExample(list(said.ids), [False, *learned[1:]], recorded=True)]
        if not said.messages:
            raise UnrenderableError(UnlearnedReason.OTHER_TOKENIZER)
        if not is_text([*said.messages, *said.tools]):
            raise UnrenderableError(UnexportedReason.HALF)
        try:
            return list(self._render_answers(said))
        except Refusal as error:
            raise UnrenderableError(f"{UnlearnedReason.REFUSED}: {error}") from None

    def _is_ours(self, said: Example) -> bool:
        """Whether recorded tokens are this tokenizer's: the prompt's text encodes to exactly these tokens.

        Prompts are encoded from text; a model's answers need not be. If the messages are known, the prompt's text
        contains the content of the first non-empty one.
        """
        ids, labels = said.ids or (), said.labels or ()
        if not ids or min(ids) < 0 or max(ids) >= self._size:
            return False
        first = next((place for place, label in enumerate(labels) if label >= 0), len(ids))
        prompt = list(ids[:first])
        text = self._format.decode(prompt)
        asked = next((m["content"].strip() for m in said.messages if m["content"].strip()), "")
        return self._format.encode(text) == prompt and asked in text

    def _render_answers(self, said: Example) -> Iterator[RenderedExample]:
        """Render answer by answer. An answer that continues the text before it shares its tokens, as in the gateway."""
        text, ids, learned = "", list[int](), list[bool]()
        for place in said.answers:
            prompt, answer = self._turn(said.messages[: place + 1], said.tools)
            if ids and not prompt.startswith(text):
                yield RenderedExample(ids, learned)
                text, ids, learned = "", [], []
            between = self._format.encode(prompt[len(text) :])
            words, own = self._answer(answer)
            if self._chosen and said.tools and (calls := said.messages[place].get("tool_calls")):
                self._check_calls(calls, own, said.tools, opened=self._format.opened(prompt))
            ids = [*ids, *between, *own]
            learned = [*learned, *[False] * len(between), *[True] * len(own)]
            text = prompt + words
        yield RenderedExample(ids, learned)

    def _answer(self, text: str) -> tuple[str, list[int]]:
        """Return an answer up to its end-of-turn token, as text and as tokens.

        If it has no such token, one is added.
        """
        ends = [text.find(end) + len(end) for end in self._end_texts if end in text]
        words = text[: min(ends)] if ends else text
        own = self._format.encode(words)
        return words, own if ends else [*own, self._close]

    def _check_calls(self, calls: Sequence[Any], ids: list[int], tools: Sequence[Any], *, opened: bool) -> None:
        """Reject an answer if the chosen format does not read the tool calls that the chat template has written."""
        read = self._format.read(ids, tools, opened=opened).tool_calls
        if [call["function"]["name"] for call in read] != [call["function"]["name"] for call in calls]:
            raise UnrenderableError(UnlearnedReason.UNREAD_CALLS)

    def _turn(self, messages: Sequence[Any], tools: Sequence[Any]) -> tuple[str, str]:
        """Return the text before the content of the last message, and the text from there on."""
        before = self._format.render(messages[:-1], tools)
        whole = self._format.render(messages, tools, prompt=False)
        common = next(
            (place for place, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b),
            min(len(before), len(whole)),
        )
        return whole[:common], whole[common:]

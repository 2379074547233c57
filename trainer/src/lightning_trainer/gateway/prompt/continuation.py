"""Exact continuation: a conversation stays one sequence of tokens, including those that were sampled.

When the messages of a request continue an earlier call of the same attempt, the prompt is that call's own prompt and
answer, token for token, followed by the new part. Tokenizing the text again would often give other tokens than those
sampled, and the calls of a conversation could not share a training row.

A join is never guessed. The messages must mean what was sent and answered (`meaning`); the chat template must still
render the earlier prompt as before, and the answer as it was sampled, except for spaces and the spelling of calls; and
the new part must convert back from its tokens to the same text. If the template leaves out the reasoning of earlier
answers, the prompt forks: the remaining parts keep their own tokens. If one of these fails, the prompt is made from the
messages alone, and the reason is recorded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.formats.reader import ParsedAnswer
from lightning_trainer.gateway.prompt.equality import (
    SYSTEM,
    Conversation,
    ConversationDigest,
    read,
    same_answer,
    same_data,
)
from lightning_trainer.gateway.prompt.forks import SampledAnswer, fork_tokens
from lightning_trainer.gateway.prompt.template import ChatFormat, Message, Switches, join_content, reasoning_of
from lightning_trainer.reasons.continuation import ContinuationReason

_EVICTED_KEPT: Final = 20_000  # ids of attempts whose calls were dropped, to be able to say so


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt for the engine.

    Attributes:
        ids: token ids.
        text: as the template renders the messages.
        how: `reasons.continuation.JOINED`, `reasons.continuation.BEGINS`, or why it continues no call.
        conversation: the conversation so far, for `Continuations.remember`.
        tools: digest of the tools.
        said: digests of the messages, one each.
        continues: the call whose tokens it begins with; None: none.
    """

    ids: tuple[int, ...]
    text: str
    how: str
    conversation: Conversation
    tools: bytes
    said: tuple[bytes, ...] = ()
    continues: _Turn | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    """An answered call. It has only the tokens after those of the call that it continues."""

    rendered: int  # characters of its prompt as the template rendered it
    digest: bytes  # number of tools
    answer: str  # as sampled, including control tokens
    opened: bool  # the prompt ends within reasoning
    reasoning: str | None  # of the answer
    thought: str | None  # the same with its marks, if the template looks for it in the content
    before: _Turn | None  # the call that it continues
    added: array[int]  # the rest of its prompt, and the answer
    prompt: int  # how many of these are the prompt
    said: bytes  # the conversation that ends with the answer
    tools: bytes
    continued: int = 0

    @property
    def size(self) -> int:
        return 4 * len(self.added) + 2 * len(self.answer) + 400  # bytes, approximately

    @property
    def ids(self) -> array[int]:
        """Prompt and answer."""
        whole = array("i")
        for turn in reversed(list(self._calls())):
            whole.extend(turn.added)
        return whole

    @property
    def count(self) -> int:
        """How many tokens prompt and answer have."""
        return sum(len(turn.added) for turn in self._calls())

    def _calls(self) -> Iterator[_Turn]:
        """Yield this call, the one that it continues, and so on."""
        turn: _Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


@dataclass(slots=True)
class _Memory:
    """The answered calls of one attempt."""

    turns: dict[bytes, list[_Turn]] = field(default_factory=dict)  # by the conversation that ends with the answer
    but_system: set[bytes] = field(default_factory=set)  # the same conversations without system messages
    answers: set[bytes] = field(default_factory=set)  # the answers alone
    said: dict[bytes, int] = field(default_factory=dict)  # each message alone, in the order of their first occurrence
    passed_by: set[bytes] = field(default_factory=set)  # conversations answered without a prompt from here
    size: int = 0


class Continuations:
    """Creates prompts for one chat format. Must not be used by two threads at once.

    Args:
        chat: renders and tokenizes.
        remembered_bytes: most memory for answered calls; attempts unused for longest are dropped first. One attempt has
            at most a quarter.
    """

    def __init__(self, chat: ChatFormat, *, remembered_bytes: int = 256 * 2**20) -> None:
        self._chat = chat
        self._remembered_bytes = remembered_bytes
        self._memories: OrderedDict[str, _Memory] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._size = 0

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        attempt_id: str | None = None,
        switches: Switches | None = None,
    ) -> RenderedPrompt:
        """Render a conversation, ending where the assistant's answer begins.

        Args:
            messages: in OpenAI's format.
            tools: those the model may call.
            attempt_id: whose earlier calls may be continued; None: none.
            switches: variables for the template.

        Raises:
            Refusal: the template does not support tools, or rejects the conversation.
        """
        found, conversation = read(messages)
        known = self._known_answers(messages, found, attempt_id)
        given, messages = (
            messages,
            [_restore_reasoning(message, known.get(place)) for place, message in enumerate(messages)],
        )
        text = self._chat.render(messages, tools, switches)
        shown = hashlib.blake2b(dumps(list(tools)), digest_size=16).digest()
        how, turn, place = self._look_up(given, found, attempt_id)
        said = tuple(_each(given))
        if turn is not None:
            how, part = self._new_part(text, turn, given[place], tools)
            if how == ContinuationReason.JOINED:
                turn.continued += 1
                return RenderedPrompt((*turn.ids, *part), text, how, conversation, shown, said, turn)
            drops = how == ContinuationReason.REWRITTEN and turn.tools == shown
            if drops and (ids := self._fork_tokens(text, messages, tools, known)) is not None:
                return RenderedPrompt(ids, text, ContinuationReason.FORKED, conversation, shown, said)
            how = ContinuationReason.TOOLS_CHANGED if turn.tools != shown else how
        return RenderedPrompt(tuple(self._chat.encode(text)), text, how, conversation, shown, said)

    def _look_up(
        self, messages: Sequence[Message], found: Sequence[ConversationDigest], attempt_id: str | None
    ) -> tuple[str, _Turn | None, int]:
        """Find the longest earlier call that these continue, and the position of its answer.

        Or return why there is none.
        """
        memory = self._memories.get(attempt_id) if attempt_id is not None else None
        places = [place for place, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
        if memory is None:
            return (
                (ContinuationReason.FORGOTTEN if places and attempt_id in self._evicted else ContinuationReason.BEGINS),
                None,
                0,
            )
        for place in reversed(places):
            turns = memory.turns.get(found[place].whole)
            if turns:
                # Calls with equal requests and answers may differ in tokens: each is continued once.
                return ContinuationReason.JOINED, min(turns, key=lambda turn: turn.continued), place
        return _why_none(memory, messages, found), None, 0

    def _known_answers(
        self, messages: Sequence[Message], found: Sequence[ConversationDigest], attempt_id: str | None
    ) -> dict[int, _Turn]:
        """Return the attempt's own answers among the messages, by their positions."""
        memory = self._memories.get(attempt_id) if attempt_id is not None else None
        if memory is None:
            return {}
        turns = {
            place: memory.turns.get(found[place].whole)
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        return {place: min(own, key=lambda turn: turn.continued) for place, own in turns.items() if own}

    def _new_part(
        self, text: str, turn: _Turn, message: Message, tools: Sequence[Message]
    ) -> tuple[str, Sequence[int]]:
        """Return the token ids of what follows a call's answer, or why it cannot be continued."""
        plain, rest = self._chat.plain, text[turn.rendered :]
        if _digest(text[: turn.rendered]) != turn.digest:
            return ContinuationReason.REWRITTEN, ()
        sampled = self._read(turn, tools)
        if plain.shown(rest).startswith(turn.answer):
            new = plain.after(rest, len(turn.answer))
        elif not _shows(sampled, message):
            return ContinuationReason.HIDDEN, ()
        else:
            new = self._after_written(rest, turn, sampled, tools)
        if not new:
            return (ContinuationReason.REWRITTEN if _shows(sampled, message) else ContinuationReason.HIDDEN), ()
        ids = self._chat.encode(new)
        faithful = self._chat.decode(ids) == self._chat.normal(new)
        return (ContinuationReason.JOINED if faithful else ContinuationReason.UNFAITHFUL), ids

    def _read(self, turn: _Turn, tools: Sequence[Message]) -> ParsedAnswer:
        end = self._chat.end_of(turn.added)
        return self._chat.parse(turn.answer.removesuffix(end), tools, opened=turn.opened)

    def _after_written(self, rest: str, turn: _Turn, sampled: ParsedAnswer, tools: Sequence[Message]) -> str | None:
        """Return what the template writes after an answer, if it writes the answer's calls or spaces differently."""
        end = self._chat.end_of(turn.added)
        before, found, after = rest.partition(end or self._chat.usual_end)
        written = self._chat.parse(self._chat.plain.shown(before), tools, opened=turn.opened)
        if not found or written.reasoning != sampled.reasoning or not same_answer(sampled, written):
            return None
        return after if end else found + after

    def _fork_tokens(
        self, text: str, messages: Sequence[Message], tools: Sequence[Message], known: dict[int, _Turn]
    ) -> tuple[int, ...] | None:
        """Return the tokens of a prompt in which the template leaves out reasoning.

        Everything else keeps its own tokens.
        """
        answers = [
            None
            if (turn := known.get(place)) is None
            else SampledAnswer(turn.added[turn.prompt :], self._read(turn, tools), turn.opened)
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return fork_tokens(self._chat, text, answers, tools)

    def remember(self, attempt_id: str, prompt: RenderedPrompt, ids: Sequence[int], message: Message) -> None:
        """Keep an answered call, so that the attempt's next prompts continue its tokens.

        Args:
            attempt_id: the attempt that sampled it.
            prompt: the prompt of the call.
            ids: as sampled, including the end of turn.
            message: as the agent got it.
        """
        memory = self._memory(attempt_id)
        answer = {"role": "assistant", **message}
        said = prompt.conversation.copy().add(answer)
        before = prompt.continues
        if before is not None and before not in memory.turns.get(before.said, ()):
            before = None  # the attempt's calls were dropped since the prompt was made
        rest = prompt.ids if before is None else prompt.ids[before.count :]
        turn = _Turn(
            rendered=len(prompt.text),
            digest=_digest(prompt.text),
            answer=self._chat.decode(ids),
            opened=self._chat.opened(prompt.text),
            reasoning=reasoning_of(message),
            thought=self._chat.thought(ids),
            before=before,
            added=array("i", (*rest, *ids)),
            prompt=len(rest),
            said=said.whole,
            tools=prompt.tools,
        )
        memory.turns.setdefault(turn.said, []).append(turn)
        memory.but_system.add(said.but_system)
        memory.answers.add(Conversation().add(answer).whole)
        for digest in (*prompt.said, Conversation().add(answer).whole):
            memory.said.setdefault(digest, len(memory.said))
        self._grow(attempt_id, memory, turn.size)

    def pass_by(self, attempt_id: str, messages: Sequence[Message], message: Message) -> None:
        """Note a call that was answered without a prompt from here, as a reason for calls that continue it."""
        _, conversation = read(messages)
        memory = self._memory(attempt_id)
        memory.passed_by.add(conversation.add({"role": "assistant", **message}).whole)
        self._grow(attempt_id, memory, 100)

    def _memory(self, attempt_id: str) -> _Memory:
        memory = self._memories.setdefault(attempt_id, _Memory())
        self._memories.move_to_end(attempt_id)
        return memory

    def _grow(self, attempt_id: str, memory: _Memory, size: int) -> None:
        memory.size += size
        self._size += size
        if memory.size > self._remembered_bytes // 4:
            self._evict(attempt_id)
        while self._size > self._remembered_bytes:
            self._evict(next(iter(self._memories)))

    def _evict(self, attempt_id: str) -> None:
        self.forget(attempt_id)
        self._evicted[attempt_id] = None
        while len(self._evicted) > _EVICTED_KEPT:
            self._evicted.popitem(last=False)

    def forget(self, attempt_id: str) -> None:
        """Drop what an attempt sampled; it has ended."""
        memory = self._memories.pop(attempt_id, None)
        self._evicted.pop(attempt_id, None)
        if memory is not None:
            self._size -= memory.size


def _why_none(memory: _Memory, messages: Sequence[Message], found: Sequence[ConversationDigest]) -> str:
    """Return why messages continue none of the attempt's calls, although they may contain some of its answers."""
    if any(digest.whole in memory.passed_by for digest in found):
        return ContinuationReason.AFTER_MESSAGES
    if not any(
        message["role"] == "assistant" and digest in memory.answers
        for message, digest in zip(messages, _each(messages), strict=True)
    ):
        return ContinuationReason.BEGINS  # assistants' messages in it are examples, or come from elsewhere
    if any(digest.but_system in memory.but_system for digest in found):
        return ContinuationReason.SYSTEM_CHANGED
    return _how_edited(memory, messages)


def _how_edited(memory: _Memory, messages: Sequence[Message]) -> str:
    """Return how a program has rewritten the history.

    If the end of what it kept is unchanged, the oldest part was left out, or replaced by fewer new messages.
    """
    systems = {place for place, message in enumerate(messages) if message["role"] in SYSTEM}
    told = [memory.said.get(digest) for digest in _each(messages)]
    start = len(messages) - 1  # the last message is new
    later = len(memory.said)
    while start > 0 and start - 1 not in systems and (place := told[start - 1]) is not None and place < later:
        start, later = start - 1, place
    if not any(message["role"] == "assistant" for message in messages[start:]):
        return ContinuationReason.EDITED
    before = [place for place in range(start) if place not in systems]
    if all(told[place] is not None for place in range(start)):
        order = [*(told[place] or 0 for place in before), later]
        return ContinuationReason.WINDOW if order == sorted(order) else ContinuationReason.EDITED
    new_system = any(told[place] is None for place in systems)
    return (
        ContinuationReason.COMPACTED
        if len(before) < later - (not new_system) * len(systems)
        else ContinuationReason.EDITED
    )


def _each(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of each message."""
    return [Conversation().add(message).whole for message in messages]


def _restore_reasoning(message: Message, turn: _Turn | None) -> Message:
    """Return one of our answers with its reasoning, which many clients do not send back.

    The template decides about it.
    """
    given = reasoning_of(message)
    if turn is None or turn.reasoning is None or given not in {None, turn.reasoning}:
        return message
    if turn.thought is None:
        return {**message, "reasoning_content": turn.reasoning}
    return {**message, "content": f"{turn.thought}{join_content(message.get('content'))}"}


def _shows(sampled: ParsedAnswer, message: Message) -> bool:
    """Whether a message contains everything that was sampled for it, apart from reasoning."""
    calls = message.get("tool_calls") or ()
    told = [(call["function"]["name"], same_data(call["function"].get("arguments"))) for call in calls]
    written = [(call["function"]["name"], same_data(call["function"]["arguments"])) for call in sampled.tool_calls]
    if told != written or sampled.left.strip():
        return False
    return bool(calls) or (sampled.content or "") == join_content(message.get("content"))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

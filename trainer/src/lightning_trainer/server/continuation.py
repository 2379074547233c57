"""Exact continuation: a conversation stays one sequence of tokens, those that were sampled among them.

When the messages of a request continue an earlier call of the same attempt, the prompt is that call's own prompt and
answer, token for token, and after it the new part. Text made into tokens again would often give other tokens than those
sampled, and the calls of a conversation could not share a training row.

A join is never guessed. The messages must mean what was sent and answered (`meaning`); the chat template must still
render the earlier prompt as it did, and the answer as it was sampled, but for the way its tool calls are written down;
and the new part must come back from the tokenizer as the text it was. Where one of these fails the prompt is made from
the messages alone, and says why.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.records import dumps
from lightning_trainer import account as reasons
from lightning_trainer.server.chat import ChatFormat, Message, joined
from lightning_trainer.server.meaning import Conversation, Said, read, same_writing

_EVICTED_KEPT: Final = 20_000  # ids of attempts whose calls were forgotten, to be able to say so


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine gets.

    Attributes:
        ids: token ids.
        text: as the template renders the messages.
        how: `account.JOINED`, `account.BEGINS`, or why it stands alone.
        conversation: what was said so far, for `Continuations.remember`.
        tools: digest of the tools.
    """

    ids: tuple[int, ...]
    text: str
    how: str
    conversation: Conversation
    tools: bytes


@dataclass(slots=True)
class _Turn:
    """An answered call."""

    rendered: int  # characters of its prompt as the template rendered it
    digest: bytes  # of those
    answer: str  # as sampled, control tokens included
    said: str  # the same without them
    ids: array[int]  # prompt and answer
    prompt: int  # how many of them are the prompt
    tools: bytes
    continued: int = 0

    @property
    def size(self) -> int:
        return 4 * len(self.ids) + 2 * len(self.answer) + 400  # bytes, about


@dataclass(slots=True)
class _Memory:
    """The answered calls of one attempt."""

    turns: dict[bytes, list[_Turn]] = field(default_factory=dict)  # by the conversation that ends with the answer
    but_system: set[bytes] = field(default_factory=set)  # the same conversations without system messages
    answers: set[bytes] = field(default_factory=set)  # the answers by themselves
    elsewhere: set[bytes] = field(default_factory=set)  # conversations answered without a prompt from here
    size: int = 0


class Continuations:
    """Makes prompts for one chat format. Not to be used by two threads at once.

    Args:
        chat: renders and tokenizes.
        remembered_bytes: most memory for answered calls; of attempts longest unused all is forgotten first. One attempt
            has at most a quarter.
    """

    def __init__(self, chat: ChatFormat, *, remembered_bytes: int = 256 * 2**20) -> None:
        self._chat = chat
        self._remembered_bytes = remembered_bytes
        self._memories: OrderedDict[str, _Memory] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._size = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message], attempt_id: str | None = None) -> Prompt:
        """Render a conversation, ending where the assistant's answer begins.

        Args:
            messages: in OpenAI's shape.
            tools: those the model may call.
            attempt_id: whose earlier calls may be continued; None: nobody's.

        Raises:
            Refusal: the template has no place for tools, or refuses the conversation.
        """
        text = self._chat.render(messages, tools)
        found, conversation = read(messages)
        shown = hashlib.blake2b(dumps(list(tools)), digest_size=16).digest()
        how, turn, place = self._look_up(messages, found, attempt_id)
        if turn is not None:
            how, part = self._new_part(text, turn, messages, tools, place)
            if how == reasons.JOINED:
                turn.continued += 1
                return Prompt((*turn.ids, *part), text, how, conversation, shown)
            how = reasons.TOOLS_CHANGED if turn.tools != shown else how
        return Prompt(tuple(self._chat.encode(text)), text, how, conversation, shown)

    def _look_up(
        self, messages: Sequence[Message], found: Sequence[Said], attempt_id: str | None
    ) -> tuple[str, _Turn | None, int]:
        """Find the longest earlier call that these continue, and the place of its answer; or say why there is none."""
        memory = self._memories.get(attempt_id) if attempt_id is not None else None
        places = [place for place, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
        if memory is None:
            return (reasons.FORGOTTEN if places and attempt_id in self._evicted else reasons.BEGINS), None, 0
        for place in reversed(places):
            turns = memory.turns.get(found[place].whole)
            if turns:
                # Calls that were asked and answered in the same words may differ in tokens: each is continued once.
                return reasons.JOINED, min(turns, key=lambda turn: turn.continued), place
        return _why_none(memory, [messages[place] for place in places], found), None, 0

    def _new_part(
        self, text: str, turn: _Turn, messages: Sequence[Message], tools: Sequence[Message], place: int
    ) -> tuple[str, Sequence[int]]:
        """Give the token ids of what follows a call's answer, or why it can't be continued."""
        plain, rest = self._chat.plain, text[turn.rendered :]
        if _digest(text[: turn.rendered]) != turn.digest:
            return reasons.REWRITTEN, ()
        if plain.shown(rest).startswith(turn.answer):
            new = plain.after(rest, len(turn.answer))
        else:
            new = self._after_calls(text, turn, messages, tools, place) if messages[place].get("tool_calls") else None
            if new and not same_writing(turn.answer, plain.shown(rest[: len(rest) - len(new)])):
                return reasons.HIDDEN, ()
        if not new:
            return (reasons.HIDDEN if self._hides(turn, messages[place]) else reasons.REWRITTEN), ()
        ids = self._chat.encode(new)
        faithful = self._chat.decode(ids) == self._chat.normal(new)
        return (reasons.JOINED if faithful else reasons.UNFAITHFUL), ids

    def _hides(self, turn: _Turn, message: Message) -> bool:
        """Whether an answer without calls says more than its message: a stop string, half a letter."""
        said = self._chat.decode(turn.ids[turn.prompt :], control_tokens=False)
        return not message.get("tool_calls") and said != joined(message.get("content"))

    def _after_calls(
        self, text: str, turn: _Turn, messages: Sequence[Message], tools: Sequence[Message], place: int
    ) -> str | None:
        """Give what the template writes after an answer with tool calls, whose JSON it writes in a way of its own."""
        said = {name: value for name, value in messages[place].items() if name != "tool_calls"}
        said["content"] = turn.said
        changed = self._chat.render([*messages[:place], said, *messages[place + 1 :]], tools)
        rest = changed[turn.rendered :]
        if _digest(changed[: turn.rendered]) != turn.digest or not self._chat.plain.shown(rest).startswith(turn.answer):
            return None
        new = self._chat.plain.after(rest, len(turn.answer))
        return new if new and text.endswith(new) and len(new) <= len(text) - turn.rendered else None

    def remember(self, attempt_id: str, prompt: Prompt, ids: Sequence[int], message: Message) -> None:
        """Keep an answered call, so that the attempt's next prompts continue its tokens.

        Args:
            attempt_id: who sampled it.
            prompt: what it answers.
            ids: as sampled, the end of turn included.
            message: as the agent got it.
        """
        memory = self._memory(attempt_id)
        turn = _Turn(
            rendered=len(prompt.text),
            digest=_digest(prompt.text),
            answer=self._chat.decode(ids),
            said=self._chat.decode(ids, control_tokens=False) if message.get("tool_calls") else "",
            ids=array("i", (*prompt.ids, *ids)),
            prompt=len(prompt.ids),
            tools=prompt.tools,
        )
        answer = {"role": "assistant", **message}
        said = prompt.conversation.copy().add(answer)
        memory.turns.setdefault(said.whole, []).append(turn)
        memory.but_system.add(said.but_system)
        memory.answers.add(Conversation().add(answer).whole)
        self._grow(attempt_id, memory, turn.size)

    def pass_by(self, attempt_id: str, messages: Sequence[Message], message: Message) -> None:
        """Note a call that was answered without a prompt from here, to be able to say so of what goes on from it."""
        _, conversation = read(messages)
        memory = self._memory(attempt_id)
        memory.elsewhere.add(conversation.add({"role": "assistant", **message}).whole)
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


def _why_none(memory: _Memory, answers: Sequence[Message], found: Sequence[Said]) -> str:
    """Say why messages continue none of the attempt's calls, although they may hold some of its answers."""
    if any(said.whole in memory.elsewhere for said in found):
        return reasons.AFTER_MESSAGES
    if not any(Conversation().add(answer).whole in memory.answers for answer in answers):
        return reasons.BEGINS  # what assistants say in it are examples, or came from elsewhere
    return reasons.SYSTEM_CHANGED if any(said.but_system in memory.but_system for said in found) else reasons.EDITED


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

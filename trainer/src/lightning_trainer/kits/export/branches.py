"""Calls of one attempt that go on from each other share a line, as they share a row in training."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_spans.schema.json import dumps
from lightning_spans.schema.transitions import Transition
from lightning_trainer.kits.export.chat import THOUGHTS, CallChat, Message, spoken
from lightning_trainer.rl.prefixes import OpenSequences

NOT_TRAINED = -100  # torch's index of labels that no loss looks at


@dataclass(frozen=True, slots=True)
class BranchCall:
    """A call, and the conversation that it is where one was asked for."""

    call: Transition
    exchange: CallChat | None = None

    @property
    def ids(self) -> NDArray[np.int32] | None:
        """(P + A,) the tokens of prompt and answer; None where not recorded."""
        tokens = self.call.tokens
        return None if tokens is None else np.array(tokens.prompt + tokens.response, dtype=np.int32)


Branch = list[BranchCall]  # each goes on from the one before


def branches(calls: Sequence[BranchCall]) -> list[Branch]:
    """Put each call onto the longest branch of its agent and weights that it continues, or on one of its own.

    What continues what is seen by tokens where both calls have them, else by messages. A branch is continued once.
    """
    found: list[Branch] = []
    by_tokens: defaultdict[object, OpenSequences[Branch]] = defaultdict(OpenSequences)
    by_messages: defaultdict[object, dict[bytes, list[Branch]]] = defaultdict(dict)
    for said in sorted(calls, key=lambda each: (each.call.turn, each.call.choice)):
        call, ids = said.call, said.ids
        # Tools stand in a prompt, so calls with others are not told by one line.
        tools = None if said.exchange is None else dumps(said.exchange.tools)
        kind = (call.agent, call.policy, call.policy_version, tools)
        if ids is not None and call.tokens is not None:
            branch = by_tokens[kind].take(ids[: len(call.tokens.prompt)]) or _new(found)
            by_tokens[kind].add(ids, branch)
        else:
            branch = _by_messages(said, by_messages[kind], found)
        branch.append(said)
    return found


def _new(found: list[Branch]) -> Branch:
    found.append([])
    return found[-1]


def _by_messages(said: BranchCall, still_open: dict[bytes, list[Branch]], found: list[Branch]) -> Branch:
    if said.exchange is None:
        return _new(found)
    marks = _marks(spoken(said.exchange.whole))
    branch = next((still_open[mark].pop(0) for mark in reversed(marks[:-1]) if still_open.get(mark)), None)
    branch = _new(found) if branch is None else branch
    still_open.setdefault(marks[-1], []).append(branch)
    return branch


def _marks(messages: Sequence[bytes]) -> list[bytes]:
    """Return a digest of each beginning of a conversation."""
    digest, marks = hashlib.sha256(), []
    for message in messages:
        digest.update(len(message).to_bytes(8) + message)
        marks.append(digest.digest())
    return marks


def tokens_of(branch: Branch) -> tuple[list[int], list[int]] | None:
    """Return (T,) tokens of a branch and (T,) labels: the same where the model said them, else `NOT_TRAINED`.

    Returns:
        None where no tokens were recorded.
    """
    ids = branch[-1].ids
    if ids is None:
        return None
    labels = np.full(len(ids), NOT_TRAINED, np.int64)
    for said in branch:
        if said.call.tokens is not None:
            start = len(said.call.tokens.prompt)
            labels[start : start + len(said.call.tokens.response)] = said.call.tokens.response
    return ids.tolist(), labels.tolist()


def messages_of(branch: Branch) -> list[Message]:
    """Return the conversation of a branch, with the thoughts of earlier answers where the program told none of them.

    Where tokens say that a call goes on from an answer, its thoughts were read, whatever its messages say.
    """
    last = branch[-1].exchange
    whole = [] if last is None else last.whole
    for said in branch[:-1]:
        place, thoughts = _place(said), None if said.exchange is None else said.exchange.answer.get(THOUGHTS)
        if thoughts is not None and _is_answer(whole, place):
            whole[place] = {THOUGHTS: thoughts, **whole[place]}
    return whole


def answers_in(branch: Branch) -> list[int]:
    """Return the places, among the messages of the last call and its answer, of what the model said itself.

    Other messages of the assistant, such as examples in a prompt, are nobody's answers here.
    """
    last = branch[-1].exchange
    if last is None:
        return []
    whole = last.whole
    return [place for place in map(_place, branch) if _is_answer(whole, place)]


def _place(said: BranchCall) -> int:
    """Return where the answer of a call stands in the conversation of a branch."""
    return -1 if said.exchange is None else len(said.exchange.messages)


def _is_answer(whole: Sequence[Message], place: int) -> bool:
    return 0 <= place < len(whole) and whole[place]["role"] == "assistant"

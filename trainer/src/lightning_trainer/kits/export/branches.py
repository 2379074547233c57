"""Calls of one attempt that continue each other share a line, as they share a row in training."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_spans.schema.json import dumps
from lightning_spans.schema.transitions import Transition
from lightning_trainer.kits.export.chat import THOUGHTS, CallChat, Message, comparison_keys
from lightning_trainer.rl.prefixes import OpenSequences

NOT_TRAINED = -100  # torch's index of labels that the loss ignores


@dataclass(frozen=True, slots=True)
class BranchCall:
    """A call, and its conversation if the format needs one."""

    call: Transition
    exchange: CallChat | None = None

    @property
    def ids(self) -> NDArray[np.int32] | None:
        """(P + A,) tokens of prompt and answer; None if they were not recorded."""
        tokens = self.call.tokens
        return None if tokens is None else np.array(tokens.prompt + tokens.response, dtype=np.int32)


Branch = list[BranchCall]  # each call continues the one before


def branches(calls: Sequence[BranchCall]) -> list[Branch]:
    """Append each call to the longest branch of its agent and weights that it continues, or start a new branch.

    Two calls are compared by tokens if both have them, otherwise by messages. A branch is continued once.
    """
    found: list[Branch] = []
    by_tokens: defaultdict[object, OpenSequences[Branch]] = defaultdict(OpenSequences)
    by_messages: defaultdict[object, dict[bytes, list[Branch]]] = defaultdict(dict)
    for said in sorted(calls, key=lambda each: (each.call.turn, each.call.choice)):
        call, ids = said.call, said.ids
        # Tools are part of a prompt, so calls with different tools cannot share a line.
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
    marks = _marks(comparison_keys(said.exchange.whole))
    branch = next((still_open[mark].pop(0) for mark in reversed(marks[:-1]) if still_open.get(mark)), None)
    branch = _new(found) if branch is None else branch
    still_open.setdefault(marks[-1], []).append(branch)
    return branch


def _marks(messages: Sequence[bytes]) -> list[bytes]:
    """Return a digest of each prefix of a conversation."""
    digest, marks = hashlib.sha256(), []
    for message in messages:
        digest.update(len(message).to_bytes(8) + message)
        marks.append(digest.digest())
    return marks


def tokens_of(branch: Branch) -> tuple[list[int], list[int]] | None:
    """Return (T,) tokens of a branch and (T,) labels: the token if the model sampled it, otherwise `NOT_TRAINED`.

    Returns:
        None if no tokens were recorded.
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
    """Return the conversation of a branch, with the thoughts of earlier answers if the program left them out.

    If the tokens show that a call continues an answer, the model read that answer's thoughts, whatever the call's
    messages contain.
    """
    last = branch[-1].exchange
    whole = [] if last is None else last.whole
    for said in branch[:-1]:
        place, thoughts = _place(said), None if said.exchange is None else said.exchange.answer.get(THOUGHTS)
        if thoughts is not None and _is_answer(whole, place):
            whole[place] = {THOUGHTS: thoughts, **whole[place]}
    return whole


def answers_in(branch: Branch) -> list[int]:
    """Return the indices of the model's own answers among the messages of the last call and its answer.

    Other messages of the assistant, such as examples in a prompt, do not count.
    """
    last = branch[-1].exchange
    if last is None:
        return []
    whole = last.whole
    return [place for place in map(_place, branch) if _is_answer(whole, place)]


def _place(said: BranchCall) -> int:
    """Return the index of a call's answer in the conversation of a branch."""
    return -1 if said.exchange is None else len(said.exchange.messages)


def _is_answer(whole: Sequence[Message], place: int) -> bool:
    return 0 <= place < len(whole) and whole[place]["role"] == "assistant"

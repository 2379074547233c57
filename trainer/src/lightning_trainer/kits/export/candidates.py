"""Candidate lines, each with the values that decide whether it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_spans.schema.agents import label, selects
from lightning_spans.schema.json import dumps
from lightning_spans.schema.transitions import Transition
from lightning_trainer.kits.export.asked import UnreadableError
from lightning_trainer.kits.export.branches import Branch, BranchCall, answers_in, branches, messages_of, tokens_of
from lightning_trainer.kits.export.chat import Message, comparison_keys, exchange
from lightning_trainer.kits.export.episodes import StoredEpisode, digest
from lightning_trainer.kits.export.files import Line
from lightning_trainer.kits.export.wanted import ExportSelection, UnexportedReason
from lightning_trainer.lineage.permits import join_tenants, tenants_of
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.rows import why_no_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCandidate:
    """The known values of a line while the store is read.

    Attributes:
        place: of the line in the spool.
        calls: number of model calls in it.
        agent: agent that made them.
        reward: the agent's reward in the attempt.
        group: attempts that are compared.
        attempt: the attempt, or the trace.
        task: digest of the task; None if it is unknown.
        opening: digest of the request of the attempt's first call.
        validation: whether it was run to validate.
        prompt: digest of the request of the line's answer.
        content: digest of everything that is trained on.
    """

    place: int
    calls: int
    agent: str | None
    reward: float | None
    group: str
    attempt: str
    task: str | None
    opening: str | None
    validation: bool
    prompt: str
    content: str


def lines_of(
    episode: StoredEpisode, wanted: ExportSelection, left_out: Counter[str]
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Make the lines of an attempt, each with the fields of `LineCandidate` except its place.

    Args:
        episode: the attempt.
        wanted: options, such as the format.
        left_out: counts the calls that are in no line, by reason.
    """
    said = list(_branch_calls(episode, wanted, left_out))
    parts = [[each] for each in said] if wanted.format == "dpo" else branches(said)
    rewards = {path: episode.reward_of(path, wanted.sources) for path in {each.call.path for each in said}}
    for branch in parts:
        path = branch[0].call.path
        reward, agent = rewards[path], None if path is None else label(path, wanted.agents)
        line = _line(branch, wanted) | _provenance(branch, episode, reward, agent)
        asked, learned = _digests(branch)
        yield (
            line,
            {
                "calls": len(branch),
                "agent": agent,
                "reward": reward,
                "group": episode.group,
                "attempt": branch[0].call.attempt_id,
                "task": episode.task,
                "opening": episode.opening,
                "validation": episode.validation,
                "prompt": asked,
                "content": learned,
            },
        )


def _branch_calls(episode: StoredEpisode, wanted: ExportSelection, left_out: Counter[str]) -> Iterator[BranchCall]:
    left = episode.left
    for call in episode.calls:
        reason, said = episode.problem, None
        if wanted.agents is not None and not selects(wanted.agents, call.path):
            reason = UntrainedReason.NOT_SELECTED
        elif reason is None:
            reason, said = _read(call, wanted, left=call.span_id in left and call.finish_reason is None)
        if said is None:
            left_out[reason or UntrainedReason.CALL_FAILED] += 1
        else:
            yield said


def _read(call: Transition, wanted: ExportSelection, *, left: bool) -> tuple[str | None, BranchCall | None]:
    if call.error is not None:
        return UntrainedReason.CALL_FAILED, None
    if wanted.format == "tokens":
        return (why_no_tokens(call), None) if call.tokens is None else (None, BranchCall(call))
    if left:
        return UnexportedReason.LEFT, None
    try:
        return None, BranchCall(call, exchange(call))
    except UnreadableError as error:
        return str(error), None


def _line(branch: Branch, wanted: ExportSelection) -> Line:
    """Return the training content of a line; `dpo` joins two of them later."""
    tokens = tokens_of(branch) if wanted.ids or wanted.format == "tokens" else None
    exact = {} if tokens is None else dict(zip(("input_ids", "labels"), tokens, strict=True))
    last = branch[-1].exchange
    if last is None:
        return exact
    tools = dumps(list(last.tools)).decode() if last.tools else None
    if wanted.format == "dpo":
        recorded = branch[-1].call.tokens
        known = wanted.ids and recorded is not None
        ids = {"prompt_ids": list(recorded.prompt), "answer_ids": list(recorded.response)} if known and recorded else {}
        return {"prompt": list(last.messages), "answer": [last.answer], "tools": tools, **ids}
    return {"messages": messages_of(branch), "tools": tools, "answers": answers_in(branch), **exact}


def _provenance(branch: Branch, episode: StoredEpisode, reward: float | None, agent: str | None) -> Line:
    call = branch[-1].call
    return {
        "agent": agent,
        **({} if call.path in {None, call.agent} else {"agent_path": call.path}),
        "reward": reward,
        "rollout_id": call.rollout_id,
        "attempt_id": call.attempt_id,
        "group_id": episode.group,
        "task_id": episode.task,
        "span_ids": [said.call.span_id for said in branch],
        **_lineage(branch, episode),
        "policy": call.policy,
        "policy_version": call.policy_version,
        "origin": episode.origin,
    }


def _lineage(branch: Branch, episode: StoredEpisode) -> Line:
    """Return the ids by which a checkpoint that was trained on the line is found again."""
    nodes = {node.span.span_id: node for node in episode.trace.chats}
    own = [nodes[said.call.span_id] for said in branch if said.call.span_id in nodes]
    return {
        "call_ids": [node.call.call_id for node in own if node.call is not None],
        "trace_id": own[-1].span.trace_id if own else None,
        **({"tenant": join_tenants(tenants)} if (tenants := tenants_of(episode.trace)) else {}),
        "reward_ids": [reward.reward_id for reward in episode.trace.rewards],
    }


def _digests(branch: Branch) -> tuple[str, str]:
    """Return digests of the request of a line's first answer, and of everything in the line that is trained on."""
    first, last = branch[0], branch[-1]
    if last.exchange is None or first.exchange is None:
        tokens = last.call.tokens
        asked: Mapping[str, Any] = {"ids": first.call.tokens.prompt if first.call.tokens else ()}
        learned: Any = tokens and [tokens.prompt, tokens.response, _prompt_lengths(branch)]
    else:
        asked = {"asked": _texts(first.exchange.messages), "tools": first.exchange.tools}
        learned = [_texts(messages_of(branch)), last.exchange.tools, answers_in(branch)]
    agent = last.call.agent
    return digest([agent, asked]), digest([agent, learned])


def _texts(messages: Sequence[Message]) -> list[str]:
    return [part.decode() for part in comparison_keys(messages)]


def _prompt_lengths(branch: Branch) -> list[int]:
    return [len(said.call.tokens.prompt) for said in branch if said.call.tokens is not None]

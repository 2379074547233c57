"""One model call: its tokens with everything known about each, its messages, its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_spans.adapter.nodes import Node
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import RefusedError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.calls import Choice
from lightning_spans.schema.json import dumps
from lightning_trainer.kits.view.answers.calls import CallChoice, CallPage, RowPlace, Token
from lightning_trainer.kits.view.names import chosen_by, names_in
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.learning import batch_of_group, row_of, step_trains
from lightning_trainer.kits.view.reading.pieces import Pieces, pieces_of
from lightning_trainer.kits.view.reading.texts import WHOLE, conversation, legible, messages, request_of, view_message
from lightning_trainer.kits.view.reading.transcripts import number_or_none, reward_row, rewards_by_node
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.policies import ADAPTERS_NAME
from lightning_trainer.report.learned_tokens import read
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.rows import Row, why_untrainable
from lightning_trainer.run.group_ids import step_of

TOKENS: Final = 3000  # number of a prompt's last tokens to show, unless all are requested
_REQUEST: Final = 500_000  # characters of a raw request
_ATTRIBUTE: Final = 20_000


def call_page(
    reader: StoreReader,
    run: Run,
    trace: Trace,
    span_id: str,
    *,
    group_id: str | None,
    tokenizers: Sequence[Path],
    whole: bool,
) -> CallPage:
    """Return a call of a trace.

    Raises:
        RefusedError: the trace has no such call.
    """
    turn, node = next(((n, node) for n, node in enumerate(trace.chats) if node.span.span_id == span_id), (0, None))
    if node is None:
        raise RefusedError(f"there is no model call with the span {span_id} in this attempt")
    batch = batch_of_group(reader, run, group_id)
    calls = [c for c in (batch.calls if batch else ()) if c.transition.span_id == span_id and _same(c, trace)]
    learned = _find_row(run, batch, calls, group_id)
    pieces = pieces_of([*tokenizers, *_folders(run)])
    prompt = node.answer.prompt_token_ids or ()
    start = 0 if whole else max(0, len(prompt) - TOKENS)
    return CallPage(
        rollout_id=trace.rollout_id,
        attempt_id=trace.attempt_id,
        span_id=span_id,
        agent=names_in(trace, chosen_by(run))[node],
        turn=turn,
        turns=[each.span.span_id for each in trace.chats],
        model=node.answer.model,
        version=node.policy_version,
        error=node.error,
        ms=(node.span.end_ns - node.span.start_ns) / 1e6,
        texts=pieces is not None,
        prompt=[learned.token(prompt[at], pieces, None, at) for at in range(start, len(prompt))],
        prompt_total=len(prompt),
        choices=[
            _choice(place, choice, pieces, calls, learned=learned, prompt=len(prompt))
            for place, choice in enumerate(node.answer.choices)
        ],
        messages=conversation(messages(node), WHOLE),
        sampling=legible(node.call.sampling) if node.call is not None else {},
        row=learned.place,
        untrained=learned.untrained,
        unread=learned.unread,
        rewards=[reward_row(reward) for reward in rewards_by_node(trace).get(span_id, ())],
        request=dumps(dict(request_of(node))).decode().strip()[:_REQUEST],
        attributes=_attributes(node),
    )


def _same(call: CountedCall, trace: Trace) -> bool:
    return call.transition.attempt_id == trace.attempt_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedCall:
    """A call in training: its row, and the update's values for the row's tokens, (T,) each, NaN elsewhere."""

    row: Row | None = None
    place: RowPlace | None = None
    gap: NDArray[np.floating] | None = None
    entropy: NDArray[np.floating] | None = None
    untrained: str | None = None
    unread: str | None = None

    def token(self, token_id: int, pieces: Pieces | None, logprob: float | None, at: int) -> Token:
        """Return the token at a position of the row."""
        row = self.row if self.row is not None and at < len(self.row.mask) else None
        trained = bool(row.mask[at]) if row is not None else None
        return Token(
            id=token_id,
            text=pieces.text(token_id) if pieces is not None else str(token_id),
            logprob=logprob,
            trained=trained,
            advantage=float(row.advantages[at]) if row is not None and trained else None,
            gap=_finite(self.gap, at) if trained else None,
            entropy=_finite(self.entropy, at) if trained else None,
        )


def _finite(values: NDArray[np.floating] | None, at: int) -> float | None:
    value = math.nan if values is None else float(values[at])
    return value if math.isfinite(value) else None


def _find_row(run: Run, batch: Batch | None, calls: Sequence[CountedCall], group_id: str | None) -> _TrainedCall:
    """Return the row of a call if the run trains its agent, and the values of its step's update."""
    if group_id is None or not step_trains(group_id):
        return _TrainedCall(untrained="it belongs to no training step")
    if batch is None or not calls:
        return _TrainedCall(
            untrained="its attempt does not count, its group has not ended, or the run's options are missing"
        )
    transition = calls[0].transition
    if not selects(chosen_by(run) or ("*",), transition.path):
        return _TrainedCall(untrained=UntrainedReason.NOT_SELECTED)
    found = row_of(batch, transition)
    if found is None:
        return _TrainedCall(untrained=calls[0].left_out or why_untrainable(transition))
    row, place = found
    seen = read(run.folder, step_of(group_id).number, row) if run.folder is not None else None
    if seen is None:
        return _TrainedCall(row=row, place=place, unread=_why_unread(row))
    columns = np.full((2, len(row.tokens)), np.nan)
    columns[:, row.mask] = seen
    return _TrainedCall(row=row, place=place, gap=columns[0], entropy=columns[1])


def _why_unread(row: Row) -> str:
    """Return why the update's values are unknown for a row."""
    if not row.has_gradient:
        return "all advantages of its row are 0, so the update did not read it"
    return "the run's folder does not have this row's tokens: an earlier version wrote it, or they were deleted"


def _choice(
    place: int,
    choice: Choice,
    pieces: Pieces | None,
    calls: Sequence[CountedCall],
    *,
    learned: _TrainedCall,
    prompt: int,
) -> CallChoice:
    judged = next((call for call in calls if call.transition.choice in (place, choice.index)), None)
    ids, logprobs = choice.token_ids or (), choice.logprobs or ()
    mine = learned if place == 0 else _TrainedCall()
    return CallChoice(
        index=choice.index,
        finish=choice.finish_reason,
        message=view_message(choice.message, WHOLE),
        tokens=[
            mine.token(token_id, pieces, logprobs[at] if at < len(logprobs) else None, prompt + at)
            for at, token_id in enumerate(ids)
        ],
        credit=number_or_none(judged.credit) if judged is not None else None,
        advantage=number_or_none(judged.advantage) if judged is not None else None,
        left_out=judged.left_out if judged is not None else None,
    )


def _attributes(node: Node) -> dict[str, Any]:
    return {
        name: value[:_ATTRIBUTE] if isinstance(value, str) else value
        for name, value in legible(node.span.attributes).items()
    }


def _folders(run: Run) -> list[Path]:
    """Return the folders that may contain the tokenizer of a run's model. Nothing is downloaded or created for it."""
    found = [run.folder / "checkpoint"] if run.folder is not None else []
    model = run.options.get("model")
    if not isinstance(model, str):
        return found
    adapters = run.folder / "checkpoint" / ADAPTERS_NAME if run.folder is not None else None
    named = Path(model).expanduser()
    return [*found, named, *([adapters] if adapters is not None else []), *_cached_folders(model)]


def _cached_folders(model: str) -> list[Path]:
    from lightning_trainer.models import cache_folder

    hub = Path.home() / ".cache" / "huggingface" / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    return [*cache_folder().glob(f"models/*/{Path(model).name}"), *sorted(hub.glob("*"))]

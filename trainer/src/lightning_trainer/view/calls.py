"""One model call: its tokens with what is known of each, what was said, what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning_spans.adapter.nodes import Node
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import LightningError, RefusedError
from lightning_spans.schema.calls import Choice
from lightning_spans.schema.json import dumps
from lightning_trainer.policies import ADAPTERS_NAME
from lightning_trainer.rl.batch import Batch, Judged
from lightning_trainer.rl.rows import Row
from lightning_trainer.view.answers import CallChoice, CallPage, Token
from lightning_trainer.view.learning import batch_of, row_of, step_trains
from lightning_trainer.view.pieces import Pieces, pieces_of
from lightning_trainer.view.reader import Reader
from lightning_trainer.view.runs import Run
from lightning_trainer.view.texts import WHOLE, legible, messages, request_of, said
from lightning_trainer.view.transcripts import known, reward_row, rewards_by_node

TOKENS: Final = 3000  # of a prompt, its last ones, unless all are asked for
_REQUEST: Final = 500_000  # characters of a raw request
_ATTRIBUTE: Final = 20_000


def call_page(
    reader: Reader,
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
        RefusedError: there is no such call in it.
    """
    turn, node = next(((n, node) for n, node in enumerate(trace.chats) if node.span.span_id == span_id), (0, None))
    if node is None:
        raise RefusedError(f"there is no model call with the span {span_id} in this attempt")
    batch = _batch(reader, run, group_id)
    calls = [c for c in (batch.calls if batch else ()) if c.transition.span_id == span_id and _same(c, trace)]
    found = row_of(batch, calls[0].transition) if batch is not None and calls else None
    pieces = pieces_of([*tokenizers, *_folders(run)])
    prompt = node.answer.prompt_token_ids or ()
    start = 0 if whole else max(0, len(prompt) - TOKENS)
    return CallPage(
        rollout_id=trace.rollout_id,
        attempt_id=trace.attempt_id,
        span_id=span_id,
        agent=node.span.agent,
        turn=turn,
        turns=[each.span.span_id for each in trace.chats],
        model=node.answer.model,
        version=node.policy_version,
        error=node.error,
        ms=(node.span.end_ns - node.span.start_ns) / 1e6,
        texts=pieces is not None,
        prompt=_prompt(prompt, start, pieces, found[0] if found else None),
        prompt_total=len(prompt),
        choices=[
            _choice(place, choice, pieces, calls, row=found[0] if found else None, prompt=len(prompt))
            for place, choice in enumerate(node.answer.choices)
        ],
        messages=[said(message, WHOLE) for message in messages(node)],
        sampling=legible(node.call.sampling) if node.call is not None else {},
        row=found[1] if found else None,
        rewards=[reward_row(reward) for reward in rewards_by_node(trace).get(span_id, ())],
        request=dumps(dict(request_of(node))).decode().strip()[:_REQUEST],
        attributes=_attributes(node),
    )


def _same(call: Judged, trace: Trace) -> bool:
    return call.transition.attempt_id == trace.attempt_id


def _batch(reader: Reader, run: Run, group_id: str | None) -> Batch | None:
    if group_id is None or not step_trains(group_id):
        return None
    try:
        made = batch_of(reader, run, [group_id])
    except LightningError:
        return None
    return made[0] if made is not None else None


def _prompt(ids: Sequence[int], start: int, pieces: Pieces | None, row: Row | None) -> list[Token]:
    return [_token(ids[at], pieces, None, row, at) for at in range(start, len(ids))]


def _choice(
    place: int, choice: Choice, pieces: Pieces | None, calls: Sequence[Judged], *, row: Row | None, prompt: int
) -> CallChoice:
    judged = next((call for call in calls if call.transition.choice in (place, choice.index)), None)
    ids, logprobs = choice.token_ids or (), choice.logprobs or ()
    mine = row if place == 0 else None
    tokens = [
        _token(token_id, pieces, logprobs[at] if at < len(logprobs) else None, mine, prompt + at)
        for at, token_id in enumerate(ids)
    ]
    return CallChoice(
        index=choice.index,
        finish=choice.finish_reason,
        message=said(choice.message, WHOLE),
        tokens=tokens,
        credit=known(judged.credit) if judged is not None else None,
        advantage=known(judged.advantage) if judged is not None else None,
        left_out=judged.left_out if judged is not None else None,
    )


def _token(token_id: int, pieces: Pieces | None, logprob: float | None, row: Row | None, at: int) -> Token:
    inside = row is not None and at < len(row.mask)
    trained = bool(row.mask[at]) if row is not None and inside else None
    return Token(
        id=token_id,
        text=pieces.text(token_id) if pieces is not None else str(token_id),
        logprob=logprob,
        trained=trained,
        advantage=float(row.advantages[at]) if row is not None and trained else None,
    )


def _attributes(node: Node) -> dict[str, Any]:
    return {
        name: value[:_ATTRIBUTE] if isinstance(value, str) else value
        for name, value in legible(node.span.attributes).items()
    }


def _folders(run: Run) -> list[Path]:
    """Name the folders that may have the tokenizer of a run's model; nothing is fetched or made for a look."""
    found = [run.folder / "checkpoint"] if run.folder is not None else []
    model = run.options.get("model")
    if not isinstance(model, str):
        return found
    adapters = run.folder / "checkpoint" / ADAPTERS_NAME if run.folder is not None else None
    named = Path(model).expanduser()
    return [*found, named, *([adapters] if adapters is not None else []), *_cached(model)]


def _cached(model: str) -> list[Path]:
    from lightning_trainer.models import cache_folder

    hub = Path.home() / ".cache" / "huggingface" / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    return [*cache_folder().glob(f"models/*/{Path(model).name}"), *sorted(hub.glob("*"))]

"""Search in everything that was recorded, a second at a time: in spans, then in calls without a span."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Select, exists, func, or_, select

from lightning_spans.schema.json import loads
from lightning_spans.store.sql import schema
from lightning_trainer.kits.view.answers.store import Hit, SearchPage
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import tasks_and_rewards
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.kits.view.runs import Run

_LOOK_S: Final = 1.0  # duration of one page of a search
_AT_ONCE: Final = 2000  # records of a search between looks at the clock
_AROUND: Final = 60
_HITS: Final = 50


def search(reader: StoreReader, run: Run, text: str, *, after: int, calls: bool = False) -> SearchPage:
    """Search names, errors and attributes of spans (which contain requests, answers, arguments and results).

    Then the requests and answers of calls without a span: those of a program that is not attached. One page searches
    for a second at most, and at least one part; the next one continues at `next` and `calls`. The newest come last.
    """
    query = _in_calls(text) if calls else _in_spans(text)
    seq = schema.calls.c.seq if calls else schema.spans.c.seq
    until, hits, looked, start = time.monotonic() + _LOOK_S, list[Hit](), 0, after
    with reader.reading() as connection:
        last = connection.scalar(select(func.max(seq))) or 0
        while after < last and len(hits) < _HITS and (after == start or time.monotonic() < until):
            part = seq.between(after + 1, after + _AT_ONCE)
            hits += [_hit(row, text) for row in connection.execute(query.where(part).order_by(seq))]
            after += _AT_ONCE
        looked = max(0, min(after, last) - start)
        more = not calls and _any_call(connection)
    hits = _with_tasks(reader, run, hits)
    if after < last:
        return SearchPage(hits=hits, looked=looked, next=after, calls=calls)
    return SearchPage(hits=hits, looked=looked, next=0 if more else None, calls=more)


def _with_tasks(reader: StoreReader, run: Run, hits: list[Hit]) -> list[Hit]:
    known = tasks_and_rewards(reader, run, (hit.rollout_id for hit in hits if hit.rollout_id is not None))
    found = ((hit, *known.get(hit.rollout_id or "", ("", None))) for hit in hits)
    return [replace(hit, task=task, reward=reward) for hit, task, reward in found]


def _any_call(connection: Connection) -> bool:
    return connection.scalar(select(schema.calls.c.seq).limit(1)) is not None


def _in_spans(text: str) -> Select[Any]:
    spans = schema.spans.c
    columns = (
        spans.rollout_id, spans.attempt_id, spans.trace_id, spans.span_id, spans.name, spans.agent,
        spans.status_message, spans.attributes,
    )  # fmt: skip
    plain = (spans.name, spans.status_message, spans.agent)
    # Attributes contain texts as JSON, and requests as JSON in JSON: a character that JSON escapes is searched escaped.
    return select(*columns).where(
        or_(
            *(column.icontains(text, autoescape=True) for column in plain),
            *(spans.attributes.icontains(form, autoescape=True) for form in _forms(text)),
        )
    )


def _in_calls(text: str) -> Select[Any]:
    calls, choices, spans = schema.calls.c, schema.choices.c, schema.spans.c
    told = exists().where(spans.trace_id == calls.trace_id, spans.span_id == calls.span_id)
    answer = func.coalesce(choices.message, "")
    columns = (
        calls.rollout_id, calls.attempt_id, calls.trace_id, calls.policy.label("name"), calls.agent,
        func.coalesce(calls.error, "").label("status_message"), calls.request, answer.label("message"),
    )  # fmt: skip
    holders = [column.icontains(form, autoescape=True) for column in (calls.request, answer) for form in _forms(text)]
    found = or_(calls.error.icontains(text, autoescape=True), calls.agent.icontains(text, autoescape=True), *holders)
    both = schema.calls.outerjoin(schema.choices, choices.call_id == calls.call_id)
    return select(*columns).select_from(both).where(found, ~told)


def _forms(text: str) -> list[str]:
    """Return a text, and its forms in JSON and in JSON within JSON, with non-ASCII characters escaped or not."""
    found = [text]
    for ascii_only in (False, True):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        found += [once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]]
    return list(dict.fromkeys(found))


def _hit(row: Any, text: str) -> Hit:
    if hasattr(row, "attributes"):
        values = [*map(str, legible(loads(row.attributes)).values()), row.attributes]
    else:
        values = [row.request, row.message]
    places = [row.name, row.agent or "", row.status_message, *values]
    forms = [re.compile(re.escape(form), re.IGNORECASE) for form in _forms(text)]
    found = next((place for holder in places for form in forms if (place := form.search(holder))), None)
    holder, (at, end) = (found.string, found.span()) if found is not None else ("", (0, 0))
    return Hit(
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        trace_id=row.trace_id,
        span_id=getattr(row, "span_id", None),
        name=row.name,
        agent=row.agent,
        before=holder[max(0, at - _AROUND) : at],
        match=holder[at:end],
        behind=holder[end : end + _AROUND],
    )

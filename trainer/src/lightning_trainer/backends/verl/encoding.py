"""The calls of a row, passed through verl to our advantage estimators in the field `uid`.

verl gives an estimator each row's reward, mask and `uid`, and nothing else. Advantages are computed where whole groups
are available, with every recorded call, so the field carries them exactly.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from lightning_trainer.rl.rows import Row


class TokenSpan(NamedTuple):
    """The sampled tokens of one call within the response of a row.

    Attributes:
        start: position of the first one; 0 is the first token after the row's prompt.
        length: number of them.
        advantage: of each.
    """

    start: int
    length: int
    advantage: float


def prompt_length(row: Row) -> int:
    """Return the number of tokens before the first sampled one."""
    return int(np.argmax(row.mask))


def spans_of(row: Row) -> list[TokenSpan]:
    """Return the calls of a row, in order."""
    places = np.flatnonzero(row.mask)
    first, spans, done = prompt_length(row), [], 0
    for length in row.lengths:
        place = int(places[done])
        spans.append(TokenSpan(place - first, length, float(row.advantages[place])))
        done += length
    return spans


def encode(spans: list[TokenSpan]) -> str:
    """Encode the calls of a row as text."""
    return json.dumps(spans)


def decode(uid: str) -> list[TokenSpan]:
    """Decode the calls of a row. A row that verl added to fill a batch has none."""
    return [TokenSpan(*span) for span in json.loads(uid)] if uid.startswith("[") else []


def rewards_to_come(spans: list[TokenSpan]) -> list[tuple[int, float]]:
    """Return rewards at the last token of each call such that their sum from any sampled token on is its call's value.

    For estimators that sum rewards backwards without discount, such as generalised advantage estimation.
    """
    following = [span.advantage for span in spans[1:]] + [0.0]
    return [
        (span.start + span.length - 1, span.advantage - later) for span, later in zip(spans, following, strict=True)
    ]

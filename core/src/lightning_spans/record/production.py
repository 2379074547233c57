"""Live use: what an attached program in production records outside attempts, configured by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import ConfigError
from lightning_spans.record.redaction import NOTHING, Redaction, read_rules
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import TRAINING, Json, Span
from lightning_spans.terms import make_terms

if TYPE_CHECKING:
    from lightning_spans.record.delivery.ended import EndedSpan

_HALF: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Live:
    """How spans outside attempts are recorded.

    Spans of attempts are always kept, since training needs complete traces.

    Attributes:
        origin: their label.
        rate: share of the traces that is kept, 0 to 1: complete traces, the same ones in every process.
        redaction: what is masked in them.
        terms: of data, as attributes, if a span states none: `lightning_spans.terms`.
    """

    origin: str = TRAINING
    rate: float = 1.0
    redaction: Redaction = NOTHING
    terms: Mapping[str, Json] = field(default_factory=dict)

    def keeps(self, span: Span | EndedSpan, attempt: Attempt | None) -> bool:
        """Whether the span is recorded."""
        return attempt is not None or is_sampled(span.trace_id, self.rate)

    def prepare(self, span: Span, attempt: Attempt | None) -> Span:
        """Label and mask a span, before it leaves the process."""
        if attempt is not None:
            return span
        if self.terms:
            span = replace(span, attributes={**self.terms, **span.attributes})
        masked = self.redaction(span) if self.redaction else span
        return masked if masked.origin == self.origin else replace(masked, origin=self.origin)


EVERYTHING: Final = Live()


def is_sampled(trace_id: str, rate: float) -> bool:
    """Whether a trace is kept at a rate. It is decided by its id, whose second half is random (W3C trace context)."""
    return rate >= 1.0 or int(trace_id[16:] or "0", 16) < rate * _HALF


def read_live(environ: Mapping[str, str] | None = None) -> Live:
    """Read ``LIGHTNING_ORIGIN``, ``_SAMPLE``, ``_REDACT``, the terms of data, and ``OPENINFERENCE_HIDE_*``.

    Raises:
        ConfigError: one of them has an invalid value.
    """
    env = os.environ if environ is None else environ
    redaction = read_rules(env.get("LIGHTNING_REDACT", "").splitlines(), env)
    terms = make_terms(
        tenant=env.get("LIGHTNING_TENANT"),
        consent=env.get("LIGHTNING_CONSENT"),
        retention_days=env.get("LIGHTNING_RETENTION_DAYS"),
        source=env.get("LIGHTNING_SOURCE"),
    )
    rate = parse_rate(env.get("LIGHTNING_SAMPLE") or "1")
    return Live(env.get("LIGHTNING_ORIGIN") or TRAINING, rate, redaction, terms)


def parse_rate(text: str) -> float:
    """Read a share between 0 and 1.

    Raises:
        ConfigError: it is no such number.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"LIGHTNING_SAMPLE={text!r}: give the share of traces to keep, between 0 and 1.")
    return rate

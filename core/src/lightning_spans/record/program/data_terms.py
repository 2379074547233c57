"""`data_terms()`: the terms under which the data of one request may be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_spans.record.context import current_terms, settle_context, use_context, with_terms
from lightning_spans.terms import make_terms


@contextmanager
def data_terms(
    *,
    tenant: str | None = None,
    consent: bool | None = None,
    retention_days: float | None = None,
    source: str | None = None,
) -> Iterator[None]:
    """State terms for all spans outside attempts that start in the block. An inner block adds to an outer one.

    Args:
        tenant: owner of the data. Tenants are not mixed unless you ask for it.
        consent: whether it may be used for training. Live traces that state nothing are not used.
        retention_days: days after which it is neither used nor kept.
        source: where it comes from, such as a product or a form.

    Raises:
        ConfigError: a value is invalid.
    """
    terms = make_terms(tenant=tenant, consent=consent, retention_days=retention_days, source=source)
    with use_context(with_terms({**current_terms(settle_context()), **terms})):
        yield

"""`data_terms()`: what a program says of the data of one request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_spans.record.context import entered, with_terms
from lightning_spans.terms import make_terms


@contextmanager
def data_terms(
    *,
    tenant: str | None = None,
    consent: bool | None = None,
    retention_days: float | None = None,
    source: str | None = None,
) -> Iterator[None]:
    """State terms for all spans outside of attempts that start in the block. An inner block adds to an outer one.

    Args:
        tenant: whose data it is. Nothing mixes tenants unless you ask for it.
        consent: whether it may be learned from. Live traces that state nothing are not.
        retention_days: days after which it is neither used nor kept.
        source: where it comes from, such as a product or a form.

    Raises:
        ConfigError: a value makes no sense.
    """
    terms = make_terms(tenant=tenant, consent=consent, retention_days=retention_days, source=source)
    with entered(with_terms(terms)):
        yield

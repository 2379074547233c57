"""The terms of a live trace: its owner, its source, whether it may be learned from, and how long it is kept.

They are attributes of its spans; for calls that a gateway recorded, they are in ``sampling`` under `TERMS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from lightning_spans.errors import ConfigError

TENANT: Final = "lightning.tenant"
SOURCE: Final = "lightning.source"
CONSENT: Final = "lightning.consent"
RETENTION: Final = "lightning.retention_days"
NAMES: Final = (TENANT, SOURCE, CONSENT, RETENTION)
TERMS: Final = "terms"  # key in the sampling of a call
GRANTED: Final = "granted"
DENIED: Final = "denied"
_LONGEST: Final = 200  # characters of a name


def make_terms(
    *,
    tenant: str | None = None,
    consent: bool | str | None = None,
    retention_days: float | str | None = None,
    source: str | None = None,
) -> dict[str, str | float]:
    """Return terms as attributes, without those that are None or empty.

    Args:
        tenant: the owner of the data.
        consent: whether it may be learned from: a bool, ``granted`` or ``denied``.
        retention_days: days after which it is neither used nor kept.
        source: where it comes from, such as a product or a form.

    Raises:
        ConfigError: a value is invalid.
    """
    terms: dict[str, str | float] = {}
    for name, value in ((TENANT, tenant), (SOURCE, source)):
        if value and len(value) > _LONGEST:
            raise ConfigError(f"{name} has {len(value)} characters. Give at most {_LONGEST}.")
        if value:
            terms[name] = value
    if consent is not None and consent != "":
        said = {True: GRANTED, False: DENIED}.get(consent, consent) if isinstance(consent, bool) else consent
        if said not in {GRANTED, DENIED}:
            raise ConfigError(f"consent {consent!r}: give {GRANTED} or {DENIED}.")
        terms[CONSENT] = said
    if retention_days is not None and retention_days != "":
        terms[RETENTION] = _days(retention_days)
    return terms


def join_terms(own: Mapping[str, Any], key: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's terms joined with its key's: the key's tenant and source win, and the stricter of the rest.

    Args:
        own: the record's attributes; those that are not terms are ignored.
        key: the key's terms.
    """
    joined = {name: own[name] for name in NAMES if name in own} | {name: key[name] for name in key}
    consents = {terms.get(CONSENT) for terms in (own, key)} - {None}
    if consents:
        joined[CONSENT] = GRANTED if consents == {GRANTED} else DENIED
    days = [read_days(terms[RETENTION]) for terms in (own, key) if RETENTION in terms]
    if days:
        joined[RETENTION] = min(days)
    return joined


def read_days(value: Any) -> float:
    """Return a record's number of days; 0 if it is invalid, so that the record is not kept by mistake."""
    try:
        days = float(value)
    except (TypeError, ValueError):
        return 0.0
    return days if days >= 0 and math.isfinite(days) else 0.0


def _days(value: float | str) -> float:
    try:
        days = float(value)
    except ValueError:
        days = math.nan
    if not (days > 0 and math.isfinite(days)):
        raise ConfigError(f"retention {value!r}: give a number of days above 0.")
    return days

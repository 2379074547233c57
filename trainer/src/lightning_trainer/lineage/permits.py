"""Which live traces may be used for training: with consent, within their retention period, of one tenant."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import TRAINING
from lightning_spans.terms import CONSENT, GRANTED, RETENTION, TENANT, TERMS, read_days
from lightning_trainer.reasons.reason import Reason


class UnpermittedReason(Reason):
    """Why a live trace must not be used."""

    DENIED_TRACE = "live trace whose consent is denied"
    UNSTATED = "live trace that states no consent: --assume-consent takes these, too"
    EXPIRED = "live trace past its retention"
    OTHER_TENANT = "live trace of another tenant than --tenant"
    SEVERAL_TENANTS = "live trace with data of several tenants"


_DAY_NS: Final = 86_400 * 10**9
_SEPARATOR: Final = "; "


@dataclass(frozen=True, slots=True, kw_only=True)
class Permits:
    """The conditions under which live traces may be used.

    Attributes:
        assume_consent: whether live traces that state no consent are used; traces that deny it never are.
        tenant: use only live traces of this tenant; None: of any.
        mix_tenants: whether a selection may contain several tenants.
    """

    assume_consent: bool = False
    tenant: str | None = None
    mix_tenants: bool = False

    def reason_against(self, trace: Trace, now_ns: int | None = None) -> UnpermittedReason | None:
        """Return why a trace must not be used; None: it may be. Runners' attempts are the user's own, not live."""
        if trace.attempt_id is not None:
            return None
        terms = list(_terms_in(trace))
        consents = {said.get(CONSENT) for said, _ in terms} - {None}
        if consents - {GRANTED}:
            return UnpermittedReason.DENIED_TRACE
        if not consents and is_live(trace) and not self.assume_consent:
            return UnpermittedReason.UNSTATED
        if is_expired(trace, now_ns):
            return UnpermittedReason.EXPIRED
        return self.reason_against_tenants(tenants_of(trace))

    def reason_against_tenants(self, tenants: Collection[str]) -> UnpermittedReason | None:
        """Return why a live trace with data of these tenants must not be used; None: it may be."""
        if len(tenants) > 1 and not self.mix_tenants:
            return UnpermittedReason.SEVERAL_TENANTS
        return UnpermittedReason.OTHER_TENANT if self.tenant is not None and set(tenants) != {self.tenant} else None

    def check_tenants(self, tenants: Collection[str]) -> None:
        """Reject a selection of several tenants.

        Raises:
            ConfigError: there are several, and none was chosen.
        """
        if len(tenants) > 1 and not self.mix_tenants:
            raise ConfigError(
                f"these are live traces of {len(tenants)} tenants: {', '.join(sorted(tenants))}. Choose one with"
                " --tenant NAME, or add --mix-tenants. In a loop, set tenant or mix_tenants in [select]."
            )


def is_live(trace: Trace) -> bool:
    """Whether a trace was recorded in production: outside of attempts, with an origin other than training."""
    return trace.attempt_id is None and any(
        node.span.origin != TRAINING or (node.call is not None and node.call.origin != TRAINING) for node in trace
    )


def is_expired(trace: Trace, now_ns: int | None = None) -> bool:
    """Whether the retention period stated by any record of a trace has ended."""
    now = time.time_ns() if now_ns is None else now_ns
    return any(
        RETENTION in said and end_ns + read_days(said[RETENTION]) * _DAY_NS <= now for said, end_ns in _terms_in(trace)
    )


def tenants_of(trace: Trace) -> set[str]:
    """Return the tenants that are named by the records of a trace."""
    return {str(said[TENANT]) for said, _ in _terms_in(trace) if said.get(TENANT)}


def join_tenants(tenants: Iterable[str]) -> str:
    """Return tenants as one text, as tasks and lines of data have it."""
    return _SEPARATOR.join(sorted(tenants))


def split_tenants(text: str) -> list[str]:
    """Return the tenants in the text that `join_tenants` made."""
    return text.split(_SEPARATOR)


def _terms_in(trace: Trace) -> Iterable[tuple[Mapping[str, Any], int]]:
    """Yield the terms stated by each record of a trace, with the record's end time."""
    for node in trace:
        yield node.span.attributes, node.span.end_ns
    calls = [node.call for node in trace] + [half.call for half in trace.lone_calls]
    for call in calls:
        said = call.sampling.get(TERMS) if call is not None else None
        if call is not None and isinstance(said, Mapping):
            yield said, call.end_ns

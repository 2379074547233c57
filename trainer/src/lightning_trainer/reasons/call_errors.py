"""Errors of attempts and of their model calls that say how an attempt ended."""

from __future__ import annotations

from typing import Final

SCORER_FAILED: Final = "scorer failed"  # prefix of the error of an attempt that has an answer but no reward
CLIENT_GONE: Final = "client cut the connection"
ATTEMPT_ENDED: Final = "the attempt ended before the answer did"
CUT_CALLS: Final = frozenset({CLIENT_GONE, ATTEMPT_ENDED})
"""Of calls that ended before their answer, by no fault of the engine."""
CUT: Final = "cut"  # in a call's sampling, true if the record has all tokens that were sampled before the cut

ENGINE_WAIT: Final = "engine_wait_s"  # in a call's sampling: seconds for which its engine could not sample
LONG_WAIT_S: Final = 1.0  # shorter ones are not recorded
ENGINE_ENDED: Final = "engine_ended"  # in a call's sampling, true if its engine ended while it answered
ENGINE_DOWN: Final = "engine down"  # prefix of the error of an attempt whose result misses an answer of its engine

QUOTA_EXCEEDED: Final = "quota_exceeded"  # error code: the key may send no more, permanently or for an hour
TOO_MUCH_AT_ONCE: Final = "too_much_at_once"  # likewise, until the requests in progress are answered

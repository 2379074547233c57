"""A server's store, over HTTP: every method is one POST, as defined in `store.api`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

import httpx

from lightning_spans.errors import (
    LeaseLostError,
    LightningError,
    RefusedError,
    RewardError,
    StoreError,
    UnauthorizedError,
)
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, End, Rollout, RolloutStatus
from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import dumps, from_json, loads, to_json
from lightning_spans.schema.rewards import Reward, as_reward
from lightning_spans.schema.spans import Json, Span
from lightning_spans.store.api import API
from lightning_spans.store.commit import GroupCommit
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.keys import read_bearer
from lightning_spans.store.protocol import ANY, PAGE, Ids, Page, Store, Where, check_rollouts, listing_of
from lightning_spans.store.tls import trusted_certificates

R = TypeVar("R")
V = TypeVar("V")

_BATCH: Final = 1000  # records in one request
_ANSWER_S: Final = 60.0
_CONNECT_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 5.0
_BUSY: Final = frozenset({408, 429, 503})  # of the server, or of a proxy in front of it
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


class HttpStore(Store):
    """A store kept by a server. The server's rejection is a `RefusedError`; threads share its connections.

    A call that cannot reach the server, loses the connection, or is told to retry (408, 429 or 503), is repeated with
    growing pauses for up to `patience_s`. That is safe because the store counts repeated records once. The exception is
    `claim`: it is not repeated if its response was lost, because its attempts would wait for their leases to expire.
    The returned numbers of new records are too small if a response was lost and the records existed at the second time.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        patience_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
        auth: httpx.Auth | None = None,
    ) -> None:
        """Create a client; nothing is sent yet.

        Args:
            url: of the server, without ``/api``.
            key: bearer key; by default `LIGHTNING_KEY` of the environment.
            patience_s: how long to keep trying.
            transport: sends requests; by default HTTP.
            auth: gives each request its key, instead of `key`.

        Raises:
            ConfigError: the key is invalid, or the certificates of `SSL_CERT_FILE` cannot be read.
        """
        base = httpx.URL(url.rstrip("/"))
        key = read_bearer(key, "key") or read_bearer(os.environ.get("LIGHTNING_KEY"), "LIGHTNING_KEY")
        self.name = str(base)
        self._patience_s = patience_s
        self._closed = False
        self._ends: GroupCommit[End, RolloutStatus] = GroupCommit(
            self._end, name=f"lightning-ends {self.name}", closed=self._closed_message()
        )
        self._client = httpx.Client(
            base_url=base,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            transport=transport,
            auth=auth,
            verify=trusted_certificates(),
            trust_env=base.host not in _LOOPBACK,  # a proxy configured for the internet does not reach our own machine
        )

    def close(self) -> None:
        """Close the connections. Calling it again changes nothing."""
        self._closed = True
        self._client.close()
        self._ends.close()

    def add_spans(self, spans: Sequence[Span]) -> int:
        """Keep spans. Existing ones are not changed."""
        return self._add("add_spans", spans)

    def add_calls(self, calls: Sequence[Call]) -> int:
        """Keep calls. Existing ones are not changed."""
        return self._add("add_calls", calls)

    def add_rewards(self, rewards: Sequence[Reward]) -> int:
        """Keep rewards. Existing ones are not changed.

        Raises:
            RewardError: a value is not a finite number; nothing is sent.
        """
        _check_finite(rewards)
        return self._add("add_rewards", rewards)

    def add_deployments(self, deployments: Sequence[Deployment]) -> int:
        """Keep transitions. Existing ones are not changed."""
        return self._add("add_deployments", deployments)

    def add_assignments(self, assignments: Sequence[Assignment]) -> int:
        """Keep assignments. Existing ones are not changed."""
        return self._add("add_assignments", assignments)

    def page(
        self,
        kind: type[R],
        where: Where = ANY,
        *,
        after: int = 0,
        limit: int | None = PAGE,
        newest_first: bool = False,
    ) -> Page[R]:
        """Read some records; without a limit as many as the server returns at once."""
        what, _ = listing_of(kind, where)
        given = {name: value if isinstance(value, str) else list(value) for name, value in where.given().items()}
        asked = {"what": what, "after": after, "limit": limit, "newest_first": newest_first or None}
        body = {name: value for name, value in asked.items() if value is not None} | given
        answer = self._post("/api/query", body, what, list)
        return Page(self._records(kind, answer[what]), answer.get("next"))

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Queue rollouts. Existing ones are not changed."""
        asked = list(rollouts)
        check_rollouts(asked)  # checked here too: JSON has no NaN, so the server would read no limit
        return self._add("enqueue", asked)

    def claim(self, worker: str, *, limit: int = 1, lease_s: float = 60.0, within: Ids = None) -> list[AttemptRecord]:
        """Start attempts for up to `limit` rollouts, oldest first, each with the context for its agent's process."""
        body = {"worker": worker, "limit": limit, "lease_s": lease_s}
        body |= {} if within is None else {"within": list(within)}
        return self._records(AttemptRecord, self._ask("claim", body, list, repeatable=False))

    def heartbeat(self, leases: Sequence[tuple[str, int]], *, lease_s: float = 60.0) -> list[str]:
        """Renew leases; return the attempt ids whose lease is lost."""
        return self._ask("heartbeat", {"leases": [list(lease) for lease in leases], "lease_s": lease_s}, list)

    def finish(
        self,
        attempt_id: str,
        fence: int,
        *,
        status: AttemptStatus,
        rewards: Sequence[Reward] = (),
        error: str | None = None,
    ) -> RolloutStatus:
        """End an attempt, with its rewards, in one transaction.

        Raises:
            LeaseLostError: another worker has taken over, or the attempt ended otherwise.
            RewardError: a reward is not a finite number; nothing is sent.
        """
        _check_finite(rewards)
        return self._ends.do(End(attempt_id, fence, status, tuple(rewards), error))

    def finish_all(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End several attempts, a thousand per request."""
        return [answer for first in range(0, len(ends), _BATCH) for answer in self._end(ends[first : first + _BATCH])]

    def _end(self, ends: Sequence[End]) -> list[RolloutStatus | LightningError]:
        """End attempts in one request; separately if one of them cannot even be sent with the others."""
        if len(ends) > 1 or any(end.final for end in ends):
            try:
                told = self._ask("finish_all", {"ends": [to_json(end) for end in ends]}, list)
                return [_answer(one) for one in told]
            except RefusedError as error:
                return [answer for end in ends for answer in self._end([end])] if len(ends) > 1 else [error]
        try:
            return [self._end_one(end) for end in ends]
        except (RefusedError, LeaseLostError, RewardError) as error:
            return [error]

    def _end_one(self, end: End) -> RolloutStatus:
        _check_finite(end.rewards)
        body = {name: value for name, value in to_json(end).items() if name != "final"}
        return cast(RolloutStatus, self._ask("finish", body, str, attempt_id=body.pop("attempt_id")))

    def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel rollouts that have not ended."""
        return self._ask("cancel", {"rollout_ids": list(rollout_ids)}, int)

    def consume_group(self, group_id: str, consumer: str) -> bool:
        """Mark a group as trained on by `consumer`. False when another consumer had it."""
        return self._ask("consume_group", {"group_id": group_id, "consumer": consumer}, bool)

    def delete(
        self,
        *,
        rollout_ids: Ids = None,
        trace_ids: Ids = None,
        call_ids: Ids = None,
        origin: str | None = None,
        before_ns: int | None = None,
        compact: bool = False,
    ) -> int:
        """Delete what has ended. The request is repeated if the server takes too long."""
        body = {
            "rollout_ids": None if rollout_ids is None else list(rollout_ids),
            "trace_ids": None if trace_ids is None else list(trace_ids),
            "call_ids": None if call_ids is None else list(call_ids),
            "origin": origin,
            "before_ns": before_ns,
            "compact": compact,
        }
        return self._ask("delete", body, int)

    def _add(self, method: str, records: Sequence[Any]) -> int:
        batched = str(API[method].batched)
        starts = range(0, len(records), _BATCH)
        return sum(
            self._ask(method, {batched: [to_json(one) for one in records[first : first + _BATCH]]}, int)
            for first in starts
        )

    def _records(self, kind: type[R], data: Sequence[Json]) -> list[R]:
        try:
            return [from_json(kind, item) for item in data]
        except ValueError as error:
            raise StoreError(f"the server at {self.name} sent an invalid record: {error}") from error

    def _ask(self, method: str, body: Mapping[str, Json], kind: type[V], *, repeatable: bool = True, **ids: str) -> V:
        """Call a method of the store and return its result; `ids` are parts of its path."""
        about = API[method]
        path = "/api" + about.path.format(**{name: quote(value, safe="") for name, value in ids.items()})
        result: V = self._post(path, body, about.answer, kind, repeatable=repeatable)[about.answer]
        return result

    def _post(
        self, path: str, body: Mapping[str, Json], field: str, kind: type[Any], *, repeatable: bool = True
    ) -> dict[str, Any]:
        """Send a request and return a response that has a field of that kind.

        Raises:
            LeaseLostError: the server returned 409.
            UnauthorizedError: it returned 401.
            RefusedError: it returned another 4xx, or the body is not JSON-like.
            StoreError: the store is closed, the server cannot be reached, failed, or returned something else.
        """
        if self._closed:
            raise StoreError(self._closed_message())
        try:
            content = dumps(body)
        except ValueError as error:
            raise RefusedError(f"POST {path} can't be sent to {self.name}: {error}") from error
        response = self._send(path, content, repeatable=repeatable)
        if response.is_error:
            raise self._refusal(path, response)
        try:
            answer = loads(response.content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get(field), kind):
            raise StoreError(f"POST {path}: {self.name} answered without {field!r}. Is it a lightning-rl server?")
        return answer

    def _closed_message(self) -> str:
        return f"the store at {self.name} is closed. Open it again to continue."

    def _send(self, path: str, content: bytes, *, repeatable: bool) -> httpx.Response:
        until = time.monotonic() + self._patience_s
        pause_s = 0.05
        while True:
            try:
                response = self._client.post(path, content=content, headers={"content-type": "application/json"})
                if response.status_code not in _BUSY:
                    return response
                failure: str | httpx.TransportError = self._refusal(path, response).args[0]
                wait_s = max(pause_s, _retry_after_s(response))
            except httpx.TransportError as error:
                failure, wait_s = error, pause_s
                if not (repeatable or isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))):
                    raise self._unreachable(path, error) from error
            if time.monotonic() + wait_s > until:
                raise self._unreachable(path, failure) from (None if isinstance(failure, str) else failure)
            # at another time than others that were cut off at the same moment
            time.sleep(wait_s * random.uniform(0.75, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _unreachable(self, path: str, failure: str | Exception) -> StoreError:
        reason = failure if isinstance(failure, str) else f"{type(failure).__name__}: {failure}"
        return StoreError(f"POST {path}: no answer from the server at {self.name} ({reason}). Is it running?")

    def _refusal(self, path: str, response: httpx.Response) -> StoreError:
        try:
            message = loads(response.content)["error"]["message"]
        except (ValueError, TypeError, KeyError):
            message = response.text[:200] or response.reason_phrase
        text = f"POST {path}: {self.name} answered {response.status_code}: {message}"
        if response.status_code == httpx.codes.CONFLICT:
            return LeaseLostError(text)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return UnauthorizedError(text)
        return RefusedError(text) if response.is_client_error else StoreError(text)


def _answer(told: Mapping[str, Json]) -> RolloutStatus | LightningError:
    if "status" in told:
        return cast(RolloutStatus, told["status"])
    kind = {"lease_lost": LeaseLostError, "bad_reward": RewardError}.get(str(told.get("code")), RefusedError)
    return kind(told.get("message", "refused"))


def _check_finite(rewards: Sequence[Reward]) -> None:
    for reward in rewards:
        try:
            as_reward(reward.value)
        except RewardError as error:
            raise RewardError(f"reward {reward.reward_id} of attempt {reward.attempt_id}: {error}") from None


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(max(0.0, float(response.headers.get("retry-after", "0"))), _LONGEST_PAUSE_S)
    except ValueError:  # a date; our servers send seconds
        return 0.0

"""A judge that compares a candidate's answer with the stable policy's, in the server's process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import Call
from lightning_trainer.kits.judging.asking import ask, key_of
from lightning_trainer.kits.judging.options import JudgeOptions, read_options
from lightning_trainer.kits.judging.transcript import entries_of
from lightning_trainer.outgoing import bearer

if TYPE_CHECKING:
    import httpx


class AnswerJudge:
    """Compares two answers to one request. May be used by several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, httpx.Client] = {}  # by endpoint and key file

    def compare(self, table: Mapping[str, Any], stable: Call, candidate: Call) -> dict[str, Any]:
        """Return the score of each answer, or why there is none.

        Args:
            table: options of the judge.
            stable: the stable policy's answer.
            candidate: the candidate's answer to the same request.
        """
        try:
            options = read_options(table)
            client = self._client(options)
        except ConfigError as error:
            return {"error": str(error)}
        both = {"stable": stable, "candidate": candidate}
        names = sorted(both)
        if hashlib.sha256(candidate.call_id.encode()).digest()[0] % 2:  # so that neither policy always comes first
            names.reverse()
        answer = ask(client, options, [entries_of(Trace.build([], [both[name]])) for name in names])
        if answer.scores is None:
            return {"error": answer.error or "no verdict"}
        return {name: score.score for name, score in zip(names, answer.scores, strict=True)}

    def _client(self, options: JudgeOptions) -> httpx.Client:
        import httpx

        name = f"{options.endpoint} {options.key_file}"
        with self._lock:
            if name not in self._clients:
                headers = bearer(key_of(options), str(options.key_file or "LIGHTNING_JUDGE_KEY"))
                self._clients[name] = httpx.Client(headers=headers)
            return self._clients[name]

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

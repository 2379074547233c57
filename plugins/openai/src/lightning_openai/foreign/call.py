"""A model call in a vendor's own format, recorded and sent as the equivalent chat completion."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_openai.call import PLUGIN
from lightning_openai.events import is_whole
from lightning_openai.foreign.answers import Answers, parts_of
from lightning_openai.foreign.dialect import CHAT, ForeignDialect
from lightning_openai.httpx.calls import HttpxCall
from lightning_openai.reading.recorded_body import RecordedBody
from lightning_spans.record.prompts import with_prompts
from lightning_spans.record.recorder import log_failure
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.spans import Json

logger = logging.getLogger("lightning_spans")
_told: Final[set[tuple[str, str]]] = set()  # what was left out, by provider and field


class ForeignCall(HttpxCall):
    """One request in a vendor's format, until its answer has been read."""

    def __init__(
        self, recorder: Recorder, client: Any, request: Any, dialect: ForeignDialect, body: Mapping[str, Json]
    ) -> None:
        self._dialect = dialect
        self._own_body = body
        self._translated = dialect.read(request.url.path.rstrip("/"), body)
        self._content_type = ""
        super().__init__(recorder, client, request, CHAT, self._translated.body)
        shown = self._translated.shows_reasoning
        self._answers = Answers(dialect, self._library, request, shows_reasoning=shown)
        if self._translated.untranslated:
            self.span.set(**{names.UNASKABLE: list(self._translated.untranslated)})

    @property
    def _provider(self) -> str | None:
        return self._dialect.provider

    def _with_prompts(self, attempt: Attempt | None) -> None:
        path = self.span.path
        prompted = self._dialect.prompted(self._own_body, lambda body: with_prompts(body, path, attempt))
        if prompted is not None:
            self._own_body = prompted
            self._translated = self._dialect.read(self._request.url.path.rstrip("/"), prompted)
            self._body = self._translated.body
            self._request = self._other(self._request.url, self._request.headers, prompted)

    def _is_sent_there(self, attempt: Attempt, *, trained: bool) -> bool:
        return trained or (attempt.replay is not None and not self._translated.untranslated)

    def _rerouted(self, url: str, attempt: Attempt, *, trained: bool) -> tuple[Any, Any]:
        if self._body.get("stream"):
            self._body = {**self._body, "stream_options": {"include_usage": True}}
        for name in self._translated.left_out:
            if (self._dialect.provider, name) not in _told:
                _told.add((self._dialect.provider, name))
                logger.warning(
                    "lightning: %s of a request in the form of %s is for the vendor's own server: it is left out where"
                    " the policy answers.", name, self._dialect.provider,
                )  # fmt: skip
        return super()._rerouted(url, attempt, trained=trained)

    def refused(self) -> Any:
        """Return an error response for a call of the policy that it cannot answer; None if it can."""
        span, attempt = self.span, self.span.attempt
        wanted = self._translated.untranslated
        if not wanted or attempt is None or attempt.endpoint is None or not self._recorder.reroutes(span):
            return None
        response = self._answers.refusal(
            400,
            f"lightning: {', '.join(wanted)}: agent {span.agent!r} is in training, and its policy takes chat"
            f" completions, which have no equivalent of this part of a {self._dialect.provider} request. Leave it out,"
            " or train other agents.",
        )
        self._status, self._recorded, self._to_end = 400, RecordedBody([response.content]), True
        self.end_left()
        return response

    def reads_first(self, response: Any) -> bool:
        """Whether to read a response before processing it: an error of the gateway, which is translated."""
        return bool(self.span.attributes.get(names.REROUTED)) and response.status_code >= 400

    def responded(self, response: Any) -> Any:
        """See `HttpxCall`. The gateway's answer is translated to the program's own format."""
        rerouted = self.span.attributes.get(names.REROUTED)
        self._content_type = response.headers.get("content-type", "")
        response = super().responded(response)
        if not rerouted:
            return response
        try:
            return self._answers.of(response)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error, self.span)
            return self._answers.refusal(502, f"lightning: the policy's answer can't be read: {error!r}")

    def _request_text(self) -> str:
        if self.span.attributes.get(names.REROUTED):
            return super()._request_text()
        return dumps(self._translated.recorded).decode()

    def _read_answer(self, text: str) -> tuple[str, Mapping[str, Json] | None, bool]:
        if self.span.attributes.get(names.REROUTED) or self._status >= 400:
            return super()._read_answer(text)
        parts = parts_of(text, self._content_type)
        if not parts:
            return text, None, self._to_end
        response = self._dialect.completion(parts)
        return dumps(response).decode(), response, self._to_end or is_whole(CHAT, response)

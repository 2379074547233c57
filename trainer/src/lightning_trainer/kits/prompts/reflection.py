"""The model that proposes prompts, at an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_spans.errors import ConfigError, LightningError
from lightning_trainer.outgoing import at_once, bearer, post_json
from lightning_trainer.session.answers import Endpoint, endpoint, only_model

PROPOSAL: Final = "proposal"
TIMEOUT_S: Final = 300.0
ORIGIN: Final = "--reflect-key or LIGHTNING_REFLECT_KEY"
_TRIES: Final = 3
_PAUSE_S: Final = 0.5
_UNREADABLE: Final = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def read_reflection(text: str, key_file: Path | None) -> Endpoint:
    """Read ``URL`` or ``MODEL=URL``; without MODEL, use the server's only model.

    Raises:
        ConfigError: the text is neither, the server cannot be reached, or the key cannot be sent.
    """
    if key_file is not None:
        try:
            key: str | None = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"key file {key_file} can't be read: {error}.") from None
    else:
        key = os.environ.get("LIGHTNING_REFLECT_KEY")
    bearer(key, ORIGIN)  # raises if the key cannot be sent
    model, equals, url = text.partition("=")
    named = bool(equals) and url.startswith(("http://", "https://")) and "/" not in model
    found = endpoint(url, model=model, key=key) if named else endpoint(text, key=key)
    return found if found.model else Endpoint(found.url, only_model(found), key)


class PaidCalls(Protocol):
    """Records results of calls, so that none is paid for twice."""

    def next(self, kind: str, asked: object) -> dict[str, Any] | None:
        """Return the recorded result of this request; None if there is none."""

    def add(self, kind: str, asked: object, came_to: dict[str, Any]) -> None:
        """Record the result of a request."""


class _NotJsonError(ValueError):
    """The server's answer is not JSON."""


@dataclass
class Reflection:
    """Returns the model's text for a prompt, and counts its tokens.

    Attributes:
        at: the model's endpoint.
        journal: of earlier calls.
        check: called during a wait; raises if the program was asked to stop.
        parameters: further fields of each request.
        tokens: of all prompts and answers so far, as the server counted them.
        failed: why it gave no proposal. GEPA would continue without one and waste rollouts, so the model is not called
            again.
    """

    at: Endpoint
    journal: PaidCalls
    check: Callable[[], None]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = field(default=0)
    failed: LightningError | None = field(default=None)

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Call the model, or return the recorded answer.

        Raises:
            LightningError: the server cannot be reached, or returns no text.
        """
        if self.failed is not None:
            raise self.failed
        try:
            came_to = self.journal.next(PROPOSAL, prompt)
            if came_to is None:
                (came_to,) = at_once(self._ask, [prompt], 1, self.check)
                self.journal.add(PROPOSAL, prompt, came_to)
        except LightningError as error:
            self.failed = error
            raise
        self.tokens += came_to["tokens"]
        return str(came_to["text"])

    def _ask(self, prompt: str | list[dict[str, Any]]) -> dict[str, Any]:
        import httpx

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {"model": self.at.model, "messages": messages, **self.parameters}
        url = f"{self.at.url}/chat/completions"
        problem, tokens = "", 0
        for number in range(_TRIES):
            time.sleep(_PAUSE_S * number)
            try:
                with httpx.Client(headers=bearer(self.at.key, ORIGIN)) as client:
                    answer = post_json(client, url, body, within_s=TIMEOUT_S)
                if answer.status_code == 200:
                    found = _read_json(answer.content)
                    tokens += int((found.get("usage") or {}).get("total_tokens") or 0)
                    text = found["choices"][0]["message"]["content"]
                    if isinstance(text, str) and text.strip():
                        text.encode()  # raises for half a character, which no prompt can contain: the agent would crash
                        return {"text": text, "tokens": tokens}
                    problem = "it answered no text"
                else:
                    problem = f"it answered {answer.status_code}: {answer.text[:300]}"
                    if 400 <= answer.status_code < 500 and answer.status_code not in (408, 429):
                        break
            except _NotJsonError as error:
                problem = str(error)
            except (httpx.HTTPError, *_UNREADABLE) as error:
                problem = f"{type(error).__name__}: {error}"
        raise LightningError(f"the reflection model at {self.at.url} gave no proposal: {problem}")


def _read_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        shown = content[:100].decode(errors="replace")
        raise _NotJsonError(f"it answered no JSON: {shown!r}") from None

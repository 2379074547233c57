"""A teacher on a vLLM server, which returns the log-probabilities of a prompt's own tokens."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_spans.errors import ConfigError, LightningError
from lightning_trainer.gateway.http.masking import remember
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.gateway.upstream.upstream import parse_upstream
from lightning_trainer.outgoing import at_once, bearer, post_json

if TYPE_CHECKING:
    import httpx

    from lightning_trainer.rl.rows import Row

KEY: Final = "LIGHTNING_TEACHER_KEY"
_AT_ONCE: Final = 16
_TRIES: Final = 3
_ANSWERED: Final = 1  # minimum tokens that vLLM generates; they count towards its max_model_len
_PAUSE_S: Final = 0.5
_SILENCE_S: Final = 600.0
_ROUNDING: Final = 1e-3  # tolerance of log-probabilities above 0
_SHOWN: Final = 512  # number of tokens from the student's whole vocabulary that a teacher must tokenize the same way
_TEXT: Final = 'def f(x):\n\treturn {"a": [1, 2.5]}  # Grüße, été, 你好, здравствуй 🙂\n\n    <tool_call> the end.'


class TeacherError(LightningError):
    """The teacher gave no log-probabilities."""


class EndpointTeacher:
    """`Teacher` on a server.

    Args:
        text: ``MODEL=URL``.
        check: called during a wait; raises to give up.
        role: name of the teacher in errors.
        key_name: variable with the server's key.

    Raises:
        ConfigError: the text has another form, or the key cannot be sent.
    """

    def __init__(
        self, text: str, check: Callable[[], None] = lambda: None, *, role: str = "teacher", key_name: str = KEY
    ) -> None:
        import httpx

        upstream, key = parse_upstream(text), os.environ.get(key_name)
        remember(key)
        self._model, self._url, self._role = upstream.model, upstream.url, role
        self._client = httpx.Client(headers=bearer(key, key_name))
        self._check = check

    def check(self, tokenizer: Any, longest: int) -> None:
        """Check that the server tokenizes text as the student does, and reads as many tokens as the student may write.

        Args:
            tokenizer: the student's.
            longest: maximum tokens of the student's prompt and answer together.

        Raises:
            ConfigError: it does not, gives no answer to this, or cannot be reached.
        """
        chat, size = ChatFormat(tokenizer), len(tokenizer)
        places = range(0, size, max(1, size // _SHOWN))
        text = _TEXT + "".join(tokenizer.all_special_tokens) + "".join(chat.decode([place]) for place in places)
        own = chat.encode(text)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            url = f"{self._url.removesuffix('/v1')}/tokenize"
            (told,) = at_once(lambda body: self._post(url, body), [body], 1, self._check)
            its, count = told["tokens"], len(told["tokens"])
            most = told.get("max_model_len")
        except (TeacherError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the teacher at {self._url} does not show its tokenizer ({error}). It must be a vLLM server, which"
                f" answers /tokenize; its key goes into {KEY}."
            ) from None
        if its != own:
            raise ConfigError(
                f"the teacher {self._model} at {self._url} has another vocabulary: it encodes a text with {count}"
                f" tokens that are {len(own)} of the student's, or others. A teacher reads the student's tokens: give"
                " one of the same family, or learn from its answers with lightning-rl sft."
            )
        if isinstance(most, int) and most < longest + _ANSWERED:
            raise ConfigError(
                f"the teacher {self._model} at {self._url} reads {most - _ANSWERED} tokens, because it writes"
                f" {_ANSWERED} more, and the student writes up to {longest}. Set --max-model-len {most - _ANSWERED}, or"
                f" start the teacher with --max-model-len {longest + _ANSWERED}."
            )

    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float64]]:
        """Return log-probabilities at temperature 1: `Teacher.logprobs`."""
        return at_once(self._row, rows, _AT_ONCE, self._check)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _row(self, row: Row) -> NDArray[np.float64]:
        ids = row.tokens.tolist()
        body = {"model": self._model, "prompt": ids, "max_tokens": _ANSWERED, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._post(f"{self._url}/completions", body)
        try:
            told = answer["choices"][0]["prompt_logprobs"]
            if len(told) != len(ids):
                raise ValueError(f"{len(told)} log-probabilities for {len(ids)} tokens")
            found = np.array([_number(told[place][str(ids[place])]["logprob"]) for place in np.flatnonzero(row.mask)])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise TeacherError(
                f"the {self._role} at {self._url} gave no log-probabilities of a prompt ({type(error).__name__}:"
                f" {error}). It must be a vLLM server, which knows prompt_logprobs."
            ) from None
        if any(math.isnan(each) for each in found):
            raise TeacherError(f"the {self._role} at {self._url} returned a log-probability that is not a number.")
        if any(each > _ROUNDING for each in found):
            raise TeacherError(f"the {self._role} at {self._url} gave a log-probability above 0: {found.max():g}.")
        return found

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        """Return the server's answer, after retries if they may help.

        Raises:
            TeacherError: it did not answer, or refused.
        """
        import httpx

        error = ""
        for number in range(_TRIES):
            time.sleep(_PAUSE_S * number)
            try:
                answer = post_json(self._client, url, body, within_s=_SILENCE_S)
            except httpx.HTTPError as problem:
                error = f"the {self._role} can't be reached: {type(problem).__name__}: {problem}"
                continue
            if answer.status_code == 200:
                return _json(answer)
            error = f"the {self._role}'s server answered {answer.status_code}: {answer.text[:300]}"
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                break
        raise TeacherError(error)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{repr(value)[:40]} is not a number")
    return float(value)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        raise TeacherError(f"the teacher's server did not send JSON: {answer.text[:300]}") from None

"""Render chat templates. They are programs: those from a model's folder run in a bounded process.

A template can loop forever or write gigabytes, and only for some conversations. So each rendering has limits for
processor time, memory and text. That process runs this file as a script.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextvars import ContextVar
from functools import cache, wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lightning_trainer.bounded import BoundedProcess, TooLongError, answer_lines

CPU_S: Final = 5.0  # per rendering
_CPU_S_A_MEGABYTE: Final = 1.0  # per megabyte of the conversation, in addition
_MEMORY: Final = 3 << 30
_MOST_TEXT: Final = 64 << 20  # characters
_TOO_MUCH: Final = "it takes more than 3 GiB of memory, or writes more than 64 MiB"
_MOST_ENDED: Final = 3  # renderings of a template that may exceed the limits; after that it is rejected
_ELSEWHERE: Final = ContextVar("lightning_rendered_elsewhere", default=False)
_ended: Final[Counter[str]] = Counter()  # renderings that exceeded the limits, by template
_RENDERER: Final = BoundedProcess(Path(__file__), str(CPU_S))


class RenderError(Exception):
    """A template rejects a conversation, or exceeds the limits."""


def render(tokenizer: Any, messages: Any, **given: Any) -> str:
    """Return a conversation as text, like `apply_chat_template`. A template that is not ours has limits.

    Raises:
        RenderError: such a template rejects it, or exceeds its limits.
    """
    if not _is_foreign(tokenizer, given.get("chat_template")):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))
    _divert()
    mark = _ELSEWHERE.set(True)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))
    finally:
        _ELSEWHERE.reset(mark)


def _is_foreign(tokenizer: Any, template: str | None) -> bool:
    """Whether a Jinja template that is not ours would be rendered."""
    base = sys.modules.get("transformers.tokenization_utils_base")
    if base is None or not isinstance(tokenizer, base.PreTrainedTokenizerBase):
        return False
    return bool((template or tokenizer.chat_template) != hermes_template())


@cache
def hermes_template() -> str:
    """Return our own chat template."""
    return (files("lightning_trainer") / "templates" / "hermes.jinja").read_text("utf-8")


@cache
def _divert() -> None:
    """Make transformers render in the process if `_ELSEWHERE` is set. Otherwise it is unchanged."""
    from transformers import tokenization_utils_base as base

    plain = vars(base)["render_jinja_template"]

    @wraps(plain)
    def rendered(**question: Any) -> Any:
        return _ask(question) if _ELSEWHERE.get() else plain(**question)

    vars(base)["render_jinja_template"] = rendered


def _ask(question: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return the result of `render_jinja_template`, computed in the process.

    Raises:
        RenderError: see `render`.
    """
    template = question["chat_template"]
    if _ended[template] >= _MOST_ENDED:
        raise RenderError(f"it used too much time or memory {_MOST_ENDED} times, and is no longer run")
    try:
        answer = json.loads(_RENDERER.ask(json.dumps(question).encode()))
    except TooLongError:
        _ended[template] += 1
        raise RenderError(f"it takes more than {CPU_S:g} s of processor time, or {_TOO_MUCH[9:]}") from None
    if "error" in answer:
        raise RenderError(answer["error"])
    return answer["rendered"], answer["indices"]


def _main() -> None:
    from transformers.utils import chat_template_utils

    plain = vars(chat_template_utils)["render_jinja_template"]  # its annotation says that it returns a string

    def answer(line: bytes) -> bytes:
        try:
            rendered, indices = plain(**json.loads(line))
        except MemoryError:
            return json.dumps({"error": _TOO_MUCH}).encode()
        except Exception as error:  # noqa: BLE001 - whatever a template raises is its refusal
            return json.dumps({"error": str(error)[:2000] or type(error).__name__}).encode()
        if sum(map(len, rendered)) > _MOST_TEXT:
            return json.dumps({"error": _TOO_MUCH}).encode()
        return json.dumps({"rendered": rendered, "indices": indices}).encode()

    answer_lines(answer, lambda line: float(sys.argv[1]) + _CPU_S_A_MEGABYTE * len(line) / 1e6, _MEMORY)


if __name__ == "__main__":
    _main()

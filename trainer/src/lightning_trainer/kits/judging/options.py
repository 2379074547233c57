"""The table `judge` of a configuration, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from lightning_spans.errors import ConfigError
from lightning_trainer.outgoing import is_url

RUBRIC: Final = (
    "Judge by the result first: an attempt that reaches the goal is better than one that does not. Among those that do"
    " not, the one that came further is better. Among those that do, the one that wasted less is better. Small"
    " differences in wording count for nothing."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Options of a judge.

    Attributes:
        endpoint: base URL of its OpenAI-compatible server.
        model: model name in the requests.
        rubric: what is better than what; a text, or the path of a file with one.
        weight: factor of its scores.
        key_file: file with the server's key; None: LIGHTNING_JUDGE_KEY.
        temperature: of its answers; None: the server's own.
        max_tokens: maximum tokens of its answer.
        passes: number of times that each group is judged, each in another order; the mean counts.
        retries: number of retries if a call fails or its answer is invalid.
        timeout_s: maximum seconds of an answer.
        concurrency: number of groups at once.
        max_chars: maximum characters of a rollout; of longer ones the middle is left out.
        schema: send a JSON schema of the answer, for servers that accept one.
        second_model: another judge that is not learned from and judges some groups again; None: there is none.
        second_endpoint: base URL of its server; None: that of the first.
        second_key_file: file with its key; None: that of the first.
        second_groups: maximum groups of a step that it judges.
    """

    endpoint: str
    model: str
    rubric: str = RUBRIC
    weight: float = 1.0
    key_file: Path | None = None
    temperature: float | None = None
    max_tokens: int = 2048
    passes: int = 1
    retries: int = 2
    timeout_s: float = 120.0
    concurrency: int = 8
    max_chars: int = 20_000
    schema: bool = True
    second_model: str | None = None
    second_endpoint: str | None = None
    second_key_file: Path | None = None
    second_groups: int = 2

    @property
    def longest_s(self) -> float:
        """Maximum seconds for a group, with room for the pauses between tries."""
        return self.passes * (self.retries + 1) * (self.timeout_s + 60.0)


def read_options(table: Mapping[str, Any]) -> JudgeOptions:
    """Read the table `judge` of a configuration.

    Raises:
        ConfigError: an option is missing, unknown or wrong.
    """
    hints = get_type_hints(JudgeOptions)
    known = {field.name for field in fields(JudgeOptions)}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"judge: there is no option {name!r}. There are: {', '.join(sorted(known))}.")
        _check_type(name, value, hints[name])
    for name in ("endpoint", "model"):
        if name not in table:
            raise ConfigError(
                f"the judge's {name} is missing. Give --judge {name}=..., or {name} in the table [judge]."
            )
    seconds = [name for name in table if name.startswith("second_")]
    if seconds and "second_model" not in table:
        raise ConfigError(f"judge: {seconds[0]} is an option of a second judge. Name that judge with second_model.")
    paths = {name: Path(table[name]) for name in ("key_file", "second_key_file") if table.get(name)}
    given = {**{name: value for name, value in table.items() if not name.endswith("key_file")}, **paths}
    options = JudgeOptions(**{**given, "rubric": _rubric(str(table.get("rubric", RUBRIC)))})
    _check(options)
    return options


def _check_type(name: str, value: Any, kind: Any) -> None:
    text = kind in {str, str | None, Path | None}
    fine = isinstance(value, bool) if kind is bool else isinstance(value, str) if text else _is_number(value, kind)
    if not fine:
        raise ConfigError(f"judge: {name} = {value!r} can't be used. It is {JudgeOptions.__annotations__[name]}.")


def _is_number(value: Any, kind: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole if kind is int else whole or (isinstance(value, float) and math.isfinite(value))


def _check(options: JudgeOptions) -> None:
    if not is_url(options.endpoint):
        raise ConfigError(
            f"judge: endpoint {options.endpoint!r} is not a URL. Give one, such as http://127.0.0.1:8000/v1."
        )
    if options.second_endpoint is not None and not is_url(options.second_endpoint):
        raise ConfigError(f"judge: second_endpoint {options.second_endpoint!r} is not a URL. Give one.")
    least_of = (
        ("second_groups", 1),
        ("max_tokens", 1),
        ("passes", 1),
        ("retries", 0),
        ("concurrency", 1),
        ("max_chars", 200),
    )
    for name, least in least_of:
        if getattr(options, name) < least:
            raise ConfigError(f"judge: {name} must be at least {least}.")
    if options.timeout_s <= 0 or options.weight == 0:
        raise ConfigError("judge: timeout_s must be more than 0, and weight not 0.")


def _rubric(text: str) -> str:
    """Return the rubric: the text itself, or the content of the file that it names."""
    if not text.strip():
        raise ConfigError("judge: the rubric is empty. Describe which answers are better, or leave it out.")
    path = Path(text)
    if "\n" not in text and path.suffix in {".txt", ".md"}:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"judge: the rubric {text} can't be read: {error}") from None
    return text

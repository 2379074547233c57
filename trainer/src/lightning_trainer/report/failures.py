"""Why programs failed, worded for their author."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from lightning_trainer.reasons.call_errors import SCORER_FAILED
from lightning_trainer.report.terminal import some

_GONE: Final = re.compile(
    r"^(?:\w+\.)*(?:(?:API|OpenAI)ConnectionError|ConnectError|ConnectionRefusedError)\b.*$", re.MULTILINE
)
_REFUSED: Final = re.compile(r"^(?:\w+\.)*(?:OpenAI)?(?:AuthenticationError|PermissionDeniedError)\b.*$", re.MULTILINE)


def last_error(text: str, lines: int = 12) -> str:
    """Return the end of a traceback; only the error if a model was not reached, because the rest is its client's."""
    of_model = _of_model(text)
    return of_model or "\n".join(text.splitlines()[-lines:])


def most_frequent_error(errors: Sequence[str]) -> str:
    """Return the most frequent last line among these errors, and its count; "" if there is none."""
    by_line: defaultdict[str, list[str]] = defaultdict(list)
    for error in filter(str.strip, errors):
        by_line[error.strip().splitlines()[-1]].append(error)
    if not by_line:
        return ""
    same = max(by_line.values(), key=len)
    return f"The most frequent error ({len(same)} of {len(errors)}):\n{last_error(same[0])}"


def advice(errors: Sequence[str]) -> str:
    """Return what to do if every rollout failed: check the agent, or the reward function for its answers."""
    if all(error.startswith(SCORER_FAILED) for error in errors):
        return "The agent answered each time. Call the reward function by itself on one answer, to see what is wrong."
    return "Run the agent by itself on one task, to see what is wrong."


def where_calls_go(
    text: str, environment: Mapping[str, str] = os.environ, *, agents: Iterable[str] | None = None
) -> str:
    """Return what to check if an agent did not reach its own model, as a line; empty for other errors.

    Args:
        text: the error.
        environment: of the program.
        agents: names of the agents that call their own endpoint, if they are known.
    """
    if not _of_model(text):
        return ""
    url = environment.get("OPENAI_BASE_URL")
    where = f"is {urlsplit(url).netloc.rpartition('@')[2] or url}" if url else "is not set, which means OpenAI"
    problem = "It refused the key: check OPENAI_API_KEY" if _REFUSED.search(text) else "Check that it is running"
    if names := some(sorted(agents or ())):
        return (
            f"Agents that are not trained call their own endpoint ({names}): OPENAI_BASE_URL {where}. {problem}, or add"
            " them to --agents.\n"
        )
    return f"Agents without a model from --model call their own endpoint: OPENAI_BASE_URL {where}. {problem}.\n"


def _of_model(text: str) -> str:
    """Return the line of the last error if a model was not reached or refused the key; otherwise empty."""
    found = [match for kind in (_GONE, _REFUSED) for match in kind.finditer(text)]
    last = max(found, key=lambda match: match.start(), default=None)
    after = "" if last is None else text[last.end() :]
    return "" if last is None or "Traceback" in after else last.group()

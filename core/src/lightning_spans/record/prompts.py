"""Replacement system prompts for agents, by name. They are inserted into requests, so the program stays unchanged."""

from __future__ import annotations

import json
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.spans import Json

logger = logging.getLogger("lightning_spans")

Prompts: TypeAlias = Mapping[str, Mapping[str, str]]
"""By agent: ``before``, a text that its system prompt holds, and ``after``, the text that replaces it.

An empty ``before`` is in every system prompt, at its start: ``after`` goes in front.
"""

FORMAT: Final = "lightning-prompts-1"
_ROLES: Final = ("system", "developer")
_attached: Prompts = {}
_missing: Final[set[str]] = set()  # agents for which a non-fitting prompt was reported


def read_prompts(path: str | Path) -> dict[str, dict[str, str]]:
    """Read the file that ``lightning-rl prompts`` wrote.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise KeyError("format")
        return {
            agent: {which: "\n".join(prompt[which]) for which in ("before", "after")}
            for agent, prompt in found["agents"].items()
        }
    except FileNotFoundError:
        raise ConfigError(f"prompts {str(path)!r}: there is no such file. It is relative to {Path.cwd()}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"prompts {str(path)!r} can't be read: {error!r}. Give the file that `lightning-rl prompts` wrote."
        ) from None


def use(prompts: Prompts) -> None:
    """Use these for attempts without their own prompts; {} for none."""
    global _attached  # noqa: PLW0603 - the patches of frameworks are process-wide, and so is what they put in
    _attached = prompts
    _missing.clear()


def with_prompts(body: Mapping[str, Json], agent: str | None, attempt: Attempt | None) -> Mapping[str, Json] | None:
    """Return the body of a model call with the agent's replacement prompt; None if it stays unchanged.

    Args:
        body: of a chat completion, of Responses or of Anthropic's messages. It is not changed.
        agent: the calling agent's path.
        attempt: its prompts have priority over those of `attach()`.
    """
    prompts: Prompts = attempt.prompts if attempt is not None and attempt.prompts else _attached
    meant = name_of_prompt(prompts, agent)
    if meant is None:
        return None
    before, after = prompts[meant]["before"], prompts[meant]["after"]
    changed = replace_prompt(body, before, after)
    if changed is None and meant not in _missing:
        _missing.add(meant)
        logger.warning(
            "lightning: the prompt of %r is not the one that the optimised prompt replaces, so it stays: it lacks"
            " %r. Was the program changed? Optimise the prompts again", meant, before[:80],
        )  # fmt: skip
    return changed


def name_of_prompt(prompts: Prompts, agent: str | None) -> str | None:
    """Return the name under which an agent, given by its path, has a prompt; None if it has none."""
    return max((name for name in prompts if selects((name,), agent)), key=len, default=None)


def own_body(body: Mapping[str, Json], before: str, after: str) -> Mapping[str, Json] | None:
    """Return the body that a call had before `with_prompts` replaced `before` by `after`.

    None if that cannot be determined: the text is not in it, is in it more than once, or does not convert back.
    """
    if sum(_count(text, after) for text in system_texts(body)) != 1:
        return None
    own = replace_prompt(body, after, before)
    return own if own is not None and replace_prompt(own, before, after) == body else None


def _count(text: str, part: str) -> int:
    """Count the occurrences of a text in another, including overlapping ones."""
    return sum(text.startswith(part, place) for place in range(len(text) - len(part) + 1))


def system_texts(body: Mapping[str, Json]) -> Iterator[str]:
    """Return every system prompt of a request, each as one text."""
    messages = [m for field in ("messages", "input") for m in _list(body.get(field)) if isinstance(m, Mapping)]
    contents = [m.get("content") for m in messages if m.get("role") in _ROLES]
    for content in (body.get("instructions"), body.get("system"), *contents):
        parts = _list(content) if not isinstance(content, str) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        yield "\n".join(text for text in texts if isinstance(text, str))


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def replace_prompt(body: Mapping[str, Json], before: str, after: str) -> dict[str, Json] | None:
    """Return the body with `before` replaced by `after` in its system prompt; None if `before` is not in it."""
    for field in ("instructions", "system"):  # of Responses, of Anthropic's messages
        instructions = _content(body.get(field), before, after)
        if instructions is not None:
            return {**body, field: instructions}
    for field in ("messages", "input"):
        messages = body.get(field)
        if not isinstance(messages, list):
            continue
        for place, message in enumerate(messages):
            if isinstance(message, Mapping) and message.get("role") in _ROLES:
                content = _content(message.get("content"), before, after)
                if content is not None:
                    return {**body, field: [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]}
    return None


def _content(content: Any, before: str, after: str) -> Any:
    if isinstance(content, str):
        return content.replace(before, after, 1) if before in content else None
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str) and before in part["text"]:
            changed = {**part, "text": part["text"].replace(before, after, 1)}
            return [*content[:place], changed, *content[place + 1 :]]
    return _across(content, before, after) if isinstance(content, list) else None


def _across(parts: Sequence[Any], before: str, after: str) -> list[Any] | None:
    """Replace a text that spans several parts, joined as the gateway joins them. The parts become one, the last."""
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    joined = "\n".join(texts)
    start = joined.find(before)
    if start < 0 or len(texts) < len(parts):
        return None
    ends = list(accumulate(len(text) + 1 for text in texts))
    first, last = bisect_right(ends, start), bisect_left(ends, start + len(before))
    begin = ends[first - 1] if first else 0
    text = joined[begin:start] + after + joined[start + len(before) : ends[last] - 1]
    return [*parts[:first], {**parts[last], "text": text}, *parts[last + 1 :]]


def system_text(request: Mapping[str, Json]) -> str | None:
    """Return the system prompt of a request: the instructions, or the first text of that role.

    None if there is none.
    """
    for field in ("instructions", "system"):
        if (text := _text(request.get(field))) is not None:
            return text
    for field in ("messages", "input"):
        messages = request.get(field)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping) and message.get("role") in _ROLES:
                return _text(message.get("content"))
    return None


def _text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return next((text for text in texts if isinstance(text, str)), None)

"""`--system-messages merge`: makes a strict chat template accept system messages anywhere and repeated user messages.

The merging is prepended to the template itself, so that checkpoints, other servers and SFT have it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.models.rendering import RenderError, render

MERGE: Final = "merge"
_MARK: Final = "{#- lightning-rl: system messages are merged #}"
_PRELUDE: Final = (
    _MARK
    + """
{%- set lightning = namespace(out=[], begun=false) -%}
{%- for message in messages -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{%- if role == 'system' and (lightning.begun or NO_SYSTEM) -%}{%- set role = 'user' -%}{%- endif -%}
{%- if role != 'system' -%}{%- set lightning.begun = true -%}{%- endif -%}
{%- set last = lightning.out[-1] if lightning.out else {} -%}
{%- if last and last.role == role and role in ('system', 'user') and last.content is string
    and message.content is string -%}
{%- set joined = dict(last, content=last.content + '\n\n' + message.content) -%}
{%- set lightning.out = lightning.out[:-1] + [joined] -%}
{%- else -%}
{%- set lightning.out = lightning.out + [dict(message, role=role)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = lightning.out %}
"""
)
_STRICT: Final = (
    {"role": "system", "content": "one"}, {"role": "user", "content": "two"}, {"role": "user", "content": "three"},
    {"role": "system", "content": "four"},
)  # fmt: skip


def merge_system_messages(tokenizer: Any) -> None:
    """Make a tokenizer's chat template merge messages: leading system messages become one, later ones a user's.

    Consecutive user messages then become one, separated by an empty line. If the template accepts no system message at
    all, the leading ones become user messages, too. Their order stays, so that a longer conversation continues a
    shorter one.

    Raises:
        ConfigError: the template rejects the merged messages as well.
    """
    if merges(str(tokenizer.chat_template)):
        return
    template = _merging_template(tokenizer)
    if template is None:
        raise ConfigError(
            "--system-messages merge does not help: the model's chat template refuses or drops merged messages as well."
            " Leave it out, or give a template of your own with --chat-template."
        )
    tokenizer.chat_template = template


def _merging_template(tokenizer: Any) -> str | None:
    for no_system in ("false", "true"):
        template = _PRELUDE.replace("NO_SYSTEM", no_system) + str(tokenizer.chat_template)
        if _shows(tokenizer, _STRICT, template):
            return template
    return None


def merges(template: str) -> bool:
    """Whether a chat template merges messages."""
    return template.startswith(_MARK)


def are_merged(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether merging changes these messages."""
    roles = ["system" if message.get("role") == "developer" else message.get("role") for message in messages]
    return "system" in roles[1:] or any(pair == ("user", "user") for pair in pairwise(roles))


def advice(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what to do about messages that a chat template rejects; empty if merging would not help."""
    if merges(str(tokenizer.chat_template)):
        return ""
    template = _merging_template(tokenizer)
    helps = template is not None and _render_messages(tokenizer, messages, template) is not None
    return " Start with --system-messages merge." if helps else ""


def takes_any_order(tokenizer: Any) -> bool:
    """Whether a chat template accepts system messages in the middle, and consecutive user messages."""
    return _shows(tokenizer, _STRICT, None)


def _shows(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None) -> bool:
    rendered = _render_messages(tokenizer, messages, template)
    return rendered is not None and all(message["content"] in rendered for message in messages)


def _render_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None) -> str | None:
    from jinja2 import TemplateError

    other = {} if template is None else {"chat_template": template}
    try:
        return render(tokenizer, list(messages), add_generation_prompt=True, **other)
    except (RenderError, TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return None

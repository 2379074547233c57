"""Tokenizers for code that renders conversations and loads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.models.merged_messages import MERGE, merge_system_messages
from lightning_trainer.models.rendering import hermes_template


def load_tokenizer(
    model: str | Path, chat_template: str | Path | None = None, system_messages: str | None = None
) -> Any:
    """Load a model's tokenizer, optionally with another chat template: a Jinja file, or ``hermes`` for ours.

    With ``system_messages="merge"``, the template merges messages that strict templates reject.

    Raises:
        ConfigError: transformers is not installed, the model has no tokenizer or no template, or one cannot be read.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("a tokenizer needs transformers: pip install 'lightning-trainer[torch]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model}: its tokenizer can't be loaded: {error}") from None
    if chat_template == "hermes":
        tokenizer.chat_template = hermes_template()
    elif chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"chat template {chat_template}: {error.strerror}.") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"{model} has no chat template. Name a Jinja file for it, or `hermes` for ours.")
    if system_messages == MERGE:
        merge_system_messages(tokenizer)
    return tokenizer

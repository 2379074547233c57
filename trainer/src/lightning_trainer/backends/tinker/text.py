"""The gateway's settings for text: tokenizer, context length, and the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.models import look
from lightning_trainer.models.tokenizers import load_tokenizer


def load_text(options: TorchOptions, longest: int | None) -> dict[str, Any]:
    """Load them from the model's folder.

    Args:
        options: the model, its chat template and its tool format.
        longest: context length that the server allows, in tokens; None if it does not report it.

    Raises:
        ConfigError: the folder has no readable configuration, or names no token that ends an answer; or
            `max_model_len` is more than the model or the server allows.
    """
    place: Path | str = look(str(options.model)).folder or str(options.model)
    tokenizer = load_tokenizer(place, options.chat_template, options.system_messages)
    config = _model_config(place)
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = min((limit for limit in (longest, own) if limit), default=None)
    chosen = options.max_model_len
    if chosen is not None and limit is not None and chosen > limit:
        raise ConfigError(
            f"max_model_len {chosen} is more than the {limit} tokens that the model and the server allow. Give less, or"
            " leave it out."
        )
    return {
        "tokenizer": tokenizer,
        "max_model_len": chosen or limit or 32768,
        "tool_format": options.tool_format,
        "end_tokens": _end_tokens(place, tokenizer),
    }


def _model_config(place: Path | str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {place}: its configuration can't be loaded: {error}") from None


def _end_tokens(place: Path | str, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, and those of the generation settings in a folder."""
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    file = Path(place) / "generation_config.json"
    if file.is_file():
        try:
            own = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} can't be read: {error}.") from None
        found |= set(own) if isinstance(own, list) else {own} - {None}
    if not found:
        raise ConfigError(f"model {place} has no end-of-turn token. Set eos_token in its tokenizer.")
    return frozenset(int(token) for token in found)

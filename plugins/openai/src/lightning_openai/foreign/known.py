"""The known formats, and which of them a request uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_openai.foreign.cohere import Cohere
from lightning_openai.foreign.dialect import ForeignDialect
from lightning_openai.foreign.gemini import Gemini
from lightning_openai.foreign.ollama import OllamaChat, OllamaGenerate
from lightning_spans.schema.spans import Json

_KNOWN: Final[tuple[ForeignDialect, ...]] = (Gemini(), OllamaChat(), OllamaGenerate(), Cohere())


def dialect_of(path: str, body: Mapping[str, Json]) -> ForeignDialect | None:
    """Return the format of a request that looks like a model call; None if it is none of these."""
    path = path.rstrip("/")
    return next((dialect for dialect in _KNOWN if dialect.knows(path, body)), None)

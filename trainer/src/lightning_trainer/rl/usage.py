"""Token counts of a model call, and whether an engine was called for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spans.schema.replays import REPLAYED
from lightning_spans.schema.spans import INPUT_TOKENS, OUTPUT_TOKENS

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node


def tokens_of(node: Node) -> tuple[int, int]:
    """Count the tokens of a model call's prompt and answers.

    The engine's own, otherwise as reported by the model server.
    """
    answer, attributes = node.answer, node.span.attributes
    exact = [len(choice.token_ids) for choice in answer.choices if choice.token_ids is not None]
    prompt = len(answer.prompt_token_ids or ()) or _number(attributes.get(INPUT_TOKENS))
    return prompt, sum(exact) or _number(attributes.get(OUTPUT_TOKENS))


def is_replayed(node: Node) -> bool:
    """Whether a model call was answered from the record of an earlier attempt."""
    return node.call is not None and REPLAYED in node.call.sampling


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0

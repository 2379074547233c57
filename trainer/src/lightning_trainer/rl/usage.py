"""How many tokens a model call had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spans.schema.spans import INPUT_TOKENS, OUTPUT_TOKENS

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node


def tokens_of(node: Node) -> tuple[int, int]:
    """Count the tokens of a model call's prompt and answers: the engine's own, else as the model server said."""
    answer, attributes = node.answer, node.span.attributes
    exact = [len(choice.token_ids) for choice in answer.choices if choice.token_ids is not None]
    prompt = len(answer.prompt_token_ids or ()) or _number(attributes.get(INPUT_TOKENS))
    return prompt, sum(exact) or _number(attributes.get(OUTPUT_TOKENS))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0

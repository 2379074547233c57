"""The table "What fits on 24, 48 and 80 GB" in docs/how-to/gpu.md: `nox -s table` writes it, a test compares it.

It is computed by the functions that `train --dry-run` uses, for models of Qwen2.5's shapes. Nothing is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.footprint import learner_memory
from lightning_trainer.engines.vllm.memory import SPARE, gib, least_memory, plan_memory
from lightning_trainer.models.shape import Shape, shape_of

PAGE = Path(__file__).parents[1] / "how-to/gpu.md"
HEAD = (
    "| weights | trained | learner, with cache | embedded engine: 24 GB | 48 GB | 80 GB"
    " | vLLM, same GPU: 24 GB | 48 GB | 80 GB |\n|---|---|---|---|---|---|---|---|---|\n"
)
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")
CARDS = (24, 48, 80)
CONTEXT, SLOTS, TOKENS, RANK = 4096, 64, 2048, 16
SIZES = {  # hidden, inner, layers, heads, key heads, vocabulary, tied embeddings
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapter": {"adapters": True},
    "adapter, `--base-bits 8`": {"adapters": True, "bits": 8},
    "adapter, `--base-bits 4`": {"adapters": True, "bits": 4},
    "the same, rounded in vLLM, too": {"adapters": True, "bits": 4, "vllm_bits": 4},
}


def rows() -> Iterator[str]:
    """Return the lines of the table."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for size, numbers in SIZES.items():
        values = dict(zip((*names, "vocab_size", "tie_word_embeddings"), numbers, strict=True))
        shape = shape_of({**values, "max_position_embeddings": CONTEXT})
        assert shape is not None
        for trained, options in TRAINED.items():
            how = {**options, "adapters": shape.count_adapter(RANK) if options else 0}
            bits = how.pop("vllm_bits", None)
            cells = [_embedded(shape, card, how) for card in CARDS] + [_vllm(shape, card, how, bits) for card in CARDS]
            whole = gib(learner_memory(shape, cached=SLOTS * TOKENS, total=80 * 2**30, **_sizes(how)).peak)
            yield f"| {size} | {trained} | {whole} | {' | '.join(cells)} |\n"


def _sizes(how: dict[str, Any]) -> dict[str, Any]:
    return {"width": 2, "tokens": TOKENS, **how}


def _embedded(shape: Shape, card: int, how: dict[str, Any]) -> str:
    total = card * 2**30
    found = learner_memory(shape, cached=SLOTS * TOKENS, total=total, **_sizes(how))
    if found.peak > total * (1 - SPARE):
        return "no" if found.peak - found.cache > total * (1 - SPARE) else "with shorter answers"
    return "yes, layers run again" if found.again else "yes"


def _vllm(shape: Shape, card: int, how: dict[str, Any], bits: int | None) -> str:
    total = card * 2**30
    left = total - least_memory(shape, width=2, context=CONTEXT, bits=bits)
    learner = learner_memory(shape, total=left, **_sizes(how))
    known = {
        "total": total,
        "width": 2,
        "slots": SLOTS,
        "context": CONTEXT,
        "adapters": 2 * how["adapters"],
        "bits": bits,
    }
    try:
        plan = plan_memory(shape, learner=learner.peak, idle=None if bits else learner.idle, **known)
    except ConfigError:
        return "no"
    return "vLLM sleeps in updates" if plan.sleeps else "yes"


def fill(text: str) -> str:
    """Return the page with today's table."""
    return TABLE.sub(lambda _: HEAD + "".join(rows()), text)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

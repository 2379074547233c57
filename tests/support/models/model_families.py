"""Families of models as the formats' tests need them: a real chat template, and a tokenizer with the family's marks."""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.models import chat_templates
from support.models.families import _trl, tokenizer_with

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
_HARMONY = (
    "<|startoftext|>", "<|start|>", "<|return|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>",
    "<|constrain|>",
)  # fmt: skip
_GLM = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip
_KIMI = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
_GEMMA = (
    "<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as the docs show it.
        template: its chat template.
        controls: texts of its control tokens.
        end: the one that ends an answer.
        format: of its tool calls; None: its template writes none that is read.
        thinking: how it opens reasoning; None: it has none.
        ends: other control tokens that end an answer.
        words: tokens of its own that are no control tokens.
        architecture: the class of transformers that a tiny model of it has.
    """

    name: str
    template: str
    controls: tuple[str, ...]
    end: str
    format: str | None
    thinking: str | None = None
    ends: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=_THINK)
    architecture: str = "Llama"


_OF_TRL: tuple[tuple[str, str, tuple[str, ...], str, str | None, str | None, tuple[str, ...], str], ...] = (
    ("Qwen2.5", "qwen2_5", _CHATML, "<|im_end|>", "hermes", None, (), "Qwen2"),
    ("Qwen3", "qwen3", _CHATML, "<|im_end|>", "hermes", "<think>", (), "Qwen3"),
    ("Qwen3 2507", "qwen3_instruct_2507", _CHATML, "<|im_end|>", "hermes", None, (), "Qwen3"),
    ("Qwen3.5", "qwen3_5_think", _CHATML, "<|im_end|>", "qwen-xml", "<think>", (), "Qwen3_5"),
    ("Qwen3.8", "qwen3_8", _CHATML, "<|im_end|>", "qwen-xml", "<think>", (), "Qwen3"),
    ("Nemotron 3 Nano", "nemotron_3_nano", _CHATML, "<|im_end|>", "qwen-xml", "<think>", (), "Llama"),
    ("Llama 3.1", "llama3_1", _LLAMA, "<|eot_id|>", "llama-json", None, ("<|eom_id|>",), "Llama"),
    ("Llama 3.2", "llama3_2", _LLAMA, "<|eot_id|>", "llama-json", None, ("<|eom_id|>",), "Llama"),
    ("gpt-oss", "gptoss", _HARMONY, "<|return|>", "harmony", "<|channel|>analysis<|message|>", ("<|call|>",), "GptOss"),
    ("GLM-4.5", "glm4moe", _GLM, "<|user|>", "glm", "<think>", ("<|observation|>",), "Glm4"),
    ("DeepSeek V3", "deepseekv3", _DEEPSEEK, "<｜end▁of▁sentence｜>", "deepseek-v3", "<think>", (), "Llama"),
    ("Gemma 4", "gemma4_v5", _GEMMA, "<turn|>", "gemma", "<|channel>thought\n", ("<|tool_response>",), "Gemma4"),
    ("LFM2.5", "lfm2_2_5", (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"), "<|im_end|>", "lfm", "<think>", (),
     "Lfm2"),
    ("R1 distilled", "deepseek_r1_distill", _DEEPSEEK[:4], "<｜end▁of▁sentence｜>", None, "<think>", (), "Qwen2"),
    ("Gemma 3", "gemma3", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", None, None, (), "Gemma3"),
)  # fmt: skip
_WRITTEN_HERE = (
    Family("Mistral v3", chat_templates.MISTRAL, _MISTRAL, "</s>", "mistral", architecture="Mistral"),
    Family("Magistral", chat_templates.MAGISTRAL, _MISTRAL, "</s>", "mistral", "[THINK]", architecture="Mistral"),
    Family("Kimi K2", chat_templates.KIMI, _KIMI, "<|im_end|>", "kimi"),
    Family("MiniMax M2", chat_templates.MINIMAX, ("]~!b[", "]~b]", "[e~["), "[e~[", "minimax", "<think>"),
    Family("DeepSeek V3.1", chat_templates.DEEPSEEK_V31, _DEEPSEEK, "<｜end▁of▁sentence｜>", "deepseek-v3", "<think>"),
    Family(
        "DeepSeek V3.2", chat_templates.DSML, (*_DEEPSEEK[:4], "｜DSML｜"), "<｜end▁of▁sentence｜>", "deepseek-dsml"
    ),
    Family("Llama pythonic", chat_templates.PYTHONIC, _LLAMA, "<|eot_id|>", "pythonic"),
    Family("unknown", chat_templates.UNKNOWN, _CHATML, "<|im_end|>", None),
)


def all_families() -> list[Family]:
    """Return every family there is here; those of trl's templates where trl's files are."""
    found = []
    for name, file, controls, end, calls, thinking, ends, architecture in _OF_TRL:
        if (template := _trl(file)) is not None:
            family = Family(name, template, controls, end, calls, thinking, ends, architecture=architecture)
            found.append(family)
    return [*found, *_WRITTEN_HERE]


def tokenizer_of(family: Family) -> Any:
    """Make a tokenizer with the family's own tokens."""
    return tokenizer_with(family.template, family.controls, family.end, family.words)

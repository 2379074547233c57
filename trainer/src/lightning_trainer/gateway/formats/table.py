"""The table of tool-call formats. A plugin registers more with the hook `lightning_register_formats`."""

# ruff: noqa: RUF001 - DeepSeek's own letters

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lightning_trainer import registry
from lightning_trainer.choices import NO_FORMAT
from lightning_trainer.gateway.formats import json_calls, literal_calls, tagged_calls
from lightning_trainer.gateway.formats.calls import Calls, Tools


@dataclass(frozen=True, slots=True)
class Thinking:
    """How reasoning is written: between two marks."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write tool calls.

    Attributes:
        name: for ``--tool-format``.
        marks: texts at which content ends and calls begin.
        read: takes the text from the first mark on; raises ValueError, KeyError or TypeError for any fault.
        first_only: a mark counts only at the beginning of the answer; elsewhere it is ordinary text.
        controls: texts of this format that may be control tokens, and are then matched as tokens.
        thinking: how reasoning is written, if that belongs to the format.
        anywhere: reasoning may occur again after content.
        dropped: marks that are neither content nor calls.
        nine_letters: ids of calls have nine letters and digits, because templates reject others.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[str, Tools], Calls]
    first_only: bool = False
    controls: tuple[str, ...] = ()
    thinking: Thinking | None = None
    anywhere: bool = False
    dropped: tuple[str, ...] = ()
    nine_letters: bool = False


_HARMONY: Final = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")

FORMATS: Final = (
    Format("hermes", ("<tool_call>",), json_calls.hermes),
    Format("qwen-xml", ("<tool_call>",), tagged_calls.qwen_xml),
    Format("glm", ("<tool_call>",), tagged_calls.glm),
    Format(
        "mistral",
        ("[TOOL_CALLS]",),
        json_calls.mistral,
        controls=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        nine_letters=True,
    ),
    Format(
        "deepseek-v3",
        ("<｜tool▁calls▁begin｜>",),
        json_calls.deepseek,
        controls=(
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    Format(
        "deepseek-dsml",
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        tagged_calls.dsml,
        controls=("｜DSML｜",),
    ),
    Format(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        json_calls.kimi,
        controls=(
            "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    Format(
        "minimax",
        ("<minimax:tool_call>",),
        tagged_calls.minimax,
        controls=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Format(
        "gemma",
        ("<|tool_call>", "<start_function_call>"),
        literal_calls.gemma,
        controls=(
            "<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>",
            "<|channel>", "<channel|>",
        ),
        thinking=Thinking("<|channel>thought\n", "<channel|>"),
    ),
    Format("lfm", ("<|tool_call_start|>",), literal_calls.lfm, controls=("<|tool_call_start|>", "<|tool_call_end|>")),
    Format(
        "harmony",
        ("<|start|>assistant to=functions", "<|start|>assistant<|channel|>commentary to=functions",
         "<|start|>assistant<|channel|>analysis to=functions", "<|channel|>commentary to=functions",
         "<|channel|>analysis to=functions", " to=functions"),
        json_calls.harmony,
        controls=_HARMONY,
        thinking=Thinking("<|channel|>analysis<|message|>", "<|end|>"),
        anywhere=True,
        dropped=("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
    ),
    Format(
        "llama-json",
        ('{"name"', '{"type": "function"', "<|python_tag|>"),
        json_calls.llama_json,
        first_only=True,
        controls=("<|python_tag|>",),
    ),
    Format(
        "pythonic",
        ("[", "<|python_start|>"),
        literal_calls.pythonic,
        first_only=True,
        controls=("<|python_start|>", "<|python_end|>"),
    ),
)  # fmt: skip
NONE: Final = NO_FORMAT


def formats() -> list[Format]:
    """Return the formats that the trainer and plugins register, in the order in which they are tried."""
    return list(registry.registrations("tool format").values())


def names() -> list[str]:
    """Return the values that ``--tool-format`` accepts."""
    return [*(each.name for each in formats()), NONE]


def by_name(name: str) -> Format | None:
    """Return a format; None for ``none``, which reads no calls.

    Raises:
        ConfigError: there is no such format.
    """
    if name == NONE:
        return None
    found: Format = registry.by_name("tool format", name)
    return found

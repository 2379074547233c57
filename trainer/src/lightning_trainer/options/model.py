"""Options for loading a model, and for turning messages into its prompt."""

from __future__ import annotations

from typing import Literal

from lightning_trainer.options.record import OptionRecord


class MessageOptions(OptionRecord):
    """How messages become a prompt, and how an answer becomes messages."""

    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, or `hermes` for the built-in template, which supports
    tools."""
    system_messages: Literal["as-sent", "merge"] = "as-sent"
    """`merge` joins leading system messages, makes later ones part of the user's message, and joins user messages that
    follow one another, for chat templates that refuse them otherwise. Recorded with each call that it changes."""
    tool_format: str | None = None
    """Format in which the model writes tool calls, such as `hermes` or `deepseek-v3`, if its chat template does not
    show it; `none` if no agent has tools. Default: the format of the run that the model comes from, otherwise detected
    from the chat template."""


class PrecisionOptions(OptionRecord):
    """Where the weights are, and in which format."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights used for generation. auto uses the model's own, or float32 on a CPU that is slower in
    bfloat16, which is measured at load time (torch)."""
    device: str = "auto"
    """Device of the backend: auto, cpu, cuda, cuda:1, ... With verl: cpu, or auto or cuda for its GPUs."""

"""Options for the model that answers agents, for loading it and for its sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.group import F, group_options
from lightning_trainer.options.measuring import RequestOptions
from lightning_trainer.options.model import MessageOptions, PrecisionOptions
from lightning_trainer.options.policies import EndpointOptions, PolicyOptions, StartOptions
from lightning_trainer.options.sampling import ContextOptions


def model_option(role: str, default: str = "") -> Callable[[F], F]:
    """Return the option that names a model, with its role and its default in the help."""
    text = f"{role}: a run, a checkpoint, a model folder or a model name."
    return model_flag(f"{text} {default}".rstrip())


def model_flag(text: str, **more: Any) -> Callable[[F], F]:
    """Return the option that names a model, for commands that take fewer kinds of them."""
    return field_option(StartOptions, "model", text=text, **more)


def endpoint_option(role: str, more: str = "") -> Callable[[F], F]:
    """Return the option that names a server for this role."""
    text = f"OpenAI-compatible server {role}; --model is then the model name in the requests."
    return field_option(EndpointOptions, "endpoint", metavar="URL", text=f"{text} {more}".rstrip())


def server_key_option(name: str, default: str) -> Callable[[F], F]:
    """Return the option for the key of the server that another option names."""
    return click.option(
        f"--{name}-key",
        type=click.Path(path_type=Path),
        help=f"File with the key of --{name}. Default: {default}.",
    )


def reflect_option(**more: Any) -> Callable[[F], F]:
    """Return the option for the model that proposes prompts."""
    return click.option(
        "--reflect", metavar="[MODEL=]URL", help="OpenAI-compatible server that proposes prompts.", **more
    )


def answered_agents_option(default: str) -> Callable[[F], F]:
    """Return the option for the agents that the model answers, with its default in the help."""
    return agents_flag(f"Agents that the model answers. {default}")


def agents_flag(text: str, *, dest: str = "agents", **more: Any) -> Callable[[F], F]:
    """Return the option that names agents."""
    return field_option(PolicyOptions, "agents", dest=dest, metavar="NAME,...", text=text, **more)


name_by_option = field_option(
    RequestOptions,
    "name_by",
    multiple=True,
    metavar="RULE",
    text="Name the agents of calls without an agent header: [NAME=]WHERE[:REGEX]. WHERE is system,"
    " model or header:FIELD. The first match counts. May be repeated.",
)
max_tokens_option = field_option(RequestOptions, "max_tokens")
chat_template_option = field_option(
    MessageOptions,
    "chat_template",
    text="Jinja file that replaces the tokenizer's chat template, or hermes for the built-in one.",
)
system_messages_option = field_option(
    MessageOptions,
    "system_messages",
    text="merge joins system and user messages that the chat template refuses otherwise, as in train.",
)
tool_format_option = field_option(
    MessageOptions,
    "tool_format",
    text="Format of the model's tool calls. Default: that of its run, otherwise of its chat template.",
)
device_option = field_option(PrecisionOptions, "device", text="Device: auto, cpu, cuda, ... [default: auto]")
dtype_option = field_option(
    PrecisionOptions, "dtype", text="Data type of the weights: auto, float32 or bfloat16. [default: auto]", type=str
)
max_model_len_option = field_option(
    ContextOptions,
    "max_model_len",
    text="Maximum tokens of prompt and answer together. Default: the limit of the run, otherwise of the model.",
)
loading_options = group_options(
    chat_template_option,
    system_messages_option,
    tool_format_option,
    device_option,
    dtype_option,
    max_model_len_option,
)

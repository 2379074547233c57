"""The upstreams that the command line names, with all their options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_spans.errors import ConfigError
from lightning_trainer.cli.servers.upstream_keys import with_keys
from lightning_trainer.gateway.http.masking import remember
from lightning_trainer.gateway.upstream.adapters import load_adapters
from lightning_trainer.gateway.upstream.upstream import Upstream, parse_provider, parse_upstream


def read_upstreams(
    texts: Sequence[str],
    *,
    timeout_s: float | None,
    keys: Sequence[str],
    adapters: Path | None,
    tokenizers: Sequence[str],
    tool_formats: Sequence[str],
    system_messages: str | None = None,
) -> list[Upstream]:
    """Read the upstreams with their keys, and with the adapters that they load now.

    Args:
        texts: ``MODEL=URL[,URL...]``.
        timeout_s: time limit of an answer in seconds; None: none.
        keys: ``MODEL=FILE`` for each whose key is in a file; the environment has the others.
        adapters: checkpoint whose adapters are loaded by the servers of the only upstream.
        tokenizers: ``MODEL=FOLDER``.
        tool_formats: ``MODEL=NAME`` of those with a tokenizer.
        system_messages: ``merge`` joins, for all tokenizers, messages that strict chat templates reject.

    Raises:
        ConfigError: one of them is malformed, names no upstream, or cannot be read or loaded.
    """
    upstreams = with_keys([parse_upstream(text, total_s=timeout_s) for text in texts], keys, os.environ)
    upstreams += load_adapters(adapters, upstreams) if adapters else []
    return _with_formats(_with_tokenizers(upstreams, tokenizers, system_messages), tool_formats)


def read_provider(url: str | None) -> Upstream | None:
    """Return the upstream for calls of named agents that are not trained, with its key; None if no URL is given."""
    key = os.environ.get("LIGHTNING_PROVIDER_KEY")
    provider = parse_provider(url, key=key) if url else None
    remember(key)
    return provider


def _with_tokenizers(
    upstreams: Sequence[Upstream], named: Sequence[str], system_messages: str | None
) -> list[Upstream]:
    """Return upstreams with the tokenizers that are named for them.

    Raises:
        ConfigError: a name matches no upstream, a folder has no tokenizer with a chat template, or messages should be
            merged but there is no tokenizer.
    """
    from lightning_trainer.models.tokenizers import load_tokenizer

    if system_messages is not None and not named:
        raise ConfigError(
            f"--system-messages {system_messages} is for models in --tokenizer MODEL=FOLDER, and none is given. Other"
            " model servers apply their own chat template."
        )
    folders = {}
    for text in named:
        model, _, folder = text.partition("=")
        if not folder or model not in {upstream.model for upstream in upstreams}:
            raise ConfigError(f"--tokenizer {text!r}: must be MODEL=FOLDER, with the MODEL of an --upstream.")
        folders[model] = folder
    return [
        replace(each, tokenizer=load_tokenizer(folders[each.model], system_messages=system_messages))
        if each.model in folders
        else each
        for each in upstreams
    ]


def _with_formats(upstreams: Sequence[Upstream], named: Sequence[str]) -> list[Upstream]:
    """Return upstreams with the tool-call formats that are named for them.

    Raises:
        ConfigError: a name matches no upstream with a tokenizer, or there is no such format.
    """
    from lightning_trainer.gateway.formats.table import by_name

    formats = dict(text.partition("=")[::2] for text in named)
    models = {upstream.model for upstream in upstreams if upstream.tokenizer is not None}
    for model, name in formats.items():
        if model not in models:
            raise ConfigError(f"--tool-format {model}={name}: must be MODEL=NAME, with the MODEL of a --tokenizer.")
        by_name(name)
    return [replace(each, tool_format=formats.get(each.model)) for each in upstreams]

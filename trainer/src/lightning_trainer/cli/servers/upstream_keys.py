"""The key of each upstream. No server is sent the key of another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.http.masking import remember
from lightning_trainer.gateway.upstream.upstream import Upstream

ONE_FOR_ALL: Final = "LIGHTNING_UPSTREAM_KEY"


def with_keys(upstreams: Sequence[Upstream], named: Sequence[str], environment: Mapping[str, str]) -> list[Upstream]:
    """Return upstreams with their keys.

    Args:
        upstreams: as named on the command line.
        named: ``MODEL=FILE`` for each whose key is in a file.
        environment: contains the other keys.

    Raises:
        ConfigError: a file cannot be read or belongs to no upstream, or one key would go to servers of several owners.
    """
    keys = {each.model: environment[_name(each)] for each in upstreams if environment.get(_name(each))}
    keys |= dict(_from_file(text, upstreams) for text in named)
    rest = [each for each in upstreams if each.model not in keys]
    one_for_all = environment.get(ONE_FOR_ALL)
    if one_for_all and rest:
        _check_same_servers(rest)
        keys |= {each.model: one_for_all for each in rest}
    for key in keys.values():
        remember(key)
    return [replace(each, key=keys.get(each.model)) for each in upstreams]


def _name(upstream: Upstream) -> str:
    return f"{ONE_FOR_ALL}_{re.sub(r'[^A-Za-z0-9]', '_', upstream.model).upper()}"


def _from_file(text: str, upstreams: Sequence[Upstream]) -> tuple[str, str]:
    model, _, file = text.partition("=")
    if not file or model not in {each.model for each in upstreams}:
        raise ConfigError(f"--upstream-key {text!r}: must be MODEL=FILE, with the MODEL of an --upstream.")
    try:
        return model, Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--upstream-key {text!r}: the file can't be read: {error}") from None


def _check_same_servers(upstreams: Sequence[Upstream]) -> None:
    """Check that the shared key is sent only to the servers of one model, or of models at the same addresses."""
    places = {frozenset(urlsplit(url).netloc for url in (each.url, *each.replicas)) for each in upstreams}
    if len(places) > 1:
        names = ", ".join(_name(each) for each in upstreams)
        raise ConfigError(
            f"{ONE_FOR_ALL} would be sent to the servers of {len(upstreams)} upstreams, "
            f"which may belong to different owners. Give each its own key: {names}, or --upstream-key MODEL=FILE."
        )

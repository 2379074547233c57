"""Whether the names of a candidate are known: its models to the server, its agent from live calls."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import name_of, selects
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import LIVE
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where
from lightning_trainer.flags.common import read_key
from lightning_trainer.report.terminal import some

_LOOKED_AT: Final = 200  # newest live calls


def refuse_unserved_models(url: str, key_file: Path | None, named: Mapping[str, str | None]) -> None:
    """Reject models that a server does not have.

    Args:
        url: the server's.
        key_file: of an admin's key.
        named: models by the option that names them; None: not given.

    Raises:
        ConfigError: names the option, the nearest model and all models of the server; or the server does not answer.
    """
    wanted = {option: model for option, model in named.items() if model is not None}
    served = _served_models(url, read_key(key_file)) if wanted else []
    for option, model in wanted.items():
        if model not in served:
            near = difflib.get_close_matches(model, served, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{option} {model!r} is not a model of {url}.{hint} Its models: {some(sorted(served)) or 'none'}."
                f" To add one, start the server with --upstream {model}=URL."
            )


def note_on_unseen_agent(store: Store, agent: str) -> str | None:
    """Return a warning if the newest live calls are of other agents: a new agent is allowed, a mistyped one useless."""
    calls = store.page(Call, Where(origin=LIVE), newest_first=True, limit=_LOOKED_AT).records
    paths = {call.agent for call in calls if call.agent is not None}
    if not paths or any(selects((agent,), path) for path in paths):
        return None
    names = sorted({name_of(path) for path in paths})
    near = difflib.get_close_matches(agent, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}? Then begin again with --agent {near[0]}." if near else ""
    return f"WARNING: none of the newest {len(calls)} live calls is of the agent {agent!r}.{hint} Seen: {some(names)}."


def _served_models(url: str, key: str | None) -> list[str]:
    import httpx

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=10.0).raise_for_status()
        return [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not list its models: {error}") from None

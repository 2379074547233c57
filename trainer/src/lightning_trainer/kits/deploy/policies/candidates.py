"""The policy that is named by the options of `lightning-rl deploy candidate`."""

from __future__ import annotations

from pathlib import Path

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.upstream.adapters import adapters_in
from lightning_trainer.kits.deploy.policies.prompted import read_prompt_policy
from lightning_trainer.kits.deploy.transitions import Policy


def read_policy(agent: str, checkpoint: Path | None, name: str | None, base: str | None, model: str | None) -> Policy:
    """Return the policy that the options name.

    Raises:
        ConfigError: they name none or two, or the checkpoint does not contain the adapter or the prompt.
    """
    if (checkpoint is None) == (model is None):
        raise ConfigError("deploy candidate: give either --checkpoint with --base, or --model.")
    if checkpoint is None:
        if base is not None or name is not None:
            raise ConfigError("deploy candidate: --base and --policy belong to --checkpoint.")
        return Policy(str(model))
    if base is None:
        raise ConfigError("deploy candidate: --checkpoint needs --base, the model of the server that it belongs to.")
    if checkpoint.is_file():
        if name is not None:
            raise ConfigError("deploy candidate: --policy names an adapter, and a file of prompts has none.")
        return read_prompt_policy(agent, checkpoint, base)
    saved = {each.name: each for each in adapters_in(checkpoint)}
    wanted = name or (agent if agent in saved or len(saved) > 1 else next(iter(saved)))
    if wanted not in saved:
        raise ConfigError(f"{checkpoint} holds no adapter {wanted!r}. Name one with --policy: {', '.join(saved)}.")
    return Policy(saved[wanted].served, str(saved[wanted].folder), base)

"""A prompt as a policy: a served model whose requests get another system prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.record.prompts import name_of_prompt, read_prompts, replace_prompt
from lightning_trainer.gateway.calls.answers import Record
from lightning_trainer.gateway.calls.models import ServedModel
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.kits.deploy.transitions import Policy

logger = masking_logger(__name__)
PROMPTED: Final = "prompted"  # in a call's sampling: whether the policy's prompt replaced the program's
_MARK: Final = "@prompts-"  # in the name of such a policy
_HASH: Final = 12  # hex digits, as in an adapter's name


def is_prompt(policy: str) -> bool:
    """Whether a policy of this name is a prompt."""
    return _MARK in policy


def read_prompt_policy(agent: str, file: Path, base: str) -> Policy:
    """Return the policy of a file that `lightning-rl prompts` wrote: its name has a hash of the content.

    Raises:
        ConfigError: the file cannot be read, or has no prompt for the agent.
    """
    _prompt_of(agent, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:_HASH]
    return Policy(f"{agent}{_MARK}{digest}", str(file.resolve()), base)


def serve_prompt(policy: Policy, base: ServedModel) -> PromptedModel:
    """Return the model that answers with a policy's prompt.

    Raises:
        ConfigError: the file cannot be read, or is not the one that was named as candidate.
    """
    file, agent = Path(str(policy.checkpoint)), policy.name.rpartition(_MARK)[0]
    before, after = _prompt_of(agent, file)
    if read_prompt_policy(agent, file, str(policy.base)).name != policy.name:
        raise ConfigError(f"{file} has changed since {policy.name} was named. Name it again: deploy candidate.")
    return PromptedModel(policy.name, base, before, after)


def _prompt_of(agent: str, file: Path) -> tuple[str, str]:
    """Return the text that is replaced, and its replacement."""
    prompts = read_prompts(file)
    name = name_of_prompt(prompts, agent)
    if name is None:
        raise ConfigError(f"{file} has no prompt for {agent}. It has prompts for: {', '.join(prompts) or 'nobody'}.")
    return prompts[name]["before"], prompts[name]["after"]


@dataclass(slots=True)
class PromptedModel:
    """A served model that gets another system prompt. Calls are recorded as the program sent them.

    A call whose prompt does not contain `before` is answered with its own prompt, and marked.

    Attributes:
        name: of the policy.
        base: the model.
        before: text in the program's system prompt.
        after: text that replaces it.
        warned: whether the log already says that a prompt does not fit.
    """

    name: str
    base: ServedModel
    before: str
    after: str
    warned: bool = False

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together; None if only the upstream knows."""
        return self.base.max_model_len

    async def answer(self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing) -> None:
        """Answer one request with the other prompt; see `ServedModel.answer`."""
        own = pending.requested
        changed = replace_prompt(own.request, self.before, self.after)
        pending.routed = replace(pending.routed, marks={**pending.routed.marks, PROMPTED: changed is not None})
        if changed is None:
            self._warn()
            await self.base.answer(pending, sender, record, routing)
            return

        async def keep(answered: PendingCall) -> None:
            answered.requested = own
            await record(answered)

        pending.requested = replace(own, request=changed)
        try:
            await self.base.answer(pending, sender, keep, routing)
        finally:
            pending.requested = own

    def _warn(self) -> None:
        if not self.warned:
            self.warned = True
            logger.error(
                "the program's system prompt does not contain the text that %s replaces, so calls keep their own"
                " prompt. Was the program changed? It begins: %r", self.name, self.before[:80],
            )  # fmt: skip

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record."""
        self.base.remember(pending)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty if it is unknown."""
        return self.base.decode(ids)

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt, with the other prompt."""
        return await self.base.count(replace_prompt(request, self.before, self.after) or request)

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:
        """Answer ``POST /v1/embeddings``."""
        return await self.base.embeddings(body)

    def forget(self, attempt_id: str) -> None:
        """Drop what is kept for an attempt that has ended."""
        self.base.forget(attempt_id)

    async def close(self) -> None:
        """Nothing to close: the base is served under its own name, too."""

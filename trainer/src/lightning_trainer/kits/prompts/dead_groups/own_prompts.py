"""The prompts that the calls of a rollout would have had without its instruction, token for token.

They are made like the gateway's prompts: in the order of the calls, each continuing the tokens of the earlier ones. The
same is done with the original requests. If that does not reproduce the recorded tokens, it is unknown how the prompt
was made, and the call is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_spans.record.prompts import own_body, system_texts
from lightning_spans.schema.agents import selects
from lightning_trainer.gateway.calls.answers import Responder
from lightning_trainer.gateway.engine import Engine, tool_format
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.chat_request import read_chat_request
from lightning_trainer.kits.prompts.dead_groups.reasons import UndistilledReason

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node
    from lightning_spans.schema.calls import Call
    from lightning_spans.schema.spans import Json
    from lightning_trainer.gateway.prompt.continuation import RenderedPrompt


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompt of a call, with and without the instruction."""

    given: RenderedPrompt
    own: RenderedPrompt


class OwnPrompts:
    """Reproduces the prompts of rollouts.

    Args:
        engine: of the policy, whose tokenizer and chat template all policies share.
    """

    def __init__(self, engine: Engine) -> None:
        self._responder = Responder(engine.tokenizer, tool_format(engine))
        self._longest = engine.max_model_len

    def read(self, nodes: Sequence[Node], agent: str, before: str, after: str) -> dict[str, tuple[int, ...] | str]:
        """Return the tokens of each prompt without the instruction, or why there are none, by span id.

        Args:
            nodes: the model calls of an attempt.
            agent: that the instruction was for.
            before: its own prompt.
            after: the instruction.
        """
        calls = {node.span.span_id: node.call for node in nodes if node.call is not None}
        instructed = {node.span.span_id for node in nodes if selects((agent,), node.path)}
        moments = [(call.start_ns, True, span) for span, call in calls.items()]
        moments += [(call.end_ns, False, span) for span, call in calls.items()]
        made: dict[str, _Prompts | str] = {}
        for _, begins, span in sorted(moments):
            call = calls[span]
            if begins:
                body = _own_body(call.request, before, after) if span in instructed else call.request
                made[span] = UndistilledReason.NO_OWN_PROMPT if body is None else self._prompts(call, body)
            elif not isinstance(prompts := made[span], str):
                self._remember(call, prompts)
        for name in {_memory(call, own=own) for call in calls.values() for own in (True, False)}:
            self._responder.forget(name)
        return {span: prompts if isinstance(prompts, str) else prompts.own.ids for span, prompts in made.items()}

    def _prompts(self, call: Call, body: Mapping[str, Json]) -> _Prompts | str:
        try:
            given = self._responder.prompt(read_chat_request(call.request), _memory(call, own=False))
            own = self._responder.prompt(read_chat_request(body), _memory(call, own=True))
        except Refusal:
            return UndistilledReason.NOT_REPRODUCED
        if given is None or own is None or given.ids != call.prompt_token_ids:
            return UndistilledReason.NOT_REPRODUCED
        longest = max((len(choice.token_ids or ()) for choice in call.choices), default=0)
        return UndistilledReason.TOO_LONG if len(own.ids) + longest > self._longest else _Prompts(given, own)

    def _remember(self, call: Call, prompts: _Prompts) -> None:
        """Let later calls continue this one, as the gateway does."""
        if call.error is not None:
            return
        for choice in call.choices:
            for own, prompt in ((False, prompts.given), (True, prompts.own)):
                ids = choice.token_ids or ()
                self._responder.continuations.remember(_memory(call, own=own), prompt, ids, choice.message)


def _own_body(request: Mapping[str, Json], before: str, after: str) -> Mapping[str, Json] | None:
    """Return a request with the agent's own prompt; unchanged if it never contained the instruction."""
    own = own_body(request, before, after)
    return request if own is None and not has_text(request, after) else own


def has_text(request: Mapping[str, Json], text: str) -> bool:
    """Whether a system prompt of a request contains a text."""
    return any(text in prompt for prompt in system_texts(request))


def _memory(call: Call, *, own: bool) -> str:
    """Return the name of a memory as in the gateway, where each policy has its own memory of an attempt."""
    return f"{call.attempt_id}/{call.policy}/{own}"

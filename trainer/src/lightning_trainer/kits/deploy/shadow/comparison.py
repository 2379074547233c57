"""The result of one copy: whether the candidate agrees with the stable policy, which rules it breaks, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from lightning_spans.chat.body import tool_calls
from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import Call
from lightning_trainer.kits.deploy.guardrails import is_bad
from lightning_trainer.kits.judging.options import read_options
from lightning_trainer.rl.told import text_of

RULES: Final = ("refused", "cut")
Kind: TypeAlias = Literal["text", "tool call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRules:
    """How copies are compared, as stated in the shadow's details.

    Attributes:
        rules: names of guardrails, counted for both policies.
        judge: options of the judge that compares different answers (`kits.judging`); None: no judge.

    Raises:
        ConfigError: a rule is unknown, or an option of the judge is invalid.
    """

    rules: tuple[str, ...] = RULES
    judge: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in self.rules:
            is_bad(name)
        if self.judge is not None:
            read_options(self.judge)

    def to_details(self) -> dict[str, Any]:
        """Return the rules as stored in the shadow's details."""
        return {"rules": list(self.rules), "judge": None if self.judge is None else dict(self.judge)}

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> ShadowRules:
        """Read the result of `to_details`.

        Raises:
            ConfigError: the details do not have this form.
        """
        try:
            return cls(rules=tuple(details["rules"]), judge=details["judge"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the shadow's details can't be read: {error}. Start it again.") from None


def agreement(stable: Call, candidate: Call) -> tuple[Kind, bool]:
    """Return the kind of the stable policy's answer, and whether the candidate agrees.

    Tool calls agree if they have the same tools with the same arguments, in any order and format of the arguments.
    Texts agree if they are equal except for white space.
    """
    messages = [_message(call) for call in (stable, candidate)]
    theirs, own = ([call.signature for call in tool_calls(message)] for message in messages)
    if theirs:
        return "tool call", theirs == own
    texts = [text_of(message.get("content")).split() for message in messages]
    return "text", candidate.error is None and not own and texts[0] == texts[1]


def measure(call: Call, usage: Mapping[str, Any], rules: Sequence[str]) -> dict[str, Any]:
    """Return the cost of an answer and the rules that it breaks.

    Args:
        call: its record.
        usage: tokens as counted by the upstream, for a call without recorded tokens.
        rules: names of guardrails.
    """
    sampled = [choice.token_ids for choice in call.choices if choice.token_ids is not None]
    prompt = usage.get("prompt_tokens") if call.prompt_token_ids is None else len(call.prompt_token_ids)
    completion = sum(map(len, sampled)) if sampled else usage.get("completion_tokens")
    return {
        "seconds": (call.end_ns - call.start_ns) / 1e9,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "rules": [name for name in rules if is_bad(name)(call)],
    }


def _message(call: Call) -> Mapping[str, Any]:
    return call.choices[0].message if call.choices else {}

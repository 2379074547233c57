"""The interface of engines, which generate with a policy, for the gateway. It needs no torch.

`EngineWait` is what a call lost to an engine that could not sample: it was down, or its weights were replaced.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

from lightning_spans.errors import ConfigError

STEERED: Final = "steered"
"""Ability of engines that say which tokens are no samples of the policy; the name of that in a call's sampling."""
FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        max_tokens: most tokens to sample; None: as many as the context allows.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: keeps the smallest set of tokens with at least this probability; 1 keeps all.
        top_k: keeps this many most likely tokens; 0 keeps all.
        stop: strings that end the answer. They are not part of the text, but their tokens are recorded.
        seed: makes the samples repeatable for the same prompt and weights; None samples freely.

    The fields below are supported by engines that declare them; see `abilities`. Log-probabilities are those before any
    of them is applied.

        min_p: keeps tokens with at least this share of the likeliest token's probability.
        presence_penalty: subtracted from the logits of tokens that the answer already contains.
        frequency_penalty: subtracted from them once per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer.
        logit_bias: added to the logits of these tokens.
        grammar: the answer's required form, in llguidance's Lark; None: any.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class SampledPiece:
    """A piece of an answer, as soon as it is sampled.

    Attributes:
        token_ids: the new tokens, including the end-of-turn token.
        logprobs: their natural log-probabilities under softmax(logits / temperature) over the whole vocabulary, before
            top-p and top-k (temperature 1 if the temperature is 0).
        text: the new text: whole characters only, without special tokens and stop strings.
        finish_reason: set on the last piece only.
        steered: which of the tokens were sampled from another distribution than the policy's, such as those that a
            grammar forces. Engines that report them have the ability `STEERED`; empty: none of them.
        version: number of the weights that sampled it, if these may have changed since the request; None: the
            engine's own when the request began.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None = None
    steered: tuple[bool, ...] = ()
    version: int | None = None


class Engine(Protocol):
    """An embedded engine. Parallel requests are batched; new weights are loaded in place between requests."""

    @property
    def model(self) -> str:
        """Name under which the policy is served."""
        ...

    @property
    def version(self) -> int:
        """Number of the weights; grows by one with each update."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, including its chat template."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        """Sample one answer. May be iterated on any event loop; closing the iterator early cancels the request.

        Raises:
            ValueError: the prompt is empty or leaves no room in the context, or an option cannot be applied. The
                gateway refuses the request; it checks beforehand that there is room.
        """
        ...


def tool_format(engine: Engine) -> str | None:
    """Return the name of the chosen format of tool calls: an engine's attribute ``tool_format``, if it has one."""
    return getattr(engine, "tool_format", None)


def set_tool_format(engines: Iterable[Engine], name: str | None) -> None:
    """Set a run's format of tool calls on its engines, so that an engine need not read the option itself.

    Args:
        engines: of the run's policies.
        name: the chosen format; None: nothing is set, and the format is the one of the chat template.

    Raises:
        ConfigError: an engine does not accept the attribute ``tool_format``.
    """
    for engine in engines:
        if name is None or tool_format(engine) == name:
            continue
        try:
            engine.tool_format = name  # type: ignore[attr-defined]  # optional, so not in the protocol
        except AttributeError:
            raise ConfigError(
                f"--tool-format {name} can't be used: {type(engine).__name__}.tool_format can't be set. Make it an"
                " attribute of the engine (docs/how-to/own-engine.md), or leave the option out."
            ) from None


def abilities(engine: Engine) -> frozenset[str]:
    """Return the fields of `Sampling` that an engine supports beyond the common ones: its attribute ``abilities``."""
    return getattr(engine, "abilities", frozenset())


def marks_steered(engine: Engine, sampling: Sampling) -> bool:
    """Return whether an engine marks the tokens of such an answer that are not samples of the policy.

    An engine with the ability `STEERED` always does. For others, their method ``marks`` says so, if they have one.
    """
    method = getattr(engine, "marks", None)
    return STEERED in abilities(engine) or (method is not None and method(sampling))


async def disconnect(engine: Engine) -> None:
    """Close an engine's connections on this event loop, which is ending: its method ``disconnect``, if any."""
    method = getattr(engine, "disconnect", None)
    if method is not None:
        await method()


class EngineWait:
    """The wait of one call, summed over its answers.

    Attributes:
        seconds: waited so far.
        ended: whether the call failed because its engine ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ended = False


_CURRENT: Final[ContextVar[EngineWait | None]] = ContextVar("engine_wait", default=None)


def measure_wait() -> EngineWait:
    """Return the wait of the call that this task answers; `add_wait` adds to it from now on."""
    wait = EngineWait()
    _CURRENT.set(wait)
    return wait


def add_wait(seconds: float) -> None:
    """Add to the wait of the current call, if it is measured."""
    if (wait := _CURRENT.get()) is not None:
        wait.seconds += seconds


def mark_ended(seconds: float) -> None:
    """Note that the current call fails because its engine has ended, and the time that it lost."""
    add_wait(seconds)
    if (wait := _CURRENT.get()) is not None:
        wait.ended = True


@contextmanager
def engine_wait() -> Iterator[None]:
    """Add the time that the block takes, also if the call is cut off within it."""
    since = time.monotonic()
    try:
        yield
    finally:
        add_wait(time.monotonic() - since)

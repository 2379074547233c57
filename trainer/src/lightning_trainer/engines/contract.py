"""The contract of an engine: it takes versions of a policy, and returns tokens and the version that sampled them.

An engine is registered under a name by the hook `lightning_register_engines` and chosen by the option `engine`. A
learner opens it, publishes each new version of its policies to it, and passes its `Engine`s to the gateway, one for
each policy. Nothing else is exchanged, so any server that samples from token ids can be an engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from lightning_spans.errors import LightningError
from lightning_trainer.gateway.engine import Engine

WriteWeights: TypeAlias = Callable[[str, Path], None]
"""Writes the newest weights of the policy named into a folder, as peft or transformers does."""


class EngineError(LightningError):
    """An engine cannot start, has ended permanently, or samples from other weights than it should."""

    exit_status = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What an engine must serve, known before anything is loaded.

    Attributes:
        model: folder of the model.
        policies: names of the LoRA adapters on it; empty: one policy.
        copies: those of them that are frozen copies of others, whose weights change only between steps.
        lora_rank: rank of the adapters; 0: all weights are trained.
        lora_targets: names of the layers that have adapters, as far as the options or existing adapters name them.
        base_bits: bits of the learner's frozen weights under the adapters; None: `dtype`.
        staleness: steps by which the weights of a rollout may be older than the newest.
        slots: maximum number of answers that are sampled at once.
        max_model_len: maximum tokens of prompt and answer; None: the model's own limit.
        dtype: number format of the weights: auto, float32 or bfloat16.
        device: device of the learner.
        seed: sampling seed for requests without their own.
        tool_format: how the model writes tool calls; None: as its chat template does.
        python: interpreter of the environment in which the engine is installed; None: this one's.
        urls: base URLs of servers that are already running; empty: the engine starts its own.
        gpus: GPUs of the engine, numbered from 0 among those that this process sees, with commas; None: the learner's.
        learner_bytes: memory that the learner needs on its device during an update.
        learner_idle_bytes: the same between updates.
        options: further options of the engine, by name.
    """

    model: Path
    policies: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    base_bits: int | None = None
    staleness: int = 0
    slots: int = 64
    max_model_len: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    tool_format: str | None = None
    python: Path | None = None
    urls: tuple[str, ...] = ()
    gpus: str | None = None
    learner_bytes: int = 0
    learner_idle_bytes: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chosen_gpus(self) -> str | None:
        """The engine's GPUs, as in `gpus`; None: all that this process sees, of which the learner has the first."""
        number = self.device.partition(":")[2]
        return number if self.gpus is None and number not in {"", "0"} else self.gpus

    @property
    def apart(self) -> bool:
        """Whether the engine has other GPUs than the learner."""
        return self.gpus is not None and (self.device.partition(":")[2] or "0") not in self.gpus.split(",")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """The learner's model.

    Attributes:
        name: name under which it is served: the policy's, or that of the frozen model under several adapters.
        tokenizer: with its chat template.
        max_model_len: maximum tokens of prompt and answer.
        loaded: the learner's own object, for an engine that generates with the same weights.
        write: writes the model into a folder with the weights that the learner computes with; None: they are those of
            the request's model.
        options: the learner's own.
        lora_targets: names of the layers that have adapters; empty: none, or unknown.
    """

    name: str
    tokenizer: Any
    max_model_len: int
    loaded: Any = None
    write: Callable[[Path], None] | None = None
    options: Any = None
    lora_targets: tuple[str, ...] = ()


class PolicyEngines(Protocol):
    """An open engine: it samples from every policy of a learner.

    Attributes:
        random: provides seeds for samples without one; its state is part of a checkpoint.
    """

    random: random.Random

    @property
    def engines(self) -> Sequence[Engine]:
        """One engine for each policy, by its `model`; with several adapters, the frozen model first."""
        ...

    def still(self) -> AbstractContextManager[None]:
        """Hold answers back within the block, in which the learner changes weights that the engine shares."""
        ...

    def publish(self, versions: Mapping[str, int], write: WriteWeights) -> None:
        """Sample the next answers from new weights. An answer in progress ends on the weights with which it began.

        Args:
            versions: numbers of the new weights, by policy.
            write: writes them, for an engine that does not share the learner's.

        Raises:
            EngineError: the engine does not take them.
        """
        ...

    def logprobs(self, policy: str, tokens: Sequence[int]) -> Sequence[float] | None:
        """Return the natural log-probabilities of all tokens but the first, under the newest weights at temperature 1.

        Returns:
            None if the engine shares the learner's weights, so that there is nothing to compare.

        Raises:
            EngineError: the engine fails.
        """
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


@runtime_checkable
class RestingEngines(Protocol):
    """An open engine that can give its memory to the learner."""

    def rest(self) -> AbstractContextManager[None]:
        """Give the engine's memory to the learner within the block, an update, if there is not enough for both.

        Answers wait meanwhile.

        Raises:
            EngineError: it does not give its memory, or does not take it back.
        """
        ...


class EngineKind(Protocol):
    """An engine that can be chosen by name."""

    def check(self, request: EngineRequest) -> None:
        """Reject a request that cannot work. Nothing has been loaded yet.

        Raises:
            ConfigError: the message says what to change.
        """
        ...

    def plan(self, request: EngineRequest) -> Sequence[str]:
        """Return lines that describe how memory is divided, for ``--dry-run``.

        Raises:
            ConfigError: there is too little memory; the message says for what, and what to change.
        """
        ...

    def open(self, request: EngineRequest, held: HeldModel) -> PolicyEngines:
        """Start the engine and wait until it answers.

        Raises:
            LightningError: it does not start; the message contains its last error.
        """
        ...


def samples_apart(engine: Engine) -> bool:
    """Whether an engine samples during an update: one that can end by itself has its own weights.

    An engine that holds answers back meanwhile declares this with ``waits_for_updates``.
    """
    return getattr(engine, "check", None) is not None and not getattr(engine, "waits_for_updates", False)


def check_engines(engines: Sequence[Engine]) -> None:
    """Raise the error that has ended an engine permanently, by its method ``check`` if it has one.

    Raises:
        EngineError: one has ended.
    """
    for engine in engines:
        check = getattr(engine, "check", None)
        if check is not None:
            check()

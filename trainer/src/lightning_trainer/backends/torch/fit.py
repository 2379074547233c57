"""Whether a run fits on its GPU, and which options make it fit. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.footprint import OVERHEAD, LearnerMemory
from lightning_trainer.backends.torch.needs import weights_of
from lightning_trainer.backends.torch.sampler import ASSUMED_TOKENS, EMBEDDED, engine_name, engine_of, learner_memory_of
from lightning_trainer.engines.devices import are_planned, gpu_total, gpu_totals
from lightning_trainer.engines.vllm.kind import is_installed
from lightning_trainer.engines.vllm.memory import SPARE, gib
from lightning_trainer.engines.vllm.rounding import BITS
from lightning_trainer.models import look
from lightning_trainer.models.bases import adapter_rank, read_base

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig

_RANK: Final = 16
_SMALL: Final = 512  # tokens of a forward pass
_SLOTS: Final = 16  # concurrent answers
_MOST: Final = 4  # changes to suggest
_MEANING: Final = {
    f"--lora-rank {_RANK}": ", which trains an adapter instead of all weights",
    f"--engine {EMBEDDED}": ", which samples more slowly",
}
_EMBEDDED: Final[Mapping[str, Any]] = {
    "engine": EMBEDDED,
    "engine_gpus": None,
    "engine_python": None,
    "engine_options": {},
}


class MemoryFit(NamedTuple):
    """The memory plan in lines, and whether memory can suffice."""

    lines: tuple[str, ...]
    fits: bool


def plan_run(config: TrainConfig) -> MemoryFit:
    """Return how the memory of a run's GPU is divided, and what to change if it does not suffice.

    Raises:
        ConfigError: an option is wrong.
    """
    total = gpu_total(config.device)
    try:
        lines = _divide(config, total)
    except _TooSmallError as error:
        return MemoryFit((*error.lines, *_advice(config, total), *_without_cuda()), fits=not error.certain)
    if not are_planned():
        return MemoryFit(tuple(lines), fits=True)
    known = total is not None and learner_memory_of(config) is not None
    first = (f"one GPU of {gib(total or 0)} holds this run.",) if known else ()
    return MemoryFit((*first, *lines, *_plan_limits(config)), fits=True)


class _TooSmallError(Exception):
    """The GPU is too small: in any case, or only if answers are as long as assumed."""

    def __init__(self, *lines: str, certain: bool = True) -> None:
        super().__init__(*lines)
        self.lines, self.certain = lines, certain


def _divide(config: TrainConfig, total: int | None) -> list[str]:
    """Return the plan in lines.

    Raises:
        _TooSmallError: memory does not suffice; contains the lines so far.
    """
    learner = learner_memory_of(config, total)
    kind, request = engine_of(config)
    if total is None or learner is None:
        return list(kind.plan(request))
    lines = [_learner_line(config, learner)]
    if engine_name(config) == EMBEDDED or bool(request.urls) or request.apart:
        missing = learner.peak - int(total * (1 - SPARE))
        if missing > 0:
            raise (
                _TooSmallError(
                    f"one GPU of {gib(total)} does not hold the learner: {gib(missing)} are missing.", *lines
                )
                if missing >= learner.cache
                else _TooSmallError(
                    f"one GPU of {gib(total)} holds the learner only if its answers are shorter than assumed: otherwise"
                    f" {gib(missing)} are missing.",
                    *lines,
                    certain=False,
                )
            )
        lines.append(f"GPU memory: {gib(total)}, of which {gib(-missing)} stay free (4 % are never planned with)")
    try:
        return [*lines, *kind.plan(request)]
    except ConfigError as error:
        raise _TooSmallError(str(error), *lines) from None


def _learner_line(config: TrainConfig, learner: LearnerMemory) -> str:
    """Return the learner's memory in one line."""
    tokens = int(config.backend_options.get("micro_batch_tokens", 2048))
    how = "layers run again" if learner.again else "all kept"
    cache = ""
    if learner.cache:
        slots = int(config.backend_options.get("slots", 64))
        length = min(config.max_model_len or ASSUMED_TOKENS, ASSUMED_TOKENS)
        cache = f" + {gib(learner.cache)} keys and values of {slots} answers with {length:,} tokens"
    return (
        f"learner: {gib(learner.peak)} = {gib(learner.weights)} weights + {gib(learner.training)} masters, gradients"
        f" and moments + {gib(learner.activations)} activations of {tokens:,} tokens ({how}) + {gib(learner.logits)}"
        f" logits{cache} + {gib(OVERHEAD)} more (computed, not measured)"
    )


def _advice(config: TrainConfig, total: int | None) -> Iterator[str]:
    """Yield changes that make the run fit, the smallest changes first."""
    found: list[_Change] = []
    for change in _changes(config):
        if len(found) == _MOST or any(known.within(change) for known in found):
            continue
        changed = config.model_copy(update=change.options)
        try:
            _divide(changed, total)
        except (_TooSmallError, ConfigError):
            continue
        if not found:
            yield "Any of these fits:"
        found.append(change)
        learner = learner_memory_of(changed, total)
        yield f"  {change.words}: the learner takes {gib(learner.peak if learner else 0)}"
    if not found:
        yield "No option of this backend makes it fit: use a larger GPU, a smaller model, or --backend verl on several."
    if (reason := _why_fixed(config)) is not None:
        yield reason


class _Change(NamedTuple):
    """Options to change, as flags and by name."""

    flags: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def words(self) -> str:
        """The flags; a single flag with its meaning."""
        alone = _MEANING.get(self.flags[0], "") if len(self.flags) == 1 else ""
        return " ".join(self.flags) + alone

    def within(self, other: _Change) -> bool:
        """Whether another change includes all of this one."""
        return set(self.flags) <= set(other.flags)

    def __or__(self, other: _Change) -> _Change:
        """Return both changes combined."""
        given = (self.options, other.options)
        inner = {name: value for each in given for name, value in each.get("backend_options", {}).items()}
        more = {"backend_options": inner} if inner else {}
        return _Change((*self.flags, *other.flags), {**self.options, **other.options, **more})


def _plan_limits(config: TrainConfig) -> Iterator[str]:
    """Yield what a plan for a GPU that is not here leaves out."""
    if learner_memory_of(config) is None:
        yield f"memory: not known, because the sizes of {config.model} are not. Give the folder of its config.json."
    adapters = config.lora_rank or adapter_rank(config.model)
    if config.engine is None and engine_name(config) == EMBEDDED and adapters and not is_installed():
        yield "Where vLLM is installed, it samples for runs with adapters: to plan that, add --engine vllm."
    yield "Nothing was loaded, so no time was measured: --dry-run without --gpu-memory measures it on this machine."


def _without_cuda() -> Iterator[str]:
    """Yield a warning if this torch cannot use the GPU."""
    if are_planned():
        return
    with suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            yield "The torch that is installed here has no CUDA: to use the processor instead, add --device cpu."


def _why_fixed(config: TrainConfig) -> str | None:
    """Return why a run cannot choose its adapters and the bits under them; None if it can."""
    if config.resume is not None:
        return f"lora_rank and base_bits cannot change, because {config.resume} is resumed: other ones need a new run."
    folder = look(config.model).folder
    base = None if folder is None else read_base(folder)
    if base is None or not base.rank:
        return None
    return (
        f"lora_rank and base_bits cannot change, because {config.model} has adapters of rank {base.rank} over"
        f" {f'{base.bits} bits' if base.bits else 'weights that are not rounded'}. To choose others, start from its"
        f" model: --model {base.folder}."
    )


def _changes(config: TrainConfig) -> Iterator[_Change]:
    """Yield possible changes: first those with the same trained weights, then fewer trained weights and fewer bits."""
    yield from _smaller(config)
    unchanged, adapters = _Change((), {}), _Change((f"--lora-rank {_RANK}",), {"lora_rank": _RANK})
    weights, fixed = weights_of(config), _why_fixed(config) is not None
    given = weights.bits if weights else None
    bits = [unchanged]
    if fixed or config.lora_rank:
        adapters = unchanged
    if not fixed:
        bits += [_Change((f"--base-bits {n}",), {"base_bits": n}) for n in (8, 4) if given is None or n < given]
    if engine_name(config) != EMBEDDED and (given == BITS or (given is None and not fixed)):
        bits.append(_rounding(config, given))
    engines = [unchanged]
    if engine_name(config) != EMBEDDED:
        engines.append(_Change((f"--engine {EMBEDDED}",), _EMBEDDED))
    for engine in engines:
        less = list(_smaller(config.model_copy(update=engine.options)))
        for each in bits:
            change = engine | adapters | each
            if change.flags:
                yield change
            for more in less:
                yield change | more
            if len(less) > 1:
                yield change | less[0] | less[1]


def _rounding(config: TrainConfig, bits: int | None) -> _Change:
    """Return the change by which vLLM has the frozen weights in 4 bits, too, if the learner has so many bits."""
    flags = (*((f"--base-bits {BITS}",) if bits is None else ()), "--engine-options quantization=bitsandbytes")
    options = {**config.engine_options, "quantization": "bitsandbytes"}
    return _Change(flags, {"engine_options": options, **({"base_bits": BITS} if bits is None else {})})


def _smaller(config: TrainConfig) -> Iterator[_Change]:
    """Yield changes that need less memory at once, and train the same weights."""
    options, embedded = config.backend_options, engine_name(config) == EMBEDDED
    if int(options.get("micro_batch_tokens", 2048)) > _SMALL:
        small = {"backend_options": {**options, "micro_batch_tokens": _SMALL}}
        yield _Change((f"--backend-options micro_batch_tokens={_SMALL}",), small)
    if embedded and int(options.get("slots", 64)) > _SLOTS:
        yield _Change((f"--backend-options slots={_SLOTS}",), {"backend_options": {**options, "slots": _SLOTS}})
    if not embedded and (config.max_model_len or ASSUMED_TOKENS + 1) > ASSUMED_TOKENS:
        yield _Change((f"--max-model-len {ASSUMED_TOKENS}",), {"max_model_len": ASSUMED_TOKENS})
    if config.lora_rank > _RANK and _why_fixed(config) is None:
        yield _Change((f"--lora-rank {_RANK}",), {"lora_rank": _RANK})
    if not embedded and config.engine_gpus is None and len(gpu_totals()) > 1:
        yield _Change(("--engine-gpus 1",), {"engine_gpus": "1"})

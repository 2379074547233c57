"""Load a model and its tokenizer, and check that the embedded engine can run it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.model import attention, recurrent
from lightning_trainer.backends.torch.model.cache import CacheShape, SlotCache
from lightning_trainer.backends.torch.model.quantised import check_source, quantise
from lightning_trainer.backends.torch.model.quiet import quiet_libraries
from lightning_trainer.backends.torch.model.step import SHORT, Chunk, StepPlan
from lightning_trainer.backends.torch.options import TorchOptions, no_cuda, unknown_device
from lightning_trainer.models import check_folder
from lightning_trainer.models.merged_messages import MERGE, merge_system_messages
from lightning_trainer.models.shape import longrope_length

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBES = 8  # the first of them warms up
_LAYERS = frozenset({"full_attention", "sliding_attention"})  # kinds of layers that plans support
_FORGETFUL = frozenset({"mlp", "moe"})  # kinds that need no plan, because each token is computed by itself
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_MOST_POSITIONS = 1 << 26  # limit of a model's longest input; the longest known is ten million
_NARROW = 24  # the window of sliding layers during the check: their own may be longer than the input of the check


class ForwardPlan(attention.AttentionPlan, recurrent.RecurrentPlan, Protocol):
    """Attention and recurrence of one forward pass over packed tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal language model whose attention and recurrent layers follow a plan.

    Attributes:
        causal: transformers' model, adapters included.
        tokenizer: its tokenizer, with a chat template.
        shape: of its key-value cache.
        max_model_len: most tokens of prompt and answer.
        end_tokens: tokens that end an answer.
        source: the folder that it was loaded from.
        base_bits: bits of the weights of its frozen linear layers; None: `shape.dtype`.
    """

    causal: Any
    tokenizer: Any
    shape: CacheShape
    max_model_len: int
    end_tokens: frozenset[int]
    source: Path
    base_bits: int | None = None

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, plan: ForwardPlan) -> Tensor:
        """(N, width) last hidden states of packed tokens."""
        body = self.causal.base_model
        with recurrent.use_plan(plan):
            out: Tensor = body(
                input_ids=tokens_N[None], position_ids=positions_N[None], plan=plan, use_cache=False
            ).last_hidden_state
        return out[0]

    @property
    def head(self) -> nn.Module:
        """The module that maps hidden states to logits."""
        head: nn.Module = self.causal.get_output_embeddings()
        cap = getattr(self.causal.config.get_text_config(), "final_logit_softcapping", None)
        return head if cap is None else nn.Sequential(head, _LogitCap(cap))


class _LogitCap(nn.Module):
    """Caps logits at a number."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self._cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self._cap) * self._cap


@quiet_libraries()
def load(options: TorchOptions, tokenizer_folder: Path | None = None) -> LoadedModel:
    """Load a model folder, with its tokenizer or another folder's.

    Raises:
        ConfigError: the folder lacks a part, or the engine cannot run this kind of model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_folder(options.model)
    if options.base_bits is not None:
        check_source(options.model)
    attention.register()
    device = _device(options.device)
    tokenizer = _read(tokenizer_folder or options.model, AutoTokenizer)
    _set_template(tokenizer, options)
    how: dict[str, Any] = {
        "attn_implementation": attention.NAME,
        "use_safetensors": True,  # without it a folder's pytorch_model.bin would be unpickled
    }
    causal: Any = _read(options.model, AutoModelForCausalLM, dtype=_dtype(options.dtype, device), **how)
    if options.dtype == "auto" and causal.dtype not in _DTYPES.values():
        del causal  # read again, because `to` would also round the frequencies of positions, which stay in float32
        causal = _read(options.model, AutoModelForCausalLM, dtype=torch.bfloat16, **how)
    _mark_as_sampled(causal.generation_config)
    causal.requires_grad_(requires_grad=False)
    if options.base_bits is not None:
        quantise(causal, options.base_bits, device, options.model)  # before the rest moves: the device may have no room
    causal = causal.to(device=device).eval()
    recurrent.follow_plans(causal)
    max_model_len = _max_len(causal.config, options)
    _fix_frequencies(causal, max_model_len)
    loaded = LoadedModel(
        causal=causal,
        tokenizer=tokenizer,
        shape=_cache_shape(causal, options.model, device),
        max_model_len=max_model_len,
        end_tokens=_end_tokens(causal, tokenizer, options.model),
        source=options.model,
        base_bits=options.base_bits,
    )
    _prove(loaded)
    return loaded


def _read(folder: Path, kind: Any, **how: Any) -> Any:
    """Load a part of a model folder, without running code from the folder or asking for permission to.

    Raises:
        ConfigError: transformers cannot load it.
    """
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, **how)
    except Exception as error:  # a malformed folder makes transformers raise almost anything
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder}: transformers can't load it: {type(error).__name__}: {reason}") from error


def _mark_as_sampled(generation: Any) -> None:
    """Set the flag that parameters of sampling imply: some versions of transformers don't save them without it."""
    if generation is not None and any(getattr(generation, name, None) is not None for name in _SAMPLING):
        generation.do_sample = True


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown_device(name) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise no_cuda(name)
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype of the loaded weights; ``auto`` is the model's own, except on processors with slow bfloat16."""
    if name == "auto" and device.type == "cpu" and not multiplies_bfloat16():
        return torch.float32
    return _DTYPES.get(name, "auto")


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices faster than float32, measured once, in about 20 ms.

    A processor's instruction set does not decide this: oneDNN reports support of bfloat16 on any processor with
    AVX-512, and AVX512_BF16 was slower than float32 on one processor (145 to 269 GFLOPS at the sizes of a small model)
    and faster on another (362 to 156).
    """
    seconds = dict.fromkeys((torch.bfloat16, torch.float32), math.inf)
    for _ in range(_PROBES):  # alternating, and the fastest of each, because other programs may run
        for dtype in seconds:
            seconds[dtype] = min(seconds[dtype], _multiply_s(dtype))
    return seconds[torch.bfloat16] < seconds[torch.float32]


def _multiply_s(dtype: torch.dtype) -> float:
    """Return the seconds of one multiplication, at the sizes of a small model's layer."""
    left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
    began = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - began


def _set_template(tokenizer: Any, options: TorchOptions) -> None:
    template = options.chat_template
    if template == "hermes":
        tokenizer.chat_template = (files("lightning_trainer") / "templates" / "hermes.jinja").read_text("utf-8")
    elif isinstance(template, Path):
        try:
            tokenizer.chat_template = template.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"chat template {template}: {error.strerror}.") from None
    elif template is not None:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise ConfigError(f"{options.model} has no chat template. Name a Jinja file for it, or `hermes` for ours.")
    if options.system_messages == MERGE:
        merge_system_messages(tokenizer)


def _cache_shape(causal: Any, model: Path, device: torch.device) -> CacheShape:
    """Return the shape of a model's cache. Refuse a model that the engine cannot run, with the reason."""
    config = causal.config.get_text_config()
    remembering = recurrent.layers_of(causal)
    attending = attention.layers_of(causal.get_decoder(), but=remembering)
    # models with recurrent layers do not always declare this
    replaceable = remembering or getattr(causal, "_supports_attention_backend", False)
    known = _LAYERS | _FORGETFUL | {getattr(module, "layer_type", None) for module in remembering}
    others = {*(getattr(config, "layer_types", None) or ())} - known
    reasons = {
        "its attention can't be replaced": not replaceable,
        "it is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
        f"it has unsupported layers ({', '.join(sorted(others))})": bool(others),
    }
    for reason, applies in reasons.items():
        if applies:
            raise _refusal(causal, model, reason)
    if remembering:
        attention.number(attending)
    key_heads, head_width = _head_shape(config, attending)
    return CacheShape(
        layers=len(attending) if remembering else config.num_hidden_layers,
        key_heads=key_heads,
        head_width=head_width,
        dtype=causal.dtype,
        device=device,
        recurrent=bool(remembering),
    )


def _head_shape(config: Any, attending: Sequence[Any]) -> tuple[int, int]:
    """Return the number and width of a layer's key heads; if layers differ (Gemma 4), the largest of each."""
    shapes = {
        (layer.k_proj.out_features // layer.head_dim, layer.head_dim)
        for layer in attending
        if hasattr(layer, "head_dim")
    }
    if len(shapes) > 1:
        return max(key_heads for key_heads, _ in shapes), max(width for _, width in shapes)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, width


def _refusal(causal: Any, model: Path, reason: str) -> ConfigError:
    kind = causal.config.get_text_config().model_type
    return ConfigError(f"the embedded engine can't run {model} ({kind}): {reason}.")


def _max_len(config: Any, options: TorchOptions) -> int:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if options.max_model_len is None:
        if limit is None:
            raise ConfigError(f"{options.model} does not state its context length. Give max_model_len.")
        if not isinstance(limit, int) or not 0 < limit <= _MOST_POSITIONS:
            raise ConfigError(f"{options.model} says max_position_embeddings = {limit!r}. Give max_model_len.")
        return min(longrope_length(text.to_dict()) or limit, limit)
    if limit is not None and options.max_model_len > limit:
        raise ConfigError(f"max_model_len {options.max_model_len} is more than the {limit} tokens of {options.model}.")
    return options.max_model_len


def _fix_frequencies(causal: Any, max_model_len: int) -> None:
    """Choose the frequencies of longrope positions once, by the longest sequence that there may be, as vLLM does.

    transformers chooses them again for each batch, by its longest sequence. A long sequence would change the
    log-probabilities of all others in its batch, and keys in the cache would have other frequencies than new ones.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in causal.modules():
        if getattr(module, "rope_type", None) == "longrope":
            compute = ROPE_INIT_FUNCTIONS[module.rope_type]
            chosen = compute(module.config, module.inv_freq.device, seq_len=max_model_len)
            module.inv_freq, module.attention_scaling = chosen
            module.rope_type = "default"  # so that they are not chosen again
            module.rope_init_fn = lambda *_, chosen=chosen: chosen  # PhiMoE calls it in each forward pass


def _end_tokens(causal: Any, tokenizer: Any, model: Path) -> frozenset[int]:
    named = causal.generation_config.eos_token_id if causal.generation_config is not None else None
    listed = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    if wrong := [each for each in listed if each is not None and not isinstance(each, int)]:
        raise ConfigError(
            f"{model} has an end-of-turn token that is not a token id: {wrong[0]!r}. Fix generation_config.json."
        )
    found = {each for each in listed if each is not None}
    if not found:
        raise ConfigError(f"{model} has no end-of-turn token: set eos_token in its tokenizer_config.json.")
    return frozenset(found)


@torch.no_grad()
def _prove(loaded: LoadedModel) -> None:
    """Forward some tokens by plan, in three steps, and as transformers would; refuse the model if they disagree.

    This finds a model with anything other than attention and rotary positions (biases, recurrent state, scaled logits)
    before it gives wrong samples.
    """
    vocabulary = loaded.causal.config.get_text_config().vocab_size
    tokens = torch.arange(7, 7 + 5 * sum(_STEPS), 5) % vocabulary
    with _narrow(loaded.causal):
        try:
            ours = loaded.head(_by_plan(loaded, tokens)).float()
        except (RuntimeError, TypeError, AttributeError) as error:
            form = "its attention has another form"
            if loaded.shape.recurrent:
                form = "its recurrent layers have an unsupported form (with transformers 5.23 it is supported)"
            reason = f"{form}: {str(error).partition(chr(10))[0]}"
            raise _refusal(loaded.causal, loaded.source, reason) from error
        loaded.causal.set_attn_implementation("eager")  # the only one that supports sinks and caps
        theirs = loaded.causal(input_ids=tokens[None].to(loaded.shape.device), use_cache=False).logits[0].float()
        loaded.causal.set_attn_implementation(attention.NAME)
    gap = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().mean().item()
    if not gap < 0.1:  # rounding in bfloat16 stays under 0.03
        raise _refusal(loaded.causal, loaded.source, f"its logits differ by {gap:.2f} nats")


_STEPS = (SHORT + 1, 5, 1)  # into the prefix, into the tail, as in decoding


def _by_plan(loaded: LoadedModel, tokens: Tensor) -> Tensor:
    """(N, width) hidden states."""
    cache = SlotCache(loaded.shape, 1, sum(_STEPS))
    cache.begin(0, tokens.numpy().astype("int32"), 0, 0)
    hidden = []
    for length in _STEPS:
        plan = StepPlan(cache, [Chunk(0, length)])
        hidden.append(loaded.hidden(plan.tokens, plan.positions, plan))
        plan.finish()
    return torch.cat(hidden)


@contextmanager
def _narrow(causal: Any) -> Iterator[None]:
    """Give sliding layers a window shorter than the check's input, in transformers' masks and in the layers."""
    changed = [
        (thing, thing.sliding_window)
        for thing in (causal.config.get_text_config(), *causal.modules())
        if isinstance(getattr(thing, "sliding_window", None), int)
    ]
    try:
        for thing, window in changed:
            thing.sliding_window = min(window, _NARROW)
        yield
    finally:
        for thing, window in changed:
            thing.sliding_window = window

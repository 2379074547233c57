"""Layers that see a window, attention sinks and capped scores: as transformers' own forward pass, to rounding.

Windows are shorter than the shortest shared prefix, so that sequences leave them in tails, prefixes and trunks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiny import make_tiny_model

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.generate import step
from lightning_trainer.backends.torch.learn.update import update
from lightning_trainer.gateway.engine import Sampling
from lightning_trainer.rl.losses import policy_loss, token_logprobs
from lightning_trainer.rl.rows import Row, token_weights

pytestmark = pytest.mark.torch

_COMMON: Final = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
_LAYERS: Final = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: Final[dict[str, dict[str, Any]]] = {
    "Mistral": {"sliding_window": 20},
    "Qwen2": {"sliding_window": 20, "use_sliding_window": True, "layer_types": _LAYERS},
    "Gemma2": {"sliding_window": 20, "layer_types": _LAYERS, "query_pre_attn_scalar": 16,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": 20, "layer_types": _LAYERS, "query_pre_attn_scalar": 24},
    "GptOss": {"sliding_window": 20, "layer_types": _LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def make_model(folder: Path, name: str, *, seed: int = 0, **settings: Any) -> Path:
    import transformers

    make_tiny_model(folder)
    config = getattr(transformers, f"{'Gemma3Text' if name == 'Gemma3' else name}Config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**{**_COMMON, **MODELS[name], **settings}))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.data.normal_(std=2)  # as strong as scores
    model.save_pretrained(folder)
    return folder


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def plain_logprobs(model: Any, prompt: list[int], answer: tuple[int, ...]) -> list[float]:
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


async def drawn(engine: Any, prompt: list[int], **sampling: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    tokens, logprobs = [], []
    async for piece in engine.generate(prompt, Sampling(**sampling)):
        tokens += piece.token_ids
        logprobs += piece.logprobs
    return tuple(tokens), tuple(logprobs)


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts far longer than the window: some share a beginning that becomes a prefix, some a short one, some none."""
    random = np.random.default_rng(seed)
    system = random.integers(3, 259, 150).tolist()
    tails = [random.integers(3, 259, length).tolist() for length in (1, 7, 30, 100, 260)]
    return [[*system, *tail] for tail in tails] + [[*system[:40], *tails[2]], tails[3], tails[4] * 3]


async def conversation(engine: Any, seed: int) -> list[tuple[list[int], tuple[int, ...], tuple[float, ...]]]:
    """Draw for all prompts at once, then go on from two answers."""
    prompts = prompts_of(seed)
    asked = [drawn(engine, prompt, max_tokens=25 + 9 * n, seed=n) for n, prompt in enumerate(prompts)]
    found = [(prompt, *answer) for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True)]
    for prompt, tokens, _ in found[2:5]:
        longer = [*prompt, *tokens, *range(50, 75)]
        found.append((longer, *await drawn(engine, longer, max_tokens=90, seed=3)))
    return found


def row_of(prompt: list[int], answer: tuple[int, ...], logprobs: tuple[float, ...], advantage: float) -> Row:
    tokens = np.array([*prompt, *answer], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    recorded = np.zeros(len(tokens), np.float32)
    recorded[len(prompt) :] = logprobs
    return Row(
        tokens=tokens, mask=mask, logprobs=recorded, advantages=np.where(mask, advantage, 0.0), lengths=(len(answer),),
        agent="a", attempt_id="t", rollout_id="r", group_id="g",
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_engine_and_update_agree_with_transformers(tmp_path: Path, name: str, seed: int) -> None:
    folder = make_model(tmp_path / "model", name, seed=seed)
    learner = TorchLearner(folder, threads=1, dtype="float32", slots=5)
    oracle = plain(folder)
    found = asyncio.run(conversation(learner.engine, seed))
    for prompt, tokens, logprobs in found:
        assert logprobs == pytest.approx(plain_logprobs(oracle, prompt, tokens), abs=2e-4)
    assert learner.engine.counts()["reused_tokens"] > 500
    rows = [row_of(*each, advantage=1.0) for each in found]
    for row, computed in zip(rows, learner.logprobs(rows), strict=True):
        assert computed == pytest.approx(row.logprobs[row.mask], abs=2e-4)
    learner.close()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_rows_forwarded_one_by_one(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "model", name)
    random = np.random.default_rng(5)
    rows = []
    for n, prompt in enumerate([*prompts_of(0), prompts_of(0)[3]]):
        answer = tuple(random.integers(3, 259, 20 + 3 * n).tolist())
        rows.append(row_of(prompt, answer, (-5.0,) * len(answer), float(random.normal())))
    learner = TorchLearner(folder, threads=1, dtype="float32")
    policy, ours = learner._trained(), {}

    def step() -> tuple[float, bool]:
        ours.update({name: master.grad.clone() for name, master in policy.masters.items()})
        return 0.0, True

    policy.step = step
    update(learner._model, policy, rows, learner.options)
    learner.close()
    model = plain(folder)
    for row, weights in zip(rows, token_weights(rows, learner.options.loss_aggregation), strict=True):
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1]
        kept = torch.from_numpy(row.mask[1:])
        new = token_logprobs(logits[kept], torch.from_numpy(row.tokens[row.mask]), 1.0)
        old, advantages = torch.from_numpy(row.logprobs[row.mask]), torch.from_numpy(row.advantages[row.mask])
        policy_loss(new, old, advantages, torch.from_numpy(weights)).loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert (ours[parameter] - gradient).abs().max() < 2e-4 * max(1.0, float(gradient.abs().max())), parameter
    if name == "GptOss":
        assert float(ours["model.layers.0.self_attn.sinks"].abs().max()) > 1e-4


def test_a_window_that_is_not_kept_is_found_when_the_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    """Though it is longer than what is tried then."""
    folder = make_model(tmp_path / "model", "Mistral", sliding_window=500)
    unlimited = step.hidden_own
    monkeypatch.setattr(step, "hidden_own", lambda seen_RQ, length, _window: unlimited(seen_RQ, length, None))
    with pytest.raises(ConfigError, match=r"mistral\): its logits differ"):
        TorchLearner(folder, threads=1, dtype="float32")


def test_gemma_3_with_a_part_for_images_is_run_on_text(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    folder = make_tiny_model(tmp_path / "model")
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    text = {**_COMMON, **MODELS["Gemma3"]}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=258)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    learner = TorchLearner(folder, threads=1, dtype="float32")
    prompt = [token for token in prompts_of(0)[2] if token < 258]
    tokens, logprobs = asyncio.run(drawn(learner.engine, prompt, max_tokens=40, seed=1, logit_bias={258: -100.0}))
    assert logprobs == pytest.approx(plain_logprobs(model, prompt, tokens), abs=2e-4)
    row = row_of(prompt, tokens, logprobs, 1.0)
    (computed,) = learner.logprobs([row])
    assert computed == pytest.approx(row.logprobs[row.mask], abs=2e-4)
    learner.close()

"""Packed rows without flash-attn: each row has the log-probabilities and gradients that it has alone."""

from __future__ import annotations

import pytest

pytest.importorskip("verl.protocol")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_trainer.backends.verl import packed
from lightning_trainer.backends.verl.options.packing import PACKED_ROWS, PLAIN

LENGTHS = (5, 1, 9, 3)


def tiny(kind: str, **more: object) -> AutoModelForCausalLM:
    sizes = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **more})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ROWS).eval()


def gradients(model: AutoModelForCausalLM, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gradients of the sum of squared logits, added up over batches of token ids and positions."""
    model.zero_grad()
    for ids, positions in batches:
        model(ids, position_ids=positions, attention_mask=None, use_cache=False).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("window", [None, 3])
def test_row_in_a_pack_is_as_alone(kind: str, window: int | None) -> None:
    packed.register()
    more = {} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    model = tiny(kind, **more)
    rows = [torch.randint(1, 40, (1, length)) for length in LENGTHS]
    places = [torch.arange(length)[None] for length in LENGTHS]
    with torch.no_grad():
        together = model(
            torch.cat(rows, 1), position_ids=torch.cat(places, 1), attention_mask=None, use_cache=False
        ).logits.split(LENGTHS, dim=1)
        model.set_attn_implementation("eager")
        for row, place, found in zip(rows, places, together, strict=True):
            torch.testing.assert_close(found, model(row, position_ids=place, use_cache=False).logits, atol=1e-5, rtol=0)
    alone = gradients(model, list(zip(rows, places, strict=True)))
    model.set_attn_implementation(PACKED_ROWS)
    found = gradients(model, [(torch.cat(rows, 1), torch.cat(places, 1))])
    for name, wanted in alone.items():
        torch.testing.assert_close(found[name], wanted, atol=1e-4, rtol=1e-4, msg=name)


def test_padded_rows_are_refused() -> None:
    packed.register()
    ids = torch.randint(1, 40, (2, 4))
    with pytest.raises(ValueError, match="packed_rows is for packed rows"):
        tiny("llama")(ids, attention_mask=torch.ones_like(ids), use_cache=False)


def test_kernel_that_fails_or_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """On a GPU, torch's kernel is tried once; here the computation row by row stands for it."""
    what = torch.device("cpu"), torch.bfloat16, 4, 2, 8
    monkeypatch.setattr(packed, "_attend_at_once", packed._attend_by_row)
    assert packed.kernel_works.__wrapped__(*what)
    monkeypatch.setattr(packed, "_attend_at_once", lambda *given: packed._attend_by_row(*given) * 1.5)
    assert not packed.kernel_works.__wrapped__(*what)
    assert "its results differ by" in caplog.text

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(packed, "_attend_at_once", refuse)
    assert not packed.kernel_works.__wrapped__(*what)
    assert "RuntimeError: no kernel image" in caplog.text

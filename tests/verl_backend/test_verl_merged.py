"""A LoRA's checkpoint of verl's becomes a model that anything loads. Without verl."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lightning_spans.errors import LightningError
from lightning_trainer.backends.verl.steps.merged import LORA, merge_adapters
from support.models.tiny import make_tiny_model

TOKENS = torch.arange(3, 40)[None]


@pytest.fixture
def written(tmp_path):
    """A model folder as verl writes it for a LoRA, in two files, and the logits that it must give."""
    model = make_tiny_model(tmp_path / "tiny", head_dim=32)
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wrapped = get_peft_model(causal, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    weights = {name: value.clone() for name, value in wrapped.state_dict().items() if "lm_head" not in name}
    folder = tmp_path / "actor" / "huggingface"
    folder.mkdir(parents=True)
    causal.config.save_pretrained(folder)
    (folder.parent / LORA).write_text(json.dumps({"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM"}))
    place = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(place.values()):
        part = {name: value.contiguous() for name, value in weights.items() if place[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        return folder, wrapped(TOKENS).logits


def test_a_loras_checkpoint_loads_as_the_model_that_was_trained(written):
    folder, logits = written
    merge_adapters(folder)
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, logits, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_of_all_weights_stays_as_it_is(written):
    folder, _ = written
    (folder.parent / LORA).unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    merge_adapters(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_adapter_that_belongs_to_no_weight_is_an_error(written):
    folder, _ = written
    save_file({"base_model.model.experts.lora_A.default.weight": torch.zeros(4, 4)}, folder / "more.safetensors")
    with pytest.raises(LightningError, match="matches no weight"):
        merge_adapters(folder)

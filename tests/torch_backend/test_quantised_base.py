"""Adapters over a frozen model of 4 or 8 bits: exact gradients of the weights that are used everywhere."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from lightning_spans.errors import ConfigError
from lightning_trainer import train
from lightning_trainer.backends.torch.checkpoint import write_base
from lightning_trainer.backends.torch.model.quantised import QuantisedLinear, write_dequantised
from support.models.sampling import collect
from support.models.tiny import make_tiny_model
from support.models.updates import Gradients, gradients, make_backend, make_batch
from support.training.policies import config, folder, lines  # noqa: F401 - a fixture among them

pytestmark = pytest.mark.torch

LORA = {"lora_rank": 4, "learning_rate": 1e-2}


def dequantised(model: Path, to: Path, bits: int, dtype: str) -> Path:
    """Write the model of ordinary weights that a quantised one computes with."""
    to.mkdir()
    with closing(make_backend(model, dtype=dtype, base_bits=bits, **LORA)) as learner:
        write_dequantised(learner._model.causal, bits, model, to)
    return to


def relative(a: Gradients, b: Gradients) -> float:
    """Norm of the difference over the norm."""
    assert a.keys() == b.keys()
    differences = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return (differences / sum(float(gradient.square().sum()) for gradient in b.values())) ** 0.5


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_gradients_are_those_of_the_dequantised_weights(tmp_path, bits, dtype, most):
    model = make_tiny_model(tmp_path / "model", dtype=dtype)
    plain = dequantised(model, tmp_path / "plain", bits, dtype)
    options = {"dtype": dtype, "activation_checkpointing": "on", **LORA}
    ours, _ = gradients(model, make_batch(), base_bits=bits, **options)
    theirs, _ = gradients(plain, make_batch(), **options)
    assert relative(ours, theirs) <= most
    unquantised, _ = gradients(model, make_batch(), **options)
    assert relative(ours, unquantised) > 1e-3, "they are not the gradients of the weights before"


def test_weights_take_as_many_bytes_as_is_planned(tmp_path):
    from lightning_trainer.models.shape import quantised_bytes, read_shape

    model = make_tiny_model(tmp_path / "model", dtype="bfloat16", hidden_size=256, intermediate_size=512)
    for bits in (4, 8):
        with closing(make_backend(model, base_bits=bits, **LORA)) as learner:
            layers = [each for each in learner._model.causal.modules() if isinstance(each, QuantisedLinear)]
            taken = sum(each.codes.nbytes + _state_bytes(each._state) for each in layers)
            rest = [p for n, p in learner._model.causal.named_parameters() if "lora_" not in n and "codes" not in n]
            taken += sum(parameter.nbytes for parameter in rest)
        planned = quantised_bytes(read_shape(str(model)), bits, width=rest[0].dtype.itemsize)
        assert taken == pytest.approx(planned, rel=0.05)


def _state_bytes(state) -> int:
    tensors = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return sum(tensor.nbytes for tensor in tensors)


def test_a_checkpoint_is_served_over_the_weights_that_it_was_trained_over(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    with closing(make_backend(model, base_bits=4, **LORA)) as learner:
        learner.update(make_batch())
        learner.save(tmp_path / "saved")
        learner.save(tmp_path / "light", resumable=False)
        before = learner.logprobs(make_batch())
    for saved in ("saved", "light"):
        with closing(make_backend(tmp_path / saved)) as learner:
            assert learner.options.base_bits == 4
            after = learner.logprobs(make_batch())
        assert max(abs(a - b).max() for a, b in zip(before, after, strict=True)) < 1e-5
    with pytest.raises(ConfigError, match=r"over a model of 4 bits, not over one of 8 bits\. Set base_bits to 4"):
        make_backend(tmp_path / "saved", base_bits=8)


def test_adapters_are_loaded_over_the_number_format_of_their_training(tmp_path):
    """A model in bfloat16 is trained in float32, and none of its weights is rounded."""
    model, saved = make_tiny_model(tmp_path / "model", dtype="bfloat16"), tmp_path / "saved"
    with closing(make_backend(model, dtype="float32", **LORA)) as learner:
        learner.update(make_batch())
        learner.save(saved)
    for asked, used in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        with closing(make_backend(saved, dtype=asked)) as learner:
            assert learner._model.shape.dtype == used
    with pytest.raises(ConfigError, match=r"model that was not rounded, not over one of 4 bits\. Leave base_bits out"):
        make_backend(saved, base_bits=4)
    words = r"trained in float32, and this run computes in bfloat16\. Set --dtype float32"
    with (
        closing(make_backend(model, dtype="bfloat16", **LORA)) as learner,
        pytest.raises(ConfigError, match=words),
    ):
        learner.load(saved)


def test_peft_loads_the_adapter(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = make_tiny_model(tmp_path / "model")
    with closing(make_backend(model, base_bits=8, **LORA)) as learner:
        learner.update(make_batch())
        learner.save(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "saved")
    assert any(parameter.abs().max() > 0 for name, parameter in loaded.named_parameters() if "lora_B" in name)


def test_a_quantised_base_answers_at_temperature_0_as_its_dequantised_weights_do(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    plain = dequantised(model, tmp_path / "plain", 4, "float32")
    answers = []
    for place, bits in ((model, 4), (plain, None)):
        with closing(make_backend(place, base_bits=bits, **LORA)) as learner:
            prompt = learner.engine.tokenizer("the quick brown fox").input_ids
            answers.append(asyncio.run(collect(learner.engine, prompt, temperature=0, max_tokens=12)))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-5)


def test_adapters_learn_over_a_quantised_base(tmp_path):
    rows = [row for row in make_batch() if float(row.advantages.sum()) > 0]
    with closing(make_backend(make_tiny_model(tmp_path / "model"), base_bits=4, **LORA)) as learner:
        before = sum(float(each.sum()) for each in learner.logprobs(rows))
        for _ in range(6):
            learner.update(rows)
        assert sum(float(each.sum()) for each in learner.logprobs(rows)) > before + 1.0


def test_what_can_not_be_quantised_is_refused(tmp_path, tiny_model, folder):  # noqa: F811
    for options, words in (
        ({"base_bits": 3}, "must be 4 or 8"),
        ({"base_bits": 4, "policies": {}, "lora_rank": 0}, "quantises the frozen model under adapters"),
        ({"base_bits": 4, "backend": "verl"}, "option of backend = torch, not verl"),
        ({"base_bits": 4, "backend": "tinker", "tinker_url": "http://127.0.0.1:9"}, "backend = torch, not tinker"),
        ({"base_bits": 4, "engine_url": "http://127.0.0.1:9/v1"}, "do not have the learner's quantised weights"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(config(tiny_model, **options))
    with pytest.raises(ConfigError, match="Set lora_rank, or leave it out"):
        make_backend(tiny_model, base_bits=4)
    quantised = make_tiny_model(tmp_path / "quantised")
    values = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="is quantised already"):
        make_backend(quantised, base_bits=4, **LORA)


def test_a_run_resumes_over_the_same_bits_alone(tiny_model, folder):  # noqa: F811
    train(config(tiny_model, base_bits=4, steps=1))
    with pytest.raises(ConfigError, match="started with base_bits = 4, not None"):
        train(config(tiny_model, steps=2, resume=folder / "out"))
    train(config(tiny_model, base_bits=4, steps=2, resume=folder / "out"))
    assert [line["step"] for line in lines(folder / "out")] == [0, 1]


def test_one_adapter_of_a_checkpoint_and_the_written_model_have_the_learners_log_probabilities(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    batch = [replace(row, policy="writer") for row in make_batch()]
    with closing(
        make_backend(make_tiny_model(tmp_path / "model"), base_bits=4, adapters=("writer",), **LORA)
    ) as learner:
        learner.update(batch)
        learner.save(tmp_path / "saved")
        expected = learner.logprobs(batch)
    with closing(make_backend(tmp_path / "saved" / "writer")) as learner:
        assert largest(learner.logprobs(make_batch()), expected) < 1e-5, "as `serve CHECKPOINT/writer` answers"
    write_base(tmp_path / "saved", tmp_path / "rounded")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "saved" / "writer")
    adapted.merge_and_unload().save_pretrained(tmp_path / "rounded")
    with closing(make_backend(tmp_path / "rounded")) as learner:
        assert largest(learner.logprobs(make_batch()), expected) < 1e-5, "as vLLM answers that was started with it"


def largest(found, expected):
    return max(abs(a - b).max() for a, b in zip(found, expected, strict=True))


def test_only_the_rounded_model_of_a_quantised_training_is_written_and_not_rounded_again(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"was not trained with base_bits\. Serve its model itself"):
        write_base(model, tmp_path / "rounded")
    plain = dequantised(model, tmp_path / "plain", 4, "float32")
    with pytest.raises(ConfigError, match=r"are rounded to 4 bits already\. Leave base_bits out"):
        make_backend(plain, base_bits=8, **LORA)

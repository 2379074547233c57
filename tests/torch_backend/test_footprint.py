"""What a plan counts is what tensors take. Counted on a CPU: sizes of tensors do not depend on the device."""

from __future__ import annotations

from contextlib import closing

import pytest

torch = pytest.importorskip("torch")

from lightning_trainer.backends.torch.footprint import kept_bytes, learner_memory
from lightning_trainer.backends.torch.learn import update as updates
from lightning_trainer.backends.torch.learn.tree_plan import TreePlan
from lightning_trainer.models.shape import read_shape
from support.models.tiny import make_tiny_model
from support.models.updates import make_backend, make_batch, make_row

pytestmark = pytest.mark.torch

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("average", [False, True])
def test_weights_masters_gradients_and_moments(tmp_path, monkeypatch, dtype, rank, average):
    model = make_tiny_model(tmp_path / "model", dtype=dtype, **SHAPE)
    options = {"teacher_weights": "ema"} if average else {}
    with closing(make_backend(model, dtype=dtype, lora_rank=rank, **options)) as learner:
        policy = learner._weights_of()
        taken = {}
        step = policy.step

        def count() -> tuple[float, bool]:
            taken["gradients"] = sum(master.grad.nbytes for master in policy.masters.values())
            return step()

        monkeypatch.setattr(policy, "step", count)
        learner.update(make_batch())
        weights = sum(parameter.nbytes for parameter in learner._model.causal.parameters())
        states = [each for state in policy.optimiser.state.values() for each in state.values()]
        separate = [policy.masters[name] for name, own in policy.working.items() if own is not policy.masters[name]]
        held = sum(tensor.nbytes for tensor in [*states, *separate, *policy.average.values()])
        trained = sum(master.numel() for master in policy.masters.values())
    shape, width = read_shape(str(model)), {"float32": 4, "bfloat16": 2}[dtype]
    adapters = shape.count_adapter(rank)
    assert (adapters or shape.parameters) == trained
    planned = learner_memory(shape, width=width, tokens=1, adapters=adapters, averaged=average)
    assert planned.weights == pytest.approx(weights, rel=0.01)
    assert planned.gradients == taken["gradients"]
    assert planned.training == pytest.approx(held + taken["gradients"], rel=0.01)


@pytest.mark.parametrize("rank", [0, 4])
def test_activations_in_bfloat16(tmp_path, rank):
    model = make_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    rows = [make_row(list(range(3, 203)), slice(100, None))]
    with closing(make_backend(model, dtype="bfloat16", lora_rank=rank)) as learner:
        learner._weights_of()
        loaded, kept = learner._model, {}
        own = {parameter.untyped_storage().data_ptr() for parameter in loaded.causal.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is used twice
            return tensor

        packed = updates._parts(loaded, rows, learner.options, share=True)[0].packed
        tokens, positions = torch.from_numpy(packed.tokens_N), torch.from_numpy(packed.positions_N)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = loaded.hidden(tokens, positions, TreePlan(packed, torch.bfloat16, loaded.shape.device))
        taken = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    assert hidden.requires_grad
    planned, again = kept_bytes(read_shape(str(model)), width=2, tokens=len(tokens))
    assert planned == pytest.approx(taken, rel=0.2)
    assert again < 0.3 * planned

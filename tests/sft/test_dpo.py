"""Preference pairs: the gradient is that of DPO's own formula, and the better answer gains over the worse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_spans.errors import DataError
from lightning_trainer.kits.sft import sft as module
from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.kits.sft.dpo import Dpo
from lightning_trainer.kits.sft.pairs import read_pair
from lightning_trainer.kits.sft.sft import sft
from support.training.stores import Said, make_store

pytestmark = pytest.mark.torch


def write(path: Path, count: int = 16) -> Path:
    lines = [
        {"prompt": [{"role": "user", "content": f"say {n}"}], "chosen": "good", "rejected": "bad words"[: 3 + n % 5]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(folder: Path, model: Path, **options: Any) -> SftConfig:
    chosen = {"model": str(model), "out": folder / "out", "loss": "dpo", "batch_size": 4, "device": "cpu"}
    return SftConfig(**{**chosen, "backend_options": {"threads": 1}, **options})


def opened(wanted: SftConfig) -> tuple[Any, list[tuple[Any, Any]]]:
    learner = module.registry.by_name("backend", "torch").learner(wanted.model, module.options_of(wanted))
    data = module.read(wanted)
    assert data.worse is not None
    better, worse = (module._rows(wanted, learner, side) for side in (data.training, data.worse[0]))
    return learner, module.match_pairs(better, worse)[0]


def test_the_gradient_is_that_of_the_formula(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = config(tmp_path, tiny_model, data=(str(write(tmp_path / "d.jsonl", 4)),), held_out=0.0, beta=0.3)
    learner, pairs = opened(wanted)
    dpo = Dpo(learner, pairs, 0.3)
    before = [each.before for each in dpo._pairs.values()]
    policy = learner._weights_of()
    away_from_the_start(policy)
    learner.save(tmp_path / "moved", resumable=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moved", dtype=torch.float32)
    loss = dpo_loss(model, pairs, before, 0.3)
    loss.backward()
    found = gradients({"": policy})
    metrics = dpo.update([chosen for chosen, _ in pairs])
    learner.close()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert abs(metrics["margin"]) > 0.01
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[""][name], parameter.grad, atol=1e-5), name


def away_from_the_start(policy: Any) -> None:
    """Change the weights, so that no margin is 0."""
    with torch.no_grad():
        for name, master in policy.masters.items():
            master.add_(0.02 * torch.randn(master.shape, generator=torch.Generator().manual_seed(len(name))))
        policy.publish()


def gradients(policies: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return where the gradients of the next update are put, by policy, in the place of a step."""
    found: dict[str, dict[str, Any]] = {}

    def kept(name: str) -> tuple[float, bool]:
        found[name] = {key: master.grad.clone() for key, master in policies[name].masters.items()}
        return 0.0, True

    for name, policy in policies.items():
        policy.step = partial(kept, name)
    return found


def dpo_loss(model: Any, pairs: Sequence[tuple[Any, Any]], before: Sequence[tuple[float, float]], beta: float) -> Any:
    """Compute DPO's loss with transformers: equation 7 of arXiv 2305.18290."""

    def likely(row: Any) -> Any:
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        found = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return found[torch.from_numpy(row.mask[1:])].sum()

    margins = [likely(a) - one - likely(b) + other for (a, b), (one, other) in zip(pairs, before, strict=True)]
    return -torch.nn.functional.logsigmoid(beta * torch.stack(margins)).mean()


@pytest.mark.parametrize("agents", [("writer",), ("writer", "checker")])
def test_the_gradient_of_each_adapter_is_that_of_the_formula_over_its_own_pairs(
    tmp_path: Path, tiny_model: Path, agents: tuple[str, ...]
) -> None:
    data = write(tmp_path / "d.jsonl", 5)
    lines = [{**json.loads(line), "agent": agents[n % len(agents)]} for n, line in enumerate(data.open())]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    policies = ",".join(f"{name}=lora" for name in agents)
    wanted = config(
        tmp_path, tiny_model, data=(str(data),), held_out=0.0, beta=0.3, policies=policies, lora_rank=4
    )  # fmt: skip
    learner, pairs = opened(wanted)
    trained = {name: learner._weights_of(name) for name in agents}
    dpo = Dpo(learner, pairs, 0.3)
    assert {row.policy for pair in pairs for row in pair} == set(agents)
    before = {chosen: dpo._pairs[chosen.attempt_id].before for chosen, _ in pairs}
    for policy in trained.values():
        away_from_the_start(policy)
    learner.save(tmp_path / "moved", resumable=False)
    found = gradients(trained)
    metrics = dpo.update([chosen for chosen, _ in pairs])
    learner.close()
    losses = []
    for name in agents:
        model = with_adapter(tiny_model, tmp_path / "moved" / name)
        own = [(chosen, rejected) for chosen, rejected in pairs if chosen.policy == name]
        loss = dpo_loss(model, own, [before[chosen] for chosen, _ in own], 0.3)
        loss.backward()
        losses += [loss.item()] * len(own)
        its = {key.replace(f".{name}.", "."): gradient for key, gradient in found[name].items()}
        assert its, name
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                mine = its.pop(key.removeprefix("base_model.model.").replace(".default.", "."))
                assert torch.allclose(mine, parameter.grad, atol=1e-5), key
                assert mine.abs().max() > 0
        assert not its
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)


def with_adapter(base: Path, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def test_the_better_answer_gains_over_the_worse(tmp_path: Path, tiny_model: Path) -> None:
    options = {"learning_rate": 1e-3, "epochs": 3, "held_out": 0.2}
    done = sft(config(tmp_path, tiny_model, data=(str(write(tmp_path / "d.jsonl", 24)),), **options))
    assert done.fitted.before == pytest.approx(0.6931, abs=1e-4)
    assert done.fitted.after < 0.5
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines if line["kind"] == "train"][-1] == 1.0


def test_pairs_of_a_store_are_learned_from(tmp_path: Path, tiny_model: Path) -> None:
    made = make_store(tmp_path)
    for n in range(4):
        for value, text in ((1.0, "yes"), (0.0, "no")):
            said = Said([{"role": "user", "content": f"q{n}"}], {"role": "assistant", "content": text})
            made.attempt({"q": n}, [said], value, group=f"g{n}")
    made.store.close()
    done = sft(config(tmp_path, tiny_model, data=(str(tmp_path / "lightning.db"),), steps=2, held_out=0.0))
    assert (done.rows, done.left_out) == (4, {})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"messages": []}, "no 'chosen'"),
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]}, "no answer"),
    ],
)
def test_what_is_no_pair_is_told(line: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read_pair(line, "here, line 1")


def test_conversations_that_begin_alike_are_a_pair() -> None:
    asked = {"role": "user", "content": "a"}
    both = [[asked, {"role": "assistant", "content": text}] for text in "bc"]
    pair = read_pair({"chosen": both[0], "rejected": both[1]}, "here")
    assert (pair.chosen.answers, pair.rejected.answers) == ((1,), (1,))


@pytest.mark.parametrize("prompt", [True, False])
def test_a_pair_of_equal_answers_is_left_out_and_counted(tmp_path: Path, tiny_model: Path, prompt: bool) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    equal = (
        {"prompt": "a", "chosen": "b", "rejected": "b"}
        if prompt
        else {name: [asked, said] for name in ("chosen", "rejected")}
    )
    data = write(tmp_path / "d.jsonl", 4)
    data.write_text(f"{json.dumps(equal)}\n{data.read_text()}")
    done = sft(config(tmp_path, tiny_model, data=(str(data),), steps=1, held_out=0.0))
    assert (done.rows, done.left_out) == (4, {"both answers of the pair are the same": 1})


def test_pairs_that_all_say_nothing_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n")
    with pytest.raises(DataError, match=r"d.jsonl: chosen and rejected are the same in all 1 pairs"):
        sft(config(tmp_path, tiny_model, data=(str(data),), steps=1))

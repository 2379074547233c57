"""Preference pairs: the gradient is that of DPO's own formula, and the better answer gains over the worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from stores import Said, make_store

from lightning_spans.errors import DataError
from lightning_trainer.sft import sft as module
from lightning_trainer.sft.config import SftConfig
from lightning_trainer.sft.data import preferred
from lightning_trainer.sft.dpo import Dpo
from lightning_trainer.sft.sft import sft

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
    return learner, module.matched(better, worse)[0]


def test_the_gradient_is_that_of_the_formula(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = config(tmp_path, tiny_model, data=(str(write(tmp_path / "d.jsonl", 4)),), held_out=0.0, beta=0.3)
    learner, pairs = opened(wanted)
    dpo = Dpo(learner, pairs, 0.3)
    learner._trained()
    before = [each.before for each in dpo._pairs.values()]
    with torch.no_grad():  # away from where it began, so that the margin is not 0
        for name, master in learner._trained().masters.items():
            master.add_(0.02 * torch.randn(master.shape, generator=torch.Generator().manual_seed(len(name))))
        learner._trained().publish()
    learner.save(tmp_path / "moved", resumable=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moved", dtype=torch.float32)

    def likely(row: Any) -> Any:
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        found = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return found[torch.from_numpy(row.mask[1:])].sum()

    margins = [likely(a) - one - likely(b) + other for (a, b), (one, other) in zip(pairs, before, strict=True)]
    loss = -torch.nn.functional.logsigmoid(0.3 * torch.stack(margins)).mean()
    loss.backward()
    policy, found = learner._trained(), {}

    def step() -> tuple[float, bool]:
        found.update({name: master.grad.clone() for name, master in policy.masters.items()})
        return 0.0, True

    policy.step = step
    metrics = dpo.update([chosen for chosen, _ in pairs])
    learner.close()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert metrics["margin"] == pytest.approx(torch.stack(margins).mean().item(), abs=1e-3)
    assert abs(metrics["margin"]) > 0.01
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-5), name


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
        preferred(line, "here, line 1")


def test_conversations_that_begin_alike_are_a_pair() -> None:
    asked = {"role": "user", "content": "a"}
    both = [[asked, {"role": "assistant", "content": text}] for text in "bc"]
    pair = preferred({"chosen": both[0], "rejected": both[1]}, "here")
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

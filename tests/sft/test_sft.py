"""`lightning-rl sft` on a tiny model: the loss is that of transformers, it falls, and training goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError, DataError, UnknownAgentError
from lightning_trainer.cli import cli
from lightning_trainer.kits.sft import sft as module
from lightning_trainer.kits.sft.config import SftConfig, with_current_names
from lightning_trainer.kits.sft.fit import mean_loss
from lightning_trainer.kits.sft.sft import sft
from lightning_trainer.models import resolve
from lightning_trainer.report.progress import Silent
from support.training.stores import Said, make_store

pytestmark = pytest.mark.torch


def write(path: Path, count: int = 24, **more: Any) -> Path:
    lines = []
    for n in range(count):
        messages = [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "abc"[n % 3] * 4}]
        lines.append({"messages": messages, **{name: value(n) for name, value in more.items()}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(folder: Path, model: Path, **options: Any) -> SftConfig:
    chosen = {"model": str(model), "out": folder / "out", "learning_rate": 3e-3, "batch_size": 4, "device": "cpu"}
    return SftConfig(**{**chosen, "backend_options": {"threads": 1}, **options})


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def rows_of(config: SftConfig) -> tuple[Any, Any]:
    learner = module.registry.by_name("backend", "torch").learner(config.model, module.options_of(config))
    return learner, module._rows(config, learner, module.read(config).training).rows


def test_the_loss_and_its_gradient_are_those_of_transformers(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = config(tmp_path, tiny_model, data=(str(write(tmp_path / "d.jsonl", 5)),), held_out=0.0)
    learner, rows = rows_of(wanted)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(row.mask)[None], ids, -100)
        own = int(row.mask.sum())
        total, count = total + model(ids, labels=labels).loss * own, count + own
    (total / count).backward()
    assert mean_loss(learner, rows) == pytest.approx((total / count).item(), abs=1e-5)
    policy, found = learner._weights_of(), {}

    def step() -> tuple[float, bool]:
        found.update({name: master.grad.clone() for name, master in policy.masters.items()})
        return 0.0, True

    policy.step = step
    assert learner.update(rows)["loss"] == pytest.approx((total / count).item(), abs=1e-5)
    learner.close()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-5), name


def test_it_learns_and_training_goes_on_from_its_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    data = write(tmp_path / "d.jsonl")
    out = tmp_path / "out"
    arguments = ["sft", str(data), "--model", str(tiny_model), "--out", str(out), "--device", "cpu"]
    arguments += ["--learning-rate", "3e-3", "--batch-size", "4", "--epochs", "3", "--backend-options", "threads=1"]
    result = CliRunner().invoke(cli, [*arguments, "--held-out", "0.2"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["loss_after"] < told["loss_before"] - 0.5
    assert (told["checkpoint"], told["left_out"]) == (str(out / "checkpoint"), {})
    assert told["rows"] + told["held_out"] == 24
    assert 0 < told["held_out"] < 12
    assert not list(out.glob("checkpoint/trainer*"))  # weights alone
    assert resolve(str(out)) == resolve(told["checkpoint"])
    learner, rows = rows_of(config(tmp_path, out / "checkpoint", data=(str(data),), held_out=0.0))
    assert mean_loss(learner, rows) < told["loss_before"] - 0.5
    learner.close()
    rates = [line["loss"] for line in lines(out, "train")]
    assert len(rates) == told["steps"]


def test_it_stops_when_the_held_out_loss_rises_and_keeps_the_best(tmp_path: Path, tiny_model: Path) -> None:
    val = write(tmp_path / "v.jsonl", 6)
    val.write_text(val.read_text().replace("aaaa", "zz").replace("bbbb", "yy").replace("cccc", "xx"))
    options = {"eval_every": 2, "patience": 2, "learning_rate": 2e-2, "steps": 60, "val": val}
    done = sft(config(tmp_path, tiny_model, data=(str(write(tmp_path / "d.jsonl")),), **options))
    assert done.fitted.steps < 60
    seen = {line["step"]: line["loss"] for line in lines(done.folder, "val") if line["step"]}
    assert done.fitted.best == min(seen, key=seen.__getitem__)
    assert done.fitted.after == min(seen.values())
    learner, rows = rows_of(config(tmp_path, done.checkpoint, data=(str(val),), held_out=0.0))
    assert mean_loss(learner, rows) == pytest.approx(done.fitted.after, abs=1e-4)
    learner.close()


def test_what_rows_that_are_drawn_together_have_in_common_goes_forward_once(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "d.jsonl"
    schemas = [f"table {number}: " + f"column {number} " * 20 for number in range(8)]
    said = [
        [{"role": "user", "content": f"{schema}question {n}"}, {"role": "assistant", "content": f"answer {n}"}]
        for schema in schemas
        for n in range(4)
    ]
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    forwarded = {}
    for together in (1, 4):
        options = {"data": (str(data),), "held_out": 0.0, "steps": 8, "group_by_prefix": together}
        done = sft(config(tmp_path, tiny_model, **options, out=tmp_path / f"together-{together}"))
        forwarded[together] = sum(line["packed_tokens"] for line in lines(done.folder, "train"))
    assert forwarded[4] < 0.75 * forwarded[1]  # the same rows, in the same number of steps


def test_each_agent_has_an_adapter_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    data = write(tmp_path / "d.jsonl", agent=lambda n: ("writer", "checker", "other")[n % 3])
    done = sft(
        config(
            tmp_path, tiny_model, data=(str(data),), policies="writer=lora,checker=lora", lora_rank=4, steps=4,
            held_out=0.0,
        )
    )  # fmt: skip
    assert done.left_out == {"agent not selected": 8}
    index = json.loads((done.checkpoint / "adapters.json").read_text())
    assert set(index["adapters"]) == {"writer", "checker"}
    learner, rows = rows_of(
        config(tmp_path, done.checkpoint, data=(str(data),), policies="writer=lora,checker=lora", lora_rank=4)
    )
    mine = [row for row in rows if row.agent == "writer"]
    from dataclasses import replace

    others = [replace(row, policy="checker") for row in mine]
    assert mean_loss(learner, mine) < mean_loss(learner, others)  # what a writer says, only its adapter has learned
    learner.close()


def test_a_store_is_learned_from_with_the_recorded_tokens(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    made = make_store(tmp_path)
    for n in range(8):
        asked = [{"role": "user", "content": f"q{n}"}]
        prompt = tokenizer.encode(f"<|im_start|>user\nq{n}<|im_end|>\n<|im_start|>assistant\n")
        if n % 2:
            said = Said(asked, {"role": "assistant", "content": "ab"}, prompt=tuple(prompt), response=(100, 101, 2))
        else:
            said = Said(asked, {"role": "assistant", "content": "ab"})
        made.attempt({"q": n}, [said], float(n), group=f"g{n}")
    made.store.close()
    wanted = config(
        tmp_path, tiny_model, data=(str(tmp_path / "lightning.db"),), agents=("writer",), min_reward=2.0, steps=1,
        held_out=0.0,
    )  # fmt: skip
    done = sft(wanted)
    assert (done.rows, done.recorded) == (6, 3)
    assert done.left_out == {"reward below --min-reward": 2}
    learner, rows = rows_of(wanted)
    learner.close()
    assert [row.tokens[row.mask].tolist() for row in rows if 100 in row.tokens[row.mask]] == [[100, 101, 2]] * 3


def test_the_best_of_each_group_of_an_evaluation_are_learned(tmp_path: Path, tiny_model: Path) -> None:
    made = make_store(tmp_path)
    for n in range(4):
        for value in (0.0, 1.0, 0.5):
            said = Said([{"role": "user", "content": f"q{n}"}], {"role": "assistant", "content": f"a{value}"})
            made.attempt({"q": n}, [said], value if n else 0.0, group=f"g{n}", mode="eval")
    made.store.close()
    store = str(tmp_path / "lightning.db")
    done = sft(config(tmp_path, tiny_model, data=(store,), best=1, min_reward=1.0, steps=1, held_out=0.0))
    assert (done.rows, done.left_out) == (3, {"reward below --min-reward": 9})


class Told(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("loss", ["likelihood", "dpo"])
def test_a_part_need_not_have_every_agent(tmp_path: Path, tiny_model: Path, loss: str) -> None:
    def part(name: str, *agents: str) -> Path:
        data = write(tmp_path / name, 4 * len(agents), agent=lambda n: agents[n % len(agents)])
        made = [json.loads(line) for line in data.read_text().splitlines()]
        pairs = [{**m, "prompt": m["messages"][:1], "chosen": "good", "rejected": "bad"} for m in made]
        data.write_text("".join(json.dumps(each) + "\n" for each in pairs))
        return data

    both, writer, checker = part("b.jsonl", "writer", "checker"), part("w.jsonl", "writer"), part("c.jsonl", "checker")
    options: dict[str, Any] = {"agents": "writer,checker", "steps": 1, "loss": loss}
    done = sft(config(tmp_path, tiny_model, data=(str(both),), val=writer, out=tmp_path / "a", **options))
    assert (done.rows, done.held_out) == (8, 4)
    told = Told()
    sft(config(tmp_path, tiny_model, data=(str(writer),), val=checker, out=tmp_path / "b", **options), told)
    assert "nothing is learned for checker: all of its answers are held out or left out" in told.notes
    with pytest.raises(UnknownAgentError, match=r"agent 'checker' was never seen\. Agents seen: writer"):
        sft(config(tmp_path, tiny_model, data=(str(writer),), val=writer, out=tmp_path / "c", **options))
    options |= {"agents": "writer"}
    with pytest.raises(DataError, match="all 4 conversations are left out"):
        sft(config(tmp_path, tiny_model, data=(str(writer),), val=checker, out=tmp_path / "d", **options))


def test_a_share_that_is_held_out_and_lacks_an_agent_is_looked_at(tmp_path: Path, tiny_model: Path) -> None:
    data = write(tmp_path / "d.jsonl", 60, agent=lambda n: "checker" if n == 7 else "writer", task_id=lambda n: f"t{n}")
    wanted = config(tmp_path, tiny_model, data=(str(data),), agents="writer,checker", steps=1)
    read = module.read(wanted)
    assert {said.agent for said in read.held_out} == {"writer"}
    assert sft(wanted).held_out == len(read.held_out)
    alone = sft(config(tmp_path, tiny_model, data=(str(data),), agents="checker", out=tmp_path / "alone", steps=1))
    assert (alone.rows, alone.held_out) == (1, 0)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"data": ("none.jsonl",)}, DataError, "does not exist"),
        ({"data": ("none.db",)}, ConfigError, "no store"),
        ({"data": ()}, ConfigError, "give the training data"),
        ({"agents": ("nobody",)}, UnknownAgentError, "nobody"),
        ({"max_length": 3, "held_out": 0.0}, DataError, "longer than max_length"),
        ({"max_tokens": 3}, ConfigError, "Write max_length, or answer_tokens"),
        ({"min_reward": 1.0}, DataError, "no reward"),
        ({"best": 1, "origin": "live"}, ConfigError, "best, origin: these select from stores"),
        ({"backend": "verl"}, ConfigError, "sft_trainer"),
        ({"steps": 1, "epochs": 1}, ConfigError, "both set the length"),
        ({"backend_options": {"learning_rate": 1}}, ConfigError, "a separate option"),
        ({"base_bits": 4}, ConfigError, "Set lora_rank or policies"),
        (
            {"base_bits": 4, "lora_rank": 1, "backend": "tinker"},
            ConfigError,
            "base_bits is an option of backend = torch",
        ),
    ],
)
def test_bad_input_is_told_and_leaves_no_folder(
    tmp_path: Path, tiny_model: Path, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    data = write(tmp_path / "d.jsonl", agent=lambda _: "writer")
    with pytest.raises(error, match=told):
        sft(config(tmp_path, tiny_model, **{"data": (str(data),), **options}))
    assert not (tmp_path / "out").exists()


def test_options_that_an_earlier_version_kept_for_the_backend_are_read_in_their_new_places() -> None:
    old = {"model": "m", "max_tokens": 9, "backend_options": {"tool_format": "hermes", "base_bits": 4, "slots": 2}}
    read = with_current_names(old)
    assert read == {
        "model": "m", "max_length": 9, "tool_format": "hermes", "base_bits": 4, "backend_options": {"slots": 2}
    }  # fmt: skip
    assert SftConfig(data=("a.jsonl",), lora_rank=1, **read).learner_options()["base_bits"] == 4

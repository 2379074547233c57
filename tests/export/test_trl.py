"""Another trainer reads what was exported: the same tokens and masks, and a step of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")  # `nox -s exports` has an environment with all that TRL needs
trl = pytest.importorskip("trl")
torch = pytest.importorskip("torch")

from lightning_trainer.kits.export.export import export
from lightning_trainer.kits.export.wanted import ExportSelection
from support.training.stores import ADD, Made, Said, calls_tool, make_store, read, says, user

pytestmark = pytest.mark.torch
PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
STEP = {"max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1, **PLAIN}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = make_store(tmp_path)
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def fill(made: Made, tokenizer: Any, *, tokens: bool) -> None:
    """A task whose two attempts call a tool and answer; each call's tokens as a gateway would record them."""
    for n, value in enumerate((1.0, 0.0)):
        asked = [user("2+3?")]
        called = calls_tool("a", **({"x": 2, "y": 3} if n == 0 else {"city": "Rome"}))
        later = [*asked, called, {"role": "tool", "tool_call_id": "a", "content": "5"}]
        first, second = Said(asked, called, tools=[ADD]), Said(later, says(f"it is {n}"), tools=[ADD])
        if tokens:
            first.prompt = tuple(tokenizer.encode("<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"))
            first.response = (*tokenizer.encode(f"call {n}"), 2)
            second.prompt = (*first.prompt, *first.response, *tokenizer.encode("\n5\n"))
            second.response = (*tokenizer.encode(f"it is {n}"), 2)
        made.attempt({"q": "2+3"}, [first, second], value)


def exported(made: Made, out: Path, **wanted: Any) -> tuple[Any, list[dict[str, Any]]]:
    from datasets import load_dataset

    export(made.store, ExportSelection(**wanted), out)
    return load_dataset("json", data_files=str(out), cache_dir=str(out.parent / "cache"))["train"], read(out)


def rows_of(batch: Any) -> dict[tuple[int, ...], list[int]]:
    """Map each sequence of a batch, padding taken off, to its labels."""
    kept = batch["attention_mask"].bool() if "attention_mask" in batch else batch["input_ids"] >= 0
    return {
        tuple(ids[mask].tolist()): labels[mask].tolist()
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], kept, strict=True)
    }


@pytest.mark.parametrize("form", ["sft", "tokens"])
def test_sft_trainer_takes_the_recorded_tokens_and_masks(
    made: Made, tokenizer: Any, tiny_model: Path, tmp_path: Path, form: str
) -> None:
    fill(made, tokenizer, tokens=True)
    data, lines = exported(made, tmp_path / "out.jsonl", format=form)
    trainer = trl.SFTTrainer(
        model=model_of(tiny_model), train_dataset=data, processing_class=tokenizer,
        args=trl.SFTConfig(output_dir=str(tmp_path / "t"), **STEP),
    )  # fmt: skip
    assert rows_of(next(iter(trainer.get_train_dataloader()))) == {
        tuple(line["input_ids"]): line["labels"] for line in lines
    }
    assert trainer.train().training_loss > 0


def test_sft_trainer_takes_conversations_with_tools(
    made: Made, tokenizer: Any, tiny_model: Path, tmp_path: Path
) -> None:
    fill(made, tokenizer, tokens=False)
    data, _ = exported(made, tmp_path / "out.jsonl", format="sft")
    trainer = trl.SFTTrainer(
        model=model_of(tiny_model), train_dataset=data, processing_class=tokenizer,
        args=trl.SFTConfig(output_dir=str(tmp_path / "t"), **STEP),
    )  # fmt: skip
    texts = [tokenizer.decode(ids) for ids in next(iter(trainer.get_train_dataloader()))["input_ids"]]
    assert any(
        '{"x": 2, "y": 3}' in text for text in texts
    )  # no argument of the other line's tool, and no text of JSON
    assert all('"name": "add", "description": "Add."' in text for text in texts)
    assert trainer.train().training_loss > 0


def test_a_large_file_whose_lines_hold_other_fields_is_loaded(made: Made, tokenizer: Any, tmp_path: Path) -> None:
    from datasets import load_dataset

    for n in range(50):
        made.attempt({"n": n}, [Said([user(f"{n}?")], says(f"it is {n}"))], 1.0)
    fill(made, tokenizer, tokens=True)
    done = export(made.store, ExportSelection(format="sft"), tmp_path / "out.jsonl")
    data = load_dataset("json", data_files=str(done.files[0]), chunksize=8192, cache_dir=str(tmp_path / "cache"))
    assert len(data["train"]) == done.lines == 52


def test_dpo_trainer_takes_pairs(made: Made, tokenizer: Any, tiny_model: Path, tmp_path: Path) -> None:
    fill(made, tokenizer, tokens=True)
    data, [line] = exported(made, tmp_path / "out.jsonl", format="dpo")
    trainer = trl.DPOTrainer(
        model=model_of(tiny_model), ref_model=model_of(tiny_model), train_dataset=data, processing_class=tokenizer,
        args=trl.DPOConfig(output_dir=str(tmp_path / "t"), **STEP),
    )  # fmt: skip
    texts = [tokenizer.decode(ids) for ids in next(iter(trainer.get_train_dataloader()))["input_ids"]]
    assert '{"x": 2, "y": 3}' in texts[0]
    assert '{"city": "Rome"}' in texts[1]
    assert trainer.train().training_loss == pytest.approx(0.6931, abs=1e-3)  # policy and reference are the same
    assert line["rewards"] == [1.0, 0.0]

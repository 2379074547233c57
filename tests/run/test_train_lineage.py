"""What `train` and `sft` write of their lineage is exactly what they learned from."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.store import open_store

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_trainer import train
from lightning_trainer.kits.export.export import export
from lightning_trainer.kits.export.wanted import ExportSelection
from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.kits.sft.sft import sft
from lightning_trainer.lineage.chain import ChainWriter
from lightning_trainer.lineage.manifest import MANIFEST
from lightning_trainer.lineage.reading import read_lineage
from lightning_trainer.lineage.search import find_checkpoints
from support.training.programs import folder_with
from support.training.tiny_runs import PROGRAMS, config, lines

folder = folder_with(5, **PROGRAMS)


def test_checkpoints_name_the_calls_rewards_files_and_code_that_they_learned_from(
    tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_s = 0.0
    append = ChainWriter.append

    def timed(self: ChainWriter, values: Any) -> Any:
        nonlocal spent_s
        began = time.process_time()
        try:
            return append(self, values)
        finally:
            spent_s += time.process_time() - began

    monkeypatch.setattr(ChainWriter, "append", timed)
    task = {"q": "say 1", "trace_id": "a" * 32, "tenant": "acme; globex"}  # as `traces --to-tasks` writes it
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n" + json.dumps({"q": "say 2"}) + "\n")
    train(config(tiny_model, steps=2, save_every=1, keep=2, checkpoint="full"))
    out = folder / "out"
    print(f"lineage: {spent_s:.4f} s of CPU, {sum(line['seconds'] for line in lines(out)):.2f} s in steps")
    store = open_store(str(out / "lightning.db"))
    calls = {call.call_id: call for call in store.calls()}
    rewards = {reward.reward_id for reward in store.rewards()}
    first, newest = (read_lineage(out / "checkpoints" / f"step-{step:06d}") for step in (1, 2))
    assert set(newest.all_of("calls")) == set(calls)
    assert set(newest.all_of("rewards")) == rewards
    assert set(first.all_of("calls")) == {
        name for name, call in calls.items() if call.rollout_id and ":t0" in call.rollout_id
    }
    assert newest.all_of("traces") == sorted({str(call.trace_id) for call in calls.values()})
    assert newest.all_of("sources") == ["run"]
    assert (newest.all_of("tasks"), newest.all_of("tenants")) == (["a" * 32], ["acme", "globex"])
    assert [Path(file["path"]).name for file in (*newest.begun["data"], *newest.begun["code"])] == [
        "tasks.jsonl", "tiny_agent.py",
    ]  # fmt: skip
    train(config(tiny_model, steps=2, save_every=1, out=None, resume="out/checkpoints/step-000001"))
    again = read_lineage(out / "checkpoint")
    assert (again.all_of("calls") != newest.all_of("calls"), len(again.steps)) == (True, 2)

    chosen = ExportSelection(format="tokens", rollout_ids=tuple(newest.all_of("rollouts")))
    export(store, chosen, folder / "lines.jsonl")
    store.close()
    exported = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    options = {"out": folder / "tuned", "steps": 1, "batch_size": 2, "device": "cpu", "held_out": 0.0}
    threads = {"backend_options": {"threads": 1}}
    sft(SftConfig(data=(str(folder / "lines.jsonl"),), model=str(out), **options, **threads))
    tuned = read_lineage(folder / "tuned")
    assert set(tuned.all_of("calls")) < {name for line in exported for name in line["call_ids"]}
    assert (len(tuned.all_of("lines")), tuned.begun["parent"]) == (2, again.head)
    learned = find_checkpoints([folder], {first.all_of("calls")[0]})
    assert (folder / "tuned" / "checkpoint").resolve() in [one.folder for one in learned]
    assert (out / MANIFEST).stat().st_nlink > 1

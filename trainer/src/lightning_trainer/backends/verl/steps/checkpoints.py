"""Registration of verl's checkpoints: the run's own link to the newest, and a line about the policy's version."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from lightning_trainer.backends.verl.resuming import link_newest
from lightning_trainer.backends.verl.run_tokenizer import put_tokenizer
from lightning_trainer.backends.verl.steps.merged import merge_adapters
from lightning_trainer.lineage.manifest import mark_checkpoint
from lightning_trainer.report.metrics import write_atomically

POLICIES: Final = "policies.jsonl"


class RegisterCheckpoint(CheckpointCallback):  # type: ignore[misc]  # verl has no types
    """Registers each checkpoint in the run's folder; created by verl as `trainer.checkpoint_callback_class`."""

    def on_save(self, *, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Register a written checkpoint."""
        folder, checkpoint = Path(self.config.trainer.default_local_dir).parent, Path(checkpoint_dir)
        model = checkpoint / "actor" / "huggingface"
        merge_adapters(model)
        forget_attention(model / "config.json")
        put_tokenizer(folder, model)
        register(folder, checkpoint, global_step)


def forget_attention(path: Path) -> None:
    """Remove the attention implementation from a model's configuration, because other programs do not know ours."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.pop("attn_implementation", None) is not None:
        write_atomically(path, json.dumps(values, indent=2).encode() + b"\n")


def register(folder: Path, checkpoint: Path, version: int) -> None:
    """Point the run's `checkpoint` to this one's model folder, and record its policy version.

    Args:
        folder: of the run.
        checkpoint: verl's folder ``global_step_N``.
        version: of the weights.
    """
    mark_checkpoint(folder, checkpoint / "actor" / "huggingface", version)
    link_newest(folder, checkpoint)
    line = {"version": version, "checkpoint": str(checkpoint), "time": round(time.time(), 3)}
    path = folder / POLICIES
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + json.dumps(line).encode() + b"\n")

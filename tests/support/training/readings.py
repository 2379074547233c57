"""What a run left behind, read for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_spans.schema.attempts import Rollout
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.learning import batch_of
from lightning_trainer.kits.view.runs import STORE_NAME, Run
from lightning_trainer.report.learned_tokens import SeenTokens, read
from lightning_trainer.rl.rows import Row
from lightning_trainer.run.group_ids import step_of

Lines = list[dict[str, Any]]


def lines(folder: Path, kind: str = "train") -> Lines:
    """Read the metrics of a run."""
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, text) if line["kind"] == kind]


def tokens_seen(folder: Path) -> Iterator[tuple[Row, SeenTokens | None]]:
    """Give the rows of a run's training, made again from its store, and what the update saw of each."""
    run = Run("run", f"sqlite:///{folder / STORE_NAME}", folder)
    reader = StoreReader(run.store)
    with closing(reader):
        for group_id in sorted(
            {rollout.group_id for rollout in reader.page(Rollout).records if rollout.mode == "train"}
        ):
            made = batch_of(reader, run, [group_id], every_agent=False)
            assert made is not None
            for row in made[0].rows:
                yield row, read(folder, step_of(group_id).number, row)


def weights(checkpoint: Path) -> Mapping[str, Any]:
    """Load the weights of one of verl's checkpoints, as any user of the model would."""
    from safetensors.torch import load_file

    return load_file(checkpoint / "actor" / "huggingface" / "model.safetensors")


def differs(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Return the largest difference of any weight."""
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left)

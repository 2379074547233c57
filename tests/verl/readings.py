"""What a run left behind, read for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]


def lines(folder: Path, kind: str = "train") -> Lines:
    """Read the metrics of a run."""
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, text) if line["kind"] == kind]


def weights(checkpoint: Path) -> Mapping[str, Any]:
    """Load the weights of one of verl's checkpoints, as any user of the model would."""
    from safetensors.torch import load_file

    return load_file(checkpoint / "actor" / "huggingface" / "model.safetensors")


def differs(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Return the largest difference of any weight."""
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left)

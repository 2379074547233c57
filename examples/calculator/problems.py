"""Problems for the calculator's agents. `python problems.py` writes train.jsonl and val.jsonl."""

from __future__ import annotations

import json
import random
from pathlib import Path


def problems(seed: int, count: int) -> list[dict[str, object]]:
    """Questions such as `What is 64-16?`. Training and held-out ones come from one generator: this shows that a tool
    and a format are learned, not arithmetic."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        left, sign, right = draw.randint(11, 99), draw.choice("+-*"), draw.randint(11, 99)
        answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
        rows.append({"question": f"What is {left}{sign}{right}?", "answer": answer})
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    write(Path("train.jsonl"), problems(seed=1, count=112))
    write(Path("val.jsonl"), problems(seed=12345, count=32))

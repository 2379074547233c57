"""Write `train.jsonl`, `val.jsonl` and `sft.jsonl` from SVAMP, read in place: `LIGHTNING_DATA`/math/SVAMP.json.

`python data.py`. Of its 1,000 problems 700 are trained on and 300 held out. The lessons are the Solver's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from agent import compute, format_value, make
from crewai import BaseLLM

HELD_OUT = 300
PLACE = "THE PROBLEM STANDS HERE"


class Listener(BaseLLM):
    """A model that keeps what it is asked."""

    def call(self, messages: Any, *_: Any, **__: Any) -> str:
        heard.append([{"role": message["role"], "content": message["content"]} for message in messages])
        return "1"


heard: list[list[dict[str, str]]] = []


def prompt() -> list[dict[str, str]]:
    """Return what CrewAI asks the Solver, with a mark where the problem stands: the crew is run once to hear it."""
    make(PLACE, Listener(model="listener")).kickoff()
    return heard[0]


def problems() -> list[dict[str, str]]:
    if not (root := os.environ.get("LIGHTNING_DATA")):
        raise SystemExit("LIGHTNING_DATA is not set: the folder that has math/SVAMP.json.")
    rows = []
    for row in json.loads((Path(root) / "math/SVAMP.json").read_text()):
        body = row["Body"].rstrip()
        expression = re.sub(r"(\d+)\.0\b", r"\1", row["Equation"]).strip()
        rows.append(
            {
                "problem": f"{body}{'' if body.endswith(('.', '?', ',')) else '.'} {row['Question']}",
                "answer": format_value(Fraction(str(row["Answer"]))),
                "expression": re.sub(r"^\( (.*) \)$", r"\1", expression),
            }
        )
    return rows


def lesson(row: dict[str, str], asked: list[dict[str, str]]) -> dict[str, Any]:
    said = [{**message, "content": message["content"].replace(PLACE, row["problem"])} for message in asked]
    return {"agent": "Solver", "messages": [*said, {"role": "assistant", "content": row["expression"]}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    rows = problems()
    random.Random(0).shuffle(rows)
    learned, held = rows[:-HELD_OUT], rows[-HELD_OUT:]
    asked = prompt()
    right = [row for row in learned if compute(row["expression"]) == row["answer"]]
    files = {"train": _tasks(learned), "val": _tasks(held), "sft": [lesson(row, asked) for row in right]}
    for name, lines in files.items():
        (given.out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name}.jsonl: {len(lines)}")


def _tasks(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"problem": row["problem"], "answer": row["answer"]} for row in rows]


if __name__ == "__main__":
    main()

"""Write `train.jsonl`, `val.jsonl`, `val_gsm8k.jsonl` and `sft.jsonl` from GSM8K and SVAMP, read in place.

`python data.py`. SVAMP is one set of 1,000: 400 are for SFT, 300 for RL, 300 held out. Of GSM8K its own training and
test files are used, of the former the problems of one step; its calculator annotations, ``<<48/2=24>>``, are
the tool calls, as in Calc-X (Kadlcik et al., 2023). No problem of RL has a lesson: what it finds is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from agent import SOLVE, TOOL, compute, format_value

STEP = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
MOST_STEPS = 1  # of GSM8K's problems to learn from: the others are out of reach for 135M
SVAMP_PARTS = (0.4, 0.3)  # lessons and tasks; the rest is held out
GSM8K_TASKS = 0.25


def folder() -> Path:
    if not (root := os.environ.get("LIGHTNING_DATA")):
        raise SystemExit("LIGHTNING_DATA is not set: the folder that has math/SVAMP.json and math/gsm8k_train.jsonl.")
    return Path(root) / "math"


def svamp() -> list[dict[str, Any]]:
    """Give problems with their one expression."""
    rows = []
    for row in json.loads((folder() / "SVAMP.json").read_text()):
        body = row["Body"].rstrip()
        problem = f"{body}{'' if body.endswith(('.', '?', ',')) else '.'} {row['Question']}"
        expression = re.sub(r"(\d+)\.0\b", r"\1", row["Equation"]).strip()
        expression = re.sub(r"^\( (.*) \)$", r"\1", expression)
        answer = format_value(Fraction(str(row["Answer"])))
        rows.append({"problem": problem, "answer": answer, "steps": [("", expression)]})
    return rows


def gsm8k(name: str) -> list[dict[str, Any]]:
    """Give problems with a sentence and an expression for each step; those whose annotations compute."""
    rows = []
    for line in (folder() / name).read_text().splitlines():
        row = json.loads(line)
        text, _, answer = row["answer"].rpartition("####")
        steps, at = [], 0
        for found in STEP.finditer(text):
            said = text[at : found.start()].strip().rpartition("=")[0].strip()
            steps.append((said.replace("\n", " "), found[1].strip()))
            at = found.end() + len(found[2]) if text[found.end() :].startswith(found[2]) else found.end()
        rows.append(
            {
                "problem": row["question"],
                "answer": format_value(Fraction(answer.strip().replace(",", ""))),
                "steps": steps,
            }
        )
    return rows


def chat(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the problem solved with tool calls; None where an annotation does not compute, or to another result."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SOLVE},
        {"role": "user", "content": row["problem"]},
    ]
    result = None
    for number, (said, expression) in enumerate(row["steps"]):
        try:
            result = compute(expression)
        except ValueError:
            return None
        arguments = json.dumps({"expression": expression})
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    if result != row["answer"]:
        return None
    messages.append({"role": "assistant", "content": f"Answer: {result}"})
    return {"agent": "solver", "messages": messages, "tools": [{"type": "function", "function": _schema()}]}


def _schema() -> dict[str, Any]:
    return {name: part for name, part in TOOL.schema.items() if name in {"name", "description", "parameters"}}


def _lessons(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (lesson for row in rows if (lesson := chat(row)) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    draw = random.Random(0)
    short = svamp()
    draw.shuffle(short)
    lessons_end, tasks_end = (round(len(short) * share) for share in (SVAMP_PARTS[0], sum(SVAMP_PARTS)))
    long = [row for row in gsm8k("gsm8k_train.jsonl") if 1 <= len(row["steps"]) <= MOST_STEPS]
    draw.shuffle(long)
    gsm8k_end = round(len(long) * GSM8K_TASKS)
    lessons = list(_lessons([*short[:lessons_end], *long[gsm8k_end:]]))
    draw.shuffle(lessons)
    tasks = [*short[lessons_end:tasks_end], *long[:gsm8k_end]]
    draw.shuffle(tasks)
    test = gsm8k("gsm8k_test.jsonl")
    draw.shuffle(test)
    files = {"train": _tasks(tasks), "val": _tasks(short[tasks_end:]), "val_gsm8k": _tasks(test[:300]), "sft": lessons}
    for name, rows in files.items():
        (given.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}.jsonl: {len(rows)}")


def _tasks(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{"problem": row["problem"], "answer": row["answer"]} for row in rows]


if __name__ == "__main__":
    main()

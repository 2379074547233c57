"""BFCL's multi-turn tasks as a program: an agent with tools, several requests of a user, and a state to bring about.

Tasks, tools and the judge of the final state are those of `bfcl-eval`; the loop is its function calling mode. The
reward is 1 where BFCL's own checker finds every turn's state and results right, else 0.
`python agent.py` writes `train.jsonl` and `val.jsonl`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning_openai

lightning_openai.attach()

import bfcl_eval  # noqa: E402
from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker  # noqa: E402
from openai import OpenAI  # noqa: E402

from lightning_spans import agent  # noqa: E402

DATA = Path(bfcl_eval.__file__).parent / "data"
MODEL = os.environ.get("MODEL", "policy")
STEPS = 20  # messages with calls in a turn; BFCL's own limit
CATEGORIES = ("multi_turn_base", "multi_turn_miss_param")  # the others change the tools midway, or the state
FILES = "GorillaFileSystem"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def run(task: dict[str, str]) -> float:
    """Play all turns of one task, and score the state that they led to."""
    entry, truth = entries(task["category"])[task["id"]]
    tag = f"run_{uuid.uuid4().hex}"  # BFCL keeps the state of a run under this name
    try:
        with agent("caller"):
            turns = play(OpenAI(), entry, tag)
        whole = len(turns) == len(truth)
        return float(whole and multi_turn_checker(turns, truth, entry, task["category"], tag)["valid"])
    finally:
        forget(tag)


def play(client: OpenAI, entry: dict[str, Any], tag: str) -> list[list[list[str]]]:
    """Let the model answer every turn, and return its calls by turn and step, as BFCL's checker takes them."""
    offered = tools(entry)
    names = {tool["function"]["name"] for tool in offered}
    messages: list[Any] = []
    turns = []
    for asked in entry["question"]:
        messages += asked
        steps = []
        for _ in range(STEPS + 1):
            reply = client.chat.completions.create(model=MODEL, messages=messages, tools=offered)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            steps.append(act(message.tool_calls, names, entry, tag, messages))
        else:
            return turns  # BFCL, too, ends a task here, and counts it as wrong
        turns.append(steps)
    return turns


def act(calls: Sequence[Any], names: set[str], entry: dict[str, Any], tag: str, messages: list[Any]) -> list[str]:
    """Execute the calls of one message, and add their results to the chat."""
    written = []
    for call in calls:
        try:
            text = expression(call.function.name, call.function.arguments, names)
        except ValueError as error:
            result = json.dumps({"error": str(error)})
        else:
            written.append(text)
            [result], _ = multi_turn_utils.execute_multi_turn_func_call(
                [text], entry["initial_config"], entry["involved_classes"], tag, entry["id"]
            )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return written


def expression(name: str, arguments: str, names: set[str]) -> str:
    """Write a call as BFCL evaluates it: with Python's eval(), so nothing but known names and plain values gets in."""
    given = json.loads(arguments or "{}")
    if name not in names:
        raise ValueError(f"there is no tool {name!r}")
    if not isinstance(given, dict) or not all(key.isidentifier() for key in given):
        raise ValueError("the arguments are no JSON object of names and values")
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def tools(entry: dict[str, Any]) -> list[Any]:
    """Return the tools of a task's classes, as OpenAI's API has them."""
    found = []
    for name in entry["involved_classes"]:
        for line in _lines(DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]):
            if line["name"] not in entry.get("excluded_function", []):
                kept = {key: line[key] for key in ("name", "description")}
                found.append({"type": "function", "function": {**kept, "parameters": _schema(line["parameters"])}})
    return found


def _schema(table: dict[str, Any]) -> dict[str, Any]:
    """Write BFCL's types as JSON Schema's."""
    return {
        key: _schema(value) if isinstance(value, dict) else TYPES.get(value, value) if key == "type" else value
        for key, value in table.items()
    }


@functools.cache
def entries(category: str) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Return the tasks of a category and their answers, by id."""
    file = f"BFCL_v4_{category}.json"
    answers = {row["id"]: row["ground_truth"] for row in _lines(DATA / "possible_answer" / file)}
    return {row["id"]: (row, answers[row["id"]]) for row in _lines(DATA / file)}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def forget(tag: str) -> None:
    """Drop the state of a run, which BFCL keeps for ever."""
    held = vars(multi_turn_utils)
    for name in [name for name in list(held) if re.match(rf"{tag}\D", name)]:
        del held[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--category", choices=CATEGORIES, default=CATEGORIES[0])
    parser.add_argument("--classes", default=FILES, help="tasks of these classes alone, with commas between; or all")
    chosen = parser.parse_args()
    wanted = None if chosen.classes == "all" else set(chosen.classes.split(","))
    kept = [key for key, (row, _) in entries(chosen.category).items() if wanted in (None, set(row["involved_classes"]))]
    for part, keys in (("train", [k for n, k in enumerate(kept) if n % 3]), ("val", kept[::3])):
        rows = [json.dumps({"id": key, "category": chosen.category}) + "\n" for key in keys]
        Path(f"{part}.jsonl").write_text("".join(rows))
        print(f"{part}.jsonl: {len(rows)} tasks")

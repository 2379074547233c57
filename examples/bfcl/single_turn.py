"""BFCL's single-turn categories as a program: one request, one answer with tool calls, scored by BFCL's AST checker.

`python single_turn.py` writes `single_train.jsonl` and `single_val.jsonl`, split by id.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import lightning_openai

lightning_openai.attach()

from agent import DATA, _lines, _schema, entries  # noqa: E402
from openai import OpenAI  # noqa: E402

from lightning_spans import agent  # noqa: E402

# The checker asks this table whether a model writes "." in names as "_", and the module imports every vendor's client.
table = types.ModuleType("bfcl_eval.constants.model_config")
table.MODEL_CONFIG_MAPPING = collections.defaultdict(  # type: ignore[attr-defined]
    lambda: types.SimpleNamespace(underscore_to_dot=True)
)
sys.modules.setdefault(table.__name__, table)
for parser in ("tree_sitter", "tree_sitter_java", "tree_sitter_javascript"):  # of Java and JavaScript, not used here
    sys.modules.setdefault(parser, types.SimpleNamespace(Language=None, Parser=None))  # type: ignore[arg-type]

CATEGORIES = ("simple_python", "live_simple", "multiple", "live_multiple", "parallel")


def run(task: dict[str, str]) -> float:
    """Ask once, with the task's tools; 1 where the checker takes the calls for right, else 0."""
    entry, truth = entries(task["category"])[task["id"]]
    tools: list[Any] = [
        {"type": "function", "function": {**f, "name": flat(f["name"]), "parameters": _schema(f["parameters"])}}
        for f in entry["function"]
    ]
    with agent("caller"):
        reply = OpenAI().chat.completions.create(
            model=os.environ.get("MODEL", "policy"), messages=entry["question"][0], tools=tools
        )
    try:
        said = reply.choices[0].message.tool_calls or []
        calls = [{call.function.name: json.loads(call.function.arguments)} for call in said]
    except ValueError:
        return 0.0
    return score(entry, calls, truth, task["category"])


def score(entry: dict[str, Any], calls: list[dict[str, Any]], truth: list[Any], category: str) -> float:
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    if not all(isinstance(given, dict) for call in calls for given in call.values()):
        return 0.0  # the checker would fail on arguments that are no object
    return float(ast_checker(entry["function"], calls, truth, Language.PYTHON, category, "any")["valid"])


def flat(name: str) -> str:
    """Return a tool's name as OpenAI's API takes it."""
    return name.replace(".", "_")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--categories", default="simple_python,live_simple")
    rows = []
    for category in arguments.parse_args().categories.split(","):
        if category not in CATEGORIES:
            raise SystemExit(f"no category {category!r}: {', '.join(CATEGORIES)}")
        rows += [{"id": row["id"], "category": category} for row in _lines(DATA / f"BFCL_v4_{category}.json")]
    for part, kept in (("train", [r for n, r in enumerate(rows) if n % 3]), ("val", rows[::3])):
        Path(f"single_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        print(f"single_{part}.jsonl: {len(kept)} tasks")

"""The rewards of docs/how-to/rewards.md. Each part is shown there as it stands here; test_cookbook.py runs them."""

from __future__ import annotations


# --8<-- [start:exact]
def exact(task, result):
    """1 for the right answer, whatever its case, spaces and final full stop."""

    def plain(text):
        return " ".join(str(text).lower().split()).rstrip(".")

    return float(plain(result) == plain(task["answer"]))


# --8<-- [end:exact]
# --8<-- [start:number]
import re


def number(task, result):
    """1 if the last number of the answer is right, to a millionth."""
    found = re.findall(r"-?\d[\d,]*\.?\d*", str(result))
    if not found:
        return 0.0
    said, right = float(found[-1].replace(",", "")), float(task["answer"])
    return float(abs(said - right) <= 1e-6 * max(1.0, abs(right)))


# --8<-- [end:number]
# --8<-- [start:overlap]
from collections import Counter


def overlap(task, result):
    """F1 of the words: how much of the answer is right, and how much of what is right was said."""
    said, right = (Counter(str(text).lower().split()) for text in (result, task["answer"]))
    common = (said & right).total()
    return 2 * common / (said.total() + right.total()) if common else 0.0


# --8<-- [end:overlap]
# --8<-- [start:choice]
CHOICES = {"refund", "delivery", "account"}


def choice(task, result):
    """1 for only the right word, 0.3 for a wrong word of the list, 0 for anything else."""
    said = str(result).strip().rstrip(".").lower()
    return 1.0 if said == task["kind"] else 0.3 if said in CHOICES else 0.0


# --8<-- [end:choice]
# --8<-- [start:fields]
import json


def fields(task, result):
    """The share of the wanted fields that the JSON answer has right; 0 if it is not a JSON object."""
    try:
        said = json.loads(result)
    except (TypeError, ValueError):
        return 0.0
    if not isinstance(said, dict):
        return 0.0
    wanted = task["fields"]
    return sum(said.get(name) == value for name, value in wanted.items()) / len(wanted)


# --8<-- [end:fields]
# --8<-- [start:passes]
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path


def passes(task, result):
    """The share of the task's assertions that hold for the program that was written, each given five seconds."""
    held = 0
    for assertion in task["tests"]:
        end = secrets.token_hex()  # printed after the assertion: a program that exits before it earns nothing
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "attempt.py").write_text(f"{result}\n{assertion}\nprint('\\n{end}')\n")
            try:
                command = [sys.executable, "-I", "-c", "import runpy; runpy.run_path('attempt.py')"]
                done = subprocess.run(command, cwd=folder, env={}, timeout=5, capture_output=True, check=False)
            except subprocess.TimeoutExpired:
                continue
            held += done.stdout.splitlines()[-1:] == [end.encode()]
    return held / len(task["tests"])


# --8<-- [end:passes]
# --8<-- [start:same-rows]
import sqlite3


def same_rows(task, result):
    """1 if a query finds the same rows as the right one, in any order; 0.1 if it only runs."""
    database = sqlite3.connect(f"file:{task['database']}?mode=ro", uri=True)  # it can't write to the database
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # nor make another, as `VACUUM INTO` does
    steps = iter(range(1000))
    database.set_progress_handler(lambda: next(steps, None) is None, 10_000)  # nor run for ever
    try:
        found, right = (sorted(map(repr, database.execute(query))) for query in (str(result), task["query"]))
    except (sqlite3.Error, sqlite3.Warning, ValueError):  # the last two: several queries at once, a null character
        return 0.0
    finally:
        database.close()
    return 1.0 if found == right else 0.1


# --8<-- [end:same-rows]
# --8<-- [start:brief]
import re


def brief(task, result):
    """The right answer, times a factor from 1 at 50 words down to 0 at 100: a short wrong answer earns nothing."""
    words = len(str(result).split())
    return ends_with(task, result) * min(1.0, max(0.0, (100 - words) / 50))


def ends_with(task, result):
    """1 if the text ends with the answer as whole words. A list of many answers earns nothing."""
    return float(re.search(rf"\b{re.escape(str(task['answer']))}\W*$", str(result)) is not None)


# --8<-- [end:brief]
# --8<-- [start:grounded]
import re


def grounded(task, result):
    """The share of the quotations of three or more words that are in the source word for word; 0 without any."""
    quotes = [quote for quote in re.findall(r'"([^"]+)"', str(result)) if len(quote.split()) >= 3]
    return sum(quote in task["source"] for quote in quotes) / len(quotes) if quotes else 0.0


# --8<-- [end:grounded]
# --8<-- [start:judged]
import os
import re

from openai import OpenAI

RUBRIC = "Rate the answer from 0 to 10 for being right and polite. Write only the number."


def judged(task, result):
    """The score of a model at its own endpoint, from 0 to 1. An unusable verdict is an error, never a 0."""
    judge = OpenAI(base_url=os.environ["JUDGE_URL"], api_key=os.environ["JUDGE_KEY"], max_retries=3)
    asked = f"Question: {task['question']}\nAnswer: {result}"
    verdict = judge.chat.completions.create(
        model=os.environ["JUDGE_MODEL"],
        temperature=0,
        messages=[{"role": "system", "content": RUBRIC}, {"role": "user", "content": asked}],
    )
    said = verdict.choices[0].message.content or ""
    if not re.fullmatch(r"\s*(10|\d)\s*", said):
        raise ValueError(f"the judge said {said!r}")
    return int(said) / 10


# --8<-- [end:judged]

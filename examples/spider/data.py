"""Write `train.jsonl`, `val.jsonl` and `sft.jsonl` from Spider, which is read in place: `LIGHTNING_DATA`/spider.

`python data.py [--slice single|all]`. Held-out questions are about databases that no training question is about.
`--questions FILE --out FOLDER` writes `val.jsonl` alone, from other questions: a JSON array as Spider's `dev.json`, or
a row a line.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent import CHECK, WRITE, doubt, format_question, look
from database import QueryError, execute, folder, place, schema

# What 135M parameters read and write: a third of all questions with `single`, a little over half with `all`.
SLICES = {
    "single": {"schema": 700, "query": 160, "joins": False},
    "all": {"schema": 1000, "query": 200, "joins": True},
}
TRAIN_TASKS = 1200


def questions(file: Path, limits: dict[str, Any]) -> list[dict[str, str]]:
    """Return the questions of a file that a slice takes, with a right query that gives rows, and tell of the others."""
    kept, left_out = [], Counter[str]()
    for row in rows_of(file):
        if reason := unfit(row, limits):
            left_out[reason] += 1
        else:
            kept.append({"database": row["db_id"], "question": row["question"], "query": row["query"]})
    if left_out:
        print(f"{file.name}, left out: {', '.join(f'{count} {reason}' for reason, count in left_out.most_common())}")
    if not kept:
        raise SystemExit(f"{file} has no question to take.")
    return kept


def rows_of(file: Path) -> list[Any]:
    """Read a JSON array, or a row a line."""
    text = file.read_text(encoding="utf-8-sig").strip()
    lines = [text] if text.startswith("[") else [line for line in text.split("\n") if line.strip()]
    try:
        read = [json.loads(line) for line in lines]
    except ValueError as error:
        raise SystemExit(f"{file} is neither a JSON array nor a row a line: {error}") from None
    return read[0] if text.startswith("[") else read


def unfit(row: Any, limits: dict[str, Any]) -> str | None:
    """Say why a slice does not take a question; None where it does."""
    for name in ("db_id", "question", "query"):
        if not (isinstance(row, dict) and isinstance(row.get(name), str) and row[name].strip()):
            return f"without {name}"
    database, query = row["db_id"], row["query"]
    if not place(database).exists():
        return "of a database that is not there"
    upper = query.upper()
    several = " JOIN " in upper or upper.count("SELECT") > 1
    if len(query) > limits["query"] or (several and not limits["joins"]) or len(schema(database)) > limits["schema"]:
        return "longer, or of more tables, than the slice takes"
    try:
        rows = execute(database, query)
    except QueryError:
        return "whose query SQLite refuses"  # the edition's corrections are for another dialect
    return None if rows else "whose query finds nothing"  # any other that finds nothing would be right


def chats(rows: list[dict[str, str]], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Give a chat for each agent: answers of the data set, and queries spoiled so that there is something to mend."""
    by_database: dict[str, list[str]] = {}
    for row in rows:
        by_database.setdefault(row["database"], []).append(row["query"])
    for row in rows:
        text = format_question(row["database"], row["question"])
        yield _chat("writer", (WRITE, text), row["query"])
        wrong = _spoil_query(row, by_database[row["database"]], draw)
        said, failed = look(row["database"], wrong)
        turns = (WRITE, text, wrong, f"SQLite says: {said}. Write another query.")
        if draw.random() < 0.3:
            yield _chat("rewriter", turns, row["query"])
        if not failed and draw.random() < 0.5:
            right = draw.random() < 0.6
            shown = row["query"] if right else wrong
            said, _ = look(row["database"], shown)
            yield _chat("checker", (CHECK, f"{text}\n\n{doubt(shown, said)}"), "yes" if right else "no")


def _spoil_query(row: dict[str, str], others: list[str], draw: random.Random) -> str:
    """Return a query that does not answer the question: of another question, or with a column that is not there."""
    query, words = row["query"], row["query"].split()
    other = draw.choice(others)
    if draw.random() < 0.5 and other != query:
        return other
    at = draw.randrange(1, len(words)) if len(words) > 1 else 0
    words[at] = draw.choice(["name", "id", "total", "", words[at] + "s", draw.choice(words)])
    return " ".join(word for word in words if word)


def _chat(agent: str, turns: tuple[str, ...], answer: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    said = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {"agent": agent, "messages": [*said, {"role": "assistant", "content": answer}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", choices=SLICES, default="all")
    parser.add_argument("--apart", type=float, default=0.0, help="share of the databases without lessons, for RL")
    parser.add_argument("--questions", type=Path, help="other questions, to evaluate on")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.questions:
        write(given.out, val=questions(given.questions, SLICES[given.slice]))
        return
    draw = random.Random(0)
    train = questions(folder() / "train.jsonl", SLICES[given.slice])
    val = questions(folder() / "test.jsonl", SLICES[given.slice])
    assert not {row["database"] for row in train} & {row["database"] for row in val}
    draw.shuffle(train)
    draw.shuffle(val)
    databases = sorted({row["database"] for row in train})
    apart = set(draw.sample(databases, round(given.apart * len(databases))))
    lessons = list(chats([row for row in train if row["database"] not in apart], draw))
    train = [row for row in train if row["database"] in apart] if apart else train
    draw.shuffle(lessons)
    write(given.out, train=train[:TRAIN_TASKS], val=val, sft=lessons)


def write(out: Path, **files: list[dict[str, Any]]) -> None:
    for name, rows in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}.jsonl: {len(rows)}")


if __name__ == "__main__":
    main()

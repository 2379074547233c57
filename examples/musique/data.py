"""Write `corpus.jsonl`, `train.jsonl`, `val.jsonl` and `sft.jsonl` from MuSiQue, read in place.

`python data.py [--index bm25|hybrid]`. The index is over all questions' paragraphs; `hybrid` writes `corpus.npy`.
`--questions FILE --out FOLDER` writes `corpus.jsonl` and `val.jsonl` from other questions: MuSiQue's or HotpotQA's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from index import HITS, KINDS, Index, build

Number = dict[tuple[str, str], int]


def read(part: str) -> list[dict[str, Any]]:
    if not (root := os.environ.get("LIGHTNING_DATA")):
        raise SystemExit("LIGHTNING_DATA is not set: the folder that has musique/musique_train_subset.jsonl.")
    text = (Path(root) / f"musique/musique_{part}_subset.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n") if line]


def own(file: Path) -> list[dict[str, Any]]:
    """Read questions as MuSiQue or HotpotQA writes them, a JSON array or a row a line, and tell what is left out."""
    text = file.read_text(encoding="utf-8-sig").strip()
    lines = [text] if text.startswith("[") else [line for line in text.split("\n") if line.strip()]
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise SystemExit(f"{file} is neither a JSON array nor a row a line: {error}") from None
    rows = rows[0] if text.startswith("[") else rows
    kept, left_out = [], Counter[str]()
    for row in rows:
        try:
            kept.append(whole(row))
        except (KeyError, TypeError, ValueError) as error:
            left_out[f"without {error.args[0]}" if isinstance(error, KeyError) else f"({error})"] += 1
    if left_out:
        print(f"{file.name}, left out: {', '.join(f'{count} {reason}' for reason, count in left_out.most_common())}")
    if not kept:
        raise SystemExit(f"{file} has no question to take.")
    return kept


def whole(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as MuSiQue writes it.

    Raises:
        KeyError: it has no question, no right answer or no paragraphs: it can't be asked or not be scored.
    """
    row = row if "paragraphs" in row else from_hotpot(row)
    for name in ("question", "answer", "paragraphs"):
        if row[name] in (None, "", []):
            raise KeyError(name)
    for paragraph in row["paragraphs"]:
        _key(paragraph)
    return row


def from_hotpot(row: dict[str, Any]) -> dict[str, Any]:
    """Write a row of HotpotQA as MuSiQue's."""
    context, facts = row["context"], row.get("supporting_facts") or ()
    if isinstance(context, dict):  # copies of the data set have columns
        context = zip(context["title"], context["sentences"], strict=True)
        facts = zip(facts["title"], facts["sent_id"], strict=True) if facts else ()
    needed = {title for title, _ in facts}
    paragraphs = [
        {"title": title, "paragraph_text": " ".join(map(str.strip, said)), "is_supporting": title in needed}
        for title, said in context
    ]
    return {"question": row["question"], "answer": row["answer"], "paragraphs": paragraphs}


def corpus(questions: list[dict[str, Any]]) -> tuple[list[dict[str, str]], Number]:
    """Return all paragraphs, each once, and the number of each."""
    number: Number = {}
    for row in questions:
        for paragraph in row["paragraphs"]:
            number.setdefault(_key(paragraph), len(number))
    return [{"title": title, "text": text} for title, text in number], number


def _key(paragraph: dict[str, Any]) -> tuple[str, str]:
    return paragraph["title"], paragraph["paragraph_text"]


def hops(row: dict[str, Any], number: Number) -> list[dict[str, Any]]:
    """Return the search questions of a question, each with its answer and the paragraph that has it."""
    by_place = {p["idx"]: number[_key(p)] for p in row["paragraphs"]}
    steps: list[dict[str, Any]] = []
    for step in row["question_decomposition"]:
        query = step["question"].replace(" >> ", " ")
        for place in range(len(steps), 0, -1):
            query = query.replace(f"#{place}", steps[place - 1]["answer"])
        steps.append({"query": query, "answer": step["answer"], "paragraph": by_place[step["paragraph_support_idx"]]})
    return steps


def lessons(row: dict[str, Any], number: Number, known: Index) -> Iterator[dict[str, Any]]:
    """Give chats for both agents: of the question, and of its first search question, being a question in itself.

    The latter is for the answerer alone: from many such lessons a searcher learns to search once. A lesson ends where
    the index does not show what the next search takes for granted: it would teach to invent.
    """
    steps = hops(row, number)
    for question, answer, taken in ((row["question"], row["answer"], steps), (steps[0]["query"], None, steps[:1])):
        found, searched = [], []
        for step in taken:
            numbers = known.search(step["query"], HITS)
            found.extend(n for n in numbers if n not in found)
            searched.append((step["query"], numbers))
            if step["answer"].lower() not in known.shown(step["paragraph"]).lower() or step["paragraph"] not in found:
                break
        else:
            if len(searched) > 1:
                yield searcher_chat(question, searched)
            yield answerer_chat(question, found, answer or steps[0]["answer"])


def searcher_chat(question: str, searched: list[tuple[str, list[int]]]) -> dict[str, Any]:
    from agent import SEARCH, format_paragraphs, search
    from agents.models.chatcmpl_converter import Converter

    messages: list[dict[str, Any]] = [{"role": "system", "content": SEARCH}, {"role": "user", "content": question}]
    for place, (query, numbers) in enumerate(searched):
        call = {"name": "search", "arguments": json.dumps({"query": query})}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call_{place}", "type": "function", "function": call}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "content": format_paragraphs(numbers)})
    messages.append({"role": "assistant", "content": "done"})
    return {"agent": "searcher", "messages": messages, "tools": [Converter.tool_to_openai(search)]}


def answerer_chat(question: str, found: list[int], answer: str) -> dict[str, Any]:
    from agent import ANSWER, format_question

    turns = (
        ("system", ANSWER),
        ("user", format_question(found, question)),
        ("assistant", f"<answer>{answer}</answer>"),
    )
    return {"agent": "answerer", "messages": [{"role": role, "content": text} for role, text in turns]}


def tasks(rows: list[dict[str, Any]], number: Number) -> list[dict[str, Any]]:
    return [
        {
            "question": row["question"],
            "answers": [
                str(right) for right in (row["answer"], *(row.get("answer_aliases") or ())) if right not in (None, "")
            ],
            "support": sorted({number[_key(p)] for p in row["paragraphs"] if p.get("is_supporting")}),
        }
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", choices=KINDS, default="bm25")
    parser.add_argument("--questions", type=Path, help="other questions to evaluate on, with an index of their own")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.questions and not given.out:
        parser.error("--questions needs --out, or the index would be another than that of train.jsonl.")
    given.out = given.out or Path(__file__).parent
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["MUSIQUE_CORPUS"] = str(given.out)
    train, held = ([], own(given.questions)) if given.questions else (read("train"), read("dev"))
    rows, number = corpus([*train, *held])
    known = build(rows, given.index, given.out)
    print(f"corpus.jsonl: {len(rows)}")
    chats = [chat for row in train for chat in lessons(row, number, known)]
    random.Random(0).shuffle(chats)
    files = {"train": tasks(train, number), "val": tasks(held, number), "sft": chats}
    for name, lines in {"val": files["val"]}.items() if given.questions else files.items():
        (given.out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name}.jsonl: {len(lines)}")


if __name__ == "__main__":
    main()

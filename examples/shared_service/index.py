"""A stand-in for something heavy that all agents use: a vector index, a pool of browsers, a database of simulators.

It takes long to load and much memory, so there must be one of it on a machine or in a cluster, not one in each worker.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

TEXTS = (
    "The calculator example trains a caller and an answerer.",
    "A rollout is one execution of the agent on a task.",
    "An attempt is one try at a rollout; a retry is a new attempt.",
    "A group holds the rollouts whose returns are compared.",
)


class Index:
    """Finds the text that shares most words with a question."""

    def __init__(self) -> None:
        if log := os.environ.get("INDEX_LOADS"):  # so that the test can count how often it was loaded
            with Path(log).open("a") as file:
                file.write(f"{os.getpid()}\n")
        self._words = [Counter(text.lower().strip(".").split()) for text in TEXTS]

    def search(self, question: str) -> str:
        """Return the best text."""
        asked = Counter(question.lower().strip("?").split())
        scores = [(sum((words & asked).values()), -place) for place, words in enumerate(self._words)]
        return TEXTS[-max(scores)[1]]

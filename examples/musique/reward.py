"""The paper's reward of an answer: 0.1 for its format, 0.9 times its word F1."""

from __future__ import annotations

import re
import string
from collections import Counter

WHOLE = {"", "yes", "no", "noanswer"}  # right as a whole or not at all, as HotpotQA counts them


def answer_in(text: str) -> str | None:
    """Return what stands between the tags; None unless there is exactly one such answer."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return answers[0].strip() if len(answers) == 1 and answers[0].strip() else None


def words(text: str) -> list[str]:
    """Return the words of an answer as SQuAD counts them: small letters, no punctuation, no articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in {"a", "an", "the"}]


def word_f1(said: str, right: str) -> float:
    one, other = words(said), words(right)
    if {" ".join(one), " ".join(other)} & WHOLE:
        return float(one == other)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other)) if common else 0.0


def score(said: str, answers: list[str]) -> float:
    """Return the paper's reward: 0.1 for the format and 0.9 times the word F1 with the nearest right answer."""
    answer = answer_in(said)
    return 0.0 if answer is None else 0.1 + 0.9 * max(word_f1(answer, right) for right in answers)

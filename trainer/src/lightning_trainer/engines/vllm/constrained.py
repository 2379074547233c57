"""Answers that must follow a grammar: which of their tokens the policy chose, and with what log-probability.

vLLM removes the tokens that a grammar forbids before it computes log-probabilities, so it reports those among the
allowed tokens. The policy's own come from a second request, which reads prompt and answer. Their ratio is the
probability of all allowed tokens: if it is about 1, the grammar left the choice to the policy, and the token is
trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_trainer.gateway.engine import SampledPiece, Sampling

# a larger forbidden probability counts as steering; in bfloat16, less is within the noise of two passes
_FORBIDDEN: Final = 0.05


def marks(sampling: Sampling) -> bool:
    """Whether the ratio shows which tokens were steered: only a grammar changes the distribution."""
    plain = replace(sampling, grammar=None, max_tokens=None, stop=(), seed=None)
    return sampling.grammar is not None and plain == Sampling()


def scoring_request(model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request for the log-probabilities of all tokens but the first, at temperature 1."""
    return {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def read_scores(reply: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Parse the answer to `scoring_request`.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it has another form.
    """
    scores = reply["choices"][0]["prompt_logprobs"]
    return [float(at[str(token)]["logprob"]) for at, token in zip(scores[1:], tokens[1:], strict=True)]


def mark_steered(pieces: Sequence[SampledPiece], own: Sequence[float]) -> list[SampledPiece]:
    """Return an answer with the policy's own log-probabilities, and with the tokens marked that a grammar steered.

    Args:
        pieces: with log-probabilities among the allowed tokens.
        own: the policy's, of the first tokens of the answer; tokens without one count as steered.
    """
    known = [*own, *[math.nan] * (sum(len(piece.token_ids) for piece in pieces) - len(own))]
    marked, first = [], 0
    for piece in pieces:
        mine = known[first : first + len(piece.token_ids)]
        first += len(mine)
        # written so that a NaN log-probability counts as steered
        free = [
            1.0 - math.exp(logprob - among) <= _FORBIDDEN for logprob, among in zip(mine, piece.logprobs, strict=True)
        ]
        kept = tuple(
            among if math.isnan(logprob) else logprob for logprob, among in zip(mine, piece.logprobs, strict=True)
        )
        marked.append(replace(piece, logprobs=kept, steered=tuple(not each for each in free)))
    return marked

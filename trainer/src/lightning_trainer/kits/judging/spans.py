"""What a judge's spans are called, and what stands in them."""

from __future__ import annotations

from typing import Final

EVALUATE: Final = "evaluate"  # the operation
# Of OpenTelemetry's conventions for evaluations.
NAME: Final = "gen_ai.evaluation.name"
SCORE: Final = "gen_ai.evaluation.score.value"
EXPLANATION: Final = "gen_ai.evaluation.explanation"
ATTEMPTS: Final = "lightning.judge.attempts"  # of what was asked: those that were told
ASKED: Final = "lightning.judge.asked"  # of a verdict: the traces in which it was asked for

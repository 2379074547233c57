"""The names and attributes of a judge's spans."""

from __future__ import annotations

from typing import Final

EVALUATE: Final = "evaluate"  # the operation
# Of OpenTelemetry's conventions for evaluations.
NAME: Final = "gen_ai.evaluation.name"
SCORE: Final = "gen_ai.evaluation.score.value"
EXPLANATION: Final = "gen_ai.evaluation.explanation"
ATTEMPTS: Final = "lightning.judge.attempts"  # of a judge's call: the attempts in it
ASKED: Final = "lightning.judge.asked"  # of a verdict: the traces of the judge's calls

"""Check that the engine that samples and the trainer that learns have the same weights, by their log-probabilities.

A weight sync that loads a tensor wrongly raises no error anywhere. It shows here, at the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_spans.errors import LightningError

LEAST: Final = 0.99
_SAME: Final = 0.01  # nats; below this mean difference, a correlation says nothing about the weights


class WeightsError(LightningError):
    """The engine does not have the trainer's weights, or they did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The similarity of two sets of log-probabilities for the same tokens.

    Attributes:
        correlation: Pearson's, over tokens; 1 if neither varies.
        gap: mean absolute difference in nats.
        tokens: how many were compared.
    """

    correlation: float
    gap: float
    tokens: int

    def metrics(self) -> dict[str, float]:
        """Return the correlation and the gap by name, for logs."""
        return {"logprob_correlation": self.correlation, "logprob_gap": self.gap}

    def check(self) -> None:
        """Check that both have the same weights.

        Raises:
            WeightsError: the correlation is below 0.99, and the difference is more than rounding.
        """
        if self.tokens and self.correlation < LEAST and self.gap > _SAME:
            raise WeightsError(
                f"the log-probabilities of vLLM and of the trainer correlate at {self.correlation:.4f} only (least:"
                f" {LEAST}), with a mean difference of {self.gap:.3f} nats over {self.tokens} tokens: vLLM does not"
                " sample from the weights that are trained. Training stops before it harms the policy. Look for an"
                " error of the weight transfer in the log; try rollout dtype float32, and a model without tied"
                " embeddings."
            )


def agreement(engine_T: NDArray[np.floating], trainer_T: NDArray[np.floating]) -> Agreement:
    """Compare log-probabilities of the same tokens.

    Args:
        engine_T: (T,) as recorded when sampled.
        trainer_T: (T,) under the trainer's weights.
    """
    engine_T, trainer_T = engine_T.astype(np.float64), trainer_T.astype(np.float64)
    if not len(engine_T):
        return Agreement(1.0, 0.0, 0)
    gap = float(np.abs(engine_T - trainer_T).mean())
    if len(engine_T) < 2 or engine_T.std() == 0.0 or trainer_T.std() == 0.0:
        return Agreement(1.0 if gap <= _SAME else 0.0, gap, len(engine_T))
    return Agreement(float(np.corrcoef(engine_T, trainer_T)[0, 1]), gap, len(engine_T))

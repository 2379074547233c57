"""The table `teacher_options` of a configuration: what the self-teacher reads, and what is learned from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from lightning_trainer.choices import Divergence, TeacherWeights
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.config.tables import read_table
from lightning_trainer.options.record import split_text

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig

PLACE: Final = "{told}"
HINT: Final = "An earlier answer to the above had this result:\n\n{told}\n\nAnswer again, with this in mind."


class SelfOptions(CheckedRecord):
    """Options of the policy as its own teacher (SDPO, arXiv 2601.20802)."""

    told: Annotated[tuple[Literal["errors", "later", "best"], ...], BeforeValidator(split_text)] = Field(
        ("errors", "later"), min_length=1
    )
    """What the teacher reads about a call: `errors` of the tools that it called; if none of them failed, the error of
    the first tool that failed `later` in the attempt; the `best` answer of the group for the same call, if that rollout
    had a higher reward."""
    top_k: int = Field(100, ge=0)
    """Number of most probable tokens of the policy whose probabilities are compared at each position; all other tokens
    count as one more. 0 compares only the sampled tokens."""
    divergence: Divergence = "reverse"
    """Divergence of the policy from its teacher that is minimised."""
    weights: TeacherWeights = "newest"
    """Weights of the teacher: the policy's `newest`, those that the run started from (`base`), or their exponential
    moving average over the steps (`ema`)."""
    ema_decay: float = Field(0.99, gt=0, lt=1)
    """Share of the average that stays in each step, for weights = ema."""
    weight: float = Field(1.0, gt=0)
    """Weight of the teacher relative to the loss of the algorithm."""
    hint: str = HINT
    """Message added to the prompt; {told} is replaced by what the teacher reads."""
    max_chars: int = Field(2000, ge=20)
    """Maximum characters of each item; the middle of longer ones is left out."""


def read_self(config: TrainConfig) -> SelfOptions:
    """Read the options of the self-teacher.

    Raises:
        ConfigError: an option is unknown or wrong, or contradicts the algorithm.
    """
    from lightning_trainer.rl.algorithms import algorithm_by_name

    options = read_table(SelfOptions, "teacher_options", config.teacher_options)
    refuse(
        {
            f"teacher_options: the hint has no {PLACE}, so the teacher would get nothing. Put it in the right place.": (
                PLACE not in options.hint
            ),
            "teacher_options: weight is the weight of the teacher relative to the rewards, and algorithm = distil uses"
            " none. Leave it out, or choose another algorithm.": config.algorithm == "distil" and options.weight != 1.0,
            f"teacher_options: weights = {options.weights} needs backend = torch, which keeps such weights. Backend ="
            f" {config.backend} does not: leave weights out.": (
                options.weights != "newest" and config.backend != "torch"
            ),
            "teacher_options: ema_decay is an option of weights = ema. Set weights, or leave ema_decay out.": (
                options.weights != "ema" and "ema_decay" in config.teacher_options
            ),
            "teacher_options: top_k = 0 has no divergence. Leave divergence out, or set top_k.": (
                options.top_k == 0 and "divergence" in config.teacher_options
            ),
            f"teacher_options: top_k = 0 adds to advantages, and algorithm = {config.algorithm} makes them in the"
            " update. Set top_k to 1 or more.": (options.top_k == 0 and algorithm_by_name(config.algorithm).critic),
        }
    )
    return options

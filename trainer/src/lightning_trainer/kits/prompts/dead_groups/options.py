"""The table `prompt_options` of a configuration: when to seek an instruction, at what cost, and how to learn it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import Field

from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.config.tables import read_table
from lightning_trainer.rl.algorithms import algorithm_by_name

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig


class DeadGroupRules(CheckedRecord):
    """Options of dead groups."""

    visits: int = Field(2, ge=1)
    """Number of consecutive steps with a task in which all of its rollouts had the lowest reward, after which an
    instruction is proposed."""
    tasks: int = Field(4, ge=1)
    """Maximum number of tasks per step that are sampled under an instruction."""
    rollouts: int | None = Field(None, ge=1)
    """Rollouts of each of these tasks. Default: group_size."""
    proposals: int = Field(16, ge=1)
    """Maximum number of instructions that the model proposes in the run."""
    tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of proposals and of rollouts under an instruction; when it is reached, no further one
    starts. Default: no limit."""
    solved: float | None = None
    """Minimum reward for learning from a rollout under an instruction. Default: any reward above the lowest."""
    weight: float = Field(1.0, gt=0)
    """Advantage of each token of a distilled answer."""


def read_options(config: TrainConfig) -> DeadGroupRules:
    """Read the options of dead groups.

    Raises:
        ConfigError: an option is unknown or wrong, or contradicts another one.
    """
    options = read_table(DeadGroupRules, "prompt_options", config.prompt_options)
    refuse(
        {
            'with_prompts needs gepa, which is not installed here. Run: pip install "lightning-trainer[prompts]"': (
                find_spec("gepa") is None
            ),
            "with_prompts looks for tasks that no rollout solves, and a judge only ranks rollouts. Give a reward"
            " function, or let the agent return the reward.": config.uses_judge,
            f"algorithm = {config.algorithm} computes advantages in the update, so with_prompts can't give them to"
            " answers. Use grpo or another algorithm without a value head.": algorithm_by_name(config.algorithm).critic,
            "algorithm = distil learns from no rewards, so no task is unsolved for it. Leave with_prompts out.": (
                config.algorithm == "distil"
            ),
            "teacher = self reads the calls of a batch, and with_prompts adds answers of other rollouts. Leave one of"
            " them out.": config.teacher is not None,
            "with_prompts reads the prompt of an agent from several tasks. Set batch_size to 2 or more.": (
                config.batch_size < 2
            ),
        }
    )
    return options

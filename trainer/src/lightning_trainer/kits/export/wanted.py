"""The options of an export, and the reasons why a call is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Final, Literal, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_trainer.lineage.permits import Permits
from lightning_trainer.reasons.reason import Reason

Format: TypeAlias = Literal["sft", "dpo", "tokens", "openinference"]
FORMATS: Final[tuple[Format, ...]] = ("sft", "dpo", "tokens", "openinference")


class UnexportedReason(Reason):
    """Why a call is in no line. Those of `UntrainedReason` are used if they mean the same."""

    NOT_ENDED = "attempt has not ended"
    OTHER_ATTEMPT = "a later attempt of its rollout counts"
    VALIDATION = "of a validation: --validation takes these, too"
    NO_REWARD = "no reward"
    LOW_REWARD = "reward below --min-reward"
    NOT_BEST = "not among the best of its group"
    NO_MESSAGES = "its request contains no chat messages"
    NOT_TEXT = "a message contains more than text"
    NO_ANSWER = "no answer recorded"
    ELSEWHERE = "its request refers to earlier messages by an id and does not contain them"
    NO_FUNCTION = "a tool or a call that is not a function"
    CUT = "answer truncated at max_tokens"
    FILTERED = "answer cut by a content filter"
    LEFT = "the agent stopped reading the answer before its end"
    HALF = "a text with an unpaired surrogate, which UTF-8 can't encode"
    TWICE = "the same line is already in the file"
    SEEN_IN_TRAINING = "held out, but its prompt is in the training part"
    ALONE = "its prompt has no other answer in its group"
    TIED = "no answer to its prompt earned another reward"
    CLOSE = "difference in reward below --margin"
    SAME_ANSWER = "the better and the worse answer are the same"
    NOT_PAIRED = "between the best and the worst of its prompt"
    NOT_CHOSEN = "it has none of the named agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSelection:
    """The options of an export.

    Attributes:
        format: of the lines.
        agents: names or globs; None: all, including calls without a known agent.
        min_reward: minimum reward of an agent in an attempt; None: any, or none.
        best: number of attempts of each group and agent to keep, by reward; None: all.
        sources: only rewards of these sources count; None: all.
        origin: only traces of this origin: ``training``, ``live``, or a label.
        rollout_ids: only these rollouts; None: all, and traces without one.
        validation: whether rollouts of validations are included if nothing is held out.
        held_out: share of the tasks whose lines go into a separate file.
        task_fields: fields that identify a task; None: all.
        all_pairs: whether each better answer makes a pair with each worse one, and not only the best with the worst.
        margin: minimum difference in reward of a pair.
        ids: whether lines of `sft` and `dpo` contain the tokens, if they were recorded.
        some_silent: whether some of the agents, if not misspelt, may be missing from these rollouts.
        permits: which live traces may be used.

    Raises:
        ConfigError: a value is out of range, or has no effect with this format.
    """

    format: Format
    agents: tuple[str, ...] | None = None
    min_reward: float | None = None
    best: int | None = None
    sources: tuple[str, ...] | None = None
    origin: str | None = None
    rollout_ids: tuple[str, ...] | None = None
    validation: bool = False
    held_out: float = 0.0
    task_fields: tuple[str, ...] | None = None
    all_pairs: bool = False
    margin: float = 0.0
    ids: bool = True
    some_silent: bool = False
    permits: Permits = field(default_factory=Permits)

    def __post_init__(self) -> None:
        pairs, spans = self.format == "dpo", self.format == "openinference"
        checks = {
            f"format must be one of {', '.join(FORMATS)}": self.format in FORMATS,
            "agents is empty: name some, or leave it out": self.agents != (),
            "best must be at least 1": self.best is None or self.best >= 1,
            "split must lie between 0 and 1": 0 <= self.held_out < 1,
            "min-reward must be a number": self.min_reward is None or isfinite(self.min_reward),
            "margin must be 0 or more": self.margin >= 0,
            "split-by groups tasks for --split: also give --split": not self.task_fields or self.held_out,
            "pairs and margin are for --format dpo": pairs or not (self.all_pairs or self.margin),
            "--format dpo already pairs the best with the worst: leave --best out": not pairs or self.best is None,
            "split is for training lines, not for --format openinference": not spans or not self.held_out,
            "best is for training lines, not for --format openinference": not spans or self.best is None,
        }
        for message, fine in checks.items():
            if not fine:
                raise ConfigError(f"export: {message}.")

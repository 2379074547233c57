"""The options of a search: what to improve, with which methods, and for how many tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from lightning_spans.errors import ConfigError
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.loading import load_options
from lightning_trainer.config.passwords import with_passwords, without_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve.fields import ImproveFields
from lightning_trainer.kits.sft.config import RoundsConfig
from lightning_trainer.models import look
from lightning_trainer.policies import ADAPTERS_NAME, BASE, SHARED_ADAPTER
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.runner.target import JUDGE
from lightning_trainer.session.answers import Endpoint
from lightning_trainer.work import Work

PROMPTS: Final = "prompts"
SFT: Final = "sft"
RL: Final = "rl"
DISTIL: Final = "distil"
METHODS: Final = (PROMPTS, SFT, RL, DISTIL)
SFT_RL: Final = "sft+rl"  # RL from the weights of rejection sampling
OPTIONS_NAME: Final = "improve.json"  # in the folder: the options
_OWN: Final = ("budget", "samples", "sft", "distil")


class ImproveConfig(ImproveFields, CheckedRecord):
    """The options of a search.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    train: TrainConfig
    """Agents, tasks, held-out tasks, model and the other options of a training run."""
    reflect: Endpoint | None = None
    """The model that proposes prompts. Default: prompts are not optimised."""
    distil: dict[str, Any] = Field(default_factory=dict)
    """Further options of distillation: its `teacher`, and `teacher_options` of the teacher `self`."""

    @property
    def load(self) -> dict[str, Any]:
        """Options for loading the model if it only samples."""
        return {"tool_format": None, **load_options(self.train)}  # the same for each method

    @property
    def followers(self) -> dict[str, str]:
        """By method: the one that continues from its weights in the last rung, if it is the best."""
        return {SFT: SFT_RL} if RL in self.methods else {}

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Names and globs of agents that the unchanged model answers, and that are not improved."""
        return tuple(agent for agent, value in self.train.policies.items() if value == BASE)

    def check(self) -> None:
        """Reject invalid options before anything is started.

        Raises:
            ConfigError: an option is invalid; the message says what to do.
        """
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            wrong = f"unknown method {unknown[0]!r}" if unknown else "no method is named"
            raise ConfigError(f"{wrong}. Use one or more of: {', '.join(METHODS)}.")
        if self.train.judge or self.train.reward == JUDGE:
            raise ConfigError(
                "a judge ranks rollouts of one task against each other, so its scores can't be compared with those of"
                " the unchanged agents. Give a reward that scores one rollout by itself, --reward module:function, and"
                " leave --judge out."
            )
        if self.train.backend != "torch":
            raise ConfigError(f"improve trains and samples in this process, and {self.train.backend} does not.")
        if RL in self.methods and self.train.algorithm == DISTIL:
            raise ConfigError("algorithm = distil is the method distil. Name it with --methods, and RL's algorithm.")
        of_teams = ("agent_weight", "schedule", "opponents", "rollback_on_cliff")
        if given := [name for name in of_teams if getattr(self.train, name)]:
            raise ConfigError(f"{given[0]}: improve trains one agent at a time, and this is for several. Leave it out.")
        if self.train.lr_schedule != "constant":
            raise ConfigError(
                f"lr_schedule = {self.train.lr_schedule} falls over the steps of one run, and the steps of improve come"
                " in several parts. Leave it out."
            )
        if DISTIL in self.methods and self.distil.get("teacher") is None:
            raise ConfigError("distil needs a teacher: --teacher MODEL, MODEL=URL or self.")
        self._check_prompts()
        self._check_model()

    def _check_prompts(self) -> None:
        if PROMPTS in self.methods and self.reflect is None:
            raise ConfigError("prompts needs a model that proposes them: --reflect [MODEL=]URL.")
        if PROMPTS in self.methods and find_spec("gepa") is None:
            raise ConfigError('prompts needs GEPA: pip install "lightning-trainer[prompts]".')

    def _check_model(self) -> None:
        folder = look(self.train.model).folder
        if folder is not None and (folder / ADAPTERS_NAME).is_file():
            raise ConfigError(
                f"{self.train.model} has adapters of agents, and improve gives each agent a new one. Give the model"
                " that they belong to."
            )
        if any(value not in {BASE, SHARED_ADAPTER} for value in self.train.policies.values()):
            raise ConfigError(
                "improve gives each agent its own adapter. Name the agents to improve with --agents, and with --policy"
                " only those that the unchanged model answers, such as checker=base."
            )
        if not self.train.lora_rank:
            raise ConfigError("improve trains an adapter for each agent. Give --lora-rank 1 or more, or leave it out.")

    def to_json(self) -> dict[str, Any]:
        """Return the options as stored in the folder, without keys."""
        reflect = None if self.reflect is None else {"url": self.reflect.url, "model": self.reflect.model}
        options = {name: getattr(self, name) for name in _OWN}
        whole = {"train": self.train.model_dump(mode="json"), "methods": self.methods, **options, "reflect": reflect}
        return dict(without_passwords(whole))

    def write(self, folder: Path) -> None:
        """Write the options into the folder."""
        write_atomically(folder / OPTIONS_NAME, (json.dumps(self.to_json(), indent=2, default=str) + "\n").encode())


def read_stored(folder: Path) -> dict[str, Any]:
    """Read the file that `ImproveConfig.write` wrote, as JSON.

    Raises:
        ConfigError: there is nothing to resume.
    """
    try:
        return dict(json.loads((folder / OPTIONS_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder} has nothing to resume: {error}. Leave --resume out.") from None


def read_options(folder: Path, reflect_key: str | None, again: Mapping[str, Any]) -> ImproveConfig:
    """Read the file that `ImproveConfig.write` wrote.

    Args:
        folder: of the search.
        reflect_key: key of the model that proposes prompts.
        again: options in the form of the file, from which those that had a password are taken.

    Raises:
        ConfigError: there is nothing to resume, it has another version, or an option that had a password is not given
            again.
    """
    values = with_passwords(read_stored(folder), again)
    try:
        train = {name: value for name, value in values["train"].items() if value is not None}
        reflect = None if values["reflect"] is None else Endpoint(**values["reflect"], key=reflect_key)
        options = {name: values[name] for name in _OWN}
        return ImproveConfig(train=TrainConfig(**train), methods=tuple(values["methods"]), reflect=reflect, **options)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} has nothing to resume: {error}. Leave --resume out.") from None


def rounds_options(config: ImproveConfig, own: Mapping[str, Any]) -> RoundsConfig:
    """Return the options of rounds: those of the run for program, training and sampling, and the rounds' own.

    Args:
        config: options of the search; ``--sft`` takes precedence over options of the run.
        own: options of these rounds, which take precedence over all others.
    """
    train = config.train
    same = (
        "target", "command", "reward", "backend_options", "chat_template", "system_messages", "dtype", "device",
        "workers", "concurrency", "isolate", "timeout_s", "max_attempts", "temperature", "name_by", "failed",
        "timeouts", "lora_rank", "lora_alpha", "base_bits", "tool_format", *(each.name for each in fields(Work)),
    )  # fmt: skip
    values = {name: getattr(train, name) for name in same}
    learner = dict(train.backend_options)
    values |= {"samples": train.group_size, "answer_tokens": train.max_tokens}
    values["weight_decay"] = learner.pop("weight_decay", None)  # an option of its own in rounds
    if train.max_model_len is not None:
        learner = {"max_model_len": train.max_model_len, **learner}
    values["backend_options"] = learner
    return RoundsConfig(**{**{n: v for n, v in values.items() if v is not None}, **config.sft, **own})

"""What is compared: the options of a training run, which ways, and what each may spend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.runner.target import JUDGE
from lightning_trainer.session.answers import Endpoint

METHODS: Final = ("rl", "sft", "prompts")
_LOADING: Final = ("chat_template", "device", "dtype", "max_model_len", "system_messages")
_GENERATING: Final = ("slots", "generate_threads", "threads")  # of the backend's own options
ASKED_NAME: Final = "compare.json"  # in the comparison's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """What to compare.

    Attributes:
        train: agents, tasks, held-out tasks, model and whatever else a training run takes.
        budget: rollouts on training tasks that each way may spend.
        methods: the ways: ``rl`` is training, ``sft`` rejection sampling, ``prompts`` looks for better prompts.
        samples: executions of each held-out task, of each side.
        rounds: of rejection sampling.
        sft: further options of it, see `RoundsConfig`.
        reflect: the model that proposes prompts; None where ``prompts`` is not among the ways.
    """

    train: TrainConfig
    budget: int
    methods: tuple[str, ...] = ("rl", "sft")
    samples: int = 4
    rounds: int = 2
    sft: Mapping[str, Any] = field(default_factory=dict)
    reflect: Endpoint | None = None

    @property
    def load(self) -> dict[str, Any]:
        """Options with which the model is loaded where it is sampled and does not learn."""
        own = {name: value for name, value in self.train.backend_options.items() if name in _GENERATING}
        own |= {name: value for name in _LOADING if (value := getattr(self.train, name)) not in (None, "auto")}
        return {**own, "tool_format": self.train.tool_format}  # on every side, whatever the model's own run had

    @property
    def step(self) -> int:
        """Most rollouts of a training step, with those of forks and of groups that are drawn anew."""
        train = self.train
        return train.batch_size * train.group_size * (1 + train.resample) + train.fork_count

    @property
    def _told_step(self) -> str:
        train, forks = self.train, self.train.fork_count
        again = f", and as many in up to {train.resample} rounds of --resample" if train.resample else ""
        more = f", and up to {forks} forks" if forks else ""
        return f"--batch-size {train.batch_size} times --group-size {train.group_size}{again}{more}"

    @property
    def answered(self) -> tuple[str, ...] | None:
        """Agents whose calls the model answers on every side, as in training; None: all that have a name."""
        return tuple(self.train.policies) or self.train.agents

    def check(self) -> None:
        """Refuse what can't be compared.

        Raises:
            ConfigError: says what, and what to do.
        """
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            named = f"unknown method {unknown[0]!r}" if unknown else "no method is named"
            raise ConfigError(f"{named}. Use one or more of: {', '.join(METHODS)}.")
        if self.train.judge or self.train.reward == JUDGE:
            raise ConfigError(
                "a comparison can't be measured by a judge: it ranks rollouts of a task against each other, and never"
                " sees those of two sides at once. Give a reward that says how good one rollout is, --reward"
                " module:function, and leave --judge out."
            )
        if self.train.val is None:
            raise ConfigError("a comparison is measured on held-out tasks: give them with --val FILE.")
        if self.train.backend != "torch":
            raise ConfigError(f"a comparison trains and samples in this process, and {self.train.backend} does not.")
        if "rl" in self.methods and self.budget < self.step:
            raise ConfigError(
                f"--budget {self.budget} is less than the rollouts of one training step, {self.step}"
                f" ({self._told_step}). Give more, or make it smaller."
            )
        if "sft" in self.methods and self.budget < self.rounds * self.train.group_size:
            raise ConfigError(
                f"--budget {self.budget} is too little for {self.rounds} rounds with {self.train.group_size} samples of"
                " a task (--group-size). Give more, or fewer --rounds."
            )
        if "prompts" in self.methods:
            if self.reflect is None:
                raise ConfigError("prompts needs a model that proposes them: --reflect [MODEL=]URL.")
            if find_spec("gepa") is None:
                raise ConfigError('prompts needs GEPA: pip install "lightning-trainer[prompts]".')

    def to_json(self) -> dict[str, Any]:
        """Return it as kept in the comparison's folder, without a key."""
        reflect = None if self.reflect is None else {"url": self.reflect.url, "model": self.reflect.model}
        own = {"budget": self.budget, "methods": self.methods, "samples": self.samples, "rounds": self.rounds}
        whole = {"train": self.train.model_dump(mode="json"), **own, "sft": dict(self.sft), "reflect": reflect}
        return dict(without_passwords(whole))


def read(folder: Path, reflect_key: str | None) -> CompareConfig:
    """Read what `CompareConfig.to_json` gave.

    Raises:
        ConfigError: there is no comparison, or it is of another version.
    """
    try:
        values: dict[str, Any] = json.loads((folder / ASKED_NAME).read_text(encoding="utf-8"))
        train = {name: value for name, value in values["train"].items() if value is not None}
        reflect = None if values["reflect"] is None else Endpoint(**values["reflect"], key=reflect_key)
        own = {"train": TrainConfig(**train), "methods": tuple(values["methods"]), "reflect": reflect}
        return CompareConfig(**{**{name: values[name] for name in ("budget", "samples", "rounds", "sft")}, **own})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"there is no comparison to go on with in {folder}: {error}. Leave --resume out.") from None

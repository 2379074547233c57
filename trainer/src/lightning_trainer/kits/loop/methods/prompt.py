"""`[train] method = "prompts"`: optimise the agent's system prompt, for a model of any server or one loaded here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.loop.methods.method import MODEL, PROMPTS, RoundInput
from lightning_trainer.kits.loop.record import StageResult
from lightning_trainer.kits.prompts import journal
from lightning_trainer.kits.prompts.optimise import optimise
from lightning_trainer.kits.prompts.options import PromptsConfig
from lightning_trainer.kits.prompts.reflection import read_reflection
from lightning_trainer.lineage.blocks import search_folder
from lightning_trainer.report.progress import Progress
from lightning_trainer.session.answers import Endpoint, Subject, read_subject

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig

_OWNED: Final = ("target", "command", "data", "val", "out", "agents", "subject", "answered")
_OF_SEARCH: Final = (
    "data", "agents", "reflect", "budget", "out", "leave_silent", "val", "subject", "answered", "tokens", "minibatch",
    "seed",
)  # fmt: skip


class PromptMethod:
    """Runs `prompts` for the one agent, whose calls `model` answers."""

    needs_base = True
    forecast_by = None

    def check(self, config: LoopConfig) -> None:
        """Reject invalid options, without a request to any model."""
        options = config.method_options
        if owned := [name for name in options if name in _OWNED]:
            raise ConfigError(f"train.{owned[0]}: the loop sets this option. Leave it out.")
        for name, example in (("model", "gpt=https://api.example/v1"), ("reflect", "large=https://api.example/v1")):
            if not isinstance(options.get(name), str):
                raise ConfigError(f'train.{name} is missing. Write {name} = "{example}".')
        given = RoundInput(data=Path("train.jsonl"), out=Path("run"))
        self._config(config, given, Endpoint(options["reflect"]), Endpoint(options["model"]))

    def learn(self, config: LoopConfig, given: RoundInput, progress: Progress) -> StageResult:
        """Search, or resume the search."""
        options = config.method_options
        subject = read_subject(options["model"], key=os.environ.get("LIGHTNING_UPSTREAM_KEY"))
        chosen = self._config(config, given, read_reflection(options["reflect"], None), subject)
        search = search_folder(chosen.out)
        begun = (search / journal.FILE).exists()
        if not begun:
            shutil.rmtree(search, ignore_errors=True)
        found = optimise(chosen, progress, resume=begun)
        facts: dict[str, Any] = {"rollouts": found.rollouts, MODEL: options["model"]}
        if not found.diff:
            return StageResult(facts, "rejected", "no better prompt was found")
        return StageResult({**facts, PROMPTS: str(found.file)})

    def eval_options(self, config: LoopConfig, given: RoundInput) -> Mapping[str, Any]:
        """Return the options of the search that are also those of an evaluation."""
        endpoint = Endpoint(config.method_options["model"])
        values = self._config(config, given, endpoint, endpoint)
        own = {name: getattr(values, name) for name in PromptsConfig.model_fields if name not in _OF_SEARCH}
        return {**own, "agents": (config.agent,)}

    def cost(self, config: LoopConfig, given: RoundInput, tasks: int) -> Mapping[str, int]:
        """Return the largest number of rollouts, or reject a budget that is too small for the tasks."""
        endpoint, compared = Endpoint(config.method_options["model"]), tasks // 2
        options = self._config(config, given, endpoint, endpoint)
        if not compared:
            raise ConfigError(
                "select.least is too small: prompts needs two tasks, one for proposals and one to compare them, besides"
                " the held-out ones. Write least = 3 or more."
            )
        need = options.least_budget(compared)
        if options.budget < need:
            raise ConfigError(
                f"train.budget = {options.budget} is too small for {tasks} tasks: trying one proposal on {compared} of"
                f" them takes {need} rollouts. Write budget = {need} or more."
            )
        return {"rollouts": options.budget}

    def _config(self, config: LoopConfig, given: RoundInput, reflect: Endpoint, subject: Subject) -> PromptsConfig:
        options = {name: value for name, value in config.method_options.items() if name not in ("model", "reflect")}
        return PromptsConfig(
            **options, target=config.target, data=given.data, out=given.out.with_suffix(".json"), reflect=reflect,
            agents=(config.agent,), subject=subject, answered=(config.agent,),
        )  # fmt: skip

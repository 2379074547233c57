"""`[train] method = "improve"`: search for the best method within a budget of tokens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve import config as search
from lightning_trainer.kits.improve.command import LEFT_OUT
from lightning_trainer.kits.improve.improve import improve
from lightning_trainer.kits.improve.tasks import FEWEST
from lightning_trainer.kits.loop.methods.adapter import check_run_options, eval_options_of, run_options
from lightning_trainer.kits.loop.methods.method import CHECKPOINT, ENDPOINT, MODEL, PROMPTS, RoundInput
from lightning_trainer.kits.loop.record import StageResult
from lightning_trainer.kits.prompts.reflection import read_reflection
from lightning_trainer.policies import DEFAULT_RANK
from lightning_trainer.report.progress import Progress
from lightning_trainer.session.answers import Endpoint

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig

_OWN: Final = ("budget", "methods", "samples", "sft", "reflect", "distil")  # all others are options of `train`


class SearchMethod:
    """Runs `improve` for the one agent. The result is an adapter, a prompt, or nothing."""

    needs_base = True
    forecast_by = "improve"

    def check(self, config: LoopConfig) -> None:
        """Reject invalid options, without a request to the reflecting model."""
        options = config.method_options
        if wrong := [name for name in options if name in LEFT_OUT]:
            raise ConfigError(f"train.{wrong[0]}: improve sets this option. Leave it out.")
        if type(options.get("budget")) is not int or options["budget"] < 1:
            raise ConfigError("train.budget: give the tokens that improve may spend, such as budget = 2000000.")
        reflect = Endpoint(str(options["reflect"])) if "reflect" in options else None
        chosen = self._config(config, RoundInput(data=Path("train.jsonl"), out=Path("run")), reflect)
        check_run_options({name: value for name, value in options.items() if name not in _OWN}, chosen.train)
        chosen.check()

    def learn(self, config: LoopConfig, given: RoundInput, progress: Progress) -> StageResult:
        """Search, or resume the search."""
        if (given.out / search.OPTIONS_NAME).exists():
            own = self._train(config, given).model_dump(mode="json")
            again = {"train": own, "distil": config.method_options.get("distil")}
            chosen = search.read_options(given.out, os.environ.get("LIGHTNING_REFLECT_KEY"), again)
            found = improve(chosen, progress, resume=given.out)
        else:
            shutil.rmtree(given.out, ignore_errors=True)
            reflect = config.method_options.get("reflect")
            chosen = self._config(config, given, None if reflect is None else read_reflection(reflect, None))
            found = improve(chosen, progress, out=given.out)
        agent, result = next(iter(found.agents.items()))
        facts: dict[str, Any] = {"tokens": result.tokens, MODEL: given.model or str(chosen.train.model)}
        if agent not in found.decision.kept:
            return StageResult(facts, "rejected", "no method is better than the unchanged agent with confidence")
        facts["method"] = found.method_of(agent)
        if facts["method"] == search.PROMPTS:
            return StageResult({**facts, PROMPTS: str(found.prompts), ENDPOINT: str(chosen.train.model)})
        return StageResult({**facts, CHECKPOINT: str(found.checkpoint.resolve())})

    def eval_options(self, config: LoopConfig, given: RoundInput) -> Mapping[str, Any]:
        """Return the options of the search's runs."""
        return eval_options_of(self._train(config, given))

    def cost(self, config: LoopConfig, given: RoundInput, tasks: int) -> Mapping[str, int]:  # noqa: ARG002
        """Return the budget, or reject too few tasks. Rollouts on tasks that it holds out itself are not part of it."""
        if tasks < FEWEST:
            raise ConfigError(
                f"select.least is too small: improve needs {FEWEST} tasks besides the held-out ones, and this round has"
                f" {tasks}. Write a larger least."
            )
        return {"tokens": int(config.method_options["budget"])}

    def _config(self, config: LoopConfig, given: RoundInput, reflect: Endpoint | None) -> search.ImproveConfig:
        options = config.method_options
        able = (search.PROMPTS,) * (reflect is not None) + (search.SFT, search.RL)
        more = {name: options[name] for name in ("samples", "sft", "distil") if name in options}
        return search.ImproveConfig(
            train=self._train(config, given),
            budget=options["budget"],
            methods=tuple(options.get("methods", able + (search.DISTIL,) * ("distil" in options))),
            reflect=reflect,
            **more,
        )

    def _train(self, config: LoopConfig, given: RoundInput) -> TrainConfig:
        """Return the options of `train`. Every search is for a new adapter of the configured model."""
        options = {name: value for name, value in config.method_options.items() if name not in _OWN}
        own = config.with_method_options({"lora_rank": DEFAULT_RANK, **options})
        return run_options(own, replace(given, model=None))

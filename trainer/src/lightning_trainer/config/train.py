"""The configuration of a training run: one frozen value, checked as a whole at construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ModelWrapValidatorHandler, model_validator

from lightning_trainer import environments as environment
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.checks import cross_check
from lightning_trainer.config.chosen import check_defaults
from lightning_trainer.config.defaults import with_defaults
from lightning_trainer.config.fields import TrainFields
from lightning_trainer.config.mistakes import refuse_unknown


class TrainConfig(TrainFields, CheckedRecord):
    """What to train, on what, and how.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
        LightningError: the environment that it names cannot be opened. It is opened here, so that the configuration has
            its target and its tasks.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _check_values(cls, values: Any, handler: ModelWrapValidatorHandler[TrainConfig]) -> TrainConfig:
        """Open the environment, and check the options against each other."""
        if isinstance(values, Mapping):
            refuse_unknown(values, cls.model_fields)
            if isinstance(values.get("algorithm"), str):
                check_defaults(values["algorithm"], cls.model_fields)
            values = with_defaults(values)
            if environment.to_open(values):  # which may take long: first all other options are checked
                asked = handler({**values, **environment.placeholder_options(values)})
                cross_check(asked)
                came = environment.open_as_options(
                    asked.env or "", asked.env_options, asked.env_tasks, asked.env_held_out
                )
                values = {**values, **came}
        config = handler(values)
        cross_check(config)
        return config

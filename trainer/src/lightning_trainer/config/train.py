"""The configuration of a training run: one frozen value, checked whole when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from lightning_spans.errors import ConfigError
from lightning_trainer import environments as environment
from lightning_trainer.config.checks import cross_check
from lightning_trainer.config.defaults import with_defaults
from lightning_trainer.config.fields import TrainFields
from lightning_trainer.config.mistakes import explain, refuse_unknown


class TrainConfig(TrainFields):
    """What to train, on what, and how.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
        LightningError: the environment that it names can't be opened. It is opened here, so that the configuration has
            its target and its tasks.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _check_values(cls, values: Any, handler: ModelWrapValidatorHandler[TrainConfig]) -> TrainConfig:
        """Turn what pydantic says into one error that says what to do."""
        if isinstance(values, Mapping):
            refuse_unknown(values, cls.model_fields)
            values = with_defaults(values)
            if environment.to_open(values):  # which may take long: all other options are looked at before
                asked = _make_config(handler, {**values, **environment.unopened(values)})
                came = environment.opened(asked.env or "", asked.env_options, asked.env_tasks, asked.env_held_out)
                values = {**values, **came}
        return _make_config(handler, values)


def _make_config(handler: ModelWrapValidatorHandler[TrainConfig], values: Any) -> TrainConfig:
    """Make a configuration, and say in one error what is wrong with it and what to do."""
    try:
        config = handler(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
    cross_check(config)
    return config

"""Configurations that report all mistakes in one error, which says what to change."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from lightning_spans.errors import ConfigError
from lightning_trainer.config.mistakes import explain
from lightning_trainer.options.record import OptionRecord


class CheckedRecord(OptionRecord):
    """Options that are checked at construction.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError(explain(error)) from None

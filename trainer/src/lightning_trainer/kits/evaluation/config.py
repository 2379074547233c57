"""The options of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import Field, model_validator

from lightning_spans.errors import ConfigError
from lightning_spans.record.prompts import Prompts, read_prompts
from lightning_trainer import registry
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.kits.evaluation.fields import EvalFields
from lightning_trainer.kits.evaluation.summary import Counting
from lightning_trainer.session.answers import AsItIs, Subject, endpoint, read_subject


class EvalConfig(EvalFields, CheckedRecord):
    """Options of an evaluation.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    counting: Counting = Field(default_factory=Counting)
    """How they count."""

    @model_validator(mode="after")
    def _check_tool_format(self) -> Self:
        registry.check("tool format", self.load.get("tool_format"))
        return self

    def subject(self, key: str | None) -> Subject:
        """Return the subject to evaluate.

        Raises:
            ConfigError: the options that name it are wrong.
        """
        if self.endpoint is not None:
            return endpoint(self.endpoint, model=self.model, key=key)
        return AsItIs() if self.model is None else read_subject(self.model, key=key)

    def read_prompts(self) -> Prompts:
        """Read the prompts that replace the agents' own; {} for none.

        Raises:
            ConfigError: they cannot be read.
        """
        return read_prompts(self.prompts) if self.prompts is not None else {}

    def to_json(self) -> dict[str, Any]:
        """Return the options as saved in the evaluation's folder."""
        return self.model_dump() | {
            name: None if (path := getattr(self, name)) is None else str(path) for name in ("data", "out", "prompts")
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EvalConfig:
        """Read the output of `to_json`.

        Raises:
            ConfigError: another version wrote it.
        """
        try:
            return cls(**{**values, "out": None, "counting": read_counting(values)})
        except (KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"this evaluation can't be resumed: its options can't be read: {error}.") from None


def read_counting(values: Mapping[str, Any]) -> Counting:
    """Read how the samples of an evaluation count from the output of `EvalConfig.to_json`."""
    own = {"timeouts": "exclude", **values["counting"]}  # the behaviour before this was an option
    return Counting(**{name: own[name] for name in ("failed", "success", "timeouts")})


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerKeys:
    """Bearer keys of servers, which are never saved.

    Attributes:
        endpoint: key of the evaluated subject.
        against: key of the baseline.
    """

    endpoint: str | None = field(default=None, repr=False)
    against: str | None = field(default=None, repr=False)

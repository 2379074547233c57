"""Tables of options inside a configuration, such as `teacher_options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from lightning_spans.errors import ConfigError
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.mistakes import refuse_unknown

R = TypeVar("R", bound=CheckedRecord)


def read_table(kind: type[R], name: str, values: Mapping[str, Any]) -> R:
    """Read the options of a table.

    Args:
        kind: the record to create from them.
        name: of the table, for the error.
        values: by name.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    try:
        refuse_unknown(values, kind.model_fields)
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None

"""The base of every record of options, and values that may be written as one text."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict


class OptionRecord(BaseModel):
    """A group of related options. The docstring below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def with_values(self, **values: Any) -> Self:
        """Return a copy with other values of some options, checked as a whole."""
        return type(self)(**{**dict(self), **values})


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_text(value: Any) -> Any:
    """Return the names in a comma-separated text; any other value unchanged."""
    return split_names(value) if isinstance(value, str) else value


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(split_text)]
"""Names, also written as one text with commas."""

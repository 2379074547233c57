"""Handoffs: AutoGen makes a tool of each, which alone knows to whom it hands over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from autogen_agentchat.base import Handoff

from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan

_USUAL: Final = "transfer_to_"  # how AutoGen names such a tool where the user does not


def tell_handoff(span: OpenSpan | None, name: str, tools: Sequence[Any] | None) -> None:
    """Say on a tool's span to whom it hands over, if it does."""
    tool = next((tool for tool in tools or () if tool.name == name), None)
    if span is not None and tool is not None:
        span.set(**{names.HANDOFF: _target(tool) or name.removeprefix(_USUAL)})


def _target(tool: Any) -> str | None:
    """Return whom a tool that `Handoff.handoff_tool` made hands over to: the handoff lies in its function's closure."""
    cells = getattr(getattr(tool, "_func", None), "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    return next((str(value.target) for value in found if isinstance(value, Handoff)), None)

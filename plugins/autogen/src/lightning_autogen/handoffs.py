"""Handoffs: AutoGen turns each into a tool, and only that tool knows the target agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from autogen_agentchat.base import Handoff

from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan

_USUAL: Final = "transfer_to_"  # AutoGen's default name for such a tool


def tell_handoff(span: OpenSpan | None, name: str, tools: Sequence[Any] | None) -> None:
    """Record a handoff's target agent on the tool span, if the tool is one."""
    tool = next((tool for tool in tools or () if tool.name == name), None)
    if span is not None and tool is not None:
        span.set(**{names.HANDOFF: _target(tool) or name.removeprefix(_USUAL)})


def _target(tool: Any) -> str | None:
    """Return the target of a tool made by `Handoff.handoff_tool`, read from its function's closure."""
    cells = getattr(getattr(tool, "_func", None), "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    return next((str(value.target) for value in found if isinstance(value, Handoff)), None)

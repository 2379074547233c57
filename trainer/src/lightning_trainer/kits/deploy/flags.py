"""Options of `deploy` that are parsed here: shares, bounds, and those of the gate."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import click

from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.group import F, group_options
from lightning_trainer.kits.deploy.options import CanaryOptions

GATE_OPTIONS: Final = ("wait_days", "worse", "better", "false_promotion", "power")
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)(%?)")


def parse_share(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Parse a share such as ``5%`` or ``0.05``."""
    return None if value is None else _share_of(context, option, value)


def _share_of(context: click.Context, option: click.Parameter, value: str) -> float:
    found = _SHARE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r}: give a share such as 5% or 0.05", context, option)
    return float(found[1]) / (100.0 if found[2] else 1.0)


def share_option(default: str | None, text: str) -> Callable[[F], F]:
    """Return the option for a share of the conversations."""
    return field_option(
        CanaryOptions, "share", text=text, default=default, type=str, callback=parse_share, metavar="SHARE"
    )


outcomes_option = click.option(
    "--outcome", "sources", multiple=True, metavar="SOURCE", help="Rewards that count. Default: all. May be repeated."
)


def gate_options(function: F) -> F:
    """Add the gate's options, with defaults and help from the record that the loop also uses."""
    fields = {name: CanaryOptions.model_fields[name] for name in GATE_OPTIONS}
    options = (
        click.option(f"--{name.replace('_', '-')}", default=field.default, show_default=True, help=field.description)
        for name, field in fields.items()
    )
    return group_options(*options)(function)


def parse_bounds(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """Parse bounds such as ``failed=2%``."""
    pairs = [value.rpartition("=") if "=" in value else (value, "", "") for value in values]  # a source may contain "="
    return {name: _share_of(context, option, share) for name, _, share in pairs}

"""Options of commands that read live traces: which of them may be used."""

from __future__ import annotations

from typing import Any

from lightning_trainer.lineage.permits import Permits
from lightning_trainer.options.record import OptionRecord


class PermitOptions(OptionRecord):
    """Which live traces may be used."""

    assume_consent: bool = False
    """Also use live traces that state no consent, such as those of earlier versions. Traces that deny it are never
    used."""
    tenant: str | None = None
    """Use only live traces of this tenant."""
    mix_tenants: bool = False
    """Allow data of several tenants in one selection, and so in one batch."""

    @property
    def permits(self) -> Permits:
        """Which live traces may be used."""
        return Permits(assume_consent=self.assume_consent, tenant=self.tenant, mix_tenants=self.mix_tenants)


def take_permits(flags: dict[str, Any]) -> Permits:
    """Remove these options from a command's flags, and return the permits."""
    chosen = {name: flags.pop(name, None) for name in PermitOptions.model_fields}
    return PermitOptions(**{name: value for name, value in chosen.items() if value is not None}).permits

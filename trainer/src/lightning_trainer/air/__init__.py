"""Automatic intermediate rewards (AIR): rules that judge the spans of an attempt. Off until configured."""

from __future__ import annotations

from lightning_trainer.air.judge import Judge, installed, read_rules
from lightning_trainer.air.rules import Finding

__all__ = ["Finding", "Judge", "installed", "read_rules"]

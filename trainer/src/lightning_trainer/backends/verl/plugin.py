"""The plugin that verl loads on import in every process, by the entry point `verl.plugins`: the CPU platform.

It must be loaded before any part of verl asks for a device, and it must be light, because every import of verl pays for
it. Everything else is registered by `registrations`, which verl imports where models are created. verl does not report
a plugin that fails, so `registrations` checks that this one was loaded.
"""

from __future__ import annotations

import os


def load() -> None:
    """Register the CPU platform with verl if the environment asks for it."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from lightning_trainer.backends.verl.cpu import platform, process_group  # noqa: F401 - registers itself

        process_group.patch()


def use_cpu() -> None:
    """Select the CPU platform for this process and those that it starts, even if verl was imported before."""
    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    load()


load()

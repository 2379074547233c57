"""What verl loads at its own import in every process, by the entry point `verl.plugins`: the CPU platform.

It must be there before anything of verl asks for a device, and it must be light: whoever imports verl pays for it.
Everything else is registered by `registrations`, which verl imports where models are made. verl keeps quiet about a
plugin that fails, so `registrations` looks whether this one was loaded.
"""

from __future__ import annotations

import os


def load() -> None:
    """Make the CPU platform known to verl where the environment asks for it."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from lightning_trainer.backends.verl.cpu import platform, process_group  # noqa: F401 - registers itself

        process_group.patch()


def use_cpu() -> None:
    """Choose the CPU platform for this process and those that it starts, even if verl was imported before."""
    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    load()


load()

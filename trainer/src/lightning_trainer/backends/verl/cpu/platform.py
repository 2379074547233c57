"""A machine without an accelerator as one of verl's platforms: torch on CPU, gloo, logical devices in Ray."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Stream:
    """A stream whose work is done when it is asked for."""

    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True


def _nothing(*_: Any, **__: Any) -> None:
    """Do what needs no doing on a CPU."""


def _used_memory(*_: Any, **__: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _free_and_total(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    """Return what stands in the place of `torch.cuda`: `torch.cpu`, and what verl calls beyond it."""
    module = types.ModuleType("lightning_cpu_device")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "get_device_name": lambda *_: "cpu",
        "mem_get_info": _free_and_total,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "current_stream": lambda *_: _Stream(),
        "Stream": lambda *_, **__: _Stream(),
        "Event": _Event,
        "stream": lambda *_: contextlib.nullcontext(),
    }
    functions |= dict.fromkeys(("memory_allocated", "memory_reserved"), _used_memory)
    functions |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _used_memory)
    silent = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
    functions |= dict.fromkeys((*silent, "set_per_process_memory_fraction"), _nothing)
    module.__dict__.update(functions)
    module.__getattr__ = lambda name: getattr(torch.cpu, name)  # type: ignore[method-assign]
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl has no types
    """Answers what verl asks of a platform. Chosen by ``VERL_PLATFORM=cpu``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        """There is always a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:  # noqa: ARG002 - verl's
        """Never found by probing: a machine with an accelerator has a CPU too."""
        return False

    def current_device(self) -> str:
        """Return what tensors are moved to."""
        return "cpu"

    def device_count(self) -> int:
        """One for each process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is nothing to choose."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Everything is done when it returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is no caching allocator."""

    def empty_cache(self) -> None:
        """There is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002 - verl's
        """A CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives run over gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets this one for the logical devices."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002 - verl's
        """There is no such profiler."""
        yield

    def profiler_start(self) -> None:
        """There is no such profiler."""

    def profiler_stop(self) -> None:
        """There is no such profiler."""

    def ray_resource_name(self) -> str:
        """Logical devices: Ray is told a number of GPUs and hands out their indices."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Ray may set what it likes."""
        return []

    def is_ipc_supported(self) -> bool:
        """Weights go through POSIX shared memory."""
        return False

    def cudart(self) -> None:
        """There is no CUDA runtime."""

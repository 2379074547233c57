"""A platform of verl for machines without an accelerator: torch on CPU, gloo, logical devices in Ray."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Stream:
    """A stream without pending work."""

    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    """An event that has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a CPU does not need it."""


def _used_memory(*_: Any, **__: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _free_and_total(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    """Return the replacement for `torch.cuda`: `torch.cpu`, and the functions that verl calls beyond it."""
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
    """verl's platform for CPUs. Selected by ``VERL_PLATFORM=cpu``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        """Whether there is a CPU: always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:  # noqa: ARG002 - verl's
        """Whether probing finds it: never, because a machine with an accelerator has a CPU too."""
        return False

    def current_device(self) -> str:
        """Return the device that tensors are moved to."""
        return "cpu"

    def device_count(self) -> int:
        """Return 1: each process has one device."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing, because there is nothing to choose."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: every operation is finished when it returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing, because there is no caching allocator."""

    def empty_cache(self) -> None:
        """Do nothing, because there is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002 - verl's
        """Return None twice: a CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return the backend of collectives: gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that Ray sets for the logical devices."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002 - verl's
        """Do nothing, because there is no such profiler."""
        yield

    def profiler_start(self) -> None:
        """Do nothing, because there is no such profiler."""

    def profiler_stop(self) -> None:
        """Do nothing, because there is no such profiler."""

    def ray_resource_name(self) -> str:
        """Return the resource of the logical devices: Ray gets a number of GPUs and assigns their indices."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return an empty list: Ray may set any variable."""
        return []

    def is_ipc_supported(self) -> bool:
        """Whether IPC is supported: no, weights go through POSIX shared memory."""
        return False

    def cudart(self) -> None:
        """Do nothing, because there is no CUDA runtime."""

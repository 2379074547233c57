"""A device named cuda that computes on the CPU and refuses what CUDA refuses: tensors of two devices in one operation.

A tensor "on" it holds a real one. Every operation that any thread does while it is `installed` is looked at: where one
tensor is of this device, all must be, but for those of no dimension, and indices may come from the CPU. So code that
puts a tensor on the wrong device fails here as it would on a GPU. What it can't show: other kernels, rounding, speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

CUDA = torch.device("cuda", 0)
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_COPYING = {"aten::copy_", "aten::_to_copy", "aten::to"}


class Pretended(torch.Tensor):
    """A tensor that says it is on the GPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        with torch.inference_mode(mode=False):  # views of it are made in and out of that mode
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device="cpu",  # to C++, whose autograd asks CUDA for threads; Python code is told another
                requires_grad=inner.requires_grad,
            )
        made.inner = inner
        return made

    device = property(lambda _: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    def cpu(self, *_: Any) -> torch.Tensor:
        """Copy it to the CPU."""
        return self.detach().inner.clone()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert it, or copy it to the CPU."""
        named = [arg for arg in (*args, kwargs.get("device")) if isinstance(arg, (str, torch.device))]
        if named and torch.device(named[0]).type == "cpu":
            return self.cpu().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        """Copy it to the CPU, as a list."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as tensors of a GPU do."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Pretended({self.inner!r})"


class _Mode(TorchDispatchMode):
    """Sees what makes a tensor on the device, where no argument is on it yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the tensors within, after a look at their devices."""
    name = func._schema.name
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    ours = [leaf for leaf in given if isinstance(leaf, Pretended)]
    asked = next((leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.device)), None)
    if asked is not None and asked.type == "cuda":
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": None}
    others = [leaf for leaf in given if leaf.dim() and not isinstance(leaf, Pretended)]
    if ours and others and name not in _COPYING and not (name in _INDEXING and isinstance(args[0], Pretended)):
        shapes = ", ".join(f"{tuple(leaf.shape)} on {leaf.device}" for leaf in given)
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {shapes}")
    if name in _INDEXING and ours and not isinstance(args[0], Pretended):
        raise RuntimeError(f"{name}: indices should be on the CPU, as what they index is")
    on_gpu = bool(ours) or (asked is not None and asked.type == "cuda")  # `Pretended.to` alone leads to the CPU
    if name == "aten::copy_":
        on_gpu = isinstance(args[0], Pretended)
    plain_args, plain_kwargs = tree_map_only(Pretended, lambda one: one.inner, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if name in {"aten::_local_scalar_dense", "aten::equal", "aten::is_same_size"}:
        return out
    if func._schema.is_mutable:  # what was changed in place, or written to, is given back as the tensor that it was
        inner = {id(one.inner): one for one in ours}
        return tree_map_only(torch.Tensor, lambda one: inner.get(id(one), one), out)
    return tree_map_only(torch.Tensor, Pretended, out) if on_gpu else out


_plain_tensor = torch.tensor


def _tensor(data: Any, **how: Any) -> torch.Tensor:
    """Make a tensor of Python values: torch's own function goes past modes to the device."""
    device = how.pop("device", None)
    made = _plain_tensor(data, **how)
    return made if device is None else made.to(device)


@contextmanager
def installed() -> Iterator[None]:
    """Let this process have the device, in all its threads that begin meanwhile."""

    def in_mode(run: Callable[[Any], None]) -> Callable[[Any], None]:
        def wrapped(thread: Any) -> None:
            with _Mode():
                run(thread)

        return wrapped

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else `Module.to` would keep plain parameters
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch, "tensor", _tensor),
        mock.patch.object(torch.cuda, "_lazy_init", return_value=None),
        mock.patch.multiple(
            torch.cuda,
            max_memory_allocated=lambda _: 2**30,
            reset_peak_memory_stats=lambda _: None,
            mem_get_info=lambda _: (2**36, 2**36),
            memory_reserved=lambda _: 0,
            memory_allocated=lambda _: 0,
        ),
        mock.patch.object(threading.Thread, "run", in_mode(threading.Thread.run)),
        _Mode(),
    ):
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

"""A GPU that is not there: its tensors are computed on the CPU, and must not meet others.

Inside `stand_in_gpu()` a tensor that is moved to "cuda", or made there, says that it lies there. So does whatever is
computed from it. As with a GPU, an operation on tensors of both devices raises, and such a tensor gives numpy nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.sae.training import sparse_codes

_ALSO_FROM_ELSEWHERE = {"aten::copy_", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Operations that a CUDA tensor does with tensors on the CPU: copies, and indices."""


def there(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on the stand-in."""
    if tensor.layout == torch.sparse_csr:
        tensor = tensor.values()
    return hasattr(tensor.untyped_storage(), "on_stand_in")


def _put_there(tensor: torch.Tensor) -> None:
    parts = [tensor]
    if tensor.layout == torch.sparse_csr:
        parts = [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    for part in parts:
        part.untyped_storage().on_stand_in = True  # type: ignore[attr-defined]


def _tensors(*of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


class _Operations(TorchDispatchMode):
    """What is computed from a tensor on the stand-in lies there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors(args, kwargs or {})
        on_it = [there(tensor) for tensor in given]
        if any(on_it) and func._schema.name not in _ALSO_FROM_ELSEWHERE:
            for tensor, here in zip(given, on_it, strict=True):
                if not here and tensor.dim():
                    raise RuntimeError(f"{func} was given tensors on cuda and on the CPU, {tuple(tensor.shape)}")
        found = func(*args, **(kwargs or {}))
        if any(on_it[:1] if func._schema.name in _ALSO_FROM_ELSEWHERE else on_it):
            for tensor in _tensors(found):
                _put_there(tensor)
        return found


class _Calls(TorchFunctionMode):
    """Reads "cuda" as the stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", 0) if there(args[0]) else func(*args)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return there(args[0])
        if func is torch.device or name == "_parse_to":  # the latter of Module.to, which then moves every parameter
            return func(*args, **kwargs)
        if name in ("numpy", "__array__") and owner is not None and there(owner):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "backward" and owner is not None:  # in which our own backward passes must read "cuda", too
            with self:
                keep = bool(kwargs.get("retain_graph"))
                return _engine_run_backward(
                    (owner,), (torch.ones_like(owner),), keep, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if func is torch.mm and "out_dtype" in kwargs:  # no such product on a CPU
            return args[0].float() @ args[1].float()
        devices = [value for value in (*args, *kwargs.values()) if _device(value) is not None]
        if name == "cpu":
            devices = [torch.device("cpu")]
        like = owner if name == "new_tensor" and not devices else args[1] if name == "to" and len(args) > 1 else None
        if isinstance(like, torch.Tensor):
            devices = [torch.device("cuda" if there(like) else "cpu")]
        wanted = _device(devices[0]) if devices else None
        args = [torch.device("cpu") if _device(value) == "cuda" else value for value in args]
        kwargs = {key: torch.device("cpu") if _device(value) == "cuda" else value for key, value in kwargs.items()}
        found = func(*args, **kwargs)
        if wanted is None or not isinstance(found, torch.Tensor) or there(found) == (wanted == "cuda"):
            return found
        if owner is None and found.requires_grad:  # a leaf that is made here
            return _on(wanted, found.detach().clone()).requires_grad_()
        return _on(wanted, found.clone())


def _on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that was just made, put on the stand-in or taken from it. Gradients do not move."""
    storage = tensor.untyped_storage()
    if device == "cuda":
        storage.on_stand_in = True  # type: ignore[attr-defined]
    elif there(tensor):
        del storage.on_stand_in  # type: ignore[attr-defined]
    return tensor


def _device(value: Any) -> str | None:
    if isinstance(value, torch.device):
        return value.type
    return value.partition(":")[0] if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda") else None


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """While the block runs. The GPU's random numbers are the CPU's."""
    own = {"get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None}
    own["get_device_name"] = lambda *_: "stand-in"
    streams = mock.MagicMock()  # what is computed is there at once
    own |= {"Stream": streams, "current_stream": streams, "stream": streams}
    here = {"record_stream": lambda *_: None, "pin_memory": lambda tensor: tensor}
    without_kernels = mock.patch.object(sparse_codes, "_WITH_KERNELS", ())
    patches = mock.patch.multiple(torch.cuda, **own), mock.patch.multiple(torch.Tensor, **here), without_kernels
    with patches[0], patches[1], patches[2], _Operations(), _Calls():
        yield


def short_of_memory(monkeypatch: pytest.MonkeyPatch, tokens: int, error: Exception) -> list[int]:
    """Let forward passes of more tokens fail; returns the sizes of all that were tried."""
    read, tried = HuggingFaceReader.read, []

    def limited(self: HuggingFaceReader, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        tried.append(ids.numel())
        if ids.numel() > tokens:
            raise error
        return read(self, ids, mask)

    monkeypatch.setattr(HuggingFaceReader, "read", limited)
    return tried


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: you tried to …"),
]

"""Settings of torch and numpy are the caller's own: they change no number here, and are given back as they were.

A notebook may begin with `torch.set_grad_enabled(False)`, and a training may call us under autocast. While a public
function runs, these have their usual values: gradient and inference mode, default dtype and device, autocast, the
precision of float32 matrix products, and what numpy does about overflows. Deterministic algorithms, anomaly mode and
the number of threads stay as they are: they say how numbers are computed, not which.

Default dtype and the precision of products belong to the whole process. The first of several threads sets them aside,
and the last gives them back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import isgenerator
from typing import Any

_lock = threading.Lock()
_thread = threading.local()
_users = 0
_aside = ExitStack()
"""What gives the settings of the process back."""
_END = object()


@contextmanager
def usual_state(*, keep_gradients: bool = False) -> Iterator[None]:
    """While it is open, settings have their usual values; also a decorator. Nested ones do nothing.

    Args:
        keep_gradients: leave gradient and inference mode alone, for what a caller's own training differentiates.
    """
    if getattr(_thread, "inside", False):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_of_process())
        if numpy := sys.modules.get("numpy"):
            stack.enter_context(numpy.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        if torch := sys.modules.get("torch"):
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            for device in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if not keep_gradients:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
        stack.callback(setattr, _thread, "inside", False)
        _thread.inside = True
        yield


@contextmanager
def _of_process() -> Iterator[None]:
    global _users
    with _lock:
        if not _users and (torch := sys.modules.get("torch")):
            if (dtype := torch.get_default_dtype()) != torch.float32:
                torch.set_default_dtype(torch.float32)
                _aside.callback(torch.set_default_dtype, dtype)
            for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
                # torch before 2.9 has no such setting.
                if (precision := getattr(products, "fp32_precision", "ieee")) not in ("ieee", "none"):
                    products.fp32_precision = "ieee"
                    _aside.callback(setattr, products, "fp32_precision", precision)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _aside.close()


def in_usual_state(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function of `tsae` that runs in the usual state. A generator that it gives does between two values.

    Args:
        name: under which `tsae` has it, and pickle finds it.
        function: the function.
    """

    @wraps(function)
    def found(*args: Any, **options: Any) -> Any:
        with usual_state():
            value: Any = function(*args, **options)
        return _stepwise(value) if isgenerator(value) else value

    found.__module__, found.__qualname__ = "tsae", name
    return found


def _stepwise(running: Any) -> Generator[Any, None, None]:
    try:
        while True:
            with usual_state():
                value = next(running, _END)
            if value is _END:
                return
            yield value
    finally:
        running.close()

"""Work beside the work: calls in a thread, and copies from a GPU for which its computations do not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Beside:
    """Calls that run one after another in a thread of their own. Leaving the block waits for all of them.

    Args:
        behind: calls that may be unfinished, which bounds the memory that they hold; 0 runs each at once.
    """

    def __init__(self, behind: int) -> None:
        self._behind = behind

    def __enter__(self) -> Beside:
        self._pool, self._running = ThreadPoolExecutor(1), deque[Future[Any]]()
        return self

    def run(self, call: Callable[[], Any]) -> None:
        """Run a call. Raises what an earlier one raised."""
        if not self._behind:
            call()
            return
        self._running.append(self._pool.submit(call))
        while self._running and (len(self._running) > self._behind or self._running[0].done()):
            self._running.popleft().result()

    def wait(self) -> None:
        """Wait for all calls. Raises what the first to fail raised."""
        while self._running:
            self._running.popleft().result()

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self.wait()


def ahead(read: Callable[[_Item], _Found], items: Iterable[_Item], threads: int) -> Iterator[_Found]:
    """What a call gives of every item, in order; of the next ones, one a thread, while the caller uses it."""
    with ThreadPoolExecutor(threads) as pool:
        running = deque[Future[_Found]]()
        for item in items:
            running.append(pool.submit(read, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device. The CPU does not wait for a copy to a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_cpu(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the CPU. The result waits for the copy and gives it; another thread may call it."""
    if tensor.device.type != "cuda":
        return lambda: tensor.cpu()
    side = _side_stream(tensor.device)
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(side):
        copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
        done = side.record_event()
    tensor.record_stream(side)

    def wait() -> torch.Tensor:
        done.synchronize()
        return copy

    return wait


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

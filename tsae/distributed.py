"""Several processes: `torchrun --nproc-per-node 2 -m tsae capture …` and `… -m tsae train …`.

Capture: every process captures whole shards, and the first enters them in the manifest in order.

Training: a step of n processes takes the same batch that one process would take. Every process reads every n-th window
of it, computes the loss on that share, and the gradients are added up, weighted by tokens. All processes then take the
same optimizer step, so that weights and counters stay equal without being sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tsae.errors import TsaeError


@dataclass(frozen=True)
class Processes:
    """The processes of one run; alone by default, where every method returns what it was given."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Of this process."""

    @property
    def first(self) -> bool:
        """Whether this one writes files and shows progress."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()

    def first_does(self, action: Callable[[], None]) -> None:
        """Have the first process do something, and the others wait for it; where it refuses, all stop."""
        refusal: TsaeError | None = None
        if self.first:
            try:
                action()
            except TsaeError as error:
                refusal = error
        if self.least(int(refusal is None)) == 0:
            raise refusal or TsaeError("the first process refused", fix="See its message.")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise over the processes."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def any(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise or of booleans."""
        return self._reduce(tensor.to(torch.uint8), dist.ReduceOp.MAX).bool()

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        return int(self._reduce(torch.tensor(number, device=self.device), dist.ReduceOp.MIN))

    def gather(self, text: str) -> list[str]:
        """The texts of all processes, in order of rank."""
        if self.size == 1:
            return [text]
        # As bytes in tensors: gathering objects would pickle them.
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], device=self.device))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        found = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [bytes(t[: int(n)].cpu().numpy()).decode() for t, n in zip(found, lengths, strict=True)]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by the sum over the processes, in which one without a gradient counts as zero."""
        if self.size > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad = self.sum(parameter.grad)

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            tensor = tensor.contiguous().clone()
            dist.all_reduce(tensor, operation)
        return tensor


def first_process() -> bool:
    """Whether this process is the first that torchrun started, which speaks for all; True without torchrun."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join(device: str, *, timeout: timedelta | None = None) -> Iterator[Processes]:
    """The processes that torchrun started, joined for the time of the block unless they were joined before.

    Args:
        device: "cuda" becomes the GPU of this process.
        timeout: how long one process may wait for another; by default that of torch.distributed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        yield Processes(device=device)
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    joined_here = not dist.is_initialized()
    if joined_here:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        if joined_here:
            dist.destroy_process_group()

"""Collective operations of several processes that torchrun started, such as sums over all of them.

- Capture: every process captures whole shards. The first enters them in the manifest, in order.
- Training: n processes take the same batches and the same steps as one process, up to the order of sums and to which
  of equal codes BatchTopK keeps. Every process reads every n-th window of the batch and computes its tokens' part of
  the loss. What the loss compares across the batch is sent (`tsae.sae.training.loss`), gradients are added up, and all
  processes take the same optimizer step, so that weights stay equal without being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tsae.base.part import local_rank, world_size
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Processes:
    """The processes of one run. A process that is alone gets back what it gave."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Of this process."""

    @property
    def first(self) -> bool:
        """Whether this one writes files and shows progress."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.size > 1:
            dist.barrier()

    def first_does(self, action: Callable[[], None]) -> None:
        """Let the first process act while the others wait. If it raises a TsaeError, all processes raise one."""
        refusal: TsaeError | None = None
        if self.first:
            try:
                action()
            except TsaeError as error:
                refusal = error
        if not all(self.counts(int(refusal is None))):
            raise refusal or TsaeError("the first process refused", fix="See its message.")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, element by element."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def least(self, tensor: torch.Tensor) -> torch.Tensor:
        """Minimum over the processes, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MIN)

    def any(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whether it is True in any process, element by element."""
        return tensor if self.size == 1 else self._reduce(tensor.to(torch.uint8), dist.ReduceOp.MAX).bool()

    def counts(self, number: int) -> list[int]:
        """Every process's number, in the order of ranks."""
        if self.size == 1:
            return [number]
        mine = torch.tensor([number], device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [int(n) for n in torch.cat(found).tolist()]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every process's tensor, in the order of ranks. They may differ in length; no gradient passes."""
        if self.size == 1:
            return [tensor]
        lengths = self.counts(len(tensor))
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in lengths]
        if max(lengths):
            dist.all_gather(found, padded)
        return [part[:length] for part, length in zip(found, lengths, strict=True)]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes. A missing gradient counts as zero."""
        if self.size > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad)

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(tensor, operation)
        return tensor


ALONE = Processes()


def joined() -> Processes:
    """The processes that `join` has joined; this one alone where it has not."""
    return Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


@contextmanager
def join(device: str, *, timeout: timedelta | None = None) -> Iterator[Processes]:
    """Join the processes that torchrun started for the time of the block, unless they were joined before.

    Args:
        device: "cuda" becomes the GPU of this process.
        timeout: how long one process may wait for another; by default that of torch.distributed.
    """
    if world_size() == 1 and not dist.is_initialized():
        yield Processes(device=device)
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        device = f"cuda:{local_rank()}"
        torch.cuda.set_device(device)
    joined_here = not dist.is_initialized()
    if joined_here:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
    finally:
        if joined_here:
            dist.destroy_process_group()

"""Several processes: `torchrun --nproc-per-node 2 -m tsae capture …` and `… -m tsae train …`.

Capture: every process captures whole shards, and the first enters them in the manifest in order.

Training: a step of n processes takes the same batch that one process would take, and the same step, up to the order of
sums (and to which of equal codes BatchTopK keeps where it cannot keep all). Every process reads every n-th window of
the batch and computes its tokens' part of the loss. What the loss compares across the batch is sent: candidates for
BatchTopK, high-level codes for InfoNCE, sums for means (`tsae.sae.fitting.loss`). Parts and gradients are added up. All
processes then take the same optimizer step, so that weights and counters stay equal without being sent.
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
        if not all(self.counts(int(refusal is None))):
            raise refusal or TsaeError("the first process refused", fix="See its message.")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise over the processes."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def least(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise the smallest of the processes'."""
        return self._reduce(tensor, dist.ReduceOp.MIN)

    def any(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise or of booleans."""
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

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all processes, in the order of ranks."""
        if self.size == 1:
            return [text]
        # As bytes in tensors: gathering objects would pickle them.
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        return [bytes(part.cpu().numpy()).decode() for part in self.gather(mine)]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by the sum over the processes, in which one without a gradient counts as zero."""
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

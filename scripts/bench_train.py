"""One training step of the T-SAE against the dense pairwise step, in the same process on the same pairs.

Baseline, as the method is usually written: both tokens of every pair are encoded, BatchTopK is a flat top-k over the
whole batch, decoding and the N × N similarities are dense, autograd does the rest, Adam is not fused. Ours: adjacent
windows encode each token once, and everything after selection touches only active codes.

The floor is one dense encode, the only dense product that cannot be avoided, plus one fused optimizer step. On a GPU
our step is the trainer's whole one: it also clips the gradient, and keeps the decoder's rows at norm 1. With
--precision bfloat16 the baseline runs under autocast, and the floor's product has bfloat16 factors.

    python scripts/bench_train.py                                   # two CPU threads
    python scripts/bench_train.py --device cuda --precision bfloat16 --d-model 2048 --d-sae 32768 --k 64 --steps 20

Ends with one line of JSON.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from tsae.activations.batches import TokenBatch
from tsae.base.distributed import Processes
from tsae.sae.config import Precision, SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training.loss import temporal_loss
from tsae.sae.training.trainer import Trainer


@dataclass(frozen=True)
class Bench:
    """Size of the step."""

    d_model: int = 576
    d_sae: int = 8192
    k: int = 32
    pairs: int = 2048
    """Pairs of adjacent tokens in a step."""
    window: int = 32
    """Adjacent tokens read together."""
    steps: int = 5
    """Timed steps of each; the median counts."""
    threads: int = 2
    """On a CPU."""
    device: str = "cpu"
    precision: Precision = "float32"
    """Of the large matrix products, in both steps."""
    memory_of: str | None = None
    """Internal: run only this step, and print the process's peak memory."""


def dense_loss(sae: TemporalSAE, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The loss of tsae.sae.training.loss written densely; x: (n, d_model), pairs: (N, 2) rows of x."""
    config = sae.config
    pre = torch.relu((x - sae.b_dec) @ sae.W_enc + sae.b_enc)
    values, indices = pre.flatten().topk(config.k * len(x), sorted=False)
    codes = torch.zeros_like(pre).flatten().scatter(0, indices, values).view_as(pre)
    high = codes[:, : config.d_high]
    x_high = high @ sae.W_dec[: config.d_high] + sae.b_dec
    x_hat = codes @ sae.W_dec + sae.b_dec
    current, previous = (F.normalize(high[pairs[:, side]], dim=1) for side in (1, 0))
    logits = current @ previous.T / config.temperature
    target = torch.arange(len(pairs), device=x.device)
    contrast = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    high_weight, weight = config.weights
    errors = high_weight * (x - x_high).pow(2).mean() + weight * (x - x_hat).pow(2).mean()
    return errors + config.temporal_weight * contrast


def make_batch(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """(windows of adjacent tokens, pairs): sparse mixtures that drift along a window."""
    generator = torch.Generator().manual_seed(0)
    n_windows = -(-bench.pairs // (bench.window - 1))
    directions = torch.randn(512, bench.d_model, generator=generator)
    topic = torch.rand(n_windows, 1, 512, generator=generator) < 0.02
    token = torch.rand(n_windows, bench.window, 512, generator=generator) < 0.03
    strength = torch.rand(n_windows, bench.window, 512, generator=generator)
    x = ((topic | token) * strength).flatten(0, 1) @ directions
    x = x * (bench.d_model**0.5 / x.norm(dim=1).mean())
    row = torch.arange(len(x))
    current = row[row % bench.window > 0][: bench.pairs]
    return x.to(bench.device), torch.stack([current - 1, current], dim=1).to(bench.device)


def make_sae(bench: Bench) -> TemporalSAE:
    sae = TemporalSAE(bench.d_model, SAEConfig(d_sae=bench.d_sae, k=bench.k)).to(bench.device)
    sae.initialize(torch.zeros(bench.d_model), torch.Generator(bench.device).manual_seed(1))
    return sae


def sparse_sae(x: torch.Tensor, d_sae: int, k: int, site: str, device: str = "cpu") -> TemporalSAE:
    """An SAE of random weights with about k active latents on such tokens (n, d_model)."""
    sae = TemporalSAE(x.shape[1], SAEConfig(d_sae=d_sae, k=k), site=site).requires_grad_(False).to(device)
    sae.initialize(x.mean(0), torch.Generator(device).manual_seed(0))
    sample = sae.preactivations(x[:256].to(device)).flatten()
    sae.threshold.fill_(sample.topk(len(sample) * k // d_sae, sorted=False).values.min())
    return sae


def baseline(bench: Bench, sae: TemporalSAE, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """`dense_loss` in the bench's precision."""
    device, on = torch.device(bench.device).type, bench.precision == "bfloat16"
    with torch.autocast(device, dtype=torch.bfloat16, enabled=on):
        return dense_loss(sae, x, pairs)


def stepper(bench: Bench, which: str) -> Callable[[], Any]:
    """One optimizer step of "ours", "dense", or the "floor"."""
    x, pairs = make_batch(bench)
    if which == "ours" and bench.device.startswith("cuda"):
        return whole_step(bench, x, pairs)
    sae = make_sae(bench)
    both = x[pairs].flatten(0, 1)  # (2N, d_model): token t − 1 and t of every pair after one another
    two = torch.arange(len(both), device=x.device).view(-1, 2)
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-4, fused=which != "dense", foreach=False)
    window = torch.arange(len(x)) // bench.window  # as the trainer gives it: on the CPU
    factors = [tensor.detach().to(getattr(torch, bench.precision)) for tensor in (x, sae.W_enc)]

    def step() -> None:
        optimizer.zero_grad(set_to_none=which != "floor")
        if which == "ours":
            temporal_loss(sae, x, pairs, trajectory=window, precision=bench.precision).total.backward()
        elif which == "dense":
            baseline(bench, sae, both, two).backward()
        else:
            torch.mm(*factors)
            for parameter in sae.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    return step


def whole_step(size: Bench, x: torch.Tensor, pairs: torch.Tensor) -> Callable[[], Any]:
    """A step of our trainer."""
    norms = SimpleNamespace(mean=size.d_model**0.5, centre=[0.0] * size.d_model, outlier_share=0.0)
    windows: Any = SimpleNamespace(
        first_tokens=x[:64].cpu().numpy(), norms=norms, d_model=size.d_model, site="blocks.0.hook_resid_post"
    )
    training = TrainingConfig(
        tokens=100_000 * len(x), batch_tokens=len(x), initial_bias="mean", device=size.device, precision=size.precision
    )
    config = SAEConfig(d_sae=size.d_sae, k=size.k, dead_after_tokens=10_000_000)
    trainer = Trainer(windows, config, training, Processes(device=size.device))
    token = np.arange(len(x))
    return partial(trainer.step, TokenBatch(x, pairs.cpu().numpy(), token // size.window, copies=token))


def timed(steps: Mapping[str, Callable[[], Any]], rounds: int, device: str, most: float = math.inf) -> dict[str, float]:
    """Median seconds of each, taken in turn, so that a busy machine slows all alike. The first round does not count.

    After `most` seconds no further round begins; one that counts is taken in any case.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    for round_ in range(rounds + 1):
        if round_ > 1 and time.perf_counter() - begin > most:
            break
        for name, step in steps.items():
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize(device: str) -> None:
    """Wait for a GPU to have done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_mb() -> float:
    """The most memory that this process has held. (A child's ru_maxrss starts from its parent's.)"""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e3


def peak_memory(bench: Bench, which: str) -> float:
    """Peak MB of a process that runs only this step; on a GPU what its allocator held."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in vars(bench).items() if value is not None]
    command = [sys.executable, __file__, *arguments, f"--memory-of={which}"]
    return float(subprocess.check_output(command, env=os.environ, text=True).split()[-1])


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    torch.set_num_threads(bench.threads)
    on_gpu = bench.device.startswith("cuda")
    if bench.memory_of is not None:
        step = stepper(bench, bench.memory_of)
        for _ in range(2):
            step()
        print(torch.cuda.max_memory_allocated() / 1e6 if on_gpu else peak_mb())
        return
    seconds = timed({name: stepper(bench, name) for name in ("ours", "dense", "floor")}, bench.steps, bench.device)
    memory = {name: peak_memory(bench, name) for name in ("ours", "dense")}
    ratio, share = seconds["dense"] / seconds["ours"], seconds["floor"] / seconds["ours"]
    where = torch.cuda.get_device_name() if on_gpu else f"{bench.threads} CPU threads"
    print(f"d_model {bench.d_model}, d_sae {bench.d_sae}, k {bench.k}, {bench.precision}, {where}")
    for name in ("dense", "ours"):
        speed = f"{bench.pairs / seconds[name]:,.0f} pairs/s"
        print(f"  {name:<6}{seconds[name] * 1e3:>10,.1f} ms a step, {speed}, peak memory {memory[name]:,.0f} MB")
    print(f"  floor {seconds['floor'] * 1e3:>10,.1f} ms (dense encode + fused Adam), {share:.0%} of ours")
    figures = {"seconds": seconds, "floor_share": share, "peak_memory_mb": memory, "size": vars(bench)}
    print(json.dumps({"name": "bench_train", "ratio": round(ratio, 3), **figures}))


if __name__ == "__main__":
    main()

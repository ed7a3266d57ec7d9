"""Training step, capture and encoding at the sizes that GPUs are for, each against its floor.

- train: one step of our trainer against one dense encode and one fused Adam step.
- capture: reading and writing a shard with a Llama of random weights against the bare forward pass of the same batches.
- encode: codes as sparse rows against the one product that they need.

    python scripts/bench_gpu.py --parts train encode --to tables.md
    python scripts/bench_gpu.py --device cpu --scale tiny     # that it runs at all

Writes the tables again after every row, where --to is given, and ends with one line of JSON. `scripts/gpu_suite.sh`
bounds the parts in time, and makes a page of their tables.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import bench_train
import numpy as np
import torch
import tyro
from bench_capture import Capturing
from tqdm.auto import tqdm

from tsae.activations.shard import open_shard
from tsae.features.encode import tokens_at_once
from tsae.features.encoded_shards import encode_shard
from tsae.rollouts.table import Rollouts
from tsae.sae.config import Precision
from tsae.sae.model import TemporalSAE

Part = Literal["train", "capture", "encode"]
Row = dict[str, Any]
_SIZES = {"full": ("2048x32768x64", "4096x65536x64", "4096x131072x64"), "tiny": ("64x512x8",)}


@dataclass(frozen=True)
class Bench:
    """What is measured."""

    parts: tuple[Part, ...] = ("train", "capture", "encode")
    device: str = "cuda"
    precisions: tuple[Precision, ...] = ("bfloat16", "float32")
    """Of the training step."""
    scale: Literal["full", "tiny"] = "full"
    sizes: tuple[str, ...] = ()
    """d_model x d_sae x k, as 4096x65536x64; by default those of the scale."""
    rounds: int = 10
    """Of every measurement, the median of which counts."""
    seconds: float = math.inf
    """After which a measurement takes no further round."""
    trajectories: int = 400
    """That capture reads, of 750 tokens on average."""
    encoded: int = 40
    """The same, for encode."""
    to: Path | None = None
    """Markdown file for the tables."""
    rows: Path | None = None
    """File to which every row is appended as a line of JSON."""
    found: dict[str, list[Row]] = field(default_factory=dict, init=False)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(d_model, d_sae, k)."""
        every = self.sizes or _SIZES[self.scale]
        return [(d_model, d_sae, k) for d_model, d_sae, k in (map(int, size.split("x")) for size in every)]

    def keep(self, part: Part, row: Row) -> None:
        """Print a row, and write the tables with it."""
        self.found.setdefault(part, []).append(row)
        print(f"{part}:", ", ".join(f"{name} {_shown(value, name)}" for name, value in row.items()), flush=True)
        if self.to is not None:
            self.to.write_text(tables(self.found), encoding="utf-8")
        if self.rows is not None:
            with self.rows.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"part": part, **row}) + "\n")

    def timed(self, steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return bench_train.timed(steps, self.rounds, self.device, self.seconds)


def step_sizes(bench: Bench) -> Iterator[tuple[bench_train.Bench, Row]]:
    """Every size of a training step, and how its rows begin."""
    pairs = 256 if bench.scale == "tiny" else 8192
    for precision in bench.precisions:
        for d_model, d_sae, k in bench.shapes:
            size = bench_train.Bench(
                d_model=d_model, d_sae=d_sae, k=k, pairs=pairs, device=bench.device, precision=precision
            )
            yield size, {"d_model": d_model, "d_sae": d_sae, "k": k, "pairs": pairs, "precision": precision}


def train(bench: Bench) -> None:
    for size, begin in step_sizes(bench):
        x, pairs = bench_train.make_batch(size)
        ours = bench_train.whole_step(size, x, pairs)
        ours()
        peak = _peak_gb(ours, bench.device)  # before the floor's weights are there
        seconds = bench.timed({"ours": ours, "floor": bench_train.stepper(size, "floor")})
        bench.keep("train", {
            **begin, "ms": seconds["ours"] * 1e3, "floor_ms": seconds["floor"] * 1e3,
            "share_of_floor": seconds["floor"] / seconds["ours"], "tokens_per_s": len(x) / seconds["ours"],
            "peak_gb": peak,
        })  # fmt: skip


def _peak_gb(step: Callable[[], None] | None, device: str) -> float:
    """What the GPU's allocator held during a step, or since its count began; on a CPU, the most of this process."""
    if not device.startswith("cuda"):
        return bench_train.peak_mb() / 1e3
    if step is not None:
        torch.cuda.reset_peak_memory_stats()
        step()
    return torch.cuda.max_memory_allocated() / 1e9


def llama(bench: Bench, d_model: int, n_blocks: int) -> Any:
    """A Llama of random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tiny = bench.scale == "tiny"
    config = LlamaConfig(
        vocab_size=1000 if tiny else 32_000, hidden_size=d_model, intermediate_size=d_model * 43 // 16, pad_token_id=0,
        num_hidden_layers=n_blocks, num_attention_heads=d_model // (16 if tiny else 128),
        num_key_value_heads=d_model // (16 if tiny else 128), max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def texts(bench: Bench, n: int) -> Rollouts:
    """Trajectories of 250 to 1,250 tokens."""
    rng, tiny = np.random.default_rng(0), bench.scale == "tiny"
    lengths = rng.integers(*((10, 50) if tiny else (200, 1000)), min(n, 20) if tiny else n)
    records = [
        {"problem_id": f"p{i}", "policy": "base", "outcome": "unknown",
         "prompt_ids": rng.integers(5, 1000, n // 4 + 1).tolist(), "response_ids": rng.integers(5, 1000, n).tolist()}
        for i, n in enumerate(lengths.tolist())
    ]  # fmt: skip
    return Rollouts.from_records(records)


def capturing(
    bench: Bench, d_model: int, n_blocks: int, rollouts: Rollouts, folder: Path, shards: int = 1
) -> Capturing:
    """Capture by a Llama, five eighths of whose blocks are read."""
    budget = 16_384 if bench.scale == "full" else 200
    return Capturing(llama(bench, d_model, n_blocks), n_blocks * 5 // 8, rollouts, folder, budget, "bfloat16", shards)


def disk(run: Capturing) -> float:
    """Seconds in which as many bytes are written and flushed, and nothing else is done."""
    n_bytes = sum((run.folder / piece.file).stat().st_size for piece in run.pieces)
    begin, block = time.perf_counter(), np.ones(min(n_bytes, 1 << 26), np.uint8)
    with (run.folder / "alone").open("wb", buffering=0) as stream:
        for _ in range(-(-n_bytes // len(block))):
            stream.write(block.data)
        os.fsync(stream.fileno())
    return time.perf_counter() - begin


def capture(bench: Bench) -> None:
    """Of a Llama of the shape of 7B, where d_model is 4,096."""
    for d_model in sorted({size[0] for size in bench.shapes}):
        with tempfile.TemporaryDirectory() as folder:
            n_blocks, rollouts = 3 if bench.scale == "tiny" else 32, texts(bench, bench.trajectories)
            run = capturing(bench, d_model, n_blocks, rollouts, Path(folder), shards=6)
            seconds = bench.timed({"ours": run.ours, "bare": run.bare})
            bench.keep("capture", {
                "d_model": d_model, "blocks": n_blocks, "dtype": "bfloat16", "tokens": run.n_tokens,
                "tokens_per_s": run.n_tokens / seconds["ours"],
                "share_of_bare_forward": seconds["bare"] / seconds["ours"],
                "s": seconds["ours"], "s_of_writing_alone": disk(run), "peak_gb": _peak_gb(run.ours, bench.device),
                "peak_gb_bare": _peak_gb(run.bare, bench.device),
            })  # fmt: skip


class _Source:
    """As much of a store as encoding one shard asks for."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.rows = rollouts, np.ones(len(rollouts), dtype=bool)


def encode(bench: Bench) -> None:
    """The shard is what the second block of a Llama of two reads: what encoding costs does not depend on it."""
    for d_model, d_sae, k in bench.shapes:
        with tempfile.TemporaryDirectory() as folder:
            rollouts = texts(bench, bench.encoded)
            run = capturing(bench, d_model, 2, rollouts, Path(folder))
            run.ours()
            shard = open_shard(run.folder / run.pieces[0].file, run.manifest, "base", run.records[0])
            source = _Source(rollouts)
            x = torch.from_numpy(shard.read(run.site, slice(None)))
            sae = bench_train.sparse_sae(x, d_sae, k, run.site, bench.device)
            at_once = tokens_at_once(sae)

            def ours(sae: TemporalSAE = sae, source: Any = source, shard: Any = shard, at_once: int = at_once) -> None:
                with tqdm(disable=True) as bar:
                    encode_shard(sae, source, shard, at_once, bar)

            def floor(sae: TemporalSAE = sae, x: torch.Tensor = x, at_once: int = at_once) -> None:
                for low in range(0, len(x), at_once):
                    torch.mm(x[low : low + at_once].to(bench.device), sae.W_enc)

            seconds = bench.timed({"ours": ours, "floor": floor})
            bench.keep("encode", {
                "d_model": d_model, "d_sae": d_sae, "k": k, "tokens": len(x), "tokens_per_s": len(x) / seconds["ours"],
                "share_of_product": seconds["floor"] / seconds["ours"],
            })  # fmt: skip


_SAYS = {
    "train": "A step of our trainer. The floor is one dense encode and one fused Adam step; the goal is 50 % of it.",
    "capture": "Capture, with writing and checksums, of a Llama of random weights, read at five eighths of its depth. "
    "The goal is 90 % of the bare forward pass.",
    "encode": "Encoding of a stored shard into sparse rows, in float32, against the one product that it needs.",
}


def tables(found: dict[str, list[Row]]) -> str:
    """A section of Markdown for every part."""
    lines = []
    for part, rows in found.items():
        names = list(rows[0])
        heads = " | ".join(name.replace("_", " ") for name in names)
        lines += ["", f"## {part.replace('_', ' ').capitalize()}", "", _SAYS[part], "", f"| {heads} |"]
        lines.append("| --- " * len(names) + "|")
        lines += [f"| {' | '.join(_shown(row[name], name) for name in names)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    return f"{value:.0%}" if name.startswith("share") else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    for part in bench.parts:
        globals()[part](bench)
    shares = [row["share_of_floor"] for row in bench.found.get("train", ())]
    print(json.dumps({"name": "bench_gpu", "ratio": min(shares, default=None), "device": bench.device, **bench.found}))


if __name__ == "__main__":
    main()

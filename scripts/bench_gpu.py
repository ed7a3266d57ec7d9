"""Training step, capture and encoding at the sizes that GPUs are for, each against its floor.

- train: one T-SAE step (`scripts/bench_train.py`) against one dense encode and one fused Adam step.
- profile: where the time of that step goes, by torch's profiler.
- variants: the step with single decisions of `tsae.sae.training.sparse_codes` taken otherwise.
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
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import bench_train
import numpy as np
import torch
import tyro
from tqdm.auto import tqdm

from tsae.activations.capture import capture_shard
from tsae.activations.forward_batches import pad, plan_batches
from tsae.activations.reading_plan import cut
from tsae.activations.shard import open_shard
from tsae.checkpoints.hooks import HuggingFaceReader, decoder_blocks, positions
from tsae.features.encode import tokens_at_once
from tsae.features.encoded_shards import encode_shard
from tsae.rollouts.table import Rollouts
from tsae.sae.config import Precision, SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training import sparse_codes

Part = Literal["train", "profile", "variants", "capture", "encode"]
Row = dict[str, Any]
_SIZES = {"full": ("2048x32768x64", "4096x65536x64", "4096x131072x64"), "tiny": ("64x512x8",)}


@dataclass(frozen=True)
class Bench:
    """What is measured."""

    parts: tuple[Part, ...] = ("train", "profile", "variants", "capture", "encode")
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
    trajectories: int = 100
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
        ours = bench_train.stepper(size, "ours")
        ours()
        peak = _peak_gb(ours, bench.device)  # before the floor's weights are there
        seconds = bench.timed({"ours": ours, "floor": bench_train.stepper(size, "floor")})
        n_tokens = len(bench_train.make_batch(size)[0])
        bench.keep("train", {
            **begin, "ms": seconds["ours"] * 1e3, "floor_ms": seconds["floor"] * 1e3,
            "share_of_floor": seconds["floor"] / seconds["ours"], "tokens_per_s": n_tokens / seconds["ours"],
            "peak_gb": peak,
        })  # fmt: skip


def _peak_gb(step: Callable[[], None], device: str) -> float:
    """What the GPU's allocator held during a step; on a CPU, the most that this process has held."""
    if not device.startswith("cuda"):
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e6
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 1e9


_PARTS_OF_A_STEP = {
    "_EncodeTopK": "encode", "_Reconstruct": "reconstruct and its gradients by codes", "_InfoNCE": "InfoNCE",
    **{f"autograd::engine::evaluate_function: {name}Backward": f"{what}, backward" for name, what in (
        ("_EncodeTopK", "encode"), ("_Reconstruct", "reconstruct"), ("_InfoNCE", "InfoNCE")
    )},
    "update": "Adam, clipping and norms of rows",
}  # fmt: skip
"""By what the profiler calls them."""


def profile(bench: Bench) -> None:
    """The parts of a step, then its longest kernels; on a CPU operations."""
    on_gpu = bench.device.startswith("cuda")
    kind = "device" if on_gpu else "cpu"
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * on_gpu]
    for size, begin in step_sizes(bench):
        step = bench_train.stepper(size, "ours")
        for _ in range(2):
            step()
        with torch.profiler.profile(activities=activities) as seen:
            step()
            bench_train.synchronize(bench.device)
        # An operation is there as what called it, on the CPU, and what it started, on the GPU.
        events = seen.key_averages()
        calls = [event for event in events if event.device_type.name == "CPU"]
        kernels = [event for event in events if event.device_type.name != "CPU" and not event.is_user_annotation]
        kernels = kernels or calls
        alone = {event.key: getattr(event, f"self_{kind}_time_total") / 1e3 for event in kernels}
        bench.keep("profile", {**begin, "of": "the whole step", "ms": sum(alone.values())})
        for event in calls:
            if event.key in _PARTS_OF_A_STEP:
                of, ms = _PARTS_OF_A_STEP[event.key], getattr(event, f"{kind}_time_total") / 1e3
                bench.keep("profile", {**begin, "of": of, "ms": ms})
        for name in sorted(alone, key=lambda name: -alone[name])[:24]:
            bench.keep("profile", {**begin, "of": f"`{name[:70].replace('|', '/')}`", "ms": alone[name]})


def variants(bench: Bench) -> None:
    """Without kernels, and with tiles of other sizes. On a CPU there are none."""
    for size, begin in step_sizes(bench):
        step = bench_train.stepper(size, "ours")
        changed: dict[str, tuple[Any, str, Any]] = {
            "as it is": (sparse_codes, "_WITH_KERNELS", sparse_codes._WITH_KERNELS),
            "torch's sparse products": (sparse_codes, "_WITH_KERNELS", ()),
        }
        if sparse_codes.kernels_for(torch.empty(0, device=bench.device)) is not None:
            from tsae.sae.training import kernels

            for constant, number in (("_TILE", 1 << 13), ("_ENTRIES", 16), ("_ENTRIES", 64), ("_WIDTH", 64),
                                            ("_WIDTH", 256), ("_LATENTS", 32), ("_COLUMNS", 8192)):  # fmt: skip
                changed[f"{constant[1:].lower()} {number}"] = (kernels, constant, number)

        def run(change: tuple[Any, str, Any], step: Callable[[], None] = step) -> None:
            with mock.patch.object(*change):
                step()

        seconds = bench.timed({name: partial(run, change) for name, change in changed.items()})
        for name, value in seconds.items():
            bench.keep("variants", {**begin, "variant": name, "ms": value * 1e3})


def llama(bench: Bench, d_model: int, n_blocks: int) -> Any:
    """A Llama of random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tiny = bench.scale == "tiny"
    config = LlamaConfig(
        vocab_size=1000 if tiny else 32_000, hidden_size=d_model, intermediate_size=d_model * 4,
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


class Capturing:
    """Capture of one shard by a Llama, five eighths of whose blocks are read.

    Args:
        bench: what is measured.
        d_model: of the Llama.
        n_blocks: of the Llama.
        rollouts: that it reads.
        folder: for the shard.
    """

    def __init__(self, bench: Bench, d_model: int, n_blocks: int, rollouts: Rollouts, folder: Path) -> None:
        self.device, self.rollouts, self.folder = bench.device, rollouts, folder
        self.model = llama(bench, d_model, n_blocks)
        self.layer = n_blocks * 5 // 8
        self.site = f"blocks.{self.layer}.hook_resid_post"
        self.lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
        self.budget = 16_384 if bench.scale == "full" else 200
        (self.piece,) = cut({"base": np.arange(len(rollouts))}, self.lengths, int(self.lengths.sum()))
        self.manifest: dict[str, Any] = {
            "dtype": "bfloat16", "sites": {self.site: {"d_model": d_model}}, "rollouts": rollouts.fingerprint,
            "readers": [{"id": "base", "weights": ""}], "config": {"token_statistics": False},
        }  # fmt: skip
        self.reader = HuggingFaceReader(self.model, [self.site])
        self.record: dict[str, Any] = {}

    def ours(self) -> None:
        with tqdm(disable=True) as bar:
            self.record = capture_shard(
                self.reader, "", self.rollouts, self.piece, self.folder, self.manifest, self.budget, bar
            )()

    @torch.no_grad()
    def bare(self) -> None:
        """The forward passes of the same batches."""
        blocks = decoder_blocks(self.model)
        kept = [blocks.pop(-1) for _ in range(len(blocks) - self.layer - 1)]
        try:
            for batch in plan_batches(self.lengths, self.budget):
                ids = [np.concatenate(self.rollouts.tokens(row)) for row in batch]
                input_ids, mask = (each.to(self.device) for each in pad(ids))
                self.model.model(
                    input_ids=input_ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
                )
        finally:
            blocks.extend(reversed(kept))

    def shard(self) -> Any:
        self.ours()
        return open_shard(self.folder / self.piece.file, self.manifest, "base", self.record)


def capture(bench: Bench) -> None:
    for d_model in sorted({size[0] for size in bench.shapes}):
        with tempfile.TemporaryDirectory() as folder:
            n_blocks, rollouts = 3 if bench.scale == "tiny" else 16, texts(bench, bench.trajectories)
            run = Capturing(bench, d_model, n_blocks, rollouts, Path(folder))
            seconds = bench.timed({"ours": run.ours, "bare": run.bare})
            n_tokens = int(run.lengths.sum())
            bench.keep("capture", {
                "d_model": d_model, "dtype": "bfloat16", "tokens": n_tokens, "tokens_per_s": n_tokens / seconds["ours"],
                "share_of_bare_forward": seconds["bare"] / seconds["ours"],
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
            run = Capturing(bench, d_model, 2, rollouts, Path(folder))
            shard, source = run.shard(), _Source(rollouts)
            x = torch.from_numpy(shard.read(run.site, slice(None)))
            sae = TemporalSAE(d_model, SAEConfig(d_sae=d_sae, k=k), site=run.site).requires_grad_(False)
            sae = sae.to(bench.device)
            sae.initialize(x.mean(0), torch.Generator(bench.device).manual_seed(0))
            sample = sae.preactivations(x[:256].to(bench.device)).flatten()
            sae.threshold.fill_(sample.topk(len(sample) * k // d_sae, sorted=False).values.min())
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
    "train": "A training step. The floor is one dense encode and one fused Adam step; the goal is 50 % of it.",
    "profile": "Where the time of a training step goes, by torch's profiler, which itself takes time: the whole step, "
    "its parts, and the longest kernels, which are in the parts.",
    "variants": "A training step with one decision taken otherwise.",
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
        lines += ["", f"## {part.capitalize()}", "", _SAYS[part], "", f"| {heads} |"]
        lines.append("| --- " * len(names) + "|")
        lines += [f"| {' | '.join(_shown(row[name], name) for name in names)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0%}" if name.startswith("share") else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    for part in bench.parts:
        globals()[part](bench)
    shares = [row["share_of_floor"] for row in bench.found.get("train", ())]
    print(json.dumps({"name": "bench_gpu", "ratio": min(shares, default=None), "device": bench.device, **bench.found}))


if __name__ == "__main__":
    main()

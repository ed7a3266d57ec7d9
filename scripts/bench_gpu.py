"""Training step, capture, encoding and diff at the sizes that GPUs are for, each against its floor.

- train: one T-SAE step (`scripts/bench_train.py`) against one dense encode and one fused Adam step.
- capture: reading and writing a shard with a Llama of random weights against the bare forward pass of the same batches.
- encode: codes as sparse rows against the one product that they need.
- diff: `scripts/bench_diff.py`, which runs on the CPU, at the same number of features.

    python scripts/bench_gpu.py --to docs/measured-gpu.md
    python scripts/bench_gpu.py --device cpu --scale tiny     # that it runs at all

Writes the tables, where --to is given, and ends with one line of JSON.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import bench_train
import numpy as np
import torch
import tyro
from tqdm.auto import tqdm

from tsae.activations.reader.assignment import cut
from tsae.activations.reader.forward_passes import pad, plan_batches
from tsae.activations.recording.shard_capture import capture_shard
from tsae.activations.shards.shard import open_shard
from tsae.checkpoints.forward.hooks import HuggingFaceReader, decoder_blocks, positions
from tsae.features.encode import tokens_at_once
from tsae.features.shard_codes import encode_shard
from tsae.rollouts.table import Rollouts
from tsae.sae.config import Precision, SAEConfig
from tsae.sae.model import TemporalSAE

Part = Literal["train", "capture", "encode", "diff"]
_SIZES: dict[str, list[tuple[int, int, int]]] = {
    "full": [(2048, 32_768, 64), (4096, 65_536, 64), (4096, 131_072, 64)],
    "tiny": [(64, 512, 8)],
}
"""(d_model, d_sae, k)."""


@dataclass(frozen=True)
class Bench:
    """What is measured."""

    parts: tuple[Part, ...] = ("train", "capture", "encode", "diff")
    device: str = "cuda"
    precisions: tuple[Precision, ...] = ("bfloat16", "float32")
    """Of the training step."""
    scale: Literal["full", "tiny"] = "full"
    rounds: int = 10
    to: Path | None = None
    """Markdown file to write."""


def train(bench: Bench) -> list[dict[str, Any]]:
    found = []
    for d_model, d_sae, k in _SIZES[bench.scale]:
        for precision in bench.precisions:
            pairs = 4096 if bench.scale == "full" else 256
            size = bench_train.Bench(
                d_model=d_model, d_sae=d_sae, k=k, pairs=pairs, device=bench.device, precision=precision
            )
            seconds = bench_train.timed(
                {name: bench_train.stepper(size, name) for name in ("ours", "floor")}, bench.rounds, bench.device
            )
            share = seconds["floor"] / seconds["ours"]
            found.append(
                {"d_model": d_model, "d_sae": d_sae, "k": k, "precision": precision, "ms": seconds["ours"] * 1e3,
                 "pairs_per_s": pairs / seconds["ours"], "share_of_floor": share}
            )  # fmt: skip
            print(
                f"train {d_model} × {d_sae}, k {k}, {precision}: {seconds['ours'] * 1e3:.1f} ms, {share:.0%} of floor"
            )
    return found


def llama(bench: Bench, d_model: int) -> Any:
    """A Llama of random weights: 16 blocks, the sixth last of which is read."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tiny = bench.scale == "tiny"
    config = LlamaConfig(
        vocab_size=1000 if tiny else 32_000, hidden_size=d_model, intermediate_size=d_model * 4,
        num_hidden_layers=3 if tiny else 16, num_attention_heads=d_model // (16 if tiny else 128),
        num_key_value_heads=d_model // (16 if tiny else 128), max_position_embeddings=4096,
    )  # fmt: skip
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def texts(bench: Bench) -> Rollouts:
    """Trajectories of 200 to 1,000 tokens."""
    rng, tiny = np.random.default_rng(0), bench.scale == "tiny"
    lengths = rng.integers(*((10, 50) if tiny else (200, 1000)), 20 if tiny else 400)
    records = [
        {"problem_id": f"p{i}", "policy": "base", "outcome": "unknown",
         "prompt_ids": rng.integers(5, 1000, n // 4 + 1).tolist(), "response_ids": rng.integers(5, 1000, n).tolist()}
        for i, n in enumerate(lengths.tolist())
    ]  # fmt: skip
    return Rollouts.from_records(records)


def capture(bench: Bench, folder: Path) -> tuple[list[dict[str, Any]], tuple[Any, Rollouts]]:
    """The figures, and the last shard with its rollouts."""
    found, rollouts = [], texts(bench)
    lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    budget = 16_384 if bench.scale == "full" else 200
    shard: Any = None
    for d_model in sorted({size[0] for size in _SIZES[bench.scale]}):
        model = llama(bench, d_model)
        layer = model.config.num_hidden_layers * 5 // 8
        site = f"blocks.{layer}.hook_resid_post"
        dtype = str(model.dtype).removeprefix("torch.")
        (piece,) = cut({"base": np.arange(len(rollouts))}, lengths, int(lengths.sum()))
        manifest: dict[str, Any] = {
            "dtype": dtype, "sites": {site: {"d_model": d_model}}, "rollouts": rollouts.fingerprint,
            "readers": [{"id": "base", "weights": ""}], "config": {"token_statistics": False},
        }  # fmt: skip
        reader = HuggingFaceReader(model, [site])
        ids = [np.concatenate(rollouts.tokens(row)) for row in range(len(rollouts))]
        blocks = decoder_blocks(model)
        record: dict[str, Any] = {}

        def ours(
            reader: Any = reader, manifest: dict[str, Any] = manifest, piece: Any = piece, record: Any = record
        ) -> None:
            with tqdm(disable=True) as bar:
                record.update(capture_shard(reader, "", rollouts, piece, folder, manifest, budget, bar))

        @torch.no_grad()
        def bare(model: Any = model, blocks: Any = blocks, layer: int = layer, ids: Any = ids) -> None:
            kept = [blocks.pop(-1) for _ in range(len(blocks) - layer - 1)]
            try:
                for batch in plan_batches(lengths, budget):
                    input_ids, mask = (each.to(bench.device) for each in pad([ids[t] for t in batch]))
                    model.model(input_ids=input_ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
            finally:
                blocks.extend(reversed(kept))

        seconds = bench_train.timed({"ours": ours, "bare": bare}, bench.rounds, bench.device)
        share = seconds["bare"] / seconds["ours"]
        speed = int(lengths.sum()) / seconds["ours"]
        found.append({"d_model": d_model, "dtype": dtype, "tokens_per_s": speed, "share_of_bare_forward": share})
        print(f"capture d_model {d_model}, {dtype}: {speed:,.0f} tokens/s, {share:.0%} of a bare forward")
        shard = open_shard(folder / piece.file, manifest, "base", record)
    return found, (shard, rollouts)


class _Source:
    """As much of a store as encoding one shard asks for."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.rows = rollouts, np.ones(len(rollouts), dtype=bool)


def encode(bench: Bench, shard: Any, rollouts: Rollouts) -> list[dict[str, Any]]:
    """Of the widest shard, at every d_sae."""
    (site,) = (name.removeprefix("activations/") for name in shard.places if name.startswith("activations/"))
    x = torch.from_numpy(shard.read(site, slice(None)))
    found = []
    for d_sae, k in sorted({size[1:] for size in _SIZES[bench.scale]}):
        sae = TemporalSAE(x.shape[1], SAEConfig(d_sae=d_sae, k=k), site=site)
        sae.initialize(x.mean(0), torch.Generator().manual_seed(0))
        sample = torch.relu((x[:256] - sae.b_dec) @ sae.W_enc).flatten()
        sae.threshold.fill_(sample.topk(256 * k, sorted=False).values.min())
        sae = sae.requires_grad_(False).to(bench.device)
        at_once = tokens_at_once(sae)
        source: Any = _Source(rollouts)

        def ours(sae: TemporalSAE = sae, at_once: int = at_once, source: Any = source) -> None:
            with tqdm(disable=True) as bar:
                encode_shard(sae, source, shard, at_once, bar)

        def floor(sae: TemporalSAE = sae, at_once: int = at_once) -> None:
            for low in range(0, len(x), at_once):
                torch.mm(x[low : low + at_once].to(bench.device), sae.W_enc)

        seconds = bench_train.timed({"ours": ours, "floor": floor}, bench.rounds, bench.device)
        share, speed = seconds["floor"] / seconds["ours"], len(x) / seconds["ours"]
        found.append({"d_model": x.shape[1], "d_sae": d_sae, "k": k, "tokens_per_s": speed, "share_of_product": share})
        print(f"encode {x.shape[1]} × {d_sae}, k {k}: {speed:,.0f} tokens/s, {share:.0%} of the product")
    return found


def diff(bench: Bench) -> list[dict[str, Any]]:
    size = ["--trajectories", "5000", "--d-sae", "32768"]
    if bench.scale == "tiny":
        size = ["--trajectories", "480", "--tokens", "40", "--d-sae", "512", "--k", "8", "--n-permutations", "200"]
        size += ["--n-bootstrap", "100", "--small", "160", "40", "4", "128"]
    command = [sys.executable, str(Path(__file__).with_name("bench_diff.py")), *size]
    found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    kept = {name: found[name] for name in ("seconds", "peak_gb", "non_zeros", "ratio")}
    print(f"diff: {found['seconds']} s, peak {found['peak_gb']} GB, {found['ratio']} × the plain way")
    return [{**kept, "ratio_to_one_pass": found["floor"]["ratio"]}]


_SAYS = {
    "train": "A training step. The floor is one dense encode and one fused Adam step; the goal is 50 % of it.",
    "capture": "Capture, with writing and checksums, of a Llama of random weights, read at five eighths of its depth. "
    "The goal is 90 % of the bare forward pass.",
    "encode": "Encoding of a stored shard into sparse rows, in float32, against the one product that it needs.",
    "diff": "A diff, which runs on the CPU.",
}


def page(bench: Bench, machine: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables in Markdown."""
    lines = ["# Measured on a GPU", "", f"By `scripts/gpu_suite.sh` on {machine}, torch {torch.__version__}, "]
    lines[-1] += f"{date.today().isoformat()}. Medians of {bench.rounds} rounds, taken in turn."
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
    on_gpu = bench.device.startswith("cuda")
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    found: dict[str, list[dict[str, Any]]] = {}
    if "train" in bench.parts:
        found["train"] = train(bench)
    with tempfile.TemporaryDirectory() as folder:
        if "capture" in bench.parts or "encode" in bench.parts:
            captured, (shard, rollouts) = capture(bench, Path(folder))
            if "capture" in bench.parts:
                found["capture"] = captured
            if "encode" in bench.parts:
                found["encode"] = encode(bench, shard, rollouts)
    if "diff" in bench.parts:
        found["diff"] = diff(bench)
    if bench.to is not None:
        bench.to.write_text(page(bench, machine, found), encoding="utf-8")
    shares = [row["share_of_floor"] for row in found.get("train", ())]
    print(json.dumps({"name": "bench_gpu", "ratio": min(shares, default=None), "device": machine, **found}))


if __name__ == "__main__":
    main()

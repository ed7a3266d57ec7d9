"""Capturing and reading activations, against what they cannot do without. All ratios are taken within one run.

- forward: capture with writing, checksum and flush to disk, against the bare forward pass: the same model cut off above
  the site, the same batches, sdpa, no hooks. In turn; the median of the rounds counts.
- windows: shuffled windows as training reads them, all from the page cache, against sequential passes over the same
  bytes in a memory map: a copy batch by batch into memory that is used again, with the map open and touched before; and
  a copy of the whole map into new memory.
- memory: peak anonymous memory (mapped files can be dropped at any time and are not counted) of a process that
  captures, or reads, ever more tokens of a tiny model.

Needs SmolLM2 (`make smollm`) and GSM8K's example_model_solutions.jsonl; parts without them are left out, and said so.
Ends with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from bench_train import timed
from gsm8k_log import trajectories
from organism.pretraining import ModelConfig, llama_config
from statements.tables import Shard, write_store
from tqdm.auto import tqdm

import tsae
from tsae.activations.batches import Windows
from tsae.activations.capture import capture_shard
from tsae.activations.forward_batches import pad, plan_batches
from tsae.activations.reading_plan import cut
from tsae.activations.shard import DTYPES
from tsae.base.beside import Beside
from tsae.checkpoints.hooks import HuggingFaceReader, decoder_blocks, positions
from tsae.testbed.tokenizer import make_tokenizer

LENGTH, PROMPT = 250, 50
"""Tokens of a random trajectory, and of its prompt."""
Part = Literal["forward", "windows", "memory"]


@dataclass(frozen=True)
class Bench:
    """What is measured, and how large."""

    solutions: Path = Path("data/example_model_solutions.jsonl")
    """GSM8K's file of four models' solutions."""
    parts: tuple[Part, ...] = ("forward", "windows", "memory")
    layer: int = 15
    """Block whose output is captured; SmolLM2 has 30."""
    tokens: int = 8192
    """About how many tokens every capture of SmolLM2 reads; in whole batches, one at least."""
    batch_tokens: tuple[int, ...] = (4096, 16_384)
    """Budgets of a forward pass to compare."""
    rounds: int = 3
    window_rounds: int = 20
    window_tokens: int = 200_000
    """Tokens of the store whose windows are read, d_model 576."""
    memory_tokens: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    threads: int = 2
    memory_of: str | None = None
    """Internal: STAGE:FOLDER, to run only this and print the process's peak."""


class Solutions:
    """GSM8K solutions as SmolLM2 reads them."""

    def __init__(self, bench: Bench) -> None:
        self.series = tsae.CheckpointSeries((tsae.Checkpoint(id="base", path=str(tsae.testbed.smollm2())),))
        tokenizer = self.series.base.load_tokenizer()
        records = [
            {
                **{name: row[name] for name in ("problem_id", "policy", "prompt", "response")},
                "prompt_ids": tokenizer(row["prompt"])["input_ids"],
                "response_ids": tokenizer(row["response"], add_special_tokens=False)["input_ids"],
                "outcome": "success" if row["correct"] else "failure",
            }
            for row in trajectories(bench.solutions)
        ]
        rows = np.random.default_rng(0).permutation(len(records))
        self.rollouts = tsae.Rollouts.from_records(records).select(rows)
        self.lengths = self.rollouts.lengths("prompt_ids") + self.rollouts.lengths("response_ids")

    def sample(self, tokens: int, batch_tokens: int) -> tsae.Rollouts:
        """Batches of all lengths, out of those in which all solutions would be read.

        So few trajectories in batches of their own would be mostly of other lengths than their neighbours: of 8,192
        tokens a fifth would be padding, of all solutions 1 %.
        """
        batches = list(plan_batches(self.lengths, batch_tokens))
        wanted = max(1, round(tokens / batch_tokens))
        chosen = [batches[int((i + 0.5) * len(batches) / wanted)] for i in range(wanted)]
        return self.rollouts.select(np.sort(np.concatenate(chosen)))


class Capturing:
    """Capture of shards up to a layer, and the bare forward passes of the same batches.

    Args:
        model: of which a layer is read.
        layer: its number.
        rollouts: that it reads.
        folder: for the shards.
        budget: tokens of a batch.
        dtype: of the stored activations.
        shards: about so many.
    """

    def __init__(
        self, model: Any, layer: int, rollouts: tsae.Rollouts, folder: Path, budget: int, dtype: str, shards: int = 1
    ) -> None:
        self.model, self.layer, self.rollouts, self.folder, self.budget = model, layer, rollouts, folder, budget
        self.site = f"blocks.{layer}.hook_resid_post"
        self.lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
        self.n_tokens = int(self.lengths.sum())
        self.pieces = list(cut({"base": np.arange(len(rollouts))}, self.lengths, -(-self.n_tokens // shards)))
        self.manifest: dict[str, Any] = {
            "dtype": dtype, "sites": {self.site: {"d_model": model.config.hidden_size}},
            "rollouts": rollouts.fingerprint, "readers": [{"id": "base", "weights": ""}],
            "config": {"token_statistics": False},
        }  # fmt: skip
        self.reader = HuggingFaceReader(model, [self.site])
        self.records: list[dict[str, Any]] = []

    def ours(self) -> None:
        """As `tsae.activations.capture` captures shard after shard."""
        self.records = []
        with tqdm(disable=True) as bar, Beside(0 if self.model.device.type == "cpu" else 1) as ends:
            for piece in self.pieces:
                end = capture_shard(
                    self.reader, "", self.rollouts, piece, self.folder, self.manifest, self.budget, bar
                )  # fmt: skip
                ends.run(partial(self._end, end))

    def _end(self, end: Callable[[], dict[str, Any]]) -> None:
        self.records.append(end())

    @torch.no_grad()
    def bare(self) -> None:
        """The forward passes of the same batches."""
        blocks = decoder_blocks(self.model)
        kept = [blocks.pop(-1) for _ in range(len(blocks) - self.layer - 1)]
        try:
            for rows in (p.rows[b] for p in self.pieces for b in plan_batches(self.lengths[p.rows], self.budget)):
                texts = [np.concatenate(self.rollouts.tokens(row)) for row in rows]
                ids, mask = (each.to(self.model.device) for each in pad(texts))
                self.model.model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
        finally:
            blocks.extend(reversed(kept))


def forward(bench: Bench, data: Solutions, folder: Path) -> dict[str, Any]:
    model, found = data.series.base.load_model(), {}
    for budget in bench.batch_tokens:
        run = Capturing(model, bench.layer, data.sample(bench.tokens, budget), folder / "forward", budget, "float32")
        seconds = timed({"capture": run.ours, "bare": run.bare}, bench.rounds, "cpu")
        ratio = seconds["capture"] / seconds["bare"]
        speed = {name: run.n_tokens / value for name, value in seconds.items()}
        found[str(budget)] = {"tokens": run.n_tokens, "ratio": ratio, "tokens_per_second": speed}
        print(f"forward, {budget} tokens a batch: capture {speed['capture']:,.0f} tokens/s, {ratio:.3f} x bare")
    return found


def make_store(folder: Path, n_tokens: int, d_model: int, dtype: str) -> tsae.ActivationStore:
    """A store of random activations in shards of half a million tokens."""
    n, generator = n_tokens // LENGTH, torch.Generator().manual_seed(0)
    ids = np.full((n, LENGTH), 2, dtype=np.int32)
    ids[:, :PROMPT] = 1

    def shards() -> Iterator[Shard]:
        for low in range(0, n, 500_000 // LENGTH):
            rows = np.arange(low, min(n, low + 500_000 // LENGTH))
            x = torch.randn(len(rows) * LENGTH, d_model, generator=generator)
            yield x.numpy(), ids[rows].ravel(), [LENGTH] * len(rows), rows

    return write_store(folder, rollouts_of(ids), {"base": (None, shards())}, site="x", dtype=dtype)


def rollouts_of(ids: np.ndarray, first: int = 0) -> tsae.Rollouts:
    """Trajectories of these tokens, (n, LENGTH), eight of a problem."""
    records = [
        {
            "problem_id": f"p{(first + i) // 8}", "policy": "base", "outcome": "unknown",
            "prompt_ids": row[:PROMPT], "response_ids": row[PROMPT:],
        }
        for i, row in enumerate(ids)
    ]  # fmt: skip
    return tsae.Rollouts.from_records(records)


def sequential(shards: list[Any], rows: int) -> dict[str, Callable[[], None]]:
    """Passes over the bytes of shards, so many rows at once; see the module."""
    maps = [np.asarray(shard.raw("x")) for shard in shards]

    def copy() -> None:
        for raw in maps:
            for low in range(0, len(raw), rows):
                raw[low : low + rows].copy()

    def whole() -> None:
        for raw in maps:
            raw.copy()

    return {"copy": copy, "copy of all at once": whole}


def windows(bench: Bench, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    batch_tokens = tsae.TrainingConfig().batch_tokens
    for dtype in DTYPES:
        store = make_store(folder / dtype, bench.window_tokens, 576, dtype)
        passes = sequential(list(store.shards()), batch_tokens)
        for window in (8, 32):
            reading = Windows(store, "x", window=window)

            def read(reading: Windows = reading) -> None:
                for _ in reading.epoch(0, batch_tokens):
                    pass

            seconds = timed({"windows": read, **passes}, bench.window_rounds, "cpu")
            ratios = {name: seconds[name] / seconds["windows"] for name in passes}
            found[f"{dtype}, window {window}"] = ratios
            of = ", ".join(f"{ratio:.0%} of a {name}" for name, ratio in ratios.items())
            print(f"windows of {window}, {dtype}: speed {of}")
    return found


# --- memory


@contextmanager
def peak_anonymous() -> Iterator[list[float]]:
    """MB of memory that is not a file's, at its peak within the block, looked at a hundred times a second."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            status = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], int(status.partition("RssAnon:")[2].split()[0]) / 1e3)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def run_stage(stage: str, folder: Path) -> None:
    """One stage in a process of its own; prints its peak."""
    with peak_anonymous() as peak:
        if stage == "rollouts":
            _ = tsae.Rollouts.read(folder / "rollouts.parquet").fingerprint
        elif stage == "capture":
            series = tsae.CheckpointSeries.load(folder / "model")
            rollouts = tsae.Rollouts.read(folder / "rollouts.parquet")
            tsae.capture(series, rollouts, ["blocks.0.hook_resid_post"], to=folder / "acts", progress=False)
        else:
            for _ in Windows(tsae.ActivationStore(folder / "acts"), "blocks.0.hook_resid_post").epoch(0, 4096):
                pass
    print(peak[0])


def memory(bench: Bench, folder: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    found: dict[str, Any] = {}
    for n_tokens in bench.memory_tokens:
        here = folder / str(n_tokens)
        shape = ModelConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=32)
        LlamaForCausalLM(llama_config(shape, max_positions=512)).save_pretrained(here / "model")
        make_tokenizer().save_pretrained(here / "model")
        rng, n, parts = np.random.default_rng(0), n_tokens // LENGTH, []
        for low in range(0, n, 4000):
            parts.append(rollouts_of(rng.integers(0, 17, (min(4000, n - low), LENGTH)), low))
        tsae.Rollouts.concat(parts).write(here / "rollouts.parquet")
        peaks = {}
        for stage in ("rollouts", "capture", "windows"):
            command = [sys.executable, __file__, f"--threads={bench.threads}", f"--memory-of={stage}:{here}"]
            peaks[stage] = float(subprocess.check_output(command, env=os.environ, text=True).split()[-1])
        found[str(n_tokens)] = peaks
        print(f"memory, {n_tokens:,} tokens: " + ", ".join(f"{name} {mb:,.0f} MB" for name, mb in peaks.items()))
    return found


def main() -> None:
    bench = tyro.cli(Bench, description=__doc__)
    torch.set_num_threads(bench.threads)
    if bench.memory_of is not None:
        stage, _, folder = bench.memory_of.partition(":")
        run_stage(stage, Path(folder))
        return
    found: dict[str, Any] = {"name": "bench_capture", "threads": bench.threads}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if "forward" in bench.parts:
            try:
                found["forward"] = forward(bench, Solutions(bench), root)
            except tsae.TsaeError as error:
                found["left_out"] = str(error)
                print(f"left out forward: {error}")
        if "windows" in bench.parts:
            found["windows"] = windows(bench, root / "windows")
        if "memory" in bench.parts:
            found["memory_mb"] = memory(bench, root / "memory")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Capturing and reading activations, against what they cannot do without. All ratios are taken within one run.

- forward: capture with writing, checksum and flush to disk, against the bare forward pass: the same model cut off above
  the site, the same batches, sdpa, no hooks. In turn; the median of the rounds counts.
- saelens: against sae_lens's CacheActivationsRunner on as many tokens of the same texts, which it packs into full
  contexts without padding; and ours on the very contexts that it reads. By the clock, and by the CPU time of all
  threads, which other programs disturb less.
- padding: the share of padding in batches of GSM8K solutions.
- windows: shuffled windows as training reads them, all from the page cache, against sequential passes over the same
  bytes in a memory map: a copy batch by batch into memory that is used again, with the map open and touched before; the
  same with the map opened anew, whose pages are then found again; a copy of the whole map into new memory; and, for
  16 bits, batches widened to float32 on the way.
- memory: peak anonymous memory (mapped files can be dropped at any time and are not counted) of a process that
  captures, or reads, ever more tokens of a tiny model.

Needs SmolLM2 (`make smollm`) and GSM8K's example_model_solutions.jsonl; parts without them are left out, and said so.
Ends with one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from gsm8k_log import trajectories
from organism.pretraining import ModelConfig, llama_config
from statements.tables import Shard, write_store
from tqdm.auto import tqdm

import tsae
from tsae.activations.batches import Windows
from tsae.activations.capture import capture_shard
from tsae.activations.forward_batches import pad, plan_batches
from tsae.activations.reading_plan import cut, open_reader
from tsae.activations.shard import DTYPES
from tsae.checkpoints.hooks import decoder_blocks, positions
from tsae.testbed.tokenizer import make_tokenizer

LENGTH, PROMPT = 250, 50
"""Tokens of a random trajectory, and of its prompt."""
Part = Literal["forward", "saelens", "padding", "windows", "memory"]


@dataclass(frozen=True)
class Bench:
    """What is measured, and how large."""

    solutions: Path = Path("data/example_model_solutions.jsonl")
    """GSM8K's file of four models' solutions."""
    parts: tuple[Part, ...] = ("forward", "saelens", "padding", "windows", "memory")
    layer: int = 15
    """Block whose output is captured; SmolLM2 has 30."""
    tokens: int = 8192
    """About how many tokens every capture of SmolLM2 reads; in whole batches, one at least."""
    batch_tokens: tuple[int, ...] = (4096, 16_384)
    """Budgets of a forward pass to compare."""
    rounds: int = 3
    window_rounds: int = 20
    """Rounds of reading windows. Beside the median ratio by the clock, that of the least CPU time is given, in
    brackets: of all threads together, so that it is a lower one, but other programs disturb it less."""
    window_tokens: int = 200_000
    """Tokens of the store whose windows are read, d_model 576."""
    memory_tokens: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    threads: int = 2
    memory_of: str | None = None
    """Internal: STAGE:FOLDER, to run only this and print the process's peak."""


class Solutions:
    """GSM8K solutions as SmolLM2 reads them, and its weights in a folder that every library can load."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        source = tsae.Checkpoint(id="base", path=str(tsae.testbed.smollm2()))
        self.path = folder / "smollm2"
        source.load_model(dtype="float32").save_pretrained(self.path)
        tokenizer = source.load_tokenizer()
        tokenizer.save_pretrained(self.path)
        self.series = tsae.CheckpointSeries.load(self.path)
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

    def packed(self, contexts: int, length: int) -> np.ndarray:
        """(contexts, length) token ids of solutions after one another."""
        n = int(np.searchsorted(self.lengths.cumsum(), contexts * length)) + 1
        stream = np.concatenate([np.concatenate(self.rollouts.tokens(row)) for row in range(n)])
        return stream[: contexts * length].reshape(contexts, length)


def missing(bench: Bench) -> str | None:
    try:
        tsae.testbed.smollm2()
    except tsae.TsaeError as error:
        return str(error)
    if not bench.solutions.is_file():
        return f"{bench.solutions} is missing: give GSM8K's example_model_solutions.jsonl as --solutions"
    return None


class Capturing:
    """One shard of SmolLM2's activations, with the model loaded."""

    def __init__(self, data: Solutions, rollouts: tsae.Rollouts, site: str) -> None:
        self.rollouts = rollouts
        self.lengths = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
        self.n_tokens = int(self.lengths.sum())
        self.reader = open_reader(data.series.base, [site], tsae.CaptureConfig())
        (self.piece,) = cut({"base": np.arange(len(rollouts))}, self.lengths, self.n_tokens)
        self.manifest = {
            "dtype": "float32",
            "sites": {site: {"d_model": 576}},
            "rollouts": rollouts.fingerprint,
            "readers": [{"id": "base", "weights": ""}],
            "config": {"token_statistics": False},
        }

    def run(self, folder: Path, batch_tokens: int) -> None:
        with tqdm(disable=True) as bar:
            capture_shard(self.reader, "", self.rollouts, self.piece, folder, self.manifest, batch_tokens, bar)()


def forward(bench: Bench, data: Solutions, folder: Path) -> dict[str, Any]:
    bare = data.series.base.load_model()
    del decoder_blocks(bare)[bench.layer + 1 :]

    @torch.no_grad()
    def forward_all(ours: Capturing, batch_tokens: int) -> None:
        texts = [np.concatenate(ours.rollouts.tokens(row)) for row in range(len(ours.rollouts))]
        for batch in plan_batches(ours.lengths, batch_tokens):
            ids, mask = pad([texts[t] for t in batch])
            bare.model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)

    found: dict[str, Any] = {}
    for budget in bench.batch_tokens:
        ours = Capturing(data, data.sample(bench.tokens, budget), f"blocks.{bench.layer}.hook_resid_post")
        actions = {
            "capture": partial(ours.run, folder / "forward", budget),
            "bare": partial(forward_all, ours, budget),
        }
        seconds = {name: by["clock"] for name, by in timed(bench.rounds, actions).items()}
        ratio = median_ratio(seconds["capture"], seconds["bare"])
        speed = {name: ours.n_tokens / statistics.median(values) for name, values in seconds.items()}
        found[str(budget)] = {"tokens": ours.n_tokens, "ratio": ratio, "tokens_per_second": speed}
        print(f"forward, {budget} tokens a batch: capture {speed['capture']:,.0f} tokens/s, {ratio:.3f} x bare")
    return found


CLOCKS = {"clock": time.perf_counter, "cpu": time.process_time}


def timed(rounds: int, actions: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, list[float]]]:
    """Seconds of each by both clocks in every round but the first, taken in turn: a busy machine slows all alike."""
    seconds: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in actions}
    for round_ in range(rounds + 1):
        for name, action in actions.items():
            start = {clock: now() for clock, now in CLOCKS.items()}
            action()
            for clock, now in CLOCKS.items() if round_ else ():
                seconds[name][clock].append(now() - start[clock])
    return seconds


def median_ratio(a: list[float], b: list[float]) -> float:
    """Of the rounds."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def saelens(bench: Bench, data: Solutions, folder: Path) -> dict[str, Any]:
    """Each reads, writes, and makes of its files what it makes of them, with its model loaded before."""
    from datasets import Dataset
    from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig

    context, site = 256, f"blocks.{bench.layer}.hook_resid_post"
    found: dict[str, Any] = {}
    for budget in bench.batch_tokens:
        batch = budget // context
        tokens = max(1, round(bench.tokens / budget)) * budget
        packed = data.packed(tokens // context, context)
        dataset = Dataset.from_dict({"tokens": np.concatenate([packed, packed]).tolist()})
        here = folder / str(budget)
        theirs = []
        for number in range(bench.rounds + 1):
            config = CacheActivationsRunnerConfig(
                dataset_path="",
                model_name=str(data.path),
                model_class_name="AutoModelForCausalLM",
                model_batch_size=batch,
                hook_name=f"model.layers.{bench.layer}",
                d_in=576,
                training_tokens=tokens,
                context_size=context,
                new_cached_activations_path=str(here / "saelens" / str(number)),
                dtype="float32",
                device="cpu",
                buffer_size_gb=tokens * 576 * 4 / 1e9,  # all at once; a larger one would be filled nevertheless
            )
            theirs.append(CacheActivationsRunner(config, override_dataset=dataset))
        runners = iter(theirs)
        records = [
            {"problem_id": str(i), "policy": "base", "prompt_ids": ids[:1], "response_ids": ids[1:]}
            for i, ids in enumerate(packed.tolist())
        ]
        same = tsae.Rollouts.from_records([{**record, "outcome": "unknown"} for record in records])
        captures = {"ours": data.sample(bench.tokens, budget), "ours on its contexts": same}
        ours = {name: Capturing(data, rollouts, site) for name, rollouts in captures.items()}
        seconds = timed(
            bench.rounds,
            {
                "saelens": lambda runners=runners: next(runners).run(),  # type: ignore[misc]
                **{name: partial(one.run, here / name, budget) for name, one in ours.items()},
            },
        )
        counts = {"saelens": tokens, **{name: one.n_tokens for name, one in ours.items()}}
        sizes = {
            name: sum(p.stat().st_size for p in (here / name / last).rglob("*") if p.is_file()) / counts[name]
            for name, last in (("saelens", "0"), ("ours", "."))
        }
        ratios: dict[str, dict[str, float]] = {}
        for name in ours:
            share = counts[name] / tokens
            ratios[name] = {
                clock: median_ratio(seconds["saelens"][clock], seconds[name][clock]) * share for clock in CLOCKS
            }
            speed = counts[name] / statistics.median(seconds[name]["clock"])
            by = ", ".join(f"{ratio:.2f} x by {label}" for label, ratio in ratios[name].items())
            print(f"saelens, {budget} tokens a batch: {name} {speed:,.0f} tokens/s, {by}")
        print(f"  bytes a token: sae_lens {sizes['saelens']:,.0f}, ours {sizes['ours']:,.0f}")
        found[str(budget)] = {"tokens": counts, "ratios": ratios, "bytes_per_token": sizes}
    return found


def padding(bench: Bench, data: Solutions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = {"base": np.arange(len(data.lengths))}
    for budget in bench.batch_tokens:
        padded = 0
        for piece in cut(rows, data.lengths, tsae.CaptureConfig().shard_tokens):
            lengths = data.lengths[piece.rows]
            padded += sum(int(lengths[batch].max()) * len(batch) for batch in plan_batches(lengths, budget))
        found[str(budget)] = 1 - int(data.lengths.sum()) / padded
        print(f"padding, {budget} tokens a batch: {found[str(budget)]:.2%} of {len(data.lengths)} solutions")
    order = np.arange(len(data.lengths)) // 32
    widest = sum(int(data.lengths[order == b].max()) * int((order == b).sum()) for b in range(order[-1] + 1))
    found["32 as they come"] = 1 - int(data.lengths.sum()) / widest
    print(f"padding, 32 solutions a batch as they come: {found['32 as they come']:.2%}")
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
    stored = getattr(torch, shards[0].dtype)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
    buffer = torch.empty(rows, maps[0].shape[1])

    def copy(maps: list[np.ndarray]) -> None:
        for raw in maps:
            for low in range(0, len(raw), rows):
                raw[low : low + rows].copy()

    def whole() -> None:
        for raw in maps:
            raw.copy()

    def widen() -> None:
        for raw in maps:
            for low in range(0, len(raw), rows):
                part = torch.from_numpy(raw[low : low + rows]).view(stored)
                buffer[: len(part)].copy_(part)

    passes: dict[str, Callable[[], None]] = {
        "copy": partial(copy, maps),
        "copy, opened anew": lambda: copy([shard.raw("x") for shard in shards]),
        "copy of all at once": whole,
    }
    return passes if stored == torch.float32 else {**passes, "copy widened": widen}


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

            seconds = timed(bench.window_rounds, {"windows": read, **passes})
            ours = seconds.pop("windows")
            clock = {name: median_ratio(by["clock"], ours["clock"]) for name, by in seconds.items()}
            cpu = {name: min(by["cpu"]) / min(ours["cpu"]) for name, by in seconds.items()}
            nanoseconds = 1e9 * min(ours["cpu"]) / bench.window_tokens
            found[f"{dtype}, window {window}"] = {"clock": clock, "cpu": cpu, "cpu_ns_per_token": nanoseconds}
            of = ", ".join(f"{ratio:.0%} ({cpu[name]:.0%}) of a {name}" for name, ratio in clock.items())
            print(f"windows of {window}, {dtype}: {nanoseconds:,.0f} ns of CPU a token; speed {of}")
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
        if lacking := missing(bench):
            print(f"left out forward, saelens and padding: {lacking}")
            found["left_out"] = lacking
        elif {"forward", "saelens", "padding"} & set(bench.parts):
            data = Solutions(bench, root)
            if "padding" in bench.parts:
                found["padding"] = padding(bench, data)
            if "forward" in bench.parts:
                found["forward"] = forward(bench, data, root)
            if "saelens" in bench.parts:
                found["saelens"] = saelens(bench, data, root)
        if "windows" in bench.parts:
            found["windows"] = windows(bench, root / "windows")
        if "memory" in bench.parts:
            found["memory_mb"] = memory(bench, root / "memory")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""How long the report takes to write and to open: by default 5,000 features and 2,000 trajectories of 200 tokens.

The feature table is drawn at random (Zipf frequencies, two runs that move some features), the diff is computed from it.
Opening is timed in Chromium with the network blocked, each time in a fresh process: until the first screen is painted,
until the explorer stands with its first card, and from a link to a card that shows its examples. Needs playwright and
Chromium. Ends with one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import tyro
from bench_train import peak_mb
from run_notebooks import CHROMIUM
from statements.tables import feature_table as planted_table

import tsae
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts

READERS = ("base", "run-a", "run-b")


@dataclass(frozen=True)
class Bench:
    """Size."""

    features: int = 5000
    problems: int = 200
    samples: int = 10
    """Responses to a problem: 4 of 10 by the base, 3 by each of two runs."""
    tokens: int = 200
    """Of a response."""
    k: int = 20
    """Active features of a token."""
    rounds: int = 5
    seed: int = 0
    to: Path | None = None
    """Keep the page here."""


def rollouts(bench: Bench, rng: np.random.Generator) -> Rollouts:
    """Random tokens, outcomes by the problem's difficulty."""
    vocabulary = np.minimum(rng.zipf(1.3, size=(bench.problems, bench.samples, bench.tokens)), 4999)
    records = []
    for problem in range(bench.problems):
        rate = rng.random()
        for sample in range(bench.samples):
            policy = READERS[0 if sample < 0.4 * bench.samples else 1 if sample < 0.7 * bench.samples else 2]
            length = int(rng.integers(bench.tokens // 2, bench.tokens + 1))
            ids = vocabulary[problem, sample, :length].tolist()
            records.append(
                {
                    "problem_id": f"problem-{problem}", "policy": policy, "prompt_ids": list(range(1, 31)),
                    "response_ids": ids, "prompt": "", "response": "", "reward": 0.0,
                    "outcome": "success" if rng.random() < rate else "failure",
                    "band": "easy" if rate > 0.7 else "hard" if rate < 0.3 else "medium",
                }
            )  # fmt: skip
    return Rollouts.from_records(records)


def feature_table(bench: Bench) -> FeatureTable:
    """The base reads everything, a run its own and the base's."""
    rng = np.random.default_rng(bench.seed)
    table = rollouts(bench, rng)
    policies = np.array(table.table["policy"].to_pylist())
    read = [
        np.flatnonzero((policies == name) | (policies == "base") | (number == 0)) for number, name in enumerate(READERS)
    ]
    rows = np.concatenate(read)
    lengths = (table.lengths("prompt_ids") + table.lengths("response_ids"))[rows]
    n_tokens = int(lengths.sum())
    chance = 1 / np.arange(10, bench.features + 10)
    column = rng.choice(bench.features, size=(n_tokens, bench.k), p=chance / chance.sum()).astype(np.int32)
    value = rng.gamma(2.0, 1.0, size=column.shape).astype(np.float32)
    # Runs move every fifth feature, by their reading and on what they wrote.
    readers = np.repeat(np.arange(len(READERS)), [len(some) for some in read])
    mover = np.repeat(readers + np.array([READERS.index(p) for p in policies])[rows], lengths)
    value *= np.where(column % 5 == 0, 1 + 0.15 * mover[:, None], 1).astype(np.float32)
    row = np.repeat(np.arange(n_tokens, dtype=np.int64), bench.k)
    codes = sp.csr_array((value.ravel(), (row, column.ravel())), shape=(n_tokens, bench.features))
    return planted_table(table, codes, list(zip(READERS, read, strict=True)), d_high=bench.features // 5, special=())


def open_times(path: Path, rounds: int) -> dict[str, float]:
    """Medians in seconds: first screen, explorer ready, card by link."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        raise SystemExit("no chromium found")
    found: dict[str, list[float]] = {"painted_s": [], "ready_s": [], "linked_card_s": []}
    with sync_playwright() as playwright:
        for _ in range(rounds):
            for link in ("", "#feature-40"):
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = browser.new_context(offline=True, viewport={"width": 1400, "height": 1000}).new_page()
                page.goto("about:blank")
                start = time.perf_counter()
                page.goto(f"{path.as_uri()}{link}", wait_until="commit")
                page.wait_for_selector("#explorer[data-ready=yes]", timeout=60_000)
                if link:
                    page.wait_for_selector("article#feature-40 mark", timeout=60_000)
                    found["linked_card_s"].append(time.perf_counter() - start)
                else:
                    page.wait_for_selector("figure.overview .main-svg", timeout=60_000)
                    found["ready_s"].append(time.perf_counter() - start)
                    script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                    found["painted_s"].append(page.evaluate(script) / 1000)
                browser.close()
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def main() -> None:
    bench = tyro.cli(Bench)
    source = feature_table(bench)
    print(source)
    strings = [f" w{i}" for i in range(5000)]
    start = time.perf_counter()
    config = tsae.DiffConfig(n_bootstrap=200, n_permutations=1000)
    diff = tsae.feature_diff(source, config, token_strings=strings, progress=False)
    print(f"{diff}; {len(diff.shifts):,} effects; diff {time.perf_counter() - start:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = bench.to or Path(folder) / "report.html"
        times, cpu = [], []
        for _ in range(min(bench.rounds, 3)):
            start, busy = time.perf_counter(), time.process_time()
            diff.to_html(path)
            times.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
        size, megabytes = bench.problems * bench.samples, path.stat().st_size / 1e6
        figures = {
            "features": bench.features, "trajectories": size, "effects": len(diff.shifts),
            "write_s": round(statistics.median(times), 1), "write_cpu_s": round(statistics.median(cpu), 1),
            "megabytes": round(megabytes, 1), "peak_mb": round(peak_mb()),
            **open_times(path.resolve(), bench.rounds),
        }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

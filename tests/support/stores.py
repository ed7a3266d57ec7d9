"""Stores whose activations say which token they are, SAEs of random weights, and short trainings that are stopped."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support.builders import BOS, EOS, synthetic_store, write_store
from support.children import exit_codes, start_ranks
from tsae.activations.store import ActivationStore
from tsae.base.artefact import write_record
from tsae.rollouts.table import Rollouts
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training.run_folder import RunFolder
from tsae.sae.training.train import train

D, SITE = 4, "x.site"


SEMICOLON, NEWLINE, SPECIAL = 7, 8, 16


class Token(NamedTuple):
    """A token of a store of `numbered_store`; its number is the first value of its activation."""

    reader: str
    row: int
    position: int
    id: int
    in_prompt: bool


class Text(NamedTuple):
    prompt: list[int]
    response: list[int]
    readers: tuple[str, ...] = ("base",)
    band: str | None = None
    outcome: str = "unknown"


def numbered_store(
    folder: Path, texts: list[Text], *, runs: dict[str, str | None] | None = None, shard_size: int = 7
) -> tuple[ActivationStore, list[Token]]:
    """A store in which every activation is (number of the token, 1e4, 0, 0), in shards of so many trajectories."""
    runs = runs or {"base": None}
    columns = [
        {"problem_id": f"p{i:04d}", "policy": "base", "prompt_ids": t.prompt, "response_ids": t.response}
        | {"outcome": t.outcome, "band": t.band}
        for i, t in enumerate(texts)
    ]
    rollouts = Rollouts.from_records(columns)
    tokens: list[Token] = []
    readers: dict[str, tuple[str | None, list[tuple]]] = {}
    for reader, run in runs.items():
        rows = [i for i, t in enumerate(texts) if reader in t.readers]
        shards = []
        for low in range(0, len(rows), shard_size):
            mine = rows[low : low + shard_size]
            first = len(tokens)
            for row in mine:
                ids = [*texts[row].prompt, *texts[row].response]
                tokens += [Token(reader, row, t, id, t < len(texts[row].prompt)) for t, id in enumerate(ids)]
            x = np.zeros((len(tokens) - first, D), np.float32)
            x[:, 0], x[:, 1] = np.arange(first, len(tokens)), 1e4
            lengths = [len(texts[row].prompt) + len(texts[row].response) for row in mine]
            shards.append((x, np.array([token.id for token in tokens[first:]]), lengths, mine))
        readers[reader] = (run, shards)
    return write_store(folder, rollouts, readers, site=SITE, special=(BOS, EOS, SPECIAL)), tokens


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a store."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    write_record(folder / "manifest.json", manifest)


def numbers(x: torch.Tensor) -> list[int]:
    return [int(n) for n in x[:, 0]]


LENS_SITE = "blocks.1.hook_resid_post"


D_IN, D_SAE = 48, 160


def lens_config(architecture: str, **more: Any) -> dict[str, Any]:
    from sae_lens import __version__

    metadata = {"sae_lens_version": __version__, "hook_name": LENS_SITE, "model_name": "tiny"}
    return {"architecture": architecture, "d_in": D_IN, "d_sae": D_SAE, "device": "cpu", "metadata": metadata, **more}


def randomized(lens: Any) -> Any:
    """Weights of every kind, decoder rows of unequal norms."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in lens.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(0.2 + 0.1 * noise.abs() if "threshold" in name else 0.3 * noise)
    return lens


WIDTH = 16


# Latents die within the run, so that AuxK and the idle counters matter to the weights.
CONFIG = SAEConfig(d_sae=128, k=3, dead_after_tokens=400)


TRAINING = TrainingConfig(tokens=24_000, batch_tokens=200, learning_rate=3e-3, save_every_steps=9)


SHORT = replace(TRAINING, tokens=5000, save_every_steps=10)  # 25 steps, two checkpoints


WRITTEN = ("sae.safetensors", "config.json", "training.json", "metrics.jsonl", "manifest.json")


def make_store(folder: Path, seed: int = 0) -> ActivationStore:
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(40, WIDTH))
    texts = [(rng.random((25, 40)) < 0.08) @ mixing + rng.normal(size=WIDTH) for _ in range(60)]
    return synthetic_store(folder, texts)


def run(store: Path, folder: Path, training: TrainingConfig = SHORT) -> None:
    train(store, CONFIG, to=folder, training=training, progress=False)


def same_files(a: Path, b: Path) -> None:
    """The same bytes, but for the command and its folder in the manifest."""
    for name in WRITTEN:
        if name == "manifest.json":
            one, other = (json.loads((folder / name).read_text()) for folder in (a, b))
            changing = dict.fromkeys(("command", "from", "checksum"))
            assert {**one, **changing} == {**other, **changing}
        else:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert sorted(p.name for p in a.iterdir()) == sorted(WRITTEN)


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """The bytes of every file below a folder, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob(pattern)) if p.is_file()}


def checkpoint(folder: Path) -> int:
    """Steps of the newest checkpoint; 0 without one."""
    return max((int(p.name) for p in (folder / "checkpoint").glob("[0-9]*")), default=0)


class Interrupted(Exception):
    """Stands for a kill where the test stays in one process."""


def interrupted(
    monkeypatch: pytest.MonkeyPatch,
    store: ActivationStore,
    folder: Path,
    saves: int = 1,
    training: TrainingConfig = SHORT,
    training_of: Callable[[Path], object] | None = None,
) -> Path:
    """A folder that a training left right after so many checkpoints."""
    save, left = RunFolder.save, itertools.count(1)

    def stopping(self: RunFolder, steps: int, tensors: Any) -> None:
        save(self, steps, tensors)
        if next(left) == saves:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stopping)
        with pytest.raises(Interrupted):
            training_of(folder) if training_of is not None else run(store.path, folder, training)
    assert checkpoint(folder) == saves * training.save_every_steps
    return folder


def run_ranks(
    store: Path, folder: Path, config: SAEConfig, training: TrainingConfig = SHORT, die: int = 0, size: int = 2
) -> list[int | None]:
    """Train on several processes; all are killed once the first has saved `die` steps."""
    ranks = start_ranks(size, _train_on_rank, store, folder, config, training)
    while die and checkpoint(folder) < die:
        time.sleep(0.001)
    for child in ranks if die else ():
        child.kill()
    return exit_codes(ranks)


def _train_on_rank(store: Path, folder: Path, config: SAEConfig, training: TrainingConfig) -> None:
    sae = train(store, config, to=folder, training=training, progress=False)
    save_file(sae.state_dict(), folder.with_name(f"{folder.name}-{os.environ['RANK']}.safetensors"))


def numbers_by_hand(sae: TemporalSAE, texts: list[np.ndarray], limit: float = np.inf) -> dict[str, float]:
    """Every measure of an SAE by loops over tokens and features, in float64; no step leads over an outlier."""
    w = {name: value.double().numpy() for name, value in sae.state_dict().items()}
    high, rows, kept, smooth = slice(sae.config.d_high), list[list[float]](), list[np.ndarray](), list[list[float]]()
    fired = np.zeros(sae.config.d_sae, dtype=bool)
    for text in texts:
        previous: tuple[np.ndarray, np.ndarray] | None = None
        alive, steps = np.zeros(sae.config.d_sae, dtype=bool), list[np.ndarray]()
        for x in text.astype(np.float64):
            if np.linalg.norm(x) > limit:
                previous = None
                continue
            pre = (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
            codes = np.where((pre > 0) & (pre > w["threshold"]), pre, 0)
            kept.append(x)
            rows.append([])
            for some in (slice(None), high):
                x_hat = codes[some] @ w["W_dec"][some] + w["b_dec"]
                cosine = x @ x_hat / np.linalg.norm(x) / np.linalg.norm(x_hat)
                rows[-1] += [((x - x_hat) ** 2).sum(), cosine, (codes[some] > 0).sum()]
            alive |= codes > 0
            if previous is not None:
                steps.append(np.abs(codes - previous[1]) / np.linalg.norm(x - previous[0]))
            previous = (x, codes)
        fired |= alive
        by_feature = {f: [step[f] for step in steps] for f in np.flatnonzero(alive)} if steps else {}
        of_high = [of for f, of in by_feature.items() if f < sae.config.d_high]
        smooth.append([np.mean([max(v) for v in some]) if some else np.nan for some in (of_high, by_feature.values())])
        smooth[-1].append(np.mean([np.mean(v) for v in of_high]) if of_high else np.nan)
    error, cosine, l0, error_high, cosine_high, l0_high = np.array(rows).mean(0)
    variance = ((np.array(kept) - np.mean(kept, axis=0)) ** 2).sum(1).mean()
    names = ("smoothness_high", "smoothness_all", "smoothness_high_mean")
    return {
        "fve": 1 - error / variance,
        "fve_high": 1 - error_high / variance,
        "silent_high": np.mean([row[-1] == 0 for row in rows]),
        "cosine": cosine,
        "cosine_high": cosine_high,
        "l0": l0,
        "l0_high": l0_high,
        "alive": fired.mean(),
        **dict(zip(names, np.nanmean(smooth, axis=0), strict=True)),
    }

"""Stores whose activations say which token they are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from support.builders import BOS, EOS
from tsae.activations.shards.manifest import FORMAT, VERSION, write_manifest
from tsae.activations.shards.writer import write_shard
from tsae.activations.store import ActivationStore
from tsae.base.files import sha256
from tsae.rollouts.table import Rollouts

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
        {
            "problem_id": f"p{i:04d}",
            "policy": "base",
            "prompt_ids": t.prompt,
            "response_ids": t.response,
            "outcome": t.outcome,
            "band": t.band,
        }
        for i, t in enumerate(texts)
    ]
    rollouts = Rollouts.from_records(columns)
    tokens: list[Token] = []
    readers = []
    for reader, run in runs.items():
        rows = [i for i, t in enumerate(texts) if reader in t.readers]
        shards = []
        for number, low in enumerate(range(0, len(rows), shard_size)):
            mine = rows[low : low + shard_size]
            first = len(tokens)
            for row in mine:
                ids = [*texts[row].prompt, *texts[row].response]
                tokens += [Token(reader, row, t, id, t < len(texts[row].prompt)) for t, id in enumerate(ids)]
            x = np.zeros((len(tokens) - first, D), np.float32)
            x[:, 0], x[:, 1] = np.arange(first, len(tokens)), 1e4
            lengths = [len(texts[row].prompt) + len(texts[row].response) for row in mine]
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            ids = np.array([token.id for token in tokens[first:]])
            file = f"{reader}/{number:05d}.h5"
            write_shard(folder / file, {SITE: torch.from_numpy(x)}, "float32", ids, offsets, np.array(mine))
            record = {"file": file, "n_tokens": len(x), "n_trajectories": len(mine), "sha256": sha256(folder / file)}
            shards.append(record)
        readers.append({"id": reader, "run": run, "step": 0, "trained_on": None, "weights": None, "shards": shards})
    rollouts.write(folder / "rollouts.parquet")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "complete": True,
        "dtype": "float32",
        "sites": {SITE: {"d_model": D}},
        "rollouts": rollouts.fingerprint,
        "special_ids": [BOS, EOS, SPECIAL],
        "readers": readers,
        "config": {},
    }
    write_manifest(folder / "manifest.json", manifest)
    return ActivationStore(folder), tokens


def numbers(x: torch.Tensor) -> list[int]:
    return [int(n) for n in x[:, 0]]

"""Stores whose activations say which token they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from support.builders import BOS, EOS, write_store
from tsae.activations.shards.manifest import write_manifest
from tsae.activations.store import ActivationStore
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
    write_manifest(folder / "manifest.json", manifest)


def numbers(x: torch.Tensor) -> list[int]:
    return [int(n) for n in x[:, 0]]

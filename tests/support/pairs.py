"""A base and a run whose difference is known: sparse sums of directions; the run has new ones and lacks others.

A direction is active on a token with the same amplitude in both checkpoints, times what its kind says: `new` 0 in the
base, `lost` 0 in the run, `weaker` a third in the base (an L1 crosscoder takes such a direction for a new one),
`turned` by 45° in the run. The others are shared. Both checkpoints have a little noise of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from statements.tables import Shard, write_store

import tsae
from tsae.rollouts.table import Rollouts

SITE = "blocks.0.hook_resid_post"
KINDS = ("new", "lost", "weaker", "turned")


@dataclass(frozen=True)
class PlantedPair:
    store: tsae.ActivationStore
    directions: Mapping[str, np.ndarray]
    """Of every kind (n, d_model) unit rows, those of the run; of `lost` those of the base."""


def planted_pair(
    folder: Path,
    *,
    n_problems: int = 60,
    n_tokens: int = 40,
    d_model: int = 32,
    n_directions: int = 48,
    n_each: int = 4,
    noise: float = 0.05,
    same: bool = False,
    seed: int = 0,
) -> PlantedPair:
    """A store of the readers `base` and `run`, who read the same trajectories.

    Args:
        folder: for the store.
        n_problems: trajectories, one a problem.
        n_tokens: of a trajectory.
        d_model: width.
        n_directions: in all.
        n_each: directions of each kind.
        noise: standard deviation of the noise, in which the checkpoints differ; amplitudes are about 2.
        same: plant nothing: the checkpoints differ by noise alone.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(n_directions, d_model))
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    run, scale = base.copy(), np.ones((2, n_directions))
    kinds = {kind: np.arange(i * n_each, (i + 1) * n_each) for i, kind in enumerate(KINDS)}
    if not same:
        scale[0, kinds["new"]], scale[1, kinds["lost"]], scale[0, kinds["weaker"]] = 0.0, 0.0, 1 / 3
        across = rng.normal(size=(n_each, d_model))
        turned = base[kinds["turned"]]
        across -= (across * turned).sum(1, keepdims=True) * turned
        run[kinds["turned"]] = (turned + across / np.linalg.norm(across, axis=1, keepdims=True)) / 2**0.5
    texts: list[list[np.ndarray]] = [[], []]
    for _ in range(n_problems):
        amplitude = (rng.random((n_tokens, n_directions)) < 4 / n_directions) * rng.uniform(1, 3, n_directions)
        amplitude *= rng.uniform(0.7, 1.3, amplitude.shape)
        for side, rows in enumerate((base, run)):
            made = (amplitude * scale[side]) @ rows + 0.5 + noise * rng.normal(size=(n_tokens, d_model))
            texts[side].append(made.astype(np.float32))
    store = paired_store(folder, {"base": texts[0], "run": texts[1]})
    return PlantedPair(store, {kind: (base if kind == "lost" else run)[rows] for kind, rows in kinds.items()})


def paired_store(
    folder: Path,
    readers: Mapping[str, list[np.ndarray]],
    *,
    problems: Sequence[str] | None = None,
    shard_size: int = 25,
) -> tsae.ActivationStore:
    """A store of readers with given activations, in small shards; those of the base and the others differ in size.

    Args:
        folder: for the store.
        readers: of every reader, the base first, one (n_tokens, d_model) a trajectory.
        problems: of the trajectories; by default each has its own.
        shard_size: trajectories of the base's shards.
    """
    texts = next(iter(readers.values()))
    records = [
        {"problem_id": f"p{i:04d}" if problems is None else problems[i], "policy": "base", "prompt_ids": [0],
         "outcome": "unknown", "response_ids": [1 + t % 9 for t in range(len(text) - 1)]}
        for i, text in enumerate(texts)
    ]  # fmt: skip
    rollouts = Rollouts.from_records(records)

    def shards(own: list[np.ndarray], size: int) -> Iterator[Shard]:
        for rows in np.array_split(np.arange(len(own)), range(size, len(own), size)):
            ids = np.concatenate([np.concatenate(rollouts.tokens(int(row))) for row in rows])
            yield np.concatenate([own[row] for row in rows]), ids, [len(own[row]) for row in rows], rows

    found = {
        reader: (None if number == 0 else reader, shards(own, shard_size + 3 * number))
        for number, (reader, own) in enumerate(readers.items())
    }
    return write_store(folder, rollouts, found, site=SITE)

"""Activation stores and feature tables of given numbers, for scripts and tests. Loads nothing heavy by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

if TYPE_CHECKING:
    import torch

    from tsae import ActivationStore, FeatureTable, Rollouts

BOS, EOS = 17, 19  # of the testbed's tokenizer


Shard = tuple[np.ndarray, np.ndarray, Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]
"""(n_tokens, d_model) activations, token ids, the number of tokens of every trajectory, and the trajectories' rows."""


def write_store(
    folder: Path,
    rollouts: Rollouts | Callable[[], Rollouts],
    readers: Mapping[str, tuple[str | None, Iterable[Shard]]],
    *,
    site: str,
    special: Sequence[int] = (),
    dtype: str = "float32",
) -> ActivationStore:
    """A store of given activations.

    Args:
        folder: for the store.
        rollouts: the trajectories, or what gives them once the shards are made.
        readers: by id the run and the shards, the base first; shards may be made one by one.
        site: the only one.
        special: ids that do not count.
        dtype: of the stored activations.
    """
    import torch

    from tsae import ActivationStore
    from tsae.activations.manifest import KIND, VERSION
    from tsae.base.artefact import write_record

    entries: list[dict[str, Any]] = []
    for step, (id, (run, shards)) in enumerate(readers.items()):
        files = []
        for number, (x, ids, lengths, rows) in enumerate(shards):
            file, width = f"{id}/{number:05d}.h5", x.shape[1]
            activations = {site: torch.from_numpy(x.astype(np.float32, copy=False))}
            digest = write_shard(folder / file, activations, dtype, ids, np.cumsum([0, *lengths]), np.asarray(rows))
            files.append({"file": file, "n_tokens": len(x), "n_trajectories": len(rows), "hash": digest})
        entries.append({"id": id, "run": run, "step": step, "trained_on": None, "weights": None, "shards": files})
    rollouts = rollouts() if callable(rollouts) else rollouts
    rollouts.write(folder / "rollouts.parquet")
    head = {"kind": KIND, "version": VERSION, "complete": True, "dtype": dtype, "config": {}}
    of_tokens = {"rollouts": rollouts.fingerprint, "special_ids": list(special), "readers": entries}
    write_record(folder / "manifest.json", {**head, "sites": {site: {"d_model": width}}, **of_tokens})
    return ActivationStore(folder)


def write_shard(
    path: Path,
    activations: Mapping[str, torch.Tensor],
    dtype: str,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    trajectory: np.ndarray,
) -> str:
    """Write one shard that is in memory; returns its SHA-256."""
    from tsae.activations.shard import ShardWriter

    sites = {site: values.shape[1] for site, values in activations.items()}
    with ShardWriter(path, sites, dtype, token_ids, offsets, trajectory) as writer:
        for site, values in activations.items():
            for i in range(len(trajectory)):
                writer.put(site, i, values[offsets[i] : offsets[i + 1]])
        return writer.finish()


def feature_table(
    rollouts: Rollouts,
    codes: np.ndarray | sp.csr_array,
    readers: list[tuple[str, np.ndarray]],
    *,
    d_high: int = 1,
    special: tuple[int, ...] = (BOS, EOS),
) -> FeatureTable:
    """A FeatureTable from codes, dense or sparse.

    Args:
        rollouts: the trajectories.
        codes: (n_tokens, n_features) of all rows after one another.
        readers: (id, row ids of the trajectories that it read), the base first.
    """
    from tsae import FeatureTable

    trajectory = np.concatenate([rows for _, rows in readers])
    texts = [np.concatenate(rollouts.tokens(int(row))) for row in trajectory]
    records = [
        {"id": id, "run": None if i == 0 else id, "step": i, "trained_on": None, "n_tokens": 1, "fve": 0.9, "l0": 1.0}
        for i, (id, _) in enumerate(readers)
    ]
    return FeatureTable(
        codes=sp.csr_array(codes.astype(np.float32, copy=False)),
        token_ids=np.concatenate(texts).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum([len(text) for text in texts])]),
        reader=np.repeat(np.arange(len(readers), dtype=np.int32), [len(rows) for _, rows in readers]),
        trajectory=trajectory,
        rollouts=rollouts,
        info={"sae": {"d_high": d_high, "site": "x"}, "readers": records, "special_ids": list(special)},
    )

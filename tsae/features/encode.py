"""Encoding: the SAE's codes of every stored token, and how well the SAE reconstructs every reader."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from tsae.activations.statistics import with_entropy
from tsae.activations.store import ActivationStore, Shard
from tsae.errors import TsaeError
from tsae.features.table import FeatureTable
from tsae.provenance import write_run
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.stability import Stability


def encode(
    sae: TemporalSAE | str | Path,
    store: ActivationStore | str | Path,
    *,
    to: str | Path | None = None,
    batch_tokens: int = 8192,
    progress: bool = True,
) -> FeatureTable:
    """Sparse codes of everything in a store, or in a subset of it.

    Of a store with token statistics the table's rollouts have the behaviour entropy.

    Args:
        sae: or its folder, whose stability.json goes along where there is one.
        store: or its folder; of a subset, its readers and trajectories are encoded.
        to: folder to save the table in; None keeps it in memory.
        batch_tokens: tokens encoded at once.
        progress: show a bar.

    Raises:
        TsaeError: where the SAE was made for another site or d_model, or stability.json for another SAE.
    """
    from tqdm.auto import tqdm

    stability = None
    if not isinstance(sae, TemporalSAE):
        folder, sae = sae, TemporalSAE.load(sae)
        stability = Stability.beside(folder, sae.fingerprint)
    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    check_fits(sae, store)
    limit = np.inf if sae.norm_limit is None else sae.norm_limit
    parts: list[sp.csr_array] = []
    token_ids, lengths, readers, trajectories = [], [], [], []
    records: list[dict[str, Any]] = []
    total = sum(int(np.diff(shard.offsets)[store.rows[shard.trajectory]].sum()) for shard in store.shards())
    if total == 0:
        raise TsaeError("no trajectory was read by these readers", where=store.path, fix="Choose a larger part.")
    with tqdm(total=total, desc="encode", unit="token", unit_scale=True, disable=not progress) as bar:
        for number, reader in enumerate(store.readers):
            quality = _Reconstruction(sae.d_model, limit)
            for shard in store.shards(reader):
                kept = store.rows[shard.trajectory]
                tokens = np.flatnonzero(np.repeat(kept, np.diff(shard.offsets)))
                for low in range(0, len(tokens), batch_tokens):
                    index = tokens[low : low + batch_tokens]
                    parts.append(_encode_batch(sae, shard, index, store, quality))
                    bar.update(len(index))
                token_ids.append(shard.token_ids[tokens])
                lengths.append(np.diff(shard.offsets)[kept])
                readers.append(np.full(kept.sum(), number, dtype=np.int32))
                trajectories.append(shard.trajectory[kept])
            info = store.reader_info(reader)
            records.append({**{k: info[k] for k in ("id", "run", "step", "trained_on")}, **quality.summary()})
    table = FeatureTable(
        codes=sp.csr_array(sp.vstack(parts, format="csr")),
        token_ids=np.concatenate(token_ids),
        row_offsets=np.concatenate([[0], np.concatenate(lengths).cumsum()]),
        reader=np.concatenate(readers),
        trajectory=np.concatenate(trajectories),
        rollouts=with_entropy(store),
        info={
            "sae": {
                **asdict(sae.config),
                "d_high": sae.config.d_high,
                "d_model": sae.d_model,
                "site": sae.site,
                "weights": sae.fingerprint,
            },
            "readers": records,
            "special_ids": sorted(store.special_ids),
        },
        stability=stability,
    )
    if to is not None:
        table.save(to)
        labels = table.rollouts.labels_fingerprint
        inputs = {"rollouts": store.manifest["rollouts"], "labels": labels, "site": sae.site, "sae": sae.fingerprint}
        if store.selection.as_dict():
            inputs["subset"] = store.selection.as_dict()
        write_run(to, "encode", sae.config, inputs)
    return table


class _Reconstruction:
    """FVE and L0 of one reader over its non-special tokens below the outlier limit."""

    def __init__(self, d_model: int, limit: float) -> None:
        self.limit = limit
        self.n, self.active, self.error, self.square = 0, 0, 0.0, 0.0
        self.total = torch.zeros(d_model, dtype=torch.float64)

    def add(self, x: torch.Tensor, x_hat: torch.Tensor, codes: torch.Tensor, counted: torch.Tensor) -> None:
        counted = counted & (x.norm(dim=1) <= self.limit)
        x, x_hat = x[counted].double(), x_hat[counted].double()
        self.n += len(x)
        self.active += int((codes[counted] > 0).sum())
        self.error += (x - x_hat).pow(2).sum().item()
        self.square += x.pow(2).sum().item()
        self.total += x.sum(0)

    def summary(self) -> dict[str, float | int | None]:
        if self.n == 0:
            return {"n_tokens": 0, "fve": None, "l0": None}
        variance = self.square - self.total.pow(2).sum().item() / self.n
        return {"n_tokens": self.n, "fve": 1 - self.error / max(variance, 1e-12), "l0": self.active / self.n}


@torch.no_grad()
def _encode_batch(
    sae: TemporalSAE, shard: Shard, index: np.ndarray, store: ActivationStore, quality: _Reconstruction
) -> sp.csr_array:
    x = torch.from_numpy(shard.read(sae.site, index))
    codes = sae.encode(x.to(sae.W_dec.device))
    special = np.isin(shard.token_ids[index], list(store.special_ids))
    quality.add(x, sae.decode(codes).cpu(), codes.cpu(), torch.from_numpy(~special))
    codes = codes.cpu()
    row, column = codes.nonzero(as_tuple=True)
    offsets = np.concatenate([[0], np.bincount(row.numpy(), minlength=len(codes)).cumsum()])
    return sp.csr_array(
        (codes[row, column].numpy(), column.numpy().astype(np.int32), offsets),
        shape=(len(codes), sae.config.d_sae),
    )

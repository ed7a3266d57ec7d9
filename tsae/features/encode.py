"""Encoding: the SAE's codes of every stored token, and its reconstruction of every reader."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from einops import reduce

from tsae.activations.catalogue import READER_INFO
from tsae.activations.shards.shard import Shard
from tsae.activations.store import ActivationStore
from tsae.activations.token_statistics import with_entropy
from tsae.base.progress import progress_bar
from tsae.base.provenance import write_run
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.stability import Stability


def encode(
    sae: TemporalSAE | str | Path,
    store: ActivationStore | str | Path,
    *,
    to: str | Path | None = None,
    batch_tokens: int = 8192,
    progress: bool = True,
) -> FeatureTable:
    """Compute sparse codes of every token in a store, or in a subset of it.

    Tokens beyond the norm limit of the SAE's training get no codes: the SAE never saw such tokens, and one of them may
    outweigh a thousand others in a mean. `FeatureTable.outlier` marks them; outlier_share is their share of a reader's
    tokens. If the store has token statistics, the table's rollouts have the behaviour entropy.

    Args:
        sae: the SAE or its folder; the folder's stability.json, if there is one, becomes part of the table.
        store: the store or its folder.
        to: folder to save the table in; None keeps it in memory.
        batch_tokens: tokens encoded at once.
        progress: show a bar.

    Raises:
        TsaeError: where the SAE was made for another site or d_model, or stability.json for another SAE.
    """
    stability = None
    if not isinstance(sae, TemporalSAE):
        folder, sae = sae, TemporalSAE.load(sae)
        stability = Stability.beside(folder, sae.fingerprint)
    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    check_fits(sae, store)
    codes: list[sp.csr_array] = []
    token_ids, lengths, readers, trajectories, outliers = [], [], [], [], []
    records: list[dict[str, Any]] = []
    total = sum(int(np.diff(shard.offsets)[store.rows[shard.trajectory]].sum()) for shard in store.shards())
    if total == 0:
        raise TsaeError("no trajectory was read by these readers", where=store.path, fix="Choose a larger part.")
    with progress_bar("encode", "token", total, shown=progress) as bar:
        for number, reader in enumerate(store.readers):
            quality = _Reconstruction(sae.d_model)
            for shard in store.shards(reader):
                kept = store.rows[shard.trajectory]
                tokens = np.flatnonzero(np.repeat(kept, np.diff(shard.offsets)))
                counted = shard.token_span(store.rollouts, "all", store.special_ids)
                for low in range(0, len(tokens), batch_tokens):
                    index = tokens[low : low + batch_tokens]
                    found, beyond = _encode_batch(sae, shard, index, counted[index], quality)
                    codes.append(found)
                    outliers.append(beyond)
                    bar.update(len(index))
                token_ids.append(shard.token_ids[tokens])
                lengths.append(np.diff(shard.offsets)[kept])
                readers.append(np.full(kept.sum(), number, dtype=np.int32))
                trajectories.append(shard.trajectory[kept])
            info = store.reader_info(reader)
            records.append({**{name: info[name] for name in READER_INFO}, **quality.summary()})
    table = FeatureTable(
        codes=sp.csr_array(sp.vstack(codes, format="csr")),
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
        outlier=np.concatenate(outliers),
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
    """FVE and L0 of one reader over the tokens of the span "all" that are no outliers, and the share of outliers."""

    def __init__(self, d_model: int) -> None:
        self.n, self.n_beyond, self.active, self.error, self.square = 0, 0, 0, 0.0, 0.0
        self.total = torch.zeros(d_model, dtype=torch.float64)

    def add(self, x: torch.Tensor, x_hat: torch.Tensor, codes: torch.Tensor, beyond: int) -> None:
        """Add (n, d_model) tokens, their reconstruction and (n, d_sae) codes, and a number of outliers."""
        x, x_hat = x.double(), x_hat.double()
        self.n += len(x)
        self.n_beyond += beyond
        self.active += int((codes > 0).sum())
        self.error += (x - x_hat).pow(2).sum().item()
        self.square += x.pow(2).sum().item()
        self.total += reduce(x, "token d_model -> d_model", "sum")

    def summary(self) -> dict[str, float | int | None]:
        share = self.n_beyond / max(self.n + self.n_beyond, 1)
        if self.n == 0:
            return {"n_tokens": 0, "fve": None, "l0": None, "outlier_share": share}
        variance = self.square - self.total.pow(2).sum().item() / self.n
        fve = 1 - self.error / max(variance, 1e-12)
        return {"n_tokens": self.n, "fve": fve, "l0": self.active / self.n, "outlier_share": share}


@torch.no_grad()
def _encode_batch(
    sae: TemporalSAE, shard: Shard, index: np.ndarray, counted: np.ndarray, quality: _Reconstruction
) -> tuple[sp.csr_array, np.ndarray]:
    """(codes of some tokens, which of them are outliers); `quality` gets the counted ones."""
    x = torch.from_numpy(shard.read(sae.site, index))
    beyond = sae.outliers(x)
    codes = sae.encode(x.to(sae.W_dec.device))
    codes[beyond] = 0
    x_hat, codes = sae.decode(codes).cpu(), codes.cpu()
    measured = torch.from_numpy(counted)
    inside = measured & ~beyond
    quality.add(x[inside], x_hat[inside], codes[inside], int((beyond & measured).sum()))
    row, column = codes.nonzero(as_tuple=True)
    offsets = np.concatenate([[0], np.bincount(row.numpy(), minlength=len(codes)).cumsum()])
    values, indices = codes[row, column].numpy(), column.numpy().astype(np.int32)
    return sp.csr_array((values, indices, offsets), shape=(len(codes), sae.config.d_sae)), beyond.numpy()

"""ShardWriter: writes one shard under a temporary name until all of it is there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from tsae.activations.shards.shard import DTYPES, as_stored, mapped, opened
from tsae.base.disk.hdf5 import HDF5Writer
from tsae.base.files import partial_name, sha256

if TYPE_CHECKING:
    import torch


class ShardWriter:
    """Writes trajectories in any order, and holds no activations; `finish` gives the file its name.

    Args:
        path: of the shard.
        sites: d_model of every site.
        dtype: stored precision.
        token_ids: (n_tokens,).
        offsets: (n_trajectories + 1,).
        trajectory: (n_trajectories,) row ids into the rollouts.
        origin: attributes of the file that say whose shard it is: ``weights`` and ``rollouts``.
        statistics: those of `tsae.activations.shards.shard.STATISTICS` that are stored too.
    """

    def __init__(
        self,
        path: Path,
        sites: Mapping[str, int],
        dtype: str,
        token_ids: np.ndarray,
        offsets: np.ndarray,
        trajectory: np.ndarray,
        origin: Mapping[str, str] | None = None,
        statistics: Sequence[str] = (),
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.sites, self.dtype, self.offsets = path, dict(sites), dtype, offsets
        self._partial = partial_name(path)
        self._writer = HDF5Writer(self._partial)
        self._file = self._writer.file
        # Allocated now, so that the order of writing does not show in the file.
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        # Texts of a fixed length: those of any length lie in a heap, which HDF5 does not survive if it is damaged.
        self._file.attrs.update({name: np.bytes_(text.encode()) for name, text in (origin or {}).items()})
        for site, d_model in self.sites.items():
            shape = (int(offsets[-1]), d_model)
            made = self._file.create_dataset(f"activations/{site}", shape, DTYPES[dtype], dcpl=early)
            made.attrs["dtype"] = np.bytes_(dtype.encode())
            self._file.create_dataset(f"norms/{site}", shape[:1], np.float32, dcpl=early)
        for name in statistics:
            self._file.create_dataset(name, (int(offsets[-1]),), np.float32, dcpl=early)
        self._file.create_dataset("token_ids", data=token_ids.astype(np.int32))
        self._file.create_dataset("offsets", data=offsets.astype(np.int64))
        self._file.create_dataset("trajectory", data=trajectory.astype(np.int64))

    def put_statistic(self, name: str, i: int, values: torch.Tensor) -> None:
        """Write a statistic of the shard's trajectory i: (n_tokens of it,)."""
        self._file[name][self.offsets[i] : self.offsets[i + 1]] = values.float().cpu().numpy()

    def put(self, site: str, i: int, values: torch.Tensor) -> None:
        """Write the shard's trajectory i, (n_tokens of it, d_model), and its norms."""
        import torch

        values = values.to(getattr(torch, self.dtype)).contiguous().cpu()
        tokens = slice(self.offsets[i], self.offsets[i + 1])
        self._file[f"activations/{site}"][tokens] = as_stored(values)
        self._file[f"norms/{site}"][tokens] = torch.linalg.vector_norm(values.float(), dim=1).numpy()

    def finish(self) -> str:
        """Flush to disk, open again, and rename; returns the file's SHA-256."""
        self._writer.close()
        with self._partial.open("rb") as stream:
            os.fsync(stream.fileno())
        _, places = opened(self._partial)
        for site in self.sites:
            mapped(self._partial, places, f"activations/{site}")
        digest = sha256(self._partial)
        os.replace(self._partial, self.path)
        return digest

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # said by `finish`, or overtaken by another error
            self._writer.close()
        self._partial.unlink(missing_ok=True)


def write_shard(
    path: Path,
    activations: Mapping[str, torch.Tensor],
    dtype: str,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    trajectory: np.ndarray,
) -> str:
    """Write one shard that is in memory; returns its SHA-256."""
    sites = {site: values.shape[1] for site, values in activations.items()}
    with ShardWriter(path, sites, dtype, token_ids, offsets, trajectory) as writer:
        for site, values in activations.items():
            for i in range(len(trajectory)):
                writer.put(site, i, values[offsets[i] : offsets[i + 1]])
        return writer.finish()

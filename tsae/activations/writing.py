"""What readers computed goes into shards: checked to be finite, and under a temporary name until all is there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from tsae.activations.plan import Piece
from tsae.activations.reading import Batch
from tsae.activations.store import DTYPES, STATISTICS, as_stored, mapped, sha256
from tsae.errors import TsaeError

if TYPE_CHECKING:
    import torch

    from tsae.rollouts.table import Rollouts


class ShardWriter:
    """Writes one shard under a temporary name, trajectory by trajectory in any order; `finish` gives it its own.

    It holds no activations, so that a shard may be larger than memory.

    Args:
        path: of the shard.
        sites: d_model of every site.
        dtype: stored precision.
        token_ids: (n_tokens,).
        offsets: (n_trajectories + 1,).
        trajectory: (n_trajectories,) row ids into the rollouts.
        origin: attributes of the file that say whose shard it is: ``weights`` and ``rollouts``.
        statistics: names of those of `STATISTICS` that come with the activations.
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
        self._partial = path.with_suffix(".tmp")
        self._file = h5py.File(self._partial, "w", libver="latest")
        # Space is given out now, so that the order of writing does not show in the file.
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._file.attrs.update(origin or {})
        for site, d_model in self.sites.items():
            shape = (int(offsets[-1]), d_model)
            made = self._file.create_dataset(f"activations/{site}", shape, DTYPES[dtype], dcpl=early)
            made.attrs["dtype"] = dtype
            self._file.create_dataset(f"norms/{site}", shape[:1], np.float32, dcpl=early)
        for name in statistics:
            self._file.create_dataset(name, (int(offsets[-1]),), np.float32, dcpl=early)
        self._file.create_dataset("token_ids", data=token_ids.astype(np.int32))
        self._file.create_dataset("offsets", data=offsets.astype(np.int64))
        self._file.create_dataset("trajectory", data=trajectory.astype(np.int64))

    def put_statistic(self, name: str, i: int, values: torch.Tensor) -> None:
        """Write a statistic of trajectory i of the shard: (n_tokens of it,)."""
        self._file[name][self.offsets[i] : self.offsets[i + 1]] = values.float().cpu().numpy()

    def put(self, site: str, i: int, values: torch.Tensor) -> None:
        """Write trajectory i of the shard, (n_tokens of it, d_model), and its norms."""
        import torch

        values = values.to(getattr(torch, self.dtype)).contiguous().cpu()
        tokens = slice(self.offsets[i], self.offsets[i + 1])
        self._file[f"activations/{site}"][tokens] = as_stored(values)
        self._file[f"norms/{site}"][tokens] = torch.linalg.vector_norm(values.float(), dim=1).numpy()

    def finish(self) -> str:
        """Flush to disk, read back, and rename; returns the file's SHA-256."""
        self._file.close()
        with self._partial.open("rb") as stream:
            os.fsync(stream.fileno())
        for site in self.sites:
            mapped(self._partial, f"activations/{site}")
        digest = sha256(self._partial)
        os.replace(self._partial, self.path)
        return digest

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
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


def put_batch(writer: ShardWriter, batch: Batch, piece: Piece, rollouts: Rollouts, checkpoint: str) -> None:
    """Write a batch into its shard, checked to be as wide as the base's and finite in the stored precision."""
    import torch

    lengths = np.diff(writer.offsets)[batch.texts].tolist()
    for name, value in batch.values.items():
        if name in STATISTICS:
            for t, text in zip(batch.texts, value.split(lengths), strict=True):
                _check_predictions(text[1:], name, checkpoint, piece.reader, rollouts, int(piece.rows[t]))
                writer.put_statistic(name, int(t), text)
            continue
        site = name
        if value.shape[-1] != writer.sites[site]:
            raise TsaeError(
                f"reader {piece.reader} has d_model {value.shape[-1]}, expected {writer.sites[site]} as the base",
                where=checkpoint,
                fix="Capture checkpoints of other models into stores of their own.",
            )
        stored = value.to(getattr(torch, writer.dtype))
        if not torch.isfinite(stored).all():
            for t, text, part in zip(batch.texts, value.split(lengths), stored.split(lengths), strict=True):
                if not torch.isfinite(part).all():
                    raise_not_finite(text, checkpoint, piece.reader, rollouts, int(piece.rows[t]), site, writer.dtype)
        for t, text in zip(batch.texts, stored.cpu().split(lengths), strict=True):
            writer.put(site, int(t), text)


def raise_not_finite(
    value: torch.Tensor, checkpoint: str, reader: str, rollouts: Rollouts, row: int, site: str, dtype: str
) -> None:
    import torch

    problem = rollouts.table["problem_id"][row].as_py()
    if bool(torch.isfinite(value).all()):
        raise TsaeError(
            f"activations up to {value.abs().max().item():.3g} at {site} overflow {dtype} "
            f"(trajectory {row}, problem {problem})",
            where=checkpoint,
            fix="Store bfloat16 or float32 (--dtype).",
        )
    raise TsaeError(
        f"activations at {site} are not finite while reader {reader} reads trajectory {row} (problem {problem})",
        where=checkpoint,
        fix="Check that checkpoint's weights, or compute in float32 (--model-dtype float32).",
    )


def _check_predictions(
    values: torch.Tensor, name: str, checkpoint: str, reader: str, rollouts: Rollouts, row: int
) -> None:
    if bool(values.isnan().any()):
        problem = rollouts.table["problem_id"][row].as_py()
        raise TsaeError(
            f"the {name} of a token is not a number while reader {reader} reads trajectory {row} (problem {problem})",
            where=checkpoint,
            fix="Check that checkpoint's weights, or compute in float32 (--model-dtype float32).",
        )

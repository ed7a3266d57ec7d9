"""Shard: some trajectories as one reader read them, in one HDF5 file that is read through memory maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from tsae.activations.spans import TokenSpan, rows_mask
from tsae.base.disk.hdf5 import Place, words
from tsae.base.disk.hdf5 import places as stored_places
from tsae.base.remote.mirror import needed
from tsae.base.seal import unchanged
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    import torch

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Stored dtype by name; numpy has no bfloat16, so its bits are stored."""

REPAIR = "Have it captured again: tsae store check STORE --repair --series SERIES."

CHANGED = "its bytes have changed: the SHA-256 is not that of the manifest"

STATISTICS = ("entropy", "logprob")
"""Of tokens, beside their activations; see `Shard`."""


@dataclass(frozen=True)
class Shard:
    """Whole trajectories as one reader read them. Arrays are memory maps."""

    path: Path
    reader: str
    dtype: str
    token_ids: np.ndarray
    """(n_tokens,) int32."""
    offsets: np.ndarray
    """(n_trajectories + 1,) int64: trajectory i has the tokens offsets[i]:offsets[i + 1]."""
    trajectory: np.ndarray
    """(n_trajectories,) row ids into the rollouts."""
    places: Mapping[str, Place] = field(default_factory=dict, repr=False)
    """Of every dataset; read once, when the file is opened."""
    sha256: str | None = None
    """SHA-256 of the file, as the manifest notes it; None for a shard that has no file."""

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    def checked(self) -> Shard:
        """Itself, after its bytes were compared with its checksum. A process reads them for that once.

        Raises:
            TsaeError: where they have changed.
        """
        if self.sha256 is not None and not unchanged(needed(self.path), self.sha256):
            raise TsaeError(CHANGED, where=self.path, fix=REPAIR)
        return self

    def raw(self, site: str) -> np.ndarray:
        """(n_tokens, d_model) memory map in the stored dtype."""
        return self._mapped(f"activations/{site}")

    def norms(self, site: str) -> np.ndarray:
        """(n_tokens,) float32 memory map: L2 norms, so that outliers are known before any activation is read."""
        return self._mapped(f"norms/{site}")

    @property
    def entropy(self) -> np.ndarray:
        """(n_tokens,) float32 memory map: entropy, in nats, of the reader's prediction of each token; NaN for the first
        token of a trajectory. Only where the store `has_token_statistics`."""
        return self._mapped("entropy")

    @property
    def logprob(self) -> np.ndarray:
        """(n_tokens,) float32 memory map: log-probability, in nats, that the reader gave each token at temperature 1;
        NaN for the first token of a trajectory. Only where the store `has_token_statistics`."""
        return self._mapped("logprob")

    def read(self, site: str, index: slice | np.ndarray) -> np.ndarray:
        """(n, d_model) float32 rows of a site.

        Raises:
            TsaeError: where a value is not finite. No capture leaves such values, and their codes would look like any.
        """
        values = as_float32(self.raw(site)[index], self.dtype)
        if values.size and not np.isfinite([values.min(), values.max()]).all():
            bad = np.flatnonzero(~np.isfinite(values).all(axis=1))[0]
            token = int(np.arange(self.n_tokens)[index][bad])
            place = int(np.searchsorted(self.offsets, token, side="right")) - 1
            what = f"{site} is not finite in trajectory {self.trajectory[place]}, token {token - self.offsets[place]}"
            raise TsaeError(what, where=self.path, fix=REPAIR)
        return values

    def token_span(self, rollouts: Rollouts, span: TokenSpan, special_ids: frozenset[int]) -> np.ndarray:
        """(n_tokens,) bool: tokens of a span; see `tsae.activations.spans.span_mask`.

        Raises:
            TsaeError: for thinking, where no response of the rollouts has any.
        """
        return rows_mask(self.token_ids, self.offsets, rollouts, self.trajectory, span, special_ids)

    def _mapped(self, name: str) -> np.ndarray:
        return mapped(self.path, self.places, name)


def open_shard(
    path: Path, manifest: Mapping[str, Any], reader: str, record: Mapping[str, Any], *, outline: bool = False
) -> Shard:
    """Open a shard of a store, finished or not, and check that it is what the manifest's record says.

    Args:
        path: of the shard.
        manifest: of the store.
        reader: of the shard.
        record: the shard's in the manifest.
        outline: leave out the checksum, which reads the whole file; see `Shard.checked`.

    Raises:
        TsaeError: where the file is missing, cannot be read, or is another capture's.
    """
    if not needed(path).is_file():
        raise TsaeError("a shard of the manifest is missing", where=path, fix=REPAIR)
    origin = next(r for r in manifest["readers"] if r["id"] == reader)
    expected = {"weights": origin["weights"], "rollouts": manifest["rollouts"]}
    attributes, places = opened(path)
    for name, found in attributes.items():
        if name in expected and expected[name] not in (None, found):
            whose = "another model" if name == "weights" else "other rollouts"
            raise TsaeError(
                f"is the shard of {whose} ({name} {found}, expected {expected[name]})", where=path, fix=REPAIR
            )
    shard = Shard(
        path=path,
        reader=reader,
        dtype=manifest["dtype"],
        token_ids=mapped(path, places, "token_ids"),
        offsets=np.asarray(mapped(path, places, "offsets")),
        trajectory=np.asarray(mapped(path, places, "trajectory")),
        places=places,
        sha256=record["sha256"],
    )
    wrong = next(_faults(shard, manifest["sites"], record["n_tokens"]), None)
    if wrong is not None:
        raise TsaeError(wrong, where=path, fix=REPAIR)
    return shard if outline else shard.checked()


def check_trajectories(shard: Shard, lengths: np.ndarray) -> None:
    """Refuse a shard whose trajectories are not some of the rollouts, each once.

    Args:
        shard: of a store.
        lengths: (n_trajectories,) tokens of every trajectory of the store's rollouts.

    Raises:
        TsaeError: where one is not there, comes twice, or has another number of tokens.
    """
    rows = shard.trajectory
    if len(rows) and rows.max() >= len(lengths):
        raise TsaeError(f"names the trajectory {rows.max()} of {len(lengths)}", where=shard.path, fix=REPAIR)
    if len(np.unique(rows)) < len(rows) or not np.array_equal(np.diff(shard.offsets), lengths[rows]):
        raise TsaeError("its trajectories are not those of the store's rollouts", where=shard.path, fix=REPAIR)


def _faults(shard: Shard, sites: Mapping[str, Any], n_tokens: int) -> Iterator[str]:
    for name in ("token_ids", "offsets", "trajectory"):
        found = getattr(shard, name)
        if found.ndim != 1 or found.dtype.kind != "i":
            yield f"/{name} has shape {found.shape} of {found.dtype}, expected whole numbers in one row"
    offsets, trajectory = shard.offsets, shard.trajectory
    if len(offsets) != len(trajectory) + 1 or offsets[0] != 0 or (np.diff(offsets) < 1).any():
        yield f"/offsets do not divide its tokens among its {len(trajectory)} trajectories"
    if len(trajectory) and trajectory.min() < 0:
        yield f"names the trajectory {trajectory.min()}"
    if shard.n_tokens != n_tokens:
        yield f"has {shard.n_tokens} tokens, expected {n_tokens}"
    if len(shard.token_ids) != n_tokens:
        yield f"has {len(shard.token_ids)} token ids, expected {n_tokens}"
    for site, info in sites.items():
        raw, shape = shard.raw(site), (n_tokens, info["d_model"])
        if raw.shape != shape:
            yield f"{site} has shape {raw.shape}, expected {shape}"
        if raw.dtype != DTYPES[shard.dtype]:
            yield f"{site} is stored as {raw.dtype}, expected {shard.dtype}"
        norms = shard.norms(site)
        if norms.shape != (n_tokens,) or norms.dtype != np.float32:
            yield f"{site} has norms of shape {norms.shape} of {norms.dtype}, expected {n_tokens} of float32"


def opened(path: Path) -> tuple[dict[str, str], dict[str, Place]]:
    """Attributes of a shard's file, and the places of its datasets."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return dict(words(file)), stored_places(file)
    except (OSError, LookupError, RuntimeError, ValueError, TypeError) as error:
        raise TsaeError(f"cannot read the shard ({str(error).splitlines()[0]})", where=path, fix=REPAIR) from error


def mapped(path: Path, places: Mapping[str, Place], name: str) -> np.ndarray:
    """A contiguous dataset as a read-only memory map."""
    if name not in places:
        raise TsaeError(f"has no /{name}", where=path, fix=REPAIR)
    offset, shape, dtype = places[name]
    if offset is None:
        return np.empty(shape, dtype)
    return np.memmap(needed(path), mode="r", dtype=dtype, offset=offset, shape=shape)


def as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as a writable float32 array."""
    values = np.array(raw)
    return values if dtype == "float32" else np.asarray(as_torch(values, dtype).float().numpy())


def as_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Stored values in their dtype. torch widens them many times faster than numpy does float16."""
    import torch

    return torch.from_numpy(values).view(getattr(torch, dtype))


def as_stored(values: torch.Tensor) -> np.ndarray:
    """A tensor's memory in the stored dtype."""
    import torch

    return np.asarray((values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy())

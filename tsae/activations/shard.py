"""Shards: some trajectories as one reader read them, in one HDF5 file that is read through memory maps.

`Shard` reads such a file, and `ShardWriter` writes one. Spans say which tokens of a trajectory count.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import h5py
import numpy as np

from tsae.base.artefact import file_hash
from tsae.base.files import flush_to_disk, partial_name, reading
from tsae.base.hdf5 import HDF5Writer, Place, words
from tsae.base.hdf5 import places as stored_places
from tsae.base.mirror import needed
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts
from tsae.rollouts.token_parts import ANSWER, OTHER, THINKING

if TYPE_CHECKING:
    import torch

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Stored dtype by name; numpy has no bfloat16, so its bits are stored."""

REPAIR = "Give the same `tsae capture` again: it captures damaged shards anew, and keeps the others."

CHANGED = "its bytes have changed: its hash is not that of the manifest"

STATISTICS = ("entropy", "logprob")
"""Of tokens, beside their activations; see `Shard`."""


TokenSpan = Literal["response", "thinking", "answer", "prompt", "last_prompt", "all"]
"""See `span_mask`."""


class Piece(NamedTuple):
    """What one shard holds."""

    reader: str
    file: str
    """Below the store's folder."""
    rows: np.ndarray
    """(n_trajectories,) row ids into the rollouts."""


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
    hash: str | None = None
    """Hash of the file, as the manifest notes it; None for a shard that has no file."""

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    def checked(self) -> Shard:
        """Itself, after its bytes were compared with its checksum. A process reads them for that once.

        Raises:
            TsaeError: where they have changed.
        """
        refuse(self.path, (self.hash is not None and file_hash(needed(self.path)) != self.hash, CHANGED, REPAIR))
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
        """(n_tokens,) bool: tokens of a span; see `span_mask`.

        Raises:
            TsaeError: for thinking, where no response of the rollouts has any.
        """
        return rows_mask(self.token_ids, self.offsets, rollouts, self.trajectory, span, special_ids)

    def _mapped(self, name: str) -> np.ndarray:
        return mapped(self.path, self.places, name)


def open_shard(
    path: Path,
    manifest: Mapping[str, Any],
    reader: str,
    record: Mapping[str, Any],
    *,
    lengths: np.ndarray | None = None,
    outline: bool = False,
) -> Shard:
    """Open a shard of a store, finished or not, and check that it is what the manifest's record says.

    Args:
        path: of the shard.
        manifest: of the store.
        reader: of the shard.
        record: the shard's in the manifest.
        lengths: (n_trajectories,) tokens of every trajectory of the rollouts, to which the shard's must belong.
        outline: leave out the checksum, which reads the whole file; see `Shard.checked`.

    Raises:
        TsaeError: where the file is missing, cannot be read, or is another capture's.
    """
    refuse(path, (not needed(path).is_file(), "a shard of the manifest is missing", REPAIR))
    origin = next(r for r in manifest["readers"] if r["id"] == reader)
    expected = {"weights": origin["weights"], "rollouts": manifest["rollouts"]}
    attributes, places = opened(path)
    arrays = {name: mapped(path, places, name) for name in ("token_ids", "offsets", "trajectory")}
    arrays |= {name: np.asarray(arrays[name]) for name in ("offsets", "trajectory")}
    shard = Shard(path, reader, manifest["dtype"], **arrays, places=places, hash=record["hash"])
    other = [name for name, found in attributes.items() if expected.get(name) not in (None, found)]
    what = f"is the shard of other {' and '.join(other)}" if other else "its datasets are not those of the manifest"
    refuse(path, (other or not _is_whole(shard, manifest["sites"], record["n_tokens"], lengths), what, REPAIR))
    return shard if outline else shard.checked()


def _is_whole(shard: Shard, sites: Mapping[str, Any], n_tokens: int, lengths: np.ndarray | None) -> bool:
    """Whether a shard has so many tokens of all its sites, and its trajectories are some of the rollouts, each once."""
    offsets, rows = shard.offsets, shard.trajectory
    if any(found.ndim != 1 or found.dtype.kind != "i" for found in (shard.token_ids, offsets, rows)):
        return False
    for site, info in sites.items():
        raw, norms = shard.raw(site), shard.norms(site)
        if raw.dtype != DTYPES[shard.dtype] or raw.shape != (n_tokens, info["d_model"]):
            return False
        if norms.dtype != np.float32 or norms.shape != (n_tokens,):
            return False
    if shard.token_ids.shape != (n_tokens,) or len(offsets) != len(rows) + 1:
        return False
    if (offsets[0], offsets[-1]) != (0, n_tokens) or (np.diff(offsets) < 1).any():
        return False
    if (rows < 0).any() or len(np.unique(rows)) < len(rows):
        return False
    return lengths is None or bool((rows < len(lengths)).all() and (np.diff(offsets) == lengths[rows]).all())


def opened(path: Path) -> tuple[dict[str, str], dict[str, Place]]:
    """Attributes of a shard's file, and the places of its datasets."""
    with reading(path, REPAIR), h5py.File(path, "r", locking=False) as file:
        return dict(words(file)), stored_places(file)


def mapped(path: Path, places: Mapping[str, Place], name: str) -> np.ndarray:
    """A contiguous dataset as a read-only memory map."""
    refuse(path, (name not in places, f"has no /{name}", REPAIR))
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
        statistics: those of `tsae.activations.shard.STATISTICS` that are stored too.
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
        self.statistics = tuple(statistics)
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
        for name in self.statistics:
            self._file.create_dataset(name, (int(offsets[-1]),), np.float32, dcpl=early)
        self._file.create_dataset("token_ids", data=token_ids.astype(np.int32))
        self._file.create_dataset("offsets", data=offsets.astype(np.int64))
        self._file.create_dataset("trajectory", data=trajectory.astype(np.int64))

    def put(self, name: str, i: int, values: torch.Tensor, norms: torch.Tensor | None = None) -> None:
        """Write the shard's trajectory i: a statistic (n_tokens,), or the activations (n_tokens, d_model) of a site
        with their norms, which are computed where they are not given."""
        import torch

        tokens = slice(self.offsets[i], self.offsets[i + 1])
        if name in self.statistics:
            self._file[name][tokens] = values.float().numpy()
            return
        values = values.to(getattr(torch, self.dtype)).contiguous()
        norms = torch.linalg.vector_norm(values.float(), dim=1) if norms is None else norms
        self._file[f"activations/{name}"][tokens] = as_stored(values)
        self._file[f"norms/{name}"][tokens] = norms.numpy()

    def finish(self) -> str:
        """Flush to disk and rename; returns the file's hash."""
        self._writer.close()
        flush_to_disk(self._partial)
        found = file_hash(self._partial)
        os.replace(self._partial, self.path)
        return found

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # said by `finish`, or overtaken by another error
            self._writer.close()
        self._partial.unlink(missing_ok=True)


def span_mask(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    prompt_lengths: np.ndarray,
    span: TokenSpan,
    special_ids: Collection[int],
    parts: np.ndarray | None = None,
) -> np.ndarray:
    """(n_tokens,) bool: tokens of a span.

    - response: tokens that the policy sampled; thinking: those in its thinking; answer: the rest of them;
    - prompt: tokens before the response; last_prompt: the last of these;
    - all: prompt and response.

    Tokens of the response that the policy did not sample are in no span. Special tokens count only as last_prompt: the
    response's first token is drawn from the prompt's last token, and chat templates may end in a special one.

    Args:
        token_ids: (n_tokens,) of whole trajectories, one after another.
        offsets: (n_trajectories + 1,) where each begins.
        prompt_lengths: (n_trajectories,) tokens of each prompt.
        span: which tokens.
        special_ids: ids of special tokens.
        parts: (n_tokens,) the part of each token (`tsae.rollouts.token_parts`); None where all responses are
            plain answers.
    """
    if span == "last_prompt":
        last = np.zeros(len(token_ids), dtype=bool)
        last[(offsets[:-1] + prompt_lengths - 1)[prompt_lengths > 0]] = True
        return last
    lengths = np.diff(offsets)
    position = np.arange(len(token_ids)) - np.repeat(offsets[:-1], lengths)
    in_prompt = position < np.repeat(prompt_lengths, lengths)
    wanted = np.ones_like(in_prompt) if span == "all" else in_prompt if span == "prompt" else ~in_prompt
    if parts is not None and span != "prompt":
        of_span = {"thinking": parts == THINKING, "answer": parts == ANSWER}
        wanted &= of_span.get(span, parts != OTHER)
    elif span == "thinking":
        wanted[:] = False
    return wanted & ~np.isin(token_ids, list(special_ids))


def rows_mask(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    rollouts: Rollouts,
    rows: np.ndarray,
    span: TokenSpan,
    special_ids: Collection[int],
) -> np.ndarray:
    """`span_mask` of some rows of rollouts, which know the prompt lengths and parts.

    Raises:
        TsaeError: for thinking, where no response of the rollouts has any.
    """
    what = "no response has thinking, by any marker that is known"
    refuse(rollouts.origin, (span == "thinking" and not rollouts.has_thinking, what, "Use the span response."))
    lengths = rollouts.lengths("prompt_ids")[rows]
    return span_mask(token_ids, offsets, lengths, span, special_ids, rollouts.token_parts(rows))

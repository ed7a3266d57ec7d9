"""The activation store: a folder with ``manifest.json``, a copy of the rollouts, and HDF5 shards.

::

    acts/
      manifest.json       sites, d_model, dtype, readers with their shards, hashes of what was read
      rollouts.parquet    the Rollouts table that row ids refer to
      base/00000.h5       one reader's shard: whole trajectories, no padding
        /activations/<site>   (n_tokens, d_model) contiguous; float32, float16, or bfloat16 as uint16
        /token_ids            (n_tokens,) int32
        /offsets              (n_trajectories + 1,) int64
        /trajectory           (n_trajectories,) int64, row ids into the rollouts
        /entropy, /logprob    (n_tokens,) float32, where `CaptureConfig.token_statistics` asked for them

Datasets are contiguous, so that they are read through memory maps. A shard enters the manifest only once it is whole
and checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np

from tsae.activations.source import Source
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    import torch

    from tsae.activations.windows import Windows

FORMAT = "tsae-activations"
VERSION = 1
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Stored dtype by name; numpy has no bfloat16, so its bits are stored."""

STATISTICS = ("entropy", "logprob")
"""Of tokens, beside their activations; see `Shard`."""

TokenSpan = Literal["response", "prompt", "all"]


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

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    def raw(self, site: str) -> np.ndarray:
        """(n_tokens, d_model) memory map in the stored dtype."""
        return _mapped(self.path, f"activations/{site}")

    def read(self, site: str, index: slice | np.ndarray) -> np.ndarray:
        """(…, d_model) float32 rows of a site."""
        return as_float32(self.raw(site)[index], self.dtype)

    @property
    def entropy(self) -> np.ndarray:
        """(n_tokens,) float32: nats of the distribution from which the reader was to predict each token; NaN for the
        first of a trajectory. Only where the store `has_token_statistics`."""
        return _mapped(self.path, "entropy")

    @property
    def logprob(self) -> np.ndarray:
        """(n_tokens,) float32: log-probability in nats that the reader gave each token, at temperature 1; NaN for the
        first of a trajectory. Only where the store `has_token_statistics`."""
        return _mapped(self.path, "logprob")

    def token_span(self, rollouts: Rollouts, span: TokenSpan, special_ids: frozenset[int]) -> np.ndarray:
        """(n_tokens,) bool: tokens of the prompt, the response or both; special tokens never count."""
        prompt_lengths = rollouts.lengths("prompt_ids")[self.trajectory]
        return span_mask(self.token_ids, self.offsets, prompt_lengths, span, special_ids)


def span_mask(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    prompt_lengths: np.ndarray,
    span: TokenSpan,
    special_ids: Collection[int],
) -> np.ndarray:
    """(n_tokens,) bool: tokens of a span; special tokens never count.

    Args:
        token_ids: (n_tokens,) of whole trajectories after one another.
        offsets: (n_trajectories + 1,) where each begins.
        prompt_lengths: (n_trajectories,) tokens of each prompt.
        span: response, prompt or all.
        special_ids: token ids that never count.
    """
    lengths = np.diff(offsets)
    position = np.arange(len(token_ids)) - np.repeat(offsets[:-1], lengths)
    in_prompt = position < np.repeat(prompt_lengths, lengths)
    wanted = np.ones_like(in_prompt) if span == "all" else in_prompt if span == "prompt" else ~in_prompt
    return wanted & ~np.isin(token_ids, list(special_ids))


class ActivationStore(Source):
    """Activations of (reader, trajectory, site), read through memory maps.

    Args:
        path: the folder that `tsae.capture` wrote.

    Raises:
        TsaeError: where there is no store, its capture did not finish, or a shard is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        if isinstance(path, Source):
            raise TsaeError(
                "keeps no activations, but a store is needed here",
                where=type(path).__name__,
                fix="Capture a store, of some of the trajectories if disk is short (`tsae capture`).",
            )
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        if not self.manifest["complete"]:
            raise TsaeError(
                "its capture did not finish", where=self.path, fix="Run the same capture again; it goes on."
            )

    @property
    def has_token_statistics(self) -> bool:
        """Whether its shards hold entropies and log-probabilities."""
        return bool(self.manifest.get("config", {}).get("token_statistics"))

    @cached_property
    def rollouts(self) -> Rollouts:
        """The trajectories that row ids refer to.

        Raises:
            TsaeError: where the file is not that of the capture.
        """
        file = self.path / "rollouts.parquet"
        rollouts = Rollouts.read(file)
        if rollouts.fingerprint != self.manifest["rollouts"]:
            raise TsaeError("these are not the rollouts that were captured", where=file, fix="Capture again.")
        return rollouts

    def shards(self, reader: str | None = None) -> Iterator[Shard]:
        """Shards in order, of one reader or of all. They are whole: which trajectories a subset has is in `rows`."""
        for record in self._records():
            if reader is None or record["id"] == reader:
                for shard in record["shards"]:
                    yield self._shard(record["id"], shard)

    def windows(self, site: str, **options: Any) -> Windows:
        from tsae.activations.windows import Windows

        return Windows(self, site, **options)

    def _shard(self, reader: str, record: Mapping[str, Any]) -> Shard:
        path = (self.path / record["file"]).resolve()
        if not path.is_relative_to(self.path.resolve()):
            raise TsaeError(
                f"the shard path {record['file']!r} leaves the store",
                where=self.path / "manifest.json",
                fix="Capture again.",
            )
        if not path.is_file():
            raise TsaeError("a shard of the manifest is missing", where=path, fix="Delete the store and capture again.")
        shard = Shard(
            path=path,
            reader=reader,
            dtype=self.manifest["dtype"],
            token_ids=_mapped(path, "token_ids"),
            offsets=np.asarray(_mapped(path, "offsets")),
            trajectory=np.asarray(_mapped(path, "trajectory")),
        )
        for site in self.sites:
            expected, found = (record["n_tokens"], self.d_model(site)), shard.raw(site).shape
            if found != expected:
                raise TsaeError(f"{site} has shape {found}, expected {expected}", where=path, fix="Capture again.")
        return shard


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store, finished or not."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise TsaeError("no activation store (no manifest.json)", where=folder, fix="Make one with `tsae capture`.")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and manifest["version"] == VERSION
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TsaeError(
            f"not a manifest ({type(error).__name__}: {error})", where=file, fix="Capture again."
        ) from error
    if not known:
        raise TsaeError(
            f"format {manifest['format']} version {manifest['version']}, expected {FORMAT} version {VERSION}",
            where=file,
        )
    return dict(manifest)


def write_shard(
    path: Path,
    activations: Mapping[str, torch.Tensor],
    dtype: str,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    trajectory: np.ndarray,
    statistics: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write one shard under a temporary name, flush it to disk, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    try:
        with h5py.File(partial, "w", libver="latest") as file:
            for site, tensor in activations.items():
                dataset = file.create_dataset(f"activations/{site}", data=_as_stored(tensor, dtype))
                dataset.attrs["dtype"] = dtype
            file.create_dataset("token_ids", data=token_ids.astype(np.int32))
            file.create_dataset("offsets", data=offsets.astype(np.int64))
            file.create_dataset("trajectory", data=trajectory.astype(np.int64))
            for name, values in (statistics or {}).items():
                file.create_dataset(name, data=values.astype(np.float32))
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _as_stored(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    import torch

    tensor = tensor.to(getattr(torch, dtype)).contiguous().cpu()
    return np.asarray((tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy())


def as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as a writable float32 array."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    values = np.asarray(raw, dtype=np.float32)
    return values if values.flags.writeable else values.copy()


def _mapped(path: Path, name: str) -> np.ndarray:
    """A contiguous dataset as a read-only memory map."""
    try:
        with h5py.File(path, "r") as file:
            dataset = file[name]
            offset, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
    except (OSError, KeyError) as error:
        raise TsaeError(
            f"cannot read /{name} ({str(error).splitlines()[0]})",
            where=path,
            fix="Delete this store and capture again.",
        ) from error
    if 0 in shape:
        return np.empty(shape, dtype)
    if offset is None:
        raise TsaeError(f"/{name} is not stored contiguously", where=path, fix="Capture again.")
    return np.memmap(path, mode="r", dtype=dtype, offset=offset, shape=shape)

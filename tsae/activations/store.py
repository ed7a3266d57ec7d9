"""The activation store: a folder with ``manifest.json``, a copy of the rollouts, and HDF5 shards.

::

    acts/
      manifest.json       sites, d_model, dtype, hashes of what was read, readers with their shards and checksums
      rollouts.parquet    the Rollouts table that row ids refer to
      base/00000.h5       one reader's shard: whole trajectories, no padding
        /activations/<site>   (n_tokens, d_model) contiguous; float32, float16, or bfloat16 as uint16
        /norms/<site>         (n_tokens,) float32, L2 norms of the stored values
        /token_ids            (n_tokens,) int32
        /offsets              (n_trajectories + 1,) int64
        /trajectory           (n_trajectories,) int64, row ids into the rollouts
        /entropy, /logprob    (n_tokens,) float32, where `CaptureConfig.token_statistics` asked for them

Datasets are contiguous, so that they are read through memory maps. A shard enters the manifest, with its SHA-256, only
once it is whole and was opened again; the attributes ``weights`` and ``rollouts`` of the file say whose it is.
`tsae.activations.checking` finds and recaptures damaged shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np

from tsae.activations.source import Source
from tsae.errors import TsaeError
from tsae.rollouts.responses.token_parts import ANSWER, OTHER, THINKING
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    import torch

    from tsae.activations.windows import Windows

FORMAT = "tsae-activations"
VERSION = 3
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Stored dtype by name; numpy has no bfloat16, so its bits are stored."""

REPAIR = "Have it captured again: tsae store check STORE --repair --series SERIES."

STATISTICS = ("entropy", "logprob")
"""Of tokens, beside their activations; see `Shard`."""

TokenSpan = Literal["response", "thinking", "answer", "prompt", "last_prompt", "all"]
"""Tokens that something is asked of; see `span_mask`."""


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
        return mapped(self.path, f"activations/{site}")

    def norms(self, site: str) -> np.ndarray:
        """(n_tokens,) float32 memory map: L2 norms, so that outliers are known before any activation is read."""
        return mapped(self.path, f"norms/{site}")

    def read(self, site: str, index: slice | np.ndarray) -> np.ndarray:
        """(n, d_model) float32 rows of a site.

        Raises:
            TsaeError: where one is not finite, which no capture leaves: codes of it would be 0, and look like any.
        """
        values = as_float32(self.raw(site)[index], self.dtype)
        if values.size and not np.isfinite([values.min(), values.max()]).all():
            bad = np.flatnonzero(~np.isfinite(values).all(axis=1))[0]
            token = int(np.arange(self.n_tokens)[index][bad])
            place = int(np.searchsorted(self.offsets, token, side="right")) - 1
            raise TsaeError(
                f"{site} is not finite in trajectory {self.trajectory[place]}, token {token - self.offsets[place]}",
                where=self.path,
                fix=REPAIR,
            )
        return values

    @property
    def entropy(self) -> np.ndarray:
        """(n_tokens,) float32: nats of the distribution from which the reader was to predict each token; NaN for the
        first of a trajectory. Only where the store `has_token_statistics`."""
        return mapped(self.path, "entropy")

    @property
    def logprob(self) -> np.ndarray:
        """(n_tokens,) float32: log-probability in nats that the reader gave each token, at temperature 1; NaN for the
        first of a trajectory. Only where the store `has_token_statistics`."""
        return mapped(self.path, "logprob")

    def token_span(self, rollouts: Rollouts, span: TokenSpan, special_ids: frozenset[int]) -> np.ndarray:
        """(n_tokens,) bool: tokens of a span; see `span_mask`.

        Raises:
            TsaeError: for thinking, where no response of the rollouts has any.
        """
        return rows_mask(self.token_ids, self.offsets, rollouts, self.trajectory, span, special_ids)


def span_mask(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    prompt_lengths: np.ndarray,
    span: TokenSpan,
    special_ids: Collection[int],
    parts: np.ndarray | None = None,
) -> np.ndarray:
    """(n_tokens,) bool: tokens of a span; special tokens never count, but as the last of a prompt.

    The first token of the response is drawn from the prompt's last token, and chat templates may end in a special one.

    - response: tokens that the policy sampled; thinking and answer: those of them that are its thinking, and the rest;
    - prompt: tokens before the response; last_prompt: the last of these, whichever it is;
    - all: prompt and response, without what the policy did not sample of the response, which is in no span.

    Args:
        token_ids: (n_tokens,) of whole trajectories after one another.
        offsets: (n_trajectories + 1,) where each begins.
        prompt_lengths: (n_trajectories,) tokens of each prompt.
        span: which tokens.
        special_ids: token ids that never count.
        parts: (n_tokens,) what each is (`tsae.rollouts.responses.token_parts`); None where all responses are plain
            answers.
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
    """`span_mask` of the tokens of some rows of rollouts, whose prompt lengths and parts these know.

    Raises:
        TsaeError: for thinking, where no response of the rollouts has any.
    """
    if span == "thinking" and not rollouts.has_thinking:
        raise TsaeError(
            "no response has thinking, by any marker that is known",
            where=rollouts.origin,
            fix="Use the span response; or, where an earlier version made these rollouts, import or sample them again, "
            "capture into the same folder (which reads no model again), and encode again.",
        )
    lengths = rollouts.lengths("prompt_ids")[rows]
    return span_mask(token_ids, offsets, lengths, span, special_ids, rollouts.token_parts(rows))


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
                    yield open_shard(self.path, self.manifest, record["id"], shard)

    def windows(self, site: str, **options: Any) -> Windows:
        from tsae.activations.windows import Windows

        return Windows(self, site, **options)


def open_shard(folder: Path, manifest: Mapping[str, Any], reader: str, record: Mapping[str, Any]) -> Shard:
    """A shard of a store, finished or not.

    Raises:
        TsaeError: where its path leaves the store, it is missing or cannot be read, or it is another capture's.
    """
    path = inside(folder, record["file"])
    if not path.is_file():
        raise TsaeError("a shard of the manifest is missing", where=path, fix=REPAIR)
    origin = next(r for r in manifest["readers"] if r["id"] == reader)
    expected = {"weights": origin.get("weights"), "rollouts": manifest["rollouts"]}
    for name, found in _attributes(path).items():
        if name in expected and expected[name] not in (None, found):
            whose = "another model" if name == "weights" else "other rollouts"
            raise TsaeError(
                f"is the shard of {whose} ({name} {found}, expected {expected[name]})", where=path, fix=REPAIR
            )
    shard = Shard(
        path=path,
        reader=reader,
        dtype=manifest["dtype"],
        token_ids=mapped(path, "token_ids"),
        offsets=np.asarray(mapped(path, "offsets")),
        trajectory=np.asarray(mapped(path, "trajectory")),
    )
    if shard.n_tokens != record["n_tokens"]:
        raise TsaeError(f"has {shard.n_tokens} tokens, expected {record['n_tokens']}", where=path, fix=REPAIR)
    for site, info in manifest["sites"].items():
        raw, shape = shard.raw(site), (record["n_tokens"], info["d_model"])
        if raw.shape != shape:
            raise TsaeError(f"{site} has shape {raw.shape}, expected {shape}", where=path, fix=REPAIR)
        if raw.dtype != DTYPES[shard.dtype]:
            raise TsaeError(f"{site} is stored as {raw.dtype}, expected {shard.dtype}", where=path, fix=REPAIR)
        if len(norms := shard.norms(site)) != record["n_tokens"]:
            raise TsaeError(f"{site} has {len(norms)} norms, expected {record['n_tokens']}", where=path, fix=REPAIR)
    return shard


def inside(folder: Path, file: str) -> Path:
    """The path of a file of a store.

    Raises:
        TsaeError: where it leads out of the store, by ".." or by a link.
    """
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise TsaeError(
            f"the shard path {file!r} leaves the store", where=folder / "manifest.json", fix="Capture again."
        )
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store, finished or not."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise TsaeError("no activation store (no manifest.json)", where=folder, fix="Make one with `tsae capture`.")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and manifest["version"] == VERSION
        if known:
            _check_structure(manifest)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise TsaeError(
            f"not a manifest ({type(error).__name__}: {error})", where=file, fix="Capture again."
        ) from error
    if not known:
        raise TsaeError(
            f"format {manifest['format']} version {manifest['version']}, expected {FORMAT} version {VERSION}",
            where=file,
        )
    return dict(manifest)


def _check_structure(manifest: dict[str, Any]) -> None:
    _check_types(
        manifest,
        {"dtype": str, "complete": bool, "rollouts": str, "sites": dict, "special_ids": list, "readers": list},
    )
    if manifest["dtype"] not in DTYPES:
        raise ValueError(f"dtype {manifest['dtype']}")
    for info in manifest["sites"].values():
        _check_types(info, {"d_model": int})
    for reader in manifest["readers"]:
        _check_types(reader, {"id": str, "shards": list})
        for shard in reader["shards"]:
            _check_types(shard, {"file": str, "n_tokens": int, "n_trajectories": int})


def _check_types(record: dict[str, Any], types: dict[str, type]) -> None:
    for name, wanted in types.items():
        if not isinstance(record[name], wanted):
            raise TypeError(f"{name} is {record[name]!r}")


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as a writable float32 array."""
    values = np.array(raw)
    return values if dtype == "float32" else np.asarray(as_torch(values, dtype).float().numpy())


def as_stored(values: torch.Tensor) -> np.ndarray:
    """A tensor's memory in the stored dtype."""
    import torch

    return np.asarray((values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy())


def as_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Stored values in their dtype. torch widens them many times faster than numpy does float16."""
    import torch

    return torch.from_numpy(values).view(getattr(torch, dtype))


def _attributes(path: Path) -> dict[str, str]:
    """Attributes of a shard's file; none where it cannot be read, which reading its datasets then says."""
    try:
        with h5py.File(path, "r") as file:
            return {name: str(value) for name, value in file.attrs.items()}
    except OSError:
        return {}


def mapped(path: Path, name: str) -> np.ndarray:
    """A contiguous dataset as a read-only memory map."""
    try:
        with h5py.File(path, "r") as file:
            dataset = file[name]
            offset, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
    except (OSError, KeyError) as error:
        raise TsaeError(
            f"cannot read /{name} ({str(error).splitlines()[0]})",
            where=path,
            fix=REPAIR,
        ) from error
    if 0 in shape:
        return np.empty(shape, dtype)
    if offset is None:
        raise TsaeError(f"/{name} is not stored contiguously", where=path, fix="Capture again.")
    return np.memmap(path, mode="r", dtype=dtype, offset=offset, shape=shape)

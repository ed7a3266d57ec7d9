"""Codes of the tokens of one shard, of a store or of models that read now; encoded shards wait on disk to be joined.

In the folder of the feature table to come::

    pieces/
      encoding.json      what is encoded, and with what; pieces of another encoding are refused
      000000.npz         of the store's first shard
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from einops import reduce

from tsae.activations.live import LiveSource
from tsae.activations.shard import Shard
from tsae.activations.store import Source
from tsae.base.files import replacing, writing
from tsae.base.part import check_same_work, digest_of, remove_work
from tsae.base.remote.mirror import local, needed, published, there
from tsae.base.untrusted import check_zip
from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import explained

_OF = "encoding.json"
_OF_PIECE = ("token_ids", "lengths", "trajectory", "outlier", "quality")


@dataclass(frozen=True)
class Piece:
    """What one shard gives to a feature table, besides its codes."""

    token_ids: np.ndarray
    """(n_tokens,) int32."""
    lengths: np.ndarray
    """(n_rows,) tokens of each row."""
    trajectory: np.ndarray
    """(n_rows,) row ids into the rollouts."""
    outlier: np.ndarray
    """(n_tokens,) bool."""
    quality: np.ndarray
    """Sums over tokens, for the reconstruction of the reader."""
    nnz: int
    """Non-zeros of its codes."""


class Pieces:
    """The pieces in a folder.

    Args:
        folder: of the feature table to come.
        identity: what is encoded, and with what.

    Raises:
        TsaeError: where the folder is that of another encoding, or of one that is not known.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]) -> None:
        self.path = local(folder) / "pieces"
        self._of = digest_of(identity)
        check_same_work(self.path / _OF, identity, "pieces of another encoding")
        published(self.path / _OF)

    def __contains__(self, number: int) -> bool:
        return there(self._file(number))

    def first(self, n: int) -> Iterator[Piece]:
        """Those of the first n shards, in order.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(n):
            with _opened(self._file(number), self._of) as found:
                piece = _piece_in(found)
            yield piece

    def codes(self, n: int) -> Iterator[sp.csr_array]:
        """(n_tokens, d_sae) float32 codes of the first n shards, in order.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(n):
            with _opened(self._file(number), self._of) as found:
                codes = _codes_in(found)
            yield codes

    def add(self, number: int, piece: Piece, codes: sp.csr_array) -> None:
        """Write the piece of a shard, whole or not at all.

        Raises:
            TsaeError: where it cannot be written, for instance on a full disk.
        """
        _write(self._file(number), piece, codes, self._of)
        published(self._file(number))

    def remove(self) -> None:
        """When they are joined."""
        remove_work(self.path / _OF)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:06d}.npz"


class KeptPieces:
    """Pieces that outlive their encoding, in a folder of their own, named by what their codes depend on.

    Args:
        folder: for the pieces; it may be missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._used: set[str] = set()

    def find(self, content: str, trajectory: np.ndarray) -> tuple[Piece, sp.csr_array] | None:
        """The piece of this content, for these row ids (n_rows,) into the rollouts; None where there is none."""
        file = self.use(content)
        if not file.is_file():
            return None
        try:
            with _opened(file, content) as found:
                return replace(_piece_in(found), trajectory=trajectory), _codes_in(found)
        except TsaeError:
            return None  # It is encoded again, and written over.

    def use(self, content: str) -> Path:
        """The file of this content; it is not removed as one of the others."""
        self._used.add(f"{content}.npz")
        return self.folder / f"{content}.npz"

    def add(self, content: str, piece: Piece, codes: sp.csr_array) -> None:
        """Keep a piece.

        Raises:
            TsaeError: where it cannot be written.
        """
        _write(self.use(content), piece, codes, content)

    def remove_others(self) -> None:
        """Remove pieces that were not asked for."""
        for file in self.folder.glob("*.npz") if self.folder.is_dir() else ():
            if file.name not in self._used:
                file.unlink(missing_ok=True)


def _piece_in(found: Any) -> Piece:
    return Piece(**{name: found[name] for name in _OF_PIECE}, nnz=int(found["offsets"][-1]))


def _codes_in(found: Any) -> sp.csr_array:
    return sp.csr_array((found["values"], found["indices"], found["offsets"]), shape=tuple(found["shape"]))


def _write(file: Path, piece: Piece, codes: sp.csr_array, of: str) -> None:
    """Write a piece, whole or not at all."""
    kept = writing(file.parent, "Make room, and give the same command again: it resumes from here.")
    with kept, replacing(file) as partial, partial.open("wb") as stream:
        np.savez(
            stream,
            values=codes.data,
            indices=codes.indices.astype(np.int32),
            offsets=codes.indptr,
            shape=np.array(codes.shape),
            of=np.array(of),
            **{name: getattr(piece, name) for name in _OF_PIECE},
        )


@contextmanager
def _opened(file: Path, of: str) -> Iterator[Any]:
    """The arrays of a piece, which belongs to the encoding, or has the content, of this hash."""
    try:
        check_zip(needed(file))
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
            if str(found["of"]) != of:
                fix = "Remove it, and encode again; the others stay."
                raise TsaeError("is a piece of another encoding", where=file, fix=fix)
            yield found
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise TsaeError(f"is damaged ({error})", where=file, fix="Remove it, and encode again.") from error


class Codes(NamedTuple):
    """What the SAE makes of some tokens."""

    sparse: sp.csr_array
    """(n, d_sae) float32; outliers have none."""
    beyond: np.ndarray
    """(n,) bool: outliers."""
    x_hat: torch.Tensor
    """(n, d_model) reconstruction, on the CPU."""


def encode_shard(
    sae: TemporalSAE, source: Source, shard: Shard, batch_tokens: int, bar: Any
) -> tuple[Piece, sp.csr_array]:
    """The codes of those trajectories of a shard that the subset has, and what else a feature table needs of them.

    Args:
        sae: the SAE.
        source: the shard's store, or the models that read it now.
        shard: one of the source's.
        batch_tokens: tokens encoded at once.
        bar: progress, in tokens.
    """
    kept = source.rows[shard.trajectory]
    lengths = np.diff(shard.offsets)
    tokens = np.flatnonzero(np.repeat(kept, lengths))
    counted = shard.token_span(source.rollouts, "all", source.special_ids)[tokens]
    if isinstance(source, LiveSource):
        found = _live(sae, source, shard, np.flatnonzero(kept), batch_tokens, bar)
        sizes = lengths[kept]
    else:
        found = _stored(sae, shard, tokens, batch_tokens, bar)
        sizes = np.diff([*range(0, len(tokens), batch_tokens), len(tokens)])
    quality = Reconstruction(sae.d_model)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    nothing = sp.csr_array((0, sae.config.d_sae), dtype=np.float32)
    held: list[Any] = [nothing] * len(sizes)
    beyond, waiting, added = np.zeros(len(tokens), dtype=bool), dict[int, np.ndarray](), 0
    for number, x, codes in found:
        place = slice(ends[number], ends[number + 1])
        one = Reconstruction(sae.d_model)
        one.add(x, codes, counted[place])
        # Copied: what was made while the dense codes lay in memory lies behind them, and leaves a hole in the heap.
        held[number], beyond[place], waiting[number] = codes.sparse.copy(), codes.beyond, one.sums()
        del x, codes
        while added in waiting:  # in order, whatever the order in which they are read
            quality.add_sums(waiting.pop(added))
            added += 1
    whole = sp.csr_array(sp.vstack(held, format="csr") if held else nothing)
    piece = Piece(
        token_ids=shard.token_ids[tokens],
        lengths=lengths[kept],
        trajectory=shard.trajectory[kept],
        outlier=beyond,
        quality=quality.sums(),
        nnz=whole.nnz,
    )
    return piece, whole


_Found = Iterator[tuple[int, torch.Tensor, Codes]]


def _stored(sae: TemporalSAE, shard: Shard, tokens: np.ndarray, batch_tokens: int, bar: Any) -> _Found:
    """(number, activations, codes) of every batch of tokens."""
    for number, low in enumerate(range(0, len(tokens), batch_tokens)):
        index = tokens[low : low + batch_tokens]
        x = torch.from_numpy(shard.read(sae.site, index))
        yield number, x, _codes(sae, x)
        bar.update(len(index))


def _live(sae: TemporalSAE, source: LiveSource, shard: Shard, texts: np.ndarray, batch_tokens: int, bar: Any) -> _Found:
    """(number, activations, codes) of every trajectory, in the order in which they are read.

    Where memory runs out, some come again.
    """
    if not len(texts):
        return  # no model is loaded for nothing
    source.hold(shard.reader)
    ids = [shard.token_ids[shard.offsets[t] : shard.offsets[t + 1]] for t in texts]
    before = bar.n
    read = source.read(shard.reader, ids, shard.trajectory[texts])
    for group in _groups(read, batch_tokens):
        x = torch.cat([values for _, values in group]).float()
        codes = _codes(sae, x)
        low = 0
        for number, values in group:
            part = slice(low, low := low + len(values))
            yield number, x[part], Codes(codes.sparse[part], codes.beyond[part], codes.x_hat[part])
            bar.update(len(values))
    bar.update(before + sum(map(len, ids)) - bar.n)


def _groups(read: Iterator[tuple[int, torch.Tensor]], batch_tokens: int) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Trajectories together, to about batch_tokens."""
    group: list[tuple[int, torch.Tensor]] = []
    held = 0
    for number, values in read:
        if group and held + len(values) > batch_tokens:
            yield group
            group, held = [], 0
        group.append((number, values))
        held += len(values)
    if group:
        yield group


@torch.no_grad()
def _codes(sae: TemporalSAE, x: torch.Tensor) -> Codes:
    """Of (n, d_model) float32 tokens."""
    beyond = sae.outliers(x)
    codes = sae.encode(x.to(sae.W_dec.device))
    codes[beyond] = 0
    x_hat, codes = sae.decode(codes, x.to(codes.device)).cpu(), codes.cpu()
    row, column = codes.nonzero(as_tuple=True)
    offsets = np.concatenate([[0], np.bincount(row.numpy(), minlength=len(codes)).cumsum()])
    values, indices = codes[row, column].numpy(), column.numpy().astype(np.int32)
    sparse = sp.csr_array((values, indices, offsets), shape=(len(codes), sae.config.d_sae))
    return Codes(sparse, beyond.numpy(), x_hat)


class Reconstruction:
    """FVE and L0 of one reader over the tokens of the span "all" that are not outliers, and the share of outliers."""

    def __init__(self, d_model: int) -> None:
        self.n, self.n_beyond, self.active, self.error, self.square = 0, 0, 0, 0.0, 0.0
        self.total = torch.zeros(d_model, dtype=torch.float64)

    def add(self, x: torch.Tensor, codes: Codes, counted: np.ndarray) -> None:
        """Add those of (n, d_model) tokens that are counted, an (n,) mask."""
        kept = torch.from_numpy(counted & ~codes.beyond)
        x, x_hat = x[kept].double(), codes.x_hat[kept].double()
        self.n += len(x)
        self.n_beyond += int((counted & codes.beyond).sum())
        self.active += int(np.diff(codes.sparse.indptr)[kept.numpy()].sum())
        self.error += (x - x_hat).pow(2).sum().item()
        self.square += x.pow(2).sum().item()
        self.total += reduce(x, "token d_model -> d_model", "sum")

    def sums(self) -> np.ndarray:
        """(5 + d_model,) float64: what `add_sums` takes."""
        return np.array([self.n, self.n_beyond, self.active, self.error, self.square, *self.total.tolist()])

    def add_sums(self, sums: np.ndarray) -> None:
        """Add what another has summed up."""
        self.n, self.n_beyond, self.active = (
            mine + int(more) for mine, more in zip((self.n, self.n_beyond, self.active), sums, strict=False)
        )
        self.error += float(sums[3])
        self.square += float(sums[4])
        self.total += torch.from_numpy(sums[5:])

    def summary(self) -> dict[str, float | int | None]:
        share = self.n_beyond / max(self.n + self.n_beyond, 1)
        if self.n == 0:
            return {"n_tokens": 0, "fve": None, "l0": None, "outlier_share": share}
        fve = explained(self.error, self.square, self.total, self.n)
        known = None if math.isnan(fve) else fve
        return {"n_tokens": self.n, "fve": known, "l0": self.active / self.n, "outlier_share": share}

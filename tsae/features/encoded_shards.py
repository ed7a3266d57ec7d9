"""Codes of the tokens of one shard, of a store or of models that read now; encoded shards wait on disk to be joined.

In the folder of the feature table to come::

    pieces/
      encoding.json      what is encoded, and with what; shards of another encoding are refused
      000000.npz         of the store's first shard

Encoded shards may also outlive their encoding, in a folder of their own (`encode(kept=)`). A hash of all that the codes
depend on then names each file.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from einops import reduce

from tsae.activations.live import LiveSource
from tsae.activations.shard import Shard
from tsae.activations.store import Source
from tsae.base.beside import ahead, to_cpu
from tsae.base.files import replacing, writing
from tsae.base.mirror import needed, published, removed, there
from tsae.base.part import check_same_work, digest_of, remove_work
from tsae.base.untrusted import check_zip
from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import explained
from tsae.sae.training.sparse_codes import csr, offsets

_OF = "encoding.json"
_OF_PIECE = ("token_ids", "lengths", "outlier", "quality")
_READING = 3  # batches that are read from disk while a GPU encodes another


@dataclass(frozen=True)
class Piece:
    """What one shard gives to a feature table, besides its codes."""

    token_ids: np.ndarray
    """(n_tokens,) int32."""
    lengths: np.ndarray
    """(n_rows,) tokens of each row."""
    outlier: np.ndarray
    """(n_tokens,) bool."""
    quality: np.ndarray
    """Sums over tokens, for the reconstruction of the reader."""
    nnz: int
    """Non-zeros of its codes."""


class EncodedShards:
    """The encoded shards in a folder.

    Args:
        folder: that holds them; it may be missing.
        names: of the files without .npz, in the order of the store's shards.
        identity: what is encoded, and with what; None in a folder of kept shards, whose names are hashes of that.

    Raises:
        TsaeError: where the folder is that of another encoding, or of an unknown one.
    """

    def __init__(self, folder: Path, names: Sequence[str], identity: dict[str, Any] | None = None) -> None:
        self.path, self.names = folder, names
        self._of = None if identity is None else digest_of(identity)
        if identity is not None:
            check_same_work(self.path / _OF, identity, "pieces of another encoding")
            published(self.path / _OF)

    def __contains__(self, number: int) -> bool:
        return there(self._file(number))

    def pieces(self) -> Iterator[Piece]:
        """The pieces of all shards, in order, without their codes.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(len(self.names)):
            with self._opened(number) as found:
                piece = Piece(**{name: found[name] for name in _OF_PIECE}, nnz=int(found["offsets"][-1]))
            yield piece

    def codes(self) -> Iterator[sp.csr_array]:
        """(n_tokens, d_sae) float32 codes of all shards, in order.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(len(self.names)):
            with self._opened(number) as found:
                parts = (found["values"], found["indices"], found["offsets"])
                codes = sp.csr_array(parts, shape=tuple(found["shape"]))
            yield codes

    def add(self, number: int, piece: Piece, codes: sp.csr_array) -> None:
        """Write an encoded shard, whole or not at all.

        Raises:
            TsaeError: where it cannot be written, for instance on a full disk.
        """
        file, indices = self._file(number), codes.indices.astype(np.int32)
        kept = writing(file.parent, "Make room, and give the same command again: it resumes from here.")
        with kept, replacing(file) as partial, partial.open("wb") as stream:
            arrays: dict[str, Any] = {"values": codes.data, "indices": indices, "offsets": codes.indptr}
            arrays |= {"shape": np.array(codes.shape), **{name: getattr(piece, name) for name in _OF_PIECE}}
            np.savez(stream, of=np.array(self._of or self.names[number]), **arrays)
        published(file)

    def remove(self) -> None:
        """Remove the encoded shards once they are joined; of kept ones, those of no shard of the store."""
        if self._of is not None:
            remove_work(self.path / _OF)
        for file in self.path.glob("*.npz"):
            if file.stem not in self.names:
                file.unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.path / f"{self.names[number]}.npz"

    @contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        """The arrays of an encoded shard. A damaged file is removed, so that the same command makes it again."""
        file = self._file(number)
        try:
            check_zip(needed(file))
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
                if str(found["of"]) != (self._of or self.names[number]):
                    fix = "Remove it, and encode again; the others stay."
                    raise TsaeError("is a piece of another encoding", where=file, fix=fix)
                yield found
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
            removed(file)
            what = f"was damaged ({error})"
            raise TsaeError(what, where=file, fix="Encode again: its shard is read anew.") from error


class Codes(NamedTuple):
    """What the SAE makes of some tokens."""

    sparse: sp.csr_array
    """(n, d_sae) float32; outliers have none."""
    beyond: np.ndarray
    """(n,) bool: outliers."""
    x_hat: torch.Tensor
    """(n, d_model) reconstruction, on the SAE's device."""


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
    quality = np.zeros(5 + sae.d_model)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    nothing = sp.csr_array((0, sae.config.d_sae), dtype=np.float32)
    held: list[Any] = [nothing] * len(sizes)
    beyond, waiting, added = np.zeros(len(tokens), dtype=bool), dict[int, np.ndarray](), 0
    for number, x, codes in found:
        place = slice(ends[number], ends[number + 1])
        # Copied: what was made while the dense codes lay in memory lies behind them, and leaves a hole in the heap.
        held[number], beyond[place] = codes.sparse.copy(), codes.beyond
        waiting[number] = reconstruction(x, codes, counted[place])
        del x, codes
        while added in waiting:  # in order, whatever the order in which they are read
            quality += waiting.pop(added)
            added += 1
    whole = sp.csr_array(sp.vstack(held, format="csr") if held else nothing)
    return Piece(shard.token_ids[tokens], lengths[kept], beyond, quality, whole.nnz), whole


_Found = Iterator[tuple[int, torch.Tensor, Codes]]


def _stored(sae: TemporalSAE, shard: Shard, tokens: np.ndarray, batch_tokens: int, bar: Any) -> _Found:
    """(number, activations on the SAE's device, codes) of every batch of tokens."""
    device = sae.W_dec.device
    on_gpu = device.type == "cuda"

    def read(index: np.ndarray) -> torch.Tensor:
        whole = index[-1] - index[0] + 1 == len(index)
        x = torch.from_numpy(shard.read(sae.site, slice(index[0], index[-1] + 1) if whole else index))
        return x.pin_memory() if on_gpu else x

    batches = [tokens[low : low + batch_tokens] for low in range(0, len(tokens), batch_tokens)]
    for number, x in enumerate(ahead(read, batches, _READING) if on_gpu else map(read, batches)):
        x = x.to(device, non_blocking=on_gpu)
        yield number, x, codes_of(sae, x)
        bar.update(len(x))


def _live(sae: TemporalSAE, source: LiveSource, shard: Shard, texts: np.ndarray, batch_tokens: int, bar: Any) -> _Found:
    """(number, activations on the SAE's device, codes) of every trajectory, in the order in which they are read.

    Where memory runs out, some come again.
    """
    if not len(texts):
        return  # no model is loaded for nothing
    source.hold(shard.reader)
    ids = [shard.token_ids[shard.offsets[t] : shard.offsets[t + 1]] for t in texts]
    before = bar.n
    read = source.read(shard.reader, ids, shard.trajectory[texts])
    for group in _groups(read, batch_tokens):
        x = torch.cat([values for _, values in group]).float().to(sae.W_dec.device)
        codes = codes_of(sae, x)
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
def codes_of(sae: TemporalSAE, x: torch.Tensor) -> Codes:
    """Of (n, d_model) float32 tokens on the SAE's device."""
    beyond = sae.outliers(x)
    codes = sae.encode(x)
    codes[beyond] = 0
    row, column = codes.nonzero(as_tuple=True)
    values, shape = codes[row, column], (len(codes), sae.config.d_sae)
    # Dense on a CPU, whose bits are compared; a GPU would take as long for it as for the codes.
    x_hat = sae.decode(csr(row, column, values, shape) if codes.is_cuda else codes, x)
    found = [to_cpu(part) for part in (values, column.int(), offsets(row, len(codes)), beyond)]
    values_here, indices, ends, outliers = (arrived().numpy() for arrived in found)
    return Codes(sp.csr_array((values_here, indices, ends), shape=shape), outliers, x_hat)


def reconstruction(x: torch.Tensor, codes: Codes, counted: np.ndarray) -> np.ndarray:
    """(5 + d_model,) float64 sums over those of some tokens that are counted, an (n,) mask; sums of parts add up.

    Tokens that are not outliers, and of these active codes, squared errors, squares and activations; and, in the second
    place, outliers. x (n, d_model) lies where its reconstruction does.
    """
    mask = counted & ~codes.beyond
    kept = torch.from_numpy(mask).to(x.device)
    x, x_hat = x[kept].double(), codes.x_hat[kept].double()
    active, error = np.diff(codes.sparse.indptr)[mask].sum(), (x - x_hat).pow(2).sum().item()
    total = reduce(x, "token d_model -> d_model", "sum").tolist()
    return np.array([len(x), (counted & codes.beyond).sum(), active, error, x.pow(2).sum().item(), *total])


def reconstructed(sums: np.ndarray) -> dict[str, float | int | None]:
    """From the sums of `reconstruction`: FVE and L0 of all tokens but outliers, and the share of outliers."""
    n, n_beyond, active, error, square = sums[:5].tolist()
    share = n_beyond / max(n + n_beyond, 1)
    if n == 0:
        return {"n_tokens": 0, "fve": None, "l0": None, "outlier_share": share}
    fve = explained(error, square, torch.from_numpy(sums[5:]), int(n))
    return {"n_tokens": int(n), "fve": None if math.isnan(fve) else fve, "l0": active / n, "outlier_share": share}

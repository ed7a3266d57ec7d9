"""Pieces of an encoding on disk: the codes of one shard of the store each, until all are there and joined.

In the folder of the feature table to come::

    pieces/
      encoding.json      what is encoded, and with what; pieces of another encoding are refused
      000000.npz         of the store's first shard
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from tsae.base.files import replacing, writing
from tsae.base.part import check_same_work, digest_of, remove_work
from tsae.base.remote.mirror import local, needed, published, there
from tsae.base.untrusted import check_zip
from tsae.errors import TsaeError

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
                piece = _piece(found)
            yield piece

    def codes(self, n: int) -> Iterator[sp.csr_array]:
        """(n_tokens, d_sae) float32 codes of the first n shards, in order.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(n):
            with _opened(self._file(number), self._of) as found:
                codes = _codes(found)
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
                return replace(_piece(found), trajectory=trajectory), _codes(found)
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


def _piece(found: Any) -> Piece:
    return Piece(**{name: found[name] for name in _OF_PIECE}, nnz=int(found["offsets"][-1]))


def _codes(found: Any) -> sp.csr_array:
    return sp.csr_array((found["values"], found["indices"], found["offsets"]), shape=tuple(found["shape"]))


def _write(file: Path, piece: Piece, codes: sp.csr_array, of: str) -> None:
    """Write a piece, whole or not at all."""
    kept = writing(file.parent, "Make room, and give the same command again: it goes on from here.")
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

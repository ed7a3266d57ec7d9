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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from tsae.base.disk.untrusted import check_zip
from tsae.base.files import replacing, writing
from tsae.base.part import check_same_work, digest_of
from tsae.base.remote.mirror import local, needed, published, removed, there
from tsae.errors import TsaeError

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
        check_same_work(self.path / "encoding.json", identity, "pieces of another encoding")
        published(self.path / "encoding.json")

    def __contains__(self, number: int) -> bool:
        return there(self._file(number))

    def first(self, n: int) -> Iterator[Piece]:
        """Those of the first n shards, in order.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(n):
            with self._opened(number) as found:
                piece = Piece(**{name: found[name] for name in _OF_PIECE}, nnz=int(found["offsets"][-1]))
            yield piece

    def codes(self, n: int) -> Iterator[sp.csr_array]:
        """(n_tokens, d_sae) float32 codes of the first n shards, in order.

        Raises:
            TsaeError: where one is missing, damaged, or of another encoding.
        """
        for number in range(n):
            with self._opened(number) as found:
                parts = (found["values"], found["indices"], found["offsets"])
                codes = sp.csr_array(parts, shape=tuple(found["shape"]))
            yield codes

    def add(self, number: int, piece: Piece, codes: sp.csr_array) -> None:
        """Write the piece of a shard, whole or not at all.

        Raises:
            TsaeError: where it cannot be written, for instance on a full disk.
        """
        kept = writing(self.path, "Make room, and give the same command again: it goes on from here.")
        with kept, replacing(self._file(number)) as partial, partial.open("wb") as stream:
            np.savez(
                stream,
                values=codes.data,
                indices=codes.indices.astype(np.int32),
                offsets=codes.indptr,
                shape=np.array(codes.shape),
                of=np.array(self._of),
                **{name: getattr(piece, name) for name in _OF_PIECE},
            )
        published(self._file(number))

    @contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        file = self._file(number)
        try:
            check_zip(needed(file))
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
                if str(found["of"]) != self._of:
                    fix = "Remove it, and encode again; the others stay."
                    raise TsaeError("is a piece of another encoding", where=file, fix=fix)
                yield found
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
            raise TsaeError(f"is damaged ({error})", where=file, fix="Remove it, and encode again.") from error

    def remove(self) -> None:
        """When they are joined."""
        removed(self.path)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:06d}.npz"

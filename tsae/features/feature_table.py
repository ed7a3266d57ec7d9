"""The FeatureTable: sparse codes of (reader, trajectory), a row a pair.

One folder, which `tsae encode` writes block by block, and which is read in parts::

    features/
      features.h5        /indices, /values (nnz,), /offsets (n_tokens + 1,): compressed sparse rows, a row a token
                         /token_ids, /outlier (n_tokens,), /row_offsets (n_rows + 1,), /reader, /trajectory (n_rows,)
      columns.h5         /columns: the same codes by features
      means.h5           /SPAN/rows, /SPAN/columns: mean activations of every row over the response, and over thinking
                         and answer where there are any; /SPAN has the attribute mask, a digest of the tokens that count
      features.json      SAE, readers with their reconstruction, special ids
      stability.json     which features other seeds find again, where that was known of the SAE
      rollouts.parquet   the Rollouts table that the codes refer to
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.activations.shard import TokenSpan, rows_mask
from tsae.base import display
from tsae.base.artefact import MANIFEST, Kind, is_whole, read_artefact, write_artefact
from tsae.base.files import reading, replacing, writing
from tsae.base.filters import need_features, several
from tsae.base.hdf5 import HDF5Writer
from tsae.base.mirror import local, published, removed
from tsae.checkpoints.loading import Checkpoint, weights_fingerprint
from tsae.errors import TsaeError
from tsae.features.sparse_matrices import (
    Columns,
    Rows,
    StoredColumns,
    StoredFile,
    StoredRows,
    columns_of,
    row_blocks,
    stretches,
    write_columns,
    write_rows,
)
from tsae.rollouts.config import BandsBy
from tsae.rollouts.table import Rollouts
from tsae.sae.quality.stability import FILE as STABILITY
from tsae.sae.quality.stability import Stability

CODES, COLUMNS, MEANS = "features.h5", "columns.h5", "means.h5"
ARRAYS = ("token_ids", "row_offsets", "reader", "trajectory", "outlier")
_FIX = "Encode again."
_FILES = (CODES, COLUMNS, MEANS, "rollouts.parquet")
_AT_ONCE = 50_000  # tokens


@dataclass(frozen=True)
class FeatureTable:
    """Sparse codes of every token that every reader read."""

    codes: Rows
    """(n_tokens, d_sae) float32, non-negative. After `load` they stay on disk. ``codes[tokens]`` then reads some of
    them, and ``codes[:]`` all. Both give a `scipy.sparse.csr_array`."""
    token_ids: np.ndarray
    """(n_tokens,) int32."""
    row_offsets: np.ndarray
    """(n_rows + 1,): row i has the tokens row_offsets[i]:row_offsets[i + 1], prompt and response."""
    reader: np.ndarray
    """(n_rows,) index into `readers`."""
    trajectory: np.ndarray
    """(n_rows,) row ids into `rollouts`."""
    rollouts: Rollouts
    info: dict[str, Any] = field(default_factory=dict)
    """sae (config, site), readers (id, run, step, trained_on, weights, reconstruction, outlier_share), special_ids;
    token_strings: text of the token ids that occur, by id as text."""
    outlier: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """(n_tokens,) bool: tokens beyond the norm limit of the SAE's training. The SAE never saw such tokens, so they have
    no codes and do not count. Empty where none is known."""
    origin: str = "features"
    """The folder it was read from; named in error messages."""
    stability: Stability | None = None
    """Stability of the SAE's latents across seeds, where `encode` found it beside the SAE."""

    @property
    def n_rows(self) -> int:
        return len(self.trajectory)

    @property
    def n_features(self) -> int:
        return int(self.codes.shape[1])

    @property
    def readers(self) -> list[str]:
        """Reader ids, the base first."""
        return [reader["id"] for reader in self.info["readers"]]

    @property
    def d_high(self) -> int:
        """Features below this index are high-level."""
        return int(self.info["sae"]["d_high"])

    def __repr__(self) -> str:
        return (
            f"FeatureTable({self.n_rows:,} rows (reader, trajectory), {self.codes.shape[0]:,} tokens, "
            f"{self.n_features:,} features, {self.codes.nnz:,} active; readers: {', '.join(self.readers)})"
        )

    def _repr_html_(self) -> str:
        kept = ["id", "run", "step", "trained_on", "n_tokens", "fve", "l0", "flagged"]
        readers = pd.DataFrame(self.info["readers"])
        facts = {
            "rows (reader, trajectory)": self.n_rows,
            "tokens": self.codes.shape[0],
            "features": self.n_features,
            "high-level": self.d_high,
            "active a token": self.codes.nnz / max(1, self.codes.shape[0]),
            "stability known": self.stability is not None,
        }
        readers = readers[[name for name in kept if name in readers]]
        note = "features.show(trajectory) shows what fires on one."
        return display.card("FeatureTable", facts, ("reconstruction per reader", readers), note=note)

    def show(
        self,
        trajectory: int,
        features: int | Sequence[int] | None = None,
        *,
        reader: str | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Show a trajectory with the activation of some features on its tokens, in a notebook or a terminal.

        Args:
            trajectory: row id into `rollouts`.
            features: one or several; by default the four that are most active on its response, relative to their root
                mean square over all rows.
            reader: who read it; by default the base.
            checkpoint: its tokenizer gives the tokens' text; without one they are shown by id.

        Raises:
            TsaeError: where that reader did not read it, or no feature fires there.
        """
        display.show_trajectory(self, trajectory, features, reader=reader, checkpoint=checkpoint)

    def reader_info(self, reader: str) -> Mapping[str, Any]:
        """id, run, step, trained_on and reconstruction of a reader."""
        for record in self.info["readers"]:
            if record["id"] == reader:
                return record
        raise TsaeError(f"no reader {reader!r}; there are {', '.join(self.readers)}", where=self.origin)

    @cached_property
    def row_of_token(self) -> np.ndarray:
        """(n_tokens,) row of each token."""
        return np.repeat(np.arange(self.n_rows), np.diff(self.row_offsets))

    def rows_of(self, tokens: np.ndarray) -> np.ndarray:
        """The row of each of some tokens, which are indices into all tokens of the table."""
        return np.searchsorted(self.row_offsets, tokens, side="right") - 1

    def counts(self, mask: np.ndarray) -> np.ndarray:
        """(n_rows,) how many tokens of a (n_tokens,) mask each row has."""
        found = np.zeros(self.n_rows, dtype=np.int64)
        for rows, tokens, ends in self.row_blocks():
            found[rows] = np.diff(np.r_[0, mask[tokens].cumsum()][ends])
        return found

    @cached_property
    def columns(self) -> Columns:
        """The codes by features: ``columns[:, features]`` is a (n_tokens, …) `scipy.sparse.csc_array`."""
        return columns_of(self.codes)

    def need(self, features: Iterable[int]) -> list[int]:
        """Some features as plain numbers, each once.

        Raises:
            TsaeError: where the table has no such feature.
        """
        found = list(dict.fromkeys(map(int, features)))
        need_features(found, self.n_features, self.origin)
        return found

    @property
    def token_strings(self) -> list[str]:
        """Text of every token id up to the largest, as the readers' tokenizer has it; empty where it is not known."""
        known = self.info.get("token_strings") or {}
        return [str(known.get(str(i), f"#{i}")) for i in range(int(self.token_ids.max()) + 1)] if known else []

    def need_sae(self, weights: str | None, d_sae: int) -> None:
        """Check that the codes are of an SAE of this fingerprint and width.

        Raises:
            TsaeError: where another SAE made them, or none.
        """
        sae = self.info.get("sae") or {}
        if "n_experts" in sae or sae.get("weights") != weights or self.n_features != d_sae:
            what = f"was encoded with another SAE ({sae.get('weights')}) than the one given ({weights})"
            raise TsaeError(what, where=self.origin, fix="Give the SAE that it was read by, or encode again.")

    @property
    def made_from(self) -> dict[str, str | None]:
        """Fingerprints of the rollouts, of their labels, and of the SAE's weights where they are known."""
        return {
            "rollouts": self.rollouts.fingerprint,
            "labels": self.rollouts.labels_fingerprint,
            "sae": (self.info.get("sae") or {}).get("weights"),
        }

    def differing(self, info: Mapping[str, Any]) -> str | None:
        """Which of rollouts, labels and SAE a result was computed from that are not this table's; None where all fit.

        Args:
            info: of the result. What it or this table does not know is taken to fit.
        """
        known = {**info, "sae": (info.get("sae") or {}).get("weights")}
        both = ((name, mine, known.get(name)) for name, mine in self.made_from.items())
        return next((name for name, mine, other in both if None not in (mine, other) and mine != other), None)

    def need_weights(self, checkpoint: Checkpoint) -> None:
        """Check that a checkpoint is the reader of its id.

        Raises:
            TsaeError: where its weights or its config are others.
        """
        known = {reader["id"]: reader.get("weights") for reader in self.info["readers"]}.get(checkpoint.id)
        if known is not None and known != weights_fingerprint(checkpoint):
            what = f"its weights or its config are not those that reader {checkpoint.id} of the features had"
            fix = "Give the series that was captured, or capture and encode again."
            raise TsaeError(what, where=checkpoint.path, fix=fix)

    def by(self, kind: BandsBy) -> FeatureTable:
        """The same codes with bands of another kind, where the rollouts have several; see `Rollouts.by`.

        Raises:
            TsaeError: where there are none of this kind.
        """
        return self if kind == "auto" else replace(self, rollouts=self.rollouts.by(kind))

    def column(self, feature: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, activations) where a feature is active, in the order of the tokens.

        Raises:
            TsaeError: where an activation is not a finite number.
        """
        found = self.columns[:, [feature]]
        if not np.isfinite(found.data).all():
            raise TsaeError(f"the codes of feature {feature} are not finite", where=self.origin, fix="Encode again.")
        return found.indices, found.data

    def row_blocks(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """(rows, their tokens, where each row begins among these, and where the last one ends), block by block."""
        for first, last in stretches(np.diff(self.row_offsets), _AT_ONCE):
            ends = self.row_offsets[first : last + 1]
            yield slice(first, last), slice(int(ends[0]), int(ends[-1])), ends - ends[0]

    def span_mask(self, span: TokenSpan = "response") -> np.ndarray:
        """(n_tokens,) bool: tokens of a span; see `tsae.activations.shard.span_mask`. Outliers never count.

        Raises:
            TsaeError: for thinking, where no response has any.
        """
        special, mask = self.info["special_ids"], np.zeros(len(self.token_ids), dtype=bool)
        for rows, tokens, ends in self.row_blocks():
            ids, trajectory = self.token_ids[tokens], self.trajectory[rows]
            mask[tokens] = rows_mask(ids, ends, self.rollouts, trajectory, span, special)
        if len(self.outlier):
            mask &= ~self.outlier
        return mask

    def row_means(self, span: TokenSpan = "response") -> Rows:
        """(n_rows, n_features): mean activation over a row's tokens of the span; 0 for a row without any.

        They are read from disk where `encode` wrote them.
        """
        mask = self.span_mask(span)
        if isinstance(self.codes, StoredRows) and span in self.codes.means:
            digest, means = self.codes.means[span]
            if digest == _digest(mask):
                return means
        return sp.csr_array(sp.vstack(list(self._means(mask)), format="csr"))

    def _means(self, mask: np.ndarray) -> Iterator[sp.csr_array]:
        """Means over the tokens of a mask, in blocks of rows."""
        for _, tokens, ends in self.row_blocks():
            codes, counted, n = self.codes[tokens], mask[tokens], len(ends) - 1
            index = codes.indices.dtype  # with another one, the product would copy all codes' indices
            place = np.flatnonzero(counted).astype(index)
            row = np.repeat(np.arange(n, dtype=index), np.diff(ends))[counted]
            weight = (1 / np.bincount(row, minlength=n)[row]).astype(np.float32)
            yield sp.csr_array(sp.csr_array((weight, (row, place)), shape=(n, codes.shape[0])) @ codes)

    def rows(self, *, reader: str | Sequence[str], policy: str | Sequence[str] | None = None) -> np.ndarray:
        """Rows of a reader or several, over the trajectories of one policy, of several or of all."""
        mask = np.isin(self.reader, [self.readers.index(self.reader_info(id)["id"]) for id in several(reader)])
        if policy is not None:
            policies = np.array(self.rollouts.table["policy"].to_pylist())[self.trajectory]
            mask &= np.isin(policies, list(several(policy)))
        return np.flatnonzero(mask)

    def save(self, folder: str | Path) -> Path:
        """Write the folder; its manifest comes last, so that a half-written table is not loaded."""
        return self.save_with((block for _, block in row_blocks(self.codes)), self.codes.nnz, folder)

    def save_with(self, codes: Iterable[sp.csr_array], nnz: int, folder: str | Path, **made: Any) -> Path:
        """Write the folder with codes that come in blocks of tokens, instead of the table's own.

        Args:
            codes: the blocks; each is held in memory only until it is written.
            nnz: non-zeros of all blocks.
            folder: for the files.
            made: config and inputs, for the manifest.
        """
        folder = local(folder, fetch=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        self.rollouts.write(folder / "rollouts.parquet")
        if self.stability is None:
            removed(folder / STABILITY)
        else:
            self.stability.write(folder / STABILITY)
        outlier = self.outlier if len(self.outlier) else np.zeros(len(self.token_ids), dtype=bool)
        arrays = {name: getattr(self, name) for name in ARRAYS} | {"outlier": outlier}
        with writing(folder, "Make room, and give the same command again. What is encoded has been kept."):
            stored = write_codes(folder, arrays, codes, (len(self.token_ids), self.n_features), nnz)
            written, means = replace(self, codes=stored), {}
            for span in ("response", "thinking", "answer") if self.rollouts.has_thinking else ("response",):
                mask = self.span_mask(span)
                means[span] = _digest(mask), written._means(mask)
            write_means(folder, means, (self.n_rows, self.n_features))
            there = [*_FILES, *([] if self.stability is None else [STABILITY])]
            content, gives = {**self.info, "n_features": self.n_features}, self.made_from
            write_artefact(folder, FEATURES, content, there=there, gives=gives, **{"inputs": gives, **made})
        for name in (*there, FEATURES.main, MANIFEST):  # this one last, there too
            published(folder / name)
        return folder

    @classmethod
    def of(cls, given: FeatureTable | str | Path) -> FeatureTable:
        """The table itself, or that of a folder."""
        return given if isinstance(given, FeatureTable) else cls.load(given)

    @classmethod
    def load(cls, folder: str | Path) -> FeatureTable:
        """Load a folder that `save` wrote. Codes and means stay there, and are read when they are needed."""
        folder = local(folder)
        if (folder / "pieces").is_dir() and not is_whole(folder):
            what = "its encoding did not finish"
            raise TsaeError(what, where=folder, fix="Give the same `tsae encode` without --part; it resumes.")
        info = read_artefact(folder, FEATURES, _FILES)
        with reading(folder / "features.json", "Encode again."):
            n_features = int(info.pop("n_features"))
        codes, arrays = read_codes(folder, n_features)
        rollouts = Rollouts.read(folder / "rollouts.parquet")
        return cls(
            codes=codes,
            rollouts=rollouts,
            info=info,
            origin=str(folder),
            stability=Stability.beside(folder, (info.get("sae") or {}).get("weights")),
            **arrays,
        )


FEATURES = Kind("features", 1, "features.json", "Make them with `tsae encode`.", FeatureTable.load)


def _digest(mask: np.ndarray) -> str:
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()


def write_codes(
    folder: Path, arrays: Mapping[str, np.ndarray], blocks: Iterable[sp.csr_array], shape: tuple[int, int], nnz: int
) -> StoredRows:
    """Write features.h5 and columns.h5, and read them back.

    Args:
        folder: for the files.
        arrays: those of `ARRAYS`.
        blocks: the codes, block of tokens by block.
        shape: (n_tokens, n_features).
        nnz: non-zeros of the codes.
    """
    with replacing(folder / CODES) as partial, HDF5Writer(partial) as file:
        for name in ARRAYS:
            file.create_dataset(name, data=arrays[name])
        counts = write_rows(file, blocks, shape, nnz)
    rows = StoredRows(StoredFile(folder / CODES), "", shape[1], None)
    with replacing(folder / COLUMNS) as partial:
        write_columns(partial, "columns", rows, counts)
    rows.columns = StoredColumns(StoredFile(folder / COLUMNS), "columns", shape[0])
    return rows


def write_means(folder: Path, means: Mapping[str, tuple[str, Iterable[sp.csr_array]]], shape: tuple[int, int]) -> None:
    """Write means.h5.

    Args:
        folder: for the file.
        means: of each span the digest of its mask, and its means in blocks of rows.
        shape: (n_rows, n_features).
    """
    with replacing(folder / MEANS) as partial:
        for span, (mask, blocks) in means.items():
            with tempfile.TemporaryFile(dir=folder) as spool:
                sizes = []
                for block in blocks:
                    sizes.append((block.shape[0], block.nnz))
                    for array, kind in ((block.indptr, np.int64), (block.indices, np.int32), (block.data, np.float32)):
                        spool.write(array.astype(kind, copy=False).data)
                spool.seek(0)
                with HDF5Writer(partial, extend=True) as file:
                    group = file.create_group(span)
                    group.attrs["mask"] = np.bytes_(mask.encode())
                    nnz = sum(n for _, n in sizes)
                    counts = write_rows(group.create_group("rows"), _spooled(spool, sizes, shape[1]), shape, nnz)
            rows = StoredRows(StoredFile(partial), f"{span}/rows", shape[1], None)
            write_columns(partial, f"{span}/columns", rows, counts)


def _spooled(spool: IO[bytes], sizes: list[tuple[int, int]], n_columns: int) -> Iterator[sp.csr_array]:
    for n, nnz in sizes:
        ends, indices, values = (
            np.frombuffer(spool.read(count * np.dtype(kind).itemsize), dtype=kind)
            for count, kind in ((n + 1, np.int64), (nnz, np.int32), (nnz, np.float32))
        )
        yield sp.csr_array((values, indices, ends), shape=(n, n_columns))


def read_codes(folder: Path, n_features: int) -> tuple[StoredRows, dict[str, np.ndarray]]:
    """The codes, with their columns and means, and the arrays of `ARRAYS`.

    Raises:
        TsaeError: where a file cannot be read.
    """
    with reading(folder, _FIX):
        file = StoredFile(folder / CODES)
        arrays = {name: file.read(name) for name in ARRAYS}
        codes = StoredRows(file, "", n_features, None)
        codes.columns = StoredColumns(StoredFile(folder / COLUMNS), "columns", codes.shape[0])
        means = StoredFile(folder / MEANS)
        for name, mask in means.attributes.items():
            span = name.removesuffix("/mask")
            columns = StoredColumns(means, f"{span}/columns", len(arrays["trajectory"]))
            codes.means[span] = str(mask), StoredRows(means, f"{span}/rows", n_features, columns)
    return codes, arrays


def masked_sums(features: FeatureTable, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n_features,) on how many of the tokens of a (n_tokens,) mask each feature is active, and its sum there."""
    fired, total = np.zeros(features.n_features, dtype=np.int64), np.zeros(features.n_features)
    for codes, counted in masked_blocks(features, mask):
        mine = codes[np.flatnonzero(counted)]
        fired += np.bincount(mine.indices[mine.data > 0], minlength=len(fired))
        total += np.bincount(mine.indices, weights=mine.data, minlength=len(total))
    return fired, total


def masked_blocks(features: FeatureTable, mask: np.ndarray) -> Iterator[tuple[sp.csr_array, np.ndarray]]:
    """(codes, mask) of the table's tokens, a block of rows at a time; blocks that the mask leaves out are not read."""
    for _, tokens, _ in features.row_blocks():
        if mask[tokens].any():
            yield features.codes[tokens], mask[tokens]

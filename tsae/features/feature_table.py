"""The FeatureTable: sparse codes of (reader, trajectory), a row a pair.

One folder::

    features/
      features.h5        /indices, /values (nnz,), /offsets (n_tokens + 1,): compressed sparse rows, a row a token
                         /token_ids, /outlier (n_tokens,), /row_offsets (n_rows + 1,), /reader, /trajectory (n_rows,)
      features.json      SAE, readers with their reconstruction, special ids
      stability.json     which features other seeds find again, where that was known of the SAE
      rollouts.parquet   the Rollouts table that /trajectory refers to
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.activations.spans import TokenSpan, rows_mask
from tsae.base.files import write_json
from tsae.base.filters import several
from tsae.base.seal import check_seal, seal
from tsae.base.views import views
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts
from tsae.sae.quality.stability import FILE as STABILITY
from tsae.sae.quality.stability import Stability

_FILES = ("features.json", "features.h5", "rollouts.parquet")
_ARRAYS = ("indices", "values", "offsets", "token_ids", "row_offsets", "reader", "trajectory", "outlier")


@dataclass(frozen=True)
class FeatureTable:
    """Sparse codes of every token that every reader read."""

    codes: sp.csr_array
    """(n_tokens, d_sae) float32, non-negative."""
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
    """sae (config, site), readers (id, run, step, trained_on, reconstruction, outlier_share), special_ids."""
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
        return views().card("FeatureTable", facts, ("reconstruction per reader", readers), note=note)

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
        views().show_trajectory(self, trajectory, features, reader=reader, checkpoint=checkpoint)

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

    def span_mask(self, span: TokenSpan = "response") -> np.ndarray:
        """(n_tokens,) bool: tokens of a span; see `tsae.activations.spans.span_mask`. Outliers never count.

        Raises:
            TsaeError: for thinking, where no response has any.
        """
        special = self.info["special_ids"]
        mask = rows_mask(self.token_ids, self.row_offsets, self.rollouts, self.trajectory, span, special)
        return mask & ~self.outlier if len(self.outlier) else mask

    def row_means(self, span: TokenSpan = "response") -> sp.csr_array:
        """(n_rows, n_features): mean activation over a row's tokens of the span; 0 for a row without any."""
        mask = self.span_mask(span)
        index = self.codes.indices.dtype  # with another one, the product would copy all codes' indices
        tokens, rows = np.flatnonzero(mask).astype(index), self.row_of_token[mask].astype(index)
        counts = np.bincount(rows, minlength=self.n_rows)
        weights = sp.csr_array(
            ((1 / counts[rows]).astype(np.float32), (rows, tokens)), shape=(self.n_rows, len(self.token_ids))
        )
        return sp.csr_array(weights @ self.codes)

    def rows(self, *, reader: str | Sequence[str], policy: str | Sequence[str] | None = None) -> np.ndarray:
        """Rows of a reader or several, over the trajectories of one policy, of several or of all."""
        mask = np.isin(self.reader, [self.readers.index(self.reader_info(id)["id"]) for id in several(reader)])
        if policy is not None:
            policies = np.array(self.rollouts.table["policy"].to_pylist())[self.trajectory]
            mask &= np.isin(policies, list(several(policy)))
        return np.flatnonzero(mask)

    def save(self, folder: str | Path) -> Path:
        """Write the folder; features.json comes last, so that a half-written table is not loaded."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "features.json").unlink(missing_ok=True)
        self.rollouts.write(folder / "rollouts.parquet")
        if self.stability is None:
            (folder / "stability.json").unlink(missing_ok=True)
        else:
            self.stability.save(folder)
        arrays = {
            "indices": self.codes.indices.astype(np.int32),
            "values": self.codes.data.astype(np.float32),
            "offsets": self.codes.indptr.astype(np.int64),
            **{name: getattr(self, name) for name in _ARRAYS[3:]},
            "outlier": self.outlier if len(self.outlier) else np.zeros(len(self.token_ids), dtype=bool),
        }
        with h5py.File(folder / "features.h5", "w", libver="latest") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array)
        write_json(folder / "features.json", {**self.info, "n_features": self.n_features})
        seal(folder, (*_FILES, STABILITY))
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> FeatureTable:
        """Load a folder that `save` wrote."""
        folder = Path(folder)
        for name in _FILES:
            if not (folder / name).is_file():
                raise TsaeError(f"holds no {name}", where=folder, fix="Make it with `tsae encode`.")
        check_seal(folder, "Encode again.")
        try:
            info = json.loads((folder / "features.json").read_text(encoding="utf-8"))
            n_features = int(info.pop("n_features"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"features.json is not a feature table's ({error})"
            raise TsaeError(found, where=folder, fix="Encode again.") from error
        try:
            with h5py.File(folder / "features.h5", "r") as file:
                arrays = {name: file[name][()] for name in _ARRAYS}
        except (OSError, KeyError) as error:
            found = f"features.h5 cannot be read ({str(error).splitlines()[0]})"
            raise TsaeError(found, where=folder, fix="Encode again.") from error
        shape = (len(arrays["token_ids"]), n_features)
        if len(arrays["values"]) <= np.iinfo(np.int32).max:
            # Otherwise scipy would widen the indices of all codes, and of what is computed from them, to 64 bits.
            arrays["offsets"] = arrays["offsets"].astype(np.int32)
        codes = sp.csr_array((arrays.pop("values"), arrays.pop("indices"), arrays.pop("offsets")), shape=shape)
        return cls(
            codes=codes,
            rollouts=Rollouts.read(folder / "rollouts.parquet"),
            info=info,
            origin=str(folder),
            stability=Stability.beside(folder, (info.get("sae") or {}).get("weights")),
            **arrays,
        )

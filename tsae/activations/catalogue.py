"""What is known of activations without reading any: sites, readers, trajectories, and subsets of these."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import pandas as pd

from tsae.activations.config import Axis, Subset
from tsae.activations.shard import Shard
from tsae.base import display
from tsae.base.filters import several
from tsae.errors import TsaeError, refuse
from tsae.rollouts.schema import BANDS, OUTCOMES
from tsae.rollouts.table import Rollouts

READER_INFO = ("id", "run", "step", "trained_on")
"""What a manifest and a feature table say of every reader."""


class Catalogue:
    """Activations of (reader, trajectory, site).

    Attributes:
        path: where they come from; named in error messages.
        manifest: as in the manifest.json of a store.
        selection: which subset of it this is.
        short_of_memory: by reader, tokens of the smallest forward passes that live reading fell back on in this
            training. A store's manifest has that by shard.
    """

    path: Path
    manifest: dict[str, Any]
    selection: Subset = Subset()
    short_of_memory: Mapping[str, int] = MappingProxyType({})

    def was_short(self, reader: str, tokens: int) -> None:
        """Keep the smaller in `short_of_memory`."""
        known = self.short_of_memory.get(reader, tokens)
        self.short_of_memory = {**self.short_of_memory, reader: min(tokens, known)}

    def shards(self, reader: str | None = None) -> Iterator[Shard]:
        """Whole trajectories in order, of one reader or of all. `rows` says which of them the subset has."""
        raise NotImplementedError

    def outlines(self) -> Iterator[Shard]:
        """All shards in order, for their sizes: not compared with their checksums. `Shard.checked` does that."""
        return self.shards()

    @cached_property
    def rollouts(self) -> Rollouts:
        """The trajectories that row ids refer to."""
        raise NotImplementedError

    def __repr__(self) -> str:
        part = "".join(f"; {axis} {', '.join(values)}" for axis, values in self.selection.as_dict().items())
        what = f"{', '.join(self.readers)} at {', '.join(self.sites)}{part}"
        return f"{type(self).__name__}({str(self.path)!r}: {what})"

    def _repr_html_(self) -> str:
        def total(record: Mapping[str, Any], name: str) -> int | None:
            """None for live models, whose shards have no such number."""
            return sum(shard.get(name, 0) for shard in record.get("shards", ())) or None

        table = pd.DataFrame(
            {
                **{key: [record.get(key) for record in self._records()] for key in READER_INFO},
                "trajectories": [total(record, "n_trajectories") for record in self._records()],
                "tokens": [total(record, "n_tokens") for record in self._records()],
            }
        )
        facts = {
            "path": self.path,
            "sites": [f"{site} (d_model {self.d_model(site)})" for site in self.sites],
            "stored as": self.manifest.get("dtype"),
            "part": "; ".join(f"{a} {', '.join(v)}" for a, v in self.selection.as_dict().items()) or None,
        }
        return display.card(type(self).__name__, facts, ("readers", table.dropna(axis=1, how="all")))

    @property
    def sites(self) -> list[str]:
        return list(self.manifest["sites"])

    @property
    def readers(self) -> list[str]:
        """Reader ids, the base first."""
        return [record["id"] for record in self._records()]

    def reader_info(self, reader: str) -> Mapping[str, Any]:
        """id, run, step and trained_on of a reader."""
        for record in self._records():
            if record["id"] == reader:
                return record
        raise TsaeError(f"no reader {reader!r}; there are {', '.join(self.readers)}", where=self.path)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.manifest["special_ids"])

    def d_model(self, site: str) -> int:
        what = f"no site {site!r}; there are {', '.join(self.sites)}"
        refuse(self.path, (site not in self.manifest["sites"], what, "Choose one of these sites."))
        return int(self.manifest["sites"][site]["d_model"])

    def subset(self, selection: Subset | None = None, **axes: str | Sequence[str]) -> Self:
        """Some of the readers and trajectories, for training, evaluation and encoding.

        Args:
            selection: what is kept; or by keyword `readers`, `runs`, `bands`, `outcomes`, each one name or several.
                What fits all axes is kept. A subset of a subset fits both.

        Raises:
            TsaeError: for names that do not occur, or where nothing is left.
        """
        wanted = selection or Subset(**{axis: several(names) for axis, names in axes.items()})
        known: dict[str, Collection[str]] = {
            "readers": [record["id"] for record in self.manifest["readers"]],
            "runs": list(dict.fromkeys(map(_run, self.manifest["readers"]))),
            "bands": BANDS,
            "outcomes": OUTCOMES,
        }
        both: dict[str, tuple[str, ...]] = {}
        for axis, values in wanted.as_dict().items():
            unknown = [value for value in values if value not in known[axis]]
            if unknown:
                what = f"no {axis.removesuffix('s')} {unknown[0]!r}; there are {', '.join(known[axis])}"
                raise TsaeError(what, where=self.path)
            before = getattr(self.selection, axis)
            both[axis] = tuple(value for value in values if not before or value in before)
        found = self._with(Subset(**{**self.selection.as_dict(), **both}))
        if not all(both.values()) or not found.readers or not found.rows.any():
            asked = ", ".join(f"{axis} {' '.join(values)}" for axis, values in wanted.as_dict().items())
            raise TsaeError(f"nothing is of {asked}", where=self.path, fix="Choose a larger part.")
        return found

    @property
    def whole(self) -> Self:
        """All readers and trajectories."""
        return self._with(Subset())

    def _with(self, selection: Subset) -> Self:
        found = copy.copy(self)
        found.__dict__.pop("rows", None)
        found.selection = selection
        return found

    @cached_property
    def rows(self) -> np.ndarray:
        """(n_trajectories,) bool over the rollouts: which trajectories the subset has."""
        kept = np.ones(len(self.rollouts), dtype=bool)
        for axis, values in (("band", self.selection.bands), ("outcome", self.selection.outcomes)):
            if values:
                kept &= np.array([value in values for value in self.rollouts.table[axis].to_pylist()])
        return kept

    def identity(self, site: str, balance: Sequence[Axis] = ()) -> dict[str, Any]:
        """What decides the batches, for the manifest: a training is resumed only where all of it is the same."""
        manifest, selected = self.manifest, self.selection.as_dict()
        # Bands and outcomes can change without a new capture.
        labels = [axis for axis in ("band", "outcome") if axis in balance or f"{axis}s" in selected]
        return {
            "rollouts": manifest["rollouts"],
            "readers": {
                record["id"]: {
                    "weights": record["weights"],
                    "shard_tokens": [shard["n_tokens"] for shard in record["shards"]],
                }
                for record in self._records()
            },
            "site": site,
            "dtype": manifest["dtype"],
            "special_ids": manifest["special_ids"],
            "capture": manifest["config"],
            **({"subset": selected} if selected else {}),
            **({"parts": parts} if (parts := self.rollouts.parts_fingerprint) else {}),
            **{axis: _hash(self.rollouts.table[axis].to_pylist()) for axis in labels},
        }

    def _records(self) -> list[dict[str, Any]]:
        """The manifest's readers that the subset has."""
        readers, runs = self.selection.readers, self.selection.runs
        return [
            record
            for record in self.manifest["readers"]
            if (not readers or record["id"] in readers) and (not runs or _run(record) in runs)
        ]


def _run(record: Mapping[str, Any]) -> str:
    """The base is a run of its own, named by its id."""
    return str(record["run"] or record["id"])


def _hash(values: Sequence[Any]) -> str:
    return hashlib.sha256("\0".join(map(str, values)).encode()).hexdigest()[:16]

"""What is known of activations without reading any: sites, readers, trajectories; and subsets of these.

Two sources have them: `tsae.activations.store.ActivationStore` on disk, and `tsae.activations.live.LiveSource`, which
has the readers compute them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tsae.activations.config import Axis, Subset
from tsae.base.filters import several
from tsae.base.views import views
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS, OUTCOMES
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from tsae.activations.store import Shard
    from tsae.activations.windows import Windows


class Source:
    """Activations of (reader, trajectory, site).

    Attributes:
        path: where they come from; named in error messages.
        manifest: as in the manifest.json of a store.
        selection: what part of it this is.
        short_of_memory: by reader, tokens of the smallest forward passes that reading fell back on, since `windows` was
            last called. A store's manifest has that by shard.
    """

    path: Path
    manifest: dict[str, Any]
    selection: Subset = Subset()
    short_of_memory: Mapping[str, int] = MappingProxyType({})

    def shards(self, reader: str | None = None) -> Iterator[Shard]:
        """Whole trajectories in order, of one reader or of all; those of a subset are in `rows`."""
        raise NotImplementedError

    def was_short(self, reader: str, tokens: int) -> None:
        """Keep the smaller in `short_of_memory`."""
        known = self.short_of_memory.get(reader, tokens)
        self.short_of_memory = {**self.short_of_memory, reader: min(tokens, known)}

    def windows(self, site: str, **options: Any) -> Windows:
        """Shuffled batches of tokens and their partners; see `tsae.activations.windows.Windows` for the options."""
        raise NotImplementedError

    @cached_property
    def rollouts(self) -> Rollouts:
        """The trajectories that row ids refer to."""
        raise NotImplementedError

    def __repr__(self) -> str:
        part = "".join(f"; {axis} {', '.join(values)}" for axis, values in self.selection.as_dict().items())
        what = f"{', '.join(self.readers)} at {', '.join(self.sites)}{part}"
        return f"{type(self).__name__}({str(self.path)!r}: {what})"

    def _repr_html_(self) -> str:
        import pandas as pd

        readers = [record for record in self.manifest["readers"] if self._has_reader(record)]
        table = pd.DataFrame(
            {
                **{key: [record.get(key) for record in readers] for key in ("id", "run", "step", "trained_on")},
                # Live models have no shards.
                "trajectories": [sum(s.get("n_trajectories", 0) for s in r.get("shards", ())) or None for r in readers],
                "tokens": [sum(s.get("n_tokens", 0) for s in r.get("shards", ())) or None for r in readers],
            }
        )
        facts = {
            "path": self.path,
            "sites": [f"{site} (d_model {self.d_model(site)})" for site in self.sites],
            "stored as": self.manifest.get("dtype"),
            "part": "; ".join(f"{a} {', '.join(v)}" for a, v in self.selection.as_dict().items()) or None,
        }
        return views().card(type(self).__name__, facts, ("readers", table.dropna(axis=1, how="all")))

    @property
    def sites(self) -> list[str]:
        return list(self.manifest["sites"])

    @property
    def readers(self) -> list[str]:
        """Reader ids, the base first."""
        return [record["id"] for record in self.manifest["readers"] if self._has_reader(record)]

    def reader_info(self, reader: str) -> Mapping[str, Any]:
        """id, run, step and trained_on of a reader."""
        for record in self.manifest["readers"]:
            if record["id"] == reader and self._has_reader(record):
                return record
        raise TsaeError(f"no reader {reader!r}; there are {', '.join(self.readers)}", where=self.path)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.manifest["special_ids"])

    def d_model(self, site: str) -> int:
        if site not in self.manifest["sites"]:
            raise TsaeError(
                f"no site {site!r}; there are {', '.join(self.sites)}",
                where=self.path,
                fix="Choose one of these sites.",
            )
        return int(self.manifest["sites"][site]["d_model"])

    # --- subsets

    def subset(self, selection: Subset | None = None, **axes: str | Sequence[str]) -> Self:
        """The same without some readers or trajectories; for training, evaluation and encoding.

        Args:
            selection: what is kept; or by keyword `readers`, `runs`, `bands`, `outcomes`, each one name or several.
                What fits all axes is kept. A subset of a subset is in both.

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
            for value in values:
                if value not in known[axis]:
                    raise TsaeError(
                        f"no {axis.removesuffix('s')} {value!r}; there are {', '.join(known[axis])}", where=self.path
                    )
            before = getattr(self.selection, axis)
            both[axis] = tuple(value for value in values if not before or value in before)
        found = copy.copy(self)
        found.__dict__.pop("rows", None)
        found.selection = Subset(**{**self.selection.as_dict(), **both})
        emptied = [axis for axis, values in both.items() if not values]
        if emptied or not found.readers or not found.rows.any():
            asked = ", ".join(f"{axis} {' '.join(values)}" for axis, values in wanted.as_dict().items())
            raise TsaeError(f"nothing is of {asked}", where=self.path, fix="Choose a larger part.")
        return found

    @property
    def whole(self) -> Self:
        """Without any selection."""
        found = copy.copy(self)
        found.__dict__.pop("rows", None)
        found.selection = Subset()
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
        """What decides the batches, for run.json: a training goes on only with equal ones."""
        manifest, selected = self.manifest, self.selection.as_dict()
        # Bands and outcomes may be measured anew without a new capture.
        labels = [axis for axis in ("band", "outcome") if axis in balance or f"{axis}s" in selected]
        return {
            "rollouts": manifest["rollouts"],
            "readers": {
                record["id"]: {
                    "weights": record.get("weights"),
                    "shard_tokens": [shard["n_tokens"] for shard in record["shards"]],
                }
                for record in self._records()
            },
            "site": site,
            "dtype": manifest["dtype"],
            "special_ids": manifest["special_ids"],
            "capture": manifest.get("config"),
            **({"subset": selected} if selected else {}),
            **({"parts": told} if (told := self.rollouts.parts_fingerprint) else {}),
            **{axis: _hash(self.rollouts.table[axis].to_pylist()) for axis in labels},
        }

    def _records(self) -> list[dict[str, Any]]:
        """The manifest's readers that the subset has."""
        return [record for record in self.manifest["readers"] if self._has_reader(record)]

    def _has_reader(self, record: Mapping[str, Any]) -> bool:
        chosen = self.selection
        return (not chosen.readers or record["id"] in chosen.readers) and (
            not chosen.runs or _run(record) in chosen.runs
        )


def _run(record: Mapping[str, Any]) -> str:
    """The base is a run of its own, named by its id."""
    return str(record["run"] or record["id"])


def _hash(values: Sequence[Any]) -> str:
    return hashlib.sha256("\0".join(map(str, values)).encode()).hexdigest()[:16]

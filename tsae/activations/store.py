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

Datasets are contiguous, so that they are read through memory maps. A shard enters the manifest, with its hash, only
once it is whole; the attributes ``weights`` and ``rollouts`` of the file say whose it is.

`Pair` shows a store's base and another reader side by side, for crosscoders. A token that both have read is one row
(2 · d_model,): the base's activation, then the other's. Training, evaluation and batches read a pair as they read a
store. Nothing is copied: rows are put together from both readers' memory maps when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.batches import Windows
from tsae.activations.catalogue import Catalogue
from tsae.activations.config import Axis
from tsae.activations.manifest import inside, read_manifest, stored_rollouts
from tsae.activations.shard import Shard, open_shard
from tsae.base.mirror import local
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts


class Source(Catalogue):
    """Activations in batches: `tsae.activations.store.ActivationStore` or `tsae.activations.live.LiveSource`."""

    def windows(self, site: str, **options: Any) -> Windows:
        """Shuffled batches of tokens and their partners; see `tsae.activations.batches.Windows`."""
        raise NotImplementedError


class ActivationStore(Source):
    """Activations of (reader, trajectory, site), read through memory maps.

    Args:
        path: the folder that `tsae.capture` wrote.

    Raises:
        TsaeError: where there is no store, its capture did not finish, or a shard is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        if isinstance(path, Source):
            fix = "Capture a store, of some of the trajectories if disk is short (`tsae capture`)."
            raise TsaeError("keeps no activations, but a store is needed here", where=type(path).__name__, fix=fix)
        self.path = local(path)
        self.manifest = read_manifest(self.path)
        if not self.manifest["complete"]:
            done = sum(len(reader["shards"]) for reader in self.manifest["readers"])
            fix = "Run the same capture again, or the parts that are missing, to resume it."
            raise TsaeError(f"its capture did not finish; {done} shards are recorded", where=self.path, fix=fix)

    @property
    def has_token_statistics(self) -> bool:
        """Whether its shards hold entropies and log-probabilities."""
        return bool(self.manifest["config"].get("token_statistics"))

    @cached_property
    def rollouts(self) -> Rollouts:
        """The trajectories that row ids refer to.

        Raises:
            TsaeError: where the file is not that of the capture.
        """
        return stored_rollouts(self.path, self.manifest, fix="Capture again.")

    def shards(self, reader: str | None = None) -> Iterator[Shard]:
        """Whole shards in order, of one reader or of all. `rows` says which trajectories a subset has."""
        return (shard.checked() for shard in self._opened(reader))

    def outlines(self) -> Iterator[Shard]:
        return self._opened(None)

    def _opened(self, reader: str | None) -> Iterator[Shard]:
        for record in self._records():
            if reader is None or record["id"] == reader:
                for shard in record["shards"]:
                    file = inside(self.path, shard["file"])
                    yield open_shard(file, self.manifest, record["id"], shard, lengths=self._lengths, outline=True)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """(n_trajectories,) tokens of every trajectory of the rollouts."""
        return self.rollouts.lengths("prompt_ids") + self.rollouts.lengths("response_ids")

    def windows(self, site: str, **options: Any) -> Windows:
        return Windows(self, site, **options)


class SideBySide:
    """Rows (n_tokens, 2 · d_model) in the stored dtype, put together when they are read; indexed like an array.

    Args:
        second: (n_tokens, d_model) of the other reader.
        firsts: such arrays of the base.
        which: (n_tokens,) in which of them the base's activation of a token is.
        place: (n_tokens,) its row there.
    """

    def __init__(self, second: np.ndarray, firsts: Sequence[np.ndarray], which: np.ndarray, place: np.ndarray) -> None:
        self._second, self._firsts, self._which, self._place = second, firsts, which, place
        self.shape, self.dtype = (len(second), 2 * second.shape[1]), second.dtype

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        tokens = np.arange(len(self._second))[index]
        return self.take(tokens, out=np.empty((len(tokens), self.shape[1]), self.dtype))

    def take(self, tokens: np.ndarray, axis: int = 0, *, out: np.ndarray, mode: str = "clip") -> np.ndarray:
        """As `numpy.ndarray.take` of whole rows."""
        width = self.shape[1] // 2
        out[:, width:] = self._second[tokens]
        which, place = self._which[tokens], self._place[tokens]
        for number in np.unique(which).tolist():
            mine = which == number
            out[mine, :width] = self._firsts[number][place[mine]]
        return out


@dataclass(frozen=True, kw_only=True)
class PairedShard(Shard):
    """A shard of the other reader, with the base's shards that hold the same trajectories."""

    bases: tuple[Shard, ...]
    which: np.ndarray
    """(n_tokens,) in which of them the base read a token."""
    place: np.ndarray
    """(n_tokens,) where there."""

    def checked(self) -> PairedShard:
        for shard in self.bases:
            shard.checked()
        super().checked()
        return self

    def raw(self, site: str) -> Any:
        """(n_tokens, 2 · d_model) in the stored dtype."""
        return SideBySide(
            np.asarray(super().raw(site)), [np.asarray(shard.raw(site)) for shard in self.bases], self.which, self.place
        )

    def norms(self, site: str) -> np.ndarray:
        """(n_tokens,) float32, L2 norms of the rows."""
        base, other = np.empty(self.n_tokens, np.float32), super().norms(site)
        for number, shard in enumerate(self.bases):
            mine = self.which == number
            base[mine] = shard.norms(site)[self.place[mine]]
        return np.hypot(base, other)


class Pair(ActivationStore):
    """What the base and another reader computed on the same tokens.

    Args:
        store: activations of both, or its folder; of a subset, its trajectories are read.
        reader: the other reader, such as "hard-150".

    Raises:
        TsaeError: where there is no such reader beside the base, or the base has not read what it read.
    """

    def __init__(self, store: ActivationStore | str | Path, reader: str) -> None:
        store = store if isinstance(store, ActivationStore) else ActivationStore(store)
        everyone = store.whole
        if reader == everyone.readers[0]:
            raise TsaeError(f"{reader!r} is the base itself", where=store.path, fix="Name another reader.")
        sites = {site: {**info, "d_model": 2 * info["d_model"]} for site, info in store.manifest["sites"].items()}
        self.path, self._both = store.path, everyone
        self.manifest = {**store.manifest, "sites": sites, "readers": [dict(everyone.reader_info(reader))]}
        self.selection = replace(store.selection, readers=(), runs=())
        self.compared = (everyone.readers[0], reader)
        """Ids of the base and the other: whose activation comes first in a row, and whose second."""
        unread = sum(int((self._base_rows[0][s.trajectory] < 0).sum()) for s in everyone._opened(reader))
        what = f"the base has not read {unread} of the trajectories that {reader} read"
        refuse(store.path, (unread, what, 'Capture with the plan "paired" or "all".'))

    @cached_property
    def _bases(self) -> list[Shard]:
        return list(self._both._opened(self.compared[0]))

    @cached_property
    def _base_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(n_trajectories,) each: which of the base's shards holds a trajectory of the rollouts, -1 for none; and its
        first token there."""
        which, first = np.full((2, len(self.rollouts)), -1)
        for number, shard in enumerate(self._bases):
            which[shard.trajectory], first[shard.trajectory] = number, shard.offsets[:-1]
        return which, first

    def _opened(self, reader: str | None) -> Iterator[Shard]:
        if reader not in (None, self.compared[1]):
            return
        which, first = self._base_rows
        for shard in self._both._opened(self.compared[1]):
            length = np.diff(shard.offsets)
            place = np.arange(shard.n_tokens) + np.repeat(first[shard.trajectory] - shard.offsets[:-1], length)
            numbers, mine = np.unique(which[shard.trajectory], return_inverse=True)
            yield PairedShard(
                **{field.name: getattr(shard, field.name) for field in fields(Shard)},
                bases=tuple(self._bases[number] for number in numbers.tolist()),
                which=np.repeat(mine, length),
                place=place,
            )

    def identity(self, site: str, balance: Sequence[Axis] = ()) -> dict[str, Any]:
        base = self.compared[0]
        beside = self._both.subset(readers=base).identity(site)["readers"]
        return {**super().identity(site, balance), "beside": beside}

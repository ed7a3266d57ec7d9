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
`tsae.activations.shards.checksums` finds damaged shards, `tsae.activations.recording.repair` captures them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.batches.windows import Windows
from tsae.activations.shards.checksums import stored_rollouts
from tsae.activations.shards.manifest import inside, read_manifest
from tsae.activations.shards.shard import Shard, check_trajectories, open_shard
from tsae.activations.source import Source
from tsae.base.remote.mirror import local
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts


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
        self.path = local(path)
        self.manifest = read_manifest(self.path)
        if not self.manifest["complete"]:
            done = sum(len(reader["shards"]) for reader in self.manifest["readers"])
            raise TsaeError(
                f"its capture did not finish; {done} shards are recorded",
                where=self.path,
                fix="Run the same capture again, or the parts that are missing; it goes on.",
            )

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
                    found = open_shard(file, self.manifest, record["id"], shard, outline=True)
                    check_trajectories(found, self._lengths)
                    yield found

    @cached_property
    def _lengths(self) -> np.ndarray:
        """(n_trajectories,) tokens of every trajectory of the rollouts."""
        return self.rollouts.lengths("prompt_ids") + self.rollouts.lengths("response_ids")

    def windows(self, site: str, **options: Any) -> Windows:
        return Windows(self, site, **options)

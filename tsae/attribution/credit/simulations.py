"""Simulated runs that are kept on disk, so that an interrupted call goes on from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tsae.attribution.credit.effects import simulate
from tsae.attribution.gradients.gradient_store import GradientStore
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.targets import Targets
from tsae.attribution.training.loss import Again
from tsae.attribution.training.optimiser import Optimiser
from tsae.base.disk.npz import read_npz
from tsae.base.files import reading, replacing
from tsae.base.progress import progress_bar

_AT_ONCE = 32
"""Subsets of a file. All gradients are read once for each."""


def simulate_kept(
    store: GradientStore,
    path: TrainingPath,
    optimiser: Optimiser,
    targets: Targets,
    kept: Sequence[np.ndarray],
    to: Path,
    mark: Any,
    *,
    again: Again = "on-policy",
    progress: bool = True,
) -> np.ndarray:
    """Simulate the run on subsets; each is simulated once, and what a file has is not simulated again.

    Args:
        store: the samples' gradients.
        path: of the run.
        optimiser: the run's.
        targets: what is evaluated.
        kept: K masks (n_trajectories,), one or more; equal ones cost nothing.
        to: folder for what was simulated.
        mark: tells runs and targets apart; goes into JSON.
        again: see `tsae.attribution.credit.effects.simulate`.
        progress: show a bar.

    Returns:
        changes (K, n_targets).
    """
    places: dict[bytes, int] = {}
    index = [places.setdefault(np.packbits(mask).tobytes(), len(places)) for mask in kept]
    first = {place: i for i, place in reversed(list(enumerate(index)))}
    distinct = [kept[first[place]] for place in range(len(places))]
    found = []
    with progress_bar("simulated runs", "run", len(distinct), shown=progress) as bar:
        for low in range(0, len(distinct), _AT_ONCE):
            some = distinct[low : low + _AT_ONCE]
            masks = np.array(some, dtype=bool)
            file = to / f"{subsets_name(mark, masks, again)}.npz"
            if file.is_file():
                changes = kept_changes(file, (len(some), len(targets.names)))
            else:
                changes = simulate(store, path, optimiser, targets, masks, again=again, progress=False).changes
                with replacing(file) as partial, partial.open("wb") as stream:
                    np.savez(stream, changes=changes)
            found.append(changes)
            bar.update(len(some))
    every: np.ndarray = np.concatenate(found)[index]
    return every


def kept_changes(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Changes of targets that an earlier call has written, one row a run where it wrote several.

    Raises:
        TsaeError: where the file is damaged, or of another shape.
    """
    with reading(file, "Remove it: it is computed again."):
        found: np.ndarray = read_npz(file)["changes"]
        if found.shape != shape or not np.issubdtype(found.dtype, np.floating):
            raise ValueError(f"its changes have the shape {found.shape}, expected {shape}")
    return found


def subsets_name(mark: Any, masks: np.ndarray, again: str) -> str:
    """Name of the file for what was computed for these subsets, (K, n_trajectories)."""
    digest = hashlib.sha256(json.dumps([mark, again, masks.shape], sort_keys=True).encode())
    digest.update(np.packbits(masks).tobytes())
    return digest.hexdigest()[:16]

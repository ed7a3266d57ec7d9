"""A null for changed weights: what moves where nothing was learnt.

For every checkpoint, `DiffConfig.noise_draws` noisy ones (`tsae.checkpoints.noise`): the base's weights and Gaussian
noise with, tensor by tensor, the norm of the checkpoint's update. They read the same trajectories as the checkpoint
did, and their shift on these is tested as the checkpoint's own is: part same_trajectories, all bands, all outcomes.

Which trajectories: up to `DiffConfig.noise_problems` problems at random, as many from every band, and up to four
trajectories of each, fewer where they are long, among those that the base and the checkpoint read; the base's own,
except in a log whose trajectories are pooled. So the checkpoint's counts here are lower than in the whole diff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.activations.config import CaptureConfig
from tsae.activations.recording.capture import capture
from tsae.checkpoints.noise import update_of
from tsae.checkpoints.series import Checkpoint, CheckpointSeries
from tsae.diff.comparisons import shift_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.contrasts import Contrast, draw
from tsae.diff.rows import Rows
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError
from tsae.features.encode import encode
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

COLUMNS = ("checkpoint", "draw", "share", "feature", "difference", "delta", "p", "q")
NOTHING_TRAINED = (
    "its weights are the base's: nothing was trained, and no shift on the same trajectories can be found. What differs "
    "between the two is chance in sampling"
)
_SAMPLES = 4  # trajectories a problem, at most
_TOKENS = 200_000  # that a reader reads; more where one trajectory a problem has more
_QUANTILES = {"median": 0.5, "q90": 0.9, "q99": 0.99, "largest": 1.0}


@dataclass(frozen=True)
class NoiseNull:
    """Shifts of checkpoints and of noise as large as their updates, on the same trajectories."""

    table: pd.DataFrame
    """One row a checkpoint, draw and tested feature:

    checkpoint      whose update gives the size of the noise
    draw            1, 2, …: a noisy checkpoint; 0: the checkpoint itself
    share           norm of the noise / norm of the update
    feature         index
    difference      of the feature's mean from the base's, on the same trajectories; delta in standard deviations of
                    the feature over base trajectories
    p, q            of the null that the feature did not move; q over the features of the checkpoint or draw
    """
    info: dict[str, dict[str, Any]]
    """By checkpoint: note (why there is nothing, or ""), update_norm (‖W − W₀‖ / ‖W₀‖ over all weights); and where
    noise was read: draws, share, n_problems, n_trajectories, n_tested and n_moved of the checkpoint, noise_tested and
    noise_moved of every draw, and quantiles of |Δ| over features of both: run and noise (median, q90, q99, largest)."""


@one_blas_thread
def noise_null(
    series: CheckpointSeries,
    sae: TemporalSAE | str | Path,
    features: FeatureTable | str | Path,
    config: DiffConfig | None = None,
    *,
    share: float = 1.0,
    capturing: CaptureConfig | None = None,
    scratch: str | Path | None = None,
    progress: bool = True,
) -> NoiseNull:
    """Read with noisy checkpoints what the checkpoints of a feature table read, and test their shifts likewise.

    For every checkpoint two whole models are in memory while the update is measured, and one while noise is read.

    Args:
        series: the checkpoints that read, by the ids of the table.
        sae: that the table was encoded with, or its folder.
        features: or its folder.
        config: of the diff.
        share: norm of the noise / norm of the update.
        capturing: device and precision of the reading; its plan does not count.
        scratch: folder for a store of activations that is deleted again; by default the system's.
        progress: show bars.

    Returns:
        for a checkpoint without an update, or one whose weights cannot be set against the base's, a note.

    Raises:
        TsaeError: where the SAE is not that of the table, or the series lacks a checkpoint of it.
    """
    features = features if isinstance(features, FeatureTable) else FeatureTable.load(features)
    sae = sae if isinstance(sae, TemporalSAE) else TemporalSAE.load(sae)
    config = config or DiffConfig()
    if config.noise_draws == 0:
        return NoiseNull(_empty(), {})
    if features.info["sae"].get("weights") not in (None, sae.fingerprint):
        raise TsaeError("was encoded with another SAE", where=features.origin, fix="Give the SAE that it names.")
    if series.base.id != features.readers[0]:
        raise TsaeError(
            f"has the base {series.base.id}, but the features were read by the base {features.readers[0]}",
            where=series.name,
            fix="Give the checkpoints that read the features.",
        )
    # Bands and outcomes are split elsewhere; here there is one count for each checkpoint.
    config = replace(config, bands=())
    own = Rows.of(features, config).own(features.readers[0])
    tables, info = [], {}
    for checkpoint in [series[reader] for reader in features.readers[1:]]:
        try:
            found, info[checkpoint.id] = _of_checkpoint(
                checkpoint, sae, features, own, config, share, capturing, scratch, progress
            )
            tables.append(found)
        except TsaeError as error:
            info[checkpoint.id] = {"note": str(error).rstrip(".")}
    together = [table for table in tables if len(table)]
    return NoiseNull(pd.concat(together, ignore_index=True) if together else _empty(), info)


def _of_checkpoint(
    checkpoint: Checkpoint,
    sae: TemporalSAE,
    features: FeatureTable,
    policy: str | None,
    config: DiffConfig,
    share: float,
    capturing: CaptureConfig | None,
    scratch: str | Path | None,
    progress: bool,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    update = update_of(checkpoint)
    norm = {"update_norm": update.relative}
    if not update.relative:
        return _empty(), {"note": NOTHING_TRAINED, **norm}
    base = features.readers[0]
    chosen = _choose(features, checkpoint.id, policy, config)
    texts = _as_of(features.rollouts.select(chosen), base)
    own = _shift(_part(features, [base, checkpoint.id], chosen, texts), config, checkpoint.id)
    noisy = [update.noisy(checkpoint, i, share=share, seed=config.seed) for i in range(1, config.noise_draws + 1)]
    table = _read(checkpoint, noisy, texts, sae, capturing, scratch, progress)
    drawn = [_shift(table, config, reader.id) for reader in noisy]
    refused = [contrast.note for contrast in (own, *drawn) if contrast.inference is None]
    if refused:
        return _empty(), {"note": refused[0], **norm}
    rows = pd.concat([_rows(checkpoint.id, i, share, c) for i, c in enumerate((own, *drawn))], ignore_index=True)
    moved = rows.assign(moved=rows.q <= config.q).groupby("draw").moved
    size = rows.delta.abs()
    return rows, {
        "note": "",
        **norm,
        "draws": config.noise_draws,
        "share": share,
        "n_problems": own.of.n_problems,
        "n_trajectories": len(chosen),
        "n_tested": int(moved.size()[0]),
        "n_moved": int(moved.sum()[0]),
        "noise_tested": [int(n) for n in moved.size()[1:]],
        "noise_moved": [int(n) for n in moved.sum()[1:]],
        "run": _quantiles(size[rows.draw == 0]),
        "noise": _quantiles(size[rows.draw > 0]),
    }


def _choose(features: FeatureTable, reader: str, policy: str | None, config: DiffConfig) -> np.ndarray:
    """Row ids, sorted, of the trajectories of a policy, or of all, that are read with noise."""
    frame, base = features.rollouts.frame, features.readers[0]
    read = np.intersect1d(*(features.trajectory[features.rows(reader=id)] for id in (base, reader)))
    read = read if policy is None else read[frame.policy.to_numpy()[read] == policy]
    if not len(read):
        raise TsaeError(
            f"no trajectory was read by both {base} and {reader}, so that noise cannot be set beside it",
            where=features.origin,
            fix='Capture with plan="auto" or "all".',
        )
    rng = np.random.default_rng([config.seed, 12])
    of = frame.iloc[read][["problem_id", "band"]].assign(row=read, at=rng.permutation(len(read)))
    problems = of.drop_duplicates("problem_id")[["problem_id", "band"]].fillna({"band": "none"})
    order = pd.Series(rng.permutation(len(problems)), index=problems.index)
    turn = order.groupby(problems.band).rank()
    ranked = problems.assign(turn=turn, order=order).sort_values(["turn", "order"]).problem_id
    # No fewer problems than a contrast needs.
    kept = of[of.problem_id.isin(ranked.head(max(config.noise_problems, config.min_problems)))]
    place = kept.groupby("problem_id")["at"].rank(method="first")
    lengths = features.rollouts.lengths("prompt_ids") + features.rollouts.lengths("response_ids")
    for n in range(_SAMPLES, 0, -1):
        rows = np.sort(kept.row[place <= n].to_numpy())
        if lengths[rows].sum() <= _TOKENS:
            break
    return rows


def _as_of(rollouts: Rollouts, policy: str) -> Rollouts:
    """Who sampled a trajectory makes no difference to how it is read; all count as one policy's."""
    return rollouts.with_column("policy", [policy] * len(rollouts))


def _part(features: FeatureTable, readers: Sequence[str], chosen: np.ndarray, texts: Rollouts) -> FeatureTable:
    """The rows of some readers on the chosen trajectories, as a table whose rollouts are `texts`."""
    rows = np.concatenate([features.rows(reader=reader) for reader in readers])
    rows = rows[np.isin(features.trajectory[rows], chosen)]
    tokens = np.concatenate([np.arange(*features.row_offsets[row : row + 2]) for row in rows])
    of_reader = {features.readers.index(reader): number for number, reader in enumerate(readers)}
    return replace(
        features,
        codes=sp.csr_array(features.codes[tokens]),
        token_ids=features.token_ids[tokens],
        outlier=features.outlier[tokens] if len(features.outlier) else features.outlier,
        row_offsets=np.concatenate([[0], np.diff(features.row_offsets)[rows].cumsum()]),
        reader=np.array([of_reader[number] for number in features.reader[rows].tolist()], dtype=np.int32),
        trajectory=np.searchsorted(chosen, features.trajectory[rows]),
        rollouts=texts,
        info={**features.info, "readers": [features.reader_info(reader) for reader in readers]},
    )


def _read(
    checkpoint: Checkpoint,
    noisy: Sequence[Checkpoint],
    texts: Rollouts,
    sae: TemporalSAE,
    capturing: CaptureConfig | None,
    scratch: str | Path | None,
    progress: bool,
) -> FeatureTable:
    """The base's and the noisy checkpoints' codes, by way of a store that is deleted again."""
    assert checkpoint.base is not None
    series = CheckpointSeries((checkpoint.base, *noisy), name=f"{checkpoint.id} and noise")
    reading = replace(capturing or CaptureConfig(), plan="all", token_statistics=False)
    if scratch is not None:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="noise-", dir=scratch) as folder:
        store = capture(series, texts, [sae.site], to=Path(folder) / "acts", config=reading, progress=progress)
        return encode(sae, store, progress=False)


def _shift(table: FeatureTable, config: DiffConfig, reader: str) -> Contrast:
    """The reader's shift on the same trajectories."""
    rows = Rows.of(table, config)
    found = shift_comparisons(table, rows, config)
    key = (reader, "same_trajectories", "all", "all")
    of = next(of for of in found if (of.checkpoint, of.part, of.band, of.outcome) == key)
    return draw(rows, of, config)


def _rows(checkpoint: str, number: int, share: float, contrast: Contrast) -> pd.DataFrame:
    i = contrast.inference
    assert i is not None
    keys = {"checkpoint": checkpoint, "draw": number, "share": share, "feature": contrast.feature}
    return pd.DataFrame({**keys, "difference": i.difference, "delta": i.delta, "p": i.p, "q": i.q})


def _quantiles(size: pd.Series) -> dict[str, float]:
    return {name: float(size.quantile(at)) for name, at in _QUANTILES.items()}


def _empty() -> pd.DataFrame:
    return pd.DataFrame(columns=list(COLUMNS))

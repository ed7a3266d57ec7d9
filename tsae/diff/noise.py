"""The null for changed weights: what moves where nothing was learnt.

For every checkpoint, `DiffConfig.noise_draws` noisy ones are made (`tsae.checkpoints.record`): the base's weights and
Gaussian noise that has, tensor by tensor, the norm of the checkpoint's update. They read the trajectories that the
checkpoint read, and their shift is tested as the checkpoint's own is: part same_trajectories, all bands, all outcomes.

Which trajectories: up to `DiffConfig.noise_problems` random problems, as many from every band, with up to four
trajectories each (fewer where they are long) that both the base and the checkpoint read. They are the base's own,
except in a log whose trajectories are pooled. So the checkpoint's counts here are lower than in the whole diff.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.activations.capture import capture
from tsae.activations.config import CaptureConfig
from tsae.activations.reading_plan import first_with
from tsae.base.files import as_path
from tsae.base.mirror import outside
from tsae.base.table_export import Tables
from tsae.checkpoints.drift import update_of
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.comparisons import Rows, shift_comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.effects import Contrast, draw
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError, refuse
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
_TOKENS = 200_000  # that a reader reads; more if one trajectory a problem has more
_QUANTILES = {"median": 0.5, "q90": 0.9, "q99": 0.99, "largest": 1.0}


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
    """Let noisy checkpoints read what the checkpoints of a feature table read, and test their shifts in the same way.

    Two whole models are in memory while an update is measured, and one while a noisy checkpoint reads.

    Args:
        series: the checkpoints that read, by the ids of the table.
        sae: that the table was encoded with, or its folder.
        features: or its folder.
        config: of the diff.
        share: norm of the noise / norm of the update.
        capturing: device and precision; its plan does not count.
        scratch: folder for a temporary store of activations; by default the system's. For a URL, one in the cache.
        progress: show bars.

    Returns:
        a note for a checkpoint without an update, or whose weights cannot be set against the base's.

    Raises:
        TsaeError: where the SAE is not that of the table, the series lacks a checkpoint of it, or one cannot be loaded,
            and where the tokenizer has other special tokens, which do not count in the table.
    """
    features = FeatureTable.of(features)
    sae, config = TemporalSAE.of(sae), config or DiffConfig()
    if config.noise_draws == 0:
        return NoiseNull(_empty(), {})
    foreign = features.made_from["sae"] not in (None, sae.fingerprint)
    refuse(features.origin, (foreign, "was encoded with another SAE", "Give the SAE that it names."))
    what = f"has the base {series.base.id}, but the features were read by the base {features.readers[0]}"
    other_base = series.base.id != features.readers[0]
    refuse(series.name, (other_base, what, "Give the checkpoints that read the features."))
    special, of_features = sorted(set(series.base.load_tokenizer().all_special_ids)), features.info["special_ids"]
    other = list({*special} ^ {*of_features})
    if first_with(features.rollouts, lambda ids: np.isin(ids, other)) is not None:
        what = f"its special tokens are {special}, and were {sorted(of_features)} when the features were read"
        fix = "Put back its tokenizer_config.json and special_tokens_map.json."
        raise TsaeError(what, where=series.base.path, fix=fix)
    for reader in features.readers:
        features.need_weights(series[reader])
    # Bands are split elsewhere; here there is one count for each checkpoint.
    config = replace(config, bands=())
    reading = _Reading(
        sae, replace(capturing or CaptureConfig(), plan="all", token_statistics=False), scratch, progress
    )
    own = Rows.of(features, config).own(features.readers[0])
    tables, info = [], {}
    for checkpoint in [series[reader] for reader in features.readers[1:]]:
        found, info[checkpoint.id] = _of_checkpoint(checkpoint, reading, features, own, config, share)
        tables.append(found)
    together = [table for table in tables if len(table)]
    return NoiseNull(pd.concat(together, ignore_index=True) if together else _empty(), info)


_STORE = ".noise-store-"
"""How the names of temporary stores begin."""


@dataclass(frozen=True)
class _Reading:
    """How noisy checkpoints read."""

    sae: TemporalSAE
    config: CaptureConfig
    scratch: str | Path | None
    progress: bool

    def codes(self, checkpoint: Checkpoint, noisy: Sequence[Checkpoint], texts: Rollouts) -> FeatureTable:
        """The codes of the base and of the noisy checkpoints; the store of activations is deleted again."""
        assert checkpoint.base is not None
        series = CheckpointSeries((checkpoint.base, *noisy), name=f"{checkpoint.id} and noise")
        scratch = None if self.scratch is None else outside(as_path(self.scratch))
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            for left in scratch.glob(f"{_STORE}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(prefix=_STORE, dir=scratch) as folder:
            to, sites = Path(folder) / "acts", [self.sae.site]
            store = capture(series, texts, sites, to=to, config=self.config, progress=self.progress)
            return encode(self.sae, store, check=False, progress=False)


def _of_checkpoint(
    checkpoint: Checkpoint,
    reading: _Reading,
    features: FeatureTable,
    policy: str | None,
    config: DiffConfig,
    share: float,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    try:
        update = update_of(checkpoint)
    except TsaeError as error:
        for model in (checkpoint.base, checkpoint):  # One that cannot be loaded is refused.
            if model is not None:
                model.load_model()
        return _empty(), {"note": str(error).rstrip(".")}
    norm = {"update_norm": update.relative}
    if not update.relative:
        return _empty(), {"note": NOTHING_TRAINED, **norm}
    base = features.readers[0]
    chosen = _choose(features, checkpoint.id, policy, config)
    texts = features.rollouts.select(chosen)
    # Who sampled a trajectory makes no difference to how it is read: all count as the base's.
    texts = texts.with_column("policy", [base] * len(texts))
    own = _shift(_part(features, [base, checkpoint.id], chosen, texts), config, checkpoint.id)
    noisy = [update.noisy(checkpoint, i, share=share, seed=config.seed) for i in range(1, config.noise_draws + 1)]
    table = reading.codes(checkpoint, noisy, texts)
    drawn = [own, *(_shift(table, config, reader.id) for reader in noisy)]
    parts = []
    for number, contrast in enumerate(drawn):
        if (found := contrast.inference) is None:
            return _empty(), {"note": contrast.note, **norm}
        keys = {"checkpoint": checkpoint.id, "draw": number, "share": share, "feature": contrast.feature}
        parts.append(
            pd.DataFrame({**keys, **{name: getattr(found, name) for name in ("difference", "delta", "p", "q")}})
        )
    rows = pd.concat(parts, ignore_index=True)
    moved = rows.assign(moved=rows.q <= config.q).groupby("draw").moved
    size, of_run = rows.delta.abs(), rows.draw == 0
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
        "run": {name: float(size[of_run].quantile(at)) for name, at in _QUANTILES.items()},
        "noise": {name: float(size[~of_run].quantile(at)) for name, at in _QUANTILES.items()},
    }


def _choose(features: FeatureTable, reader: str, policy: str | None, config: DiffConfig) -> np.ndarray:
    """Sorted row ids of the trajectories, of a policy or of all, that noisy checkpoints read."""
    frame, base = features.rollouts.frame, features.readers[0]
    read = np.intersect1d(*(features.trajectory[features.rows(reader=id)] for id in (base, reader)))
    read = read if policy is None else read[frame.policy.to_numpy()[read] == policy]
    if not len(read):
        what = f"no trajectory was read by both {base} and {reader}, so that noise cannot be set beside it"
        raise TsaeError(what, where=features.origin, fix='Capture with plan="auto" or "all".')
    rng = np.random.default_rng([config.seed, 12])
    of = frame.iloc[read][["problem_id", "band"]].assign(row=read, at=rng.permutation(len(read)))
    problems = of.drop_duplicates("problem_id")[["problem_id", "band"]].fillna({"band": "none"})
    order = pd.Series(rng.permutation(len(problems)), index=problems.index)
    turn = order.groupby(problems.band).rank()
    ranked = problems.assign(turn=turn, order=order).sort_values(["turn", "order"]).problem_id
    # At least as many problems as a contrast needs.
    kept = of[of.problem_id.isin(ranked.head(max(config.noise_problems, config.min_problems)))]
    place = kept.groupby("problem_id")["at"].rank(method="first")
    lengths = features.rollouts.lengths("prompt_ids") + features.rollouts.lengths("response_ids")
    for n in range(_SAMPLES, 0, -1):
        rows = np.sort(kept.row[place <= n].to_numpy())
        if lengths[rows].sum() <= _TOKENS:
            break
    return rows


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


def _shift(table: FeatureTable, config: DiffConfig, reader: str) -> Contrast:
    """The reader's shift on the same trajectories."""
    rows = Rows.of(table, config)
    found = shift_comparisons(table, rows, config)
    key = (reader, "same_trajectories", "all", "all")
    of = next(of for of in found if (of.checkpoint, of.part, of.band, of.outcome) == key)
    return draw(rows, of, config)


def _empty() -> pd.DataFrame:
    return pd.DataFrame(columns=list(COLUMNS))


@dataclass(frozen=True)
class NoiseNull(Tables):
    """Shifts of checkpoints and of noise as large as their updates, on the same trajectories."""

    table: pd.DataFrame
    """One row a checkpoint, draw and tested feature:

    checkpoint      whose update gives the size of the noise
    draw            1, 2, …: a noisy checkpoint; 0: the checkpoint itself
    share           norm of the noise / norm of the update
    feature         index
    difference      the feature's mean minus the base's, on the same trajectories
    delta           the same in standard deviations of the feature over base trajectories
    p, q            of the null that the feature did not move; q over the features of the checkpoint or draw
    """
    info: dict[str, dict[str, Any]]
    """By checkpoint: note (why there is nothing, or ""), update_norm (‖W − W₀‖ / ‖W₀‖ over all weights). Where noise
    was read also draws, share, n_problems, n_trajectories; n_tested and n_moved of the checkpoint; noise_tested and
    noise_moved of every draw; run and noise: quantiles of |Δ| over features (median, q90, q99, largest)."""

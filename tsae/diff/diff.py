"""`feature_diff`: all contrasts of a FeatureTable, their gates, and what the features respond to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.base.provenance import versions
from tsae.diff.comparisons import Comparison, comparisons
from tsae.diff.config import DiffConfig
from tsae.diff.confounds import confound_table
from tsae.diff.contrasts import Contrast, draw
from tsae.diff.dynamics import dynamics
from tsae.diff.families import Families, assign_families, family_shifts
from tsae.diff.null import REPEATS, null_counts
from tsae.diff.result import FeatureDiff
from tsae.diff.rows import Rows
from tsae.diff.threads import in_threads, one_blas_thread
from tsae.errors import TsaeError
from tsae.features.annotations import Annotator, TokenClasses, annotate_tokens, responds_to, top_tokens
from tsae.features.sums import active_counts
from tsae.features.table import FeatureTable
from tsae.rollouts.behaviours import behaviour_table
from tsae.sae.quality.stability import Stability


@one_blas_thread
def feature_diff(
    features: FeatureTable | str | Path,
    config: DiffConfig | None = None,
    *,
    annotator: Annotator | None = None,
    token_strings: Sequence[str] | None = None,
    stability: Stability | str | Path | None = None,
    families: Families | None = None,
    logits: pd.DataFrame | None = None,
    steps: FeatureTable | str | Path | None = None,
    progress: bool = True,
) -> FeatureDiff:
    """Compare every checkpoint with the base, and successes with failures.

    Args:
        features: or its folder.
        config: defaults of `DiffConfig`.
        annotator: names the class of every response token; without it features are described by their top tokens.
        token_strings: text of every token id; without it tokens are shown by id.
        stability: of the SAE's latents across seeds, or the folder with its stability.json; by default what `encode`
            found beside the SAE.
        families: token classes of the annotator that make up families, such as `tsae.features.mathematics.FAMILIES`.
        logits: what `tsae.features.logits.logit_effects` gave, to describe the features by.
        steps: or its folder: the same SAE's codes of more steps of the runs, for `FeatureDiff.dynamics` alone; by
            default the steps in `features`.
        progress: show a bar.

    Raises:
        TsaeError: where a band that is asked for is empty, stability or steps are those of another SAE, or families are
            given without an annotator.
    """
    features = features if isinstance(features, FeatureTable) else FeatureTable.load(features)
    config = config or DiffConfig()
    stable = _stability_of(features, stability)
    if families is not None and annotator is None:
        raise TsaeError("families are made of an annotator's classes", where="families", fix="Give its annotator too.")
    of_steps = features if steps is None else _steps_of(features, steps)
    along = dynamics(of_steps, config)
    rows = Rows.of(features, config)
    compared = comparisons(features, rows, config)
    drawn = _draw(rows, compared, config, progress)
    strings = token_strings if token_strings is not None else _ids_as_text(features)
    classes = None if annotator is None else annotate_tokens(features, annotator, strings)
    described = _describe(features, rows, config, classes, strings)
    by_family = pd.DataFrame()
    if families is not None and classes is not None:
        described = described.join(assign_families(features, classes, families, config))
        by_family = family_shifts(features, rows, described.family, config)
    if stable is not None:
        described["stability"] = stable.per_latent
    if logits is not None:
        described = described.join(logits)
    return FeatureDiff(
        shifts=_shift_table(features, rows, drawn),
        contrasts=_contrast_table(features, rows, drawn, config),
        features=described,
        behaviours=behaviour_table(
            features.rollouts,
            reference=features.info["readers"][0]["id"],
            confidence=config.confidence,
        ),
        confounds=confound_table(features, rows, drawn, config),
        families=by_family,
        dynamics=None if along is None else along.table,
        behaviour_dynamics=None if along is None else along.behaviours,
        info={
            "config": config.settings(),
            "versions": versions(),
            "sae": features.info["sae"],
            "readers": _flagged(features, config),
            "null_repeats": REPEATS,
            "bands": features.rollouts.info.get("bands"),
            "rollouts": features.rollouts.fingerprint,
            "second_look": (features.rollouts.info.get("log") or {}).get("second_look"),
            "labels": features.rollouts.labels_fingerprint,
            **({"without_span": left_out} if (left_out := rows.without_tokens(features)) else {}),
            "stability": None if stable is None else stable.summary(described.firing_rate.to_numpy() > 0),
            "steps": [] if along is None else _flagged(of_steps, config),
            "no_dynamics": {} if along is None else along.notes,
            "causally_tested": False,
            "token_strings": _strings_of(features, token_strings),
        },
        source=features,
    )


def _draw(rows: Rows, compared: Sequence[Comparison], config: DiffConfig, progress: bool) -> list[Contrast]:
    from tqdm.auto import tqdm

    drawn = in_threads([partial(draw, rows, of, config) for of in compared], config.threads)
    return list(tqdm(drawn, desc="diff", unit="contrast", total=len(compared), disable=not progress))


def _stability_of(features: FeatureTable, given: Stability | str | Path | None) -> Stability | None:
    if given is None:
        return features.stability
    found = given if isinstance(given, Stability) else Stability.load(given)
    where = "stability" if isinstance(given, Stability) else given
    return found.of(features.info["sae"].get("weights"), where)


def _steps_of(features: FeatureTable, given: FeatureTable | str | Path) -> FeatureTable:
    steps = given if isinstance(given, FeatureTable) else FeatureTable.load(given)
    expected, found = (table.info["sae"].get("weights") for table in (features, steps))
    if expected != found or steps.n_features != features.n_features:
        raise TsaeError(
            f"the steps were encoded with another SAE ({found}) than the features ({expected})",
            where=steps.origin,
            fix="Encode both with one SAE.",
        )
    return steps


def _flagged(features: FeatureTable, config: DiffConfig) -> list[dict[str, Any]]:
    """The readers, and whether the SAE reconstructs them badly or leaves out many of their tokens."""
    return [
        {
            **reader,
            "flagged": reader["fve"] is None
            or reader["fve"] < config.min_fve
            or reader.get("outlier_share", 0) > config.max_outliers,
        }
        for reader in features.info["readers"]
    ]


def _run_of(features: FeatureTable, checkpoint: str) -> dict[str, Any]:
    info = features.reader_info(checkpoint)
    return {"run": info["run"], "step": info["step"]}


_NUMBERS = ("difference", "low", "high", "delta", "delta_low", "delta_high", "p", "q", "p_differs", "q_differs")


def _shift_table(features: FeatureTable, rows: Rows, drawn: list[Contrast]) -> pd.DataFrame:
    parts = []
    for c in drawn:
        if c.inference is None:
            continue
        silent = rows.scales[c.of.checkpoint].silent[c.feature]
        columns = {**_keys(features, c.of), "feature": c.feature, "mean": c.mean_a, "reference": c.mean_b}
        columns |= {name: getattr(c.inference, name) for name in _NUMBERS}
        parts.append(pd.DataFrame({**columns, "scale": np.where(silent, "pooled", "base"), "auroc": c.auroc}))
    names = ["kind", "checkpoint", "run", "step", "part", "band", "outcome", "feature", "mean", "reference"]
    names += [*_NUMBERS, "scale", "auroc"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def _keys(features: FeatureTable, of: Comparison) -> dict[str, Any]:
    return {**of.key, **_run_of(features, of.checkpoint)}


def _contrast_table(features: FeatureTable, rows: Rows, drawn: list[Contrast], config: DiffConfig) -> pd.DataFrame:
    nulls = null_counts(rows, [replace(c.of, note=c.note) for c in drawn], config)
    found = [c.inference for c in drawn]
    table = pd.DataFrame([_keys(features, c.of) for c in drawn])
    table = table[["kind", "checkpoint", "run", "step", "part", "band", "outcome"]]
    return table.assign(
        n_problems=[c.of.n_problems for c in drawn],
        n_trajectories=[len(c.of.rows) for c in drawn],
        n_tokens=[int(rows.n_tokens[c.of.rows].sum()) for c in drawn],
        rows=[c.of.fingerprint for c in drawn],
        n_left_out=[c.of.n_left_out for c in drawn],
        n_tested=[len(c.feature) for c in drawn],
        n_discoveries=[0 if i is None else int((i.q <= config.q).sum()) for i in found],
        n_differs=[0 if i is None else int((i.q_differs <= config.q).sum()) for i in found],
        n_null=[mean for mean, _ in nulls],
        null_any=[share for _, share in nulls],
        detectable_delta=[c.detectable_delta for c in drawn],
        note=[c.note for c in drawn],
    )


def _describe(
    features: FeatureTable,
    rows: Rows,
    config: DiffConfig,
    classes: TokenClasses | None,
    strings: Sequence[str],
) -> pd.DataFrame:
    counted = np.flatnonzero(features.span_mask(config.span))
    jobs: list[Callable[[], Any]] = [
        partial(top_tokens, features, strings),
        partial(_length_correlation, features, rows),
    ]
    tokens, correlation = in_threads(jobs, config.threads)
    fired = active_counts(features.codes, counted)
    index = pd.RangeIndex(features.n_features, name="feature")
    table = pd.DataFrame(
        {
            "group": np.where(np.arange(features.n_features) < features.d_high, "high", "low"),
            "firing_rate": fired / max(len(counted), 1),
            "length_correlation": correlation,
        },
        index=index,
    )
    if features.rollouts.has_thinking:
        table["thinking_share"] = _thinking_share(features)
    if classes is not None:
        table = table.join(responds_to(features, classes))
    else:
        table["responds_to"] = [" ".join(repr(t) for t in found[:3]) or "never active" for found in tokens.top_tokens]
    return table.join(tokens)


def _thinking_share(features: FeatureTable) -> np.ndarray:
    """(n_features,) share of a feature's activation in responses that falls on thinking; 0 where it never fires."""
    of_thinking, of_response = (
        features.codes.T @ features.span_mask(span).astype(np.float64) for span in ("thinking", "response")
    )
    return np.divide(of_thinking, of_response, out=np.zeros(features.n_features), where=of_response > 0)


def _length_correlation(features: FeatureTable, rows: Rows) -> np.ndarray:
    """(n_features,) Spearman correlation of a trajectory's mean activation with its response length, on the base."""
    base = features.readers[0]
    picked = rows.by_reader[base, rows.own(base)]
    length = rankdata(features.rollouts.n_sampled[features.trajectory[picked]])
    length, n = length - length.mean(), len(picked)
    columns = sp.csc_array(rows.values[picked])
    product, square = np.zeros((2, features.n_features))
    for feature in range(features.n_features):
        column = slice(columns.indptr[feature], columns.indptr[feature + 1])
        # Activations are not negative, so that zeros share the lowest ranks.
        zeros = n - (column.stop - column.start)
        above = rankdata(columns.data[column]) + (zeros - 1) / 2
        product[feature] = above @ length[columns.indices[column]]
        square[feature] = ((above - (n - zeros) / 2) ** 2).sum() + zeros * ((n - zeros) / 2) ** 2
    norm = np.sqrt(square * (length**2).sum())
    return np.divide(product, norm, out=np.zeros(features.n_features), where=norm > 0)


def _strings_of(features: FeatureTable, strings: Sequence[str] | None) -> dict[str, str]:
    """Text of the token ids that occur, by id as text, as JSON wants it; empty where no strings were given."""
    if strings is None:
        return {}
    # Lone surrogates do not go into a UTF-8 file.
    return {str(i): strings[i].encode("utf-8", "replace").decode() for i in np.unique(features.token_ids).tolist()}


def _ids_as_text(features: FeatureTable) -> list[str]:
    return [f"#{i}" for i in range(int(features.token_ids.max()) + 1)]

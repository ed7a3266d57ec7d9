"""`feature_diff`: all contrasts of a FeatureTable, their gates, and what the features respond to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.confounds import confound_table
from tsae.diff.contrasts import (
    Contrast,
    Rows,
    contrast_bands,
    interaction_contrasts,
    outcome_contrasts,
    shift_contrasts,
)
from tsae.diff.dynamics import dynamics
from tsae.diff.families import Families, assign_families, family_shifts
from tsae.diff.null import null_contrasts
from tsae.diff.result import FeatureDiff
from tsae.diff.threads import in_threads, one_blas_thread
from tsae.errors import TsaeError
from tsae.features.annotations import Annotator, TokenClasses, annotate_tokens, responds_to, top_tokens
from tsae.features.sums import active_counts
from tsae.features.table import FeatureTable
from tsae.provenance import versions
from tsae.rollouts.behaviours import behaviour_table
from tsae.sae.stability import Stability


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
    contrast_bands(features, config)  # An empty band is said before anything is computed.
    rows = Rows.of(features, config)
    drawn = _draw(features, rows, config, progress)
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
        shifts=_shift_table(features, drawn),
        contrasts=_contrast_table(features, drawn, config),
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
            "null": null_contrasts(features, rows, config),
            "bands": features.rollouts.info.get("bands"),
            "rollouts": features.rollouts.fingerprint,
            "labels": features.rollouts.labels_fingerprint,
            "stability": None if stable is None else stable.summary(described.firing_rate.to_numpy() > 0),
            "steps": [] if along is None else _flagged(of_steps, config),
            "no_dynamics": {} if along is None else along.notes,
            "causally_tested": False,
            "token_strings": _strings_of(features, token_strings),
        },
        source=features,
    )


def _draw(features: FeatureTable, rows: Rows, config: DiffConfig, progress: bool) -> list[Contrast]:
    from tqdm.auto import tqdm

    jobs = [
        *shift_contrasts(features, rows, config),
        *outcome_contrasts(features, rows, config),
        *interaction_contrasts(features, rows, config),
    ]
    drawn = in_threads(jobs, config.threads)
    return list(tqdm(drawn, desc="diff", unit="contrast", total=len(jobs), disable=not progress))


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
    """The readers, and whether the SAE reconstructs them badly."""
    return [
        {**reader, "flagged": reader["fve"] is None or reader["fve"] < config.min_fve}
        for reader in features.info["readers"]
    ]


def _run_of(features: FeatureTable, checkpoint: str) -> dict[str, Any]:
    info = features.reader_info(checkpoint)
    return {"run": info["run"], "step": info["step"]}


def _shift_table(features: FeatureTable, drawn: list[Contrast]) -> pd.DataFrame:
    parts = []
    for c in drawn:
        if c.inference is None or c.mean_a is None or c.mean_b is None or c.auroc is None:
            continue
        i = c.inference
        keys = {"kind": c.kind, "checkpoint": c.checkpoint, **_run_of(features, c.checkpoint)}
        keys |= {"part": c.part, "band": c.band, "outcome": c.outcome}
        columns = {"feature": c.feature, "mean": c.mean_a, "reference": c.mean_b, "difference": i.difference}
        columns |= {"low": i.low, "high": i.high, "d": i.d, "auroc": c.auroc, "p": i.p, "q": i.q}
        parts.append(pd.DataFrame({**keys, **columns}))
    names = ["kind", "checkpoint", "run", "step", "part", "band", "outcome", "feature", "mean", "reference"]
    names += ["difference", "low", "high", "d", "auroc", "p", "q"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def _contrast_table(features: FeatureTable, drawn: list[Contrast], config: DiffConfig) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "kind": c.kind,
                "checkpoint": c.checkpoint,
                **_run_of(features, c.checkpoint),
                "part": c.part,
                "band": c.band,
                "outcome": c.outcome,
                "n_problems": c.n_problems,
                "n_left_out": c.n_left_out,
                "n_tested": len(c.feature),
                "n_discoveries": 0 if c.inference is None else int((c.inference.q <= config.q).sum()),
                "detectable_d": c.detectable_d,
                "note": c.note,
            }
            for c in drawn
        ]
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
    if classes is not None:
        table = table.join(responds_to(features, classes))
    else:
        table["responds_to"] = [" ".join(repr(t) for t in found[:3]) or "never active" for found in tokens.top_tokens]
    return table.join(tokens)


def _length_correlation(features: FeatureTable, rows: Rows) -> np.ndarray:
    """(n_features,) Spearman correlation of a trajectory's mean activation with its response length, on the base."""
    base = features.readers[0]
    picked = rows.by_reader[base, rows.own(base)]
    length = rankdata(features.rollouts.lengths("response_ids")[features.trajectory[picked]])
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

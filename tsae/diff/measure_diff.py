"""`feature_diff`: every contrast of a FeatureTable, its controls, and what the features respond to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from tsae.base.provenance import versions
from tsae.checkpoints.loading import text_of
from tsae.diff.config import DiffConfig
from tsae.diff.contrast.comparisons import Comparison, comparisons
from tsae.diff.contrast.draw_contrast import Contrast, draw
from tsae.diff.contrast.rows import Rows
from tsae.diff.controls.confounds import confound_table
from tsae.diff.controls.null_discoveries import REPEATS
from tsae.diff.descriptions import describe
from tsae.diff.dynamics import dynamics
from tsae.diff.effect_tables import contrast_table, shift_table
from tsae.diff.families import Families, assign_families, family_shifts
from tsae.diff.feature_diff import FeatureDiff
from tsae.diff.threads import in_threads, one_blas_thread
from tsae.errors import TsaeError
from tsae.features.contexts import Annotator, annotate_tokens
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.bands import bands_info
from tsae.rollouts.behaviours import behaviour_table, by_thirds
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
        annotator: names the class of every response token. Without it, top tokens describe the features.
        token_strings: text of every token id. Without it, tokens are shown by id.
        stability: of the SAE's latents across seeds, or the folder with its stability.json; by default what `encode`
            found beside the SAE.
        families: the annotator's token classes that make up families, such as `tsae.features.mathematics.FAMILIES`.
        logits: from `tsae.features.contexts.logit_effects`, to describe the features.
        steps: the same SAE's codes of more steps of the runs, or their folder, for `FeatureDiff.dynamics` only; by
            default the steps in `features`.
        progress: show a bar.

    Raises:
        TsaeError: where a band that is asked for is empty, stability or steps belong to another SAE, or families are
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
    # A padded vocabulary has ids that no tokenizer knows, and a model may sample them.
    given = list(token_strings or ())
    strings = given + [f"#{i}" for i in range(len(given), int(features.token_ids.max()) + 1)]
    classes = None if annotator is None else annotate_tokens(features, annotator, strings)
    described = describe(features, rows, config, classes, strings)
    by_family = pd.DataFrame()
    if families is not None and classes is not None:
        described = described.join(assign_families(features, classes, families, config))
        by_family = family_shifts(features, rows, described.family, config)
    if stable is not None:
        described["stability"] = stable.per_latent
    if logits is not None:
        described = described.join(logits)
    return FeatureDiff(
        shifts=shift_table(features, rows, drawn),
        contrasts=contrast_table(features, rows, drawn, config),
        features=described,
        behaviours=behaviour_table(
            by_thirds(features.rollouts), reference=features.readers[0], confidence=config.confidence
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
            "bands": bands_info(features.rollouts.info, features.rollouts.origin),
            "rollouts": features.rollouts.fingerprint,
            "second_look": (features.rollouts.info.get("log") or {}).get("second_look"),
            "labels": features.rollouts.labels_fingerprint,
            **({"without_span": left_out} if (left_out := rows.without_tokens(features)) else {}),
            "stability": None if stable is None else stable.summary(described.firing_rate.to_numpy() > 0),
            "steps": [] if along is None else _flagged(of_steps, config),
            "no_dynamics": {} if along is None else along.notes,
            "causally_tested": False,
            "token_strings": _strings_of(features, strings if given else None),
        },
        source=features,
    )


def _draw(rows: Rows, compared: Sequence[Comparison], config: DiffConfig, progress: bool) -> list[Contrast]:
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
    """The readers, flagged where the SAE reconstructs them badly or leaves out many of their tokens."""
    return [
        {
            **reader,
            "flagged": reader["fve"] is None
            or reader["fve"] < config.min_fve
            or reader.get("outlier_share", 0) > config.max_outliers,
        }
        for reader in features.info["readers"]
    ]


def _strings_of(features: FeatureTable, strings: Sequence[str] | None) -> dict[str, str]:
    """Text of the token ids that occur, by id as text (JSON has no other keys); empty without strings."""
    if strings is None:
        return {}
    # UTF-8 cannot hold lone surrogates.
    ids = np.unique(features.token_ids).tolist()
    return {str(i): text_of(strings, i).encode("utf-8", "replace").decode() for i in ids}

"""Explanations: labels of features with their scores, and the features that stay unlabelled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tsae.base.files import as_path, reading
from tsae.base.seal import read_whole, write_whole
from tsae.base.table_export import Tables, write_table
from tsae.base.untrusted import visible
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError

FILE, _TABLE = "explanations.json", "explanations.parquet"
_SCORES = ("detection", "fuzzing", "score", "control_detection", "control_fuzzing", "control", "answered")
_KINDS = {
    **dict.fromkeys(("feature", "n_detection", "n_fuzzing"), "integer"), **dict.fromkeys(("label", "note"), "string"),
    **dict.fromkeys(_SCORES, "floating"), "shown": "boolean",
}  # fmt: skip
"""Columns, and what pandas infers of their values."""
_FIX = "Make it again with `tsae explain`."


@dataclass(frozen=True)
class Explanations(Tables):
    """What a labeller says that features respond to, and how far that holds on contexts it has not seen."""

    table: pd.DataFrame
    """One row a feature:

    feature              index
    label                one line; empty where the labeller gave none
    detection, fuzzing   balanced accuracy on held-out contexts (`tsae.diff.explaining.label_contexts`); NaN where there
                         are too few of them, or too few answers
    score                mean of both
    control_detection, control_fuzzing, control   the same with the label of another feature
    n_detection, n_fuzzing  contexts
    answered             share of contexts with a verdict
    shown                whether the label is shown: its score is at least the config's min_score, and above its control
                         where there is one
    note                 why it is not
    """
    info: dict[str, Any] = field(default_factory=dict)
    """labeller (the model's name, or that it is rules), by_model, config, sae and rollouts (fingerprints), tokens that
    the server was asked for."""

    @property
    def labels(self) -> dict[int, str]:
        """Labels that are shown, by feature."""
        kept = self.table[self.table.shown]
        return dict(zip(kept.feature.tolist(), kept.label.tolist(), strict=True))

    def __repr__(self) -> str:
        means = self.table[["score", "control"]].mean()
        return (
            f"Explanations({len(self.labels)} of {len(self.table)} features labelled by "
            f"{visible(str(self.info['labeller']))}; mean "
            f"score {means.score:.2f}, with other features' labels {means.control:.2f})"
        )

    def mark(self, diff: FeatureDiff) -> FeatureDiff:
        """The diff with the labels: `features` has the columns label (empty where none is shown) and label_score.

        Raises:
            TsaeError: where the diff is of another SAE, or nothing says of which one the labels are.
        """
        if self.info["sae"] is None:
            what = "the labels do not say of which SAE they are, as its features do not"
            raise TsaeError(what, where="Explanations.mark", fix="Make the features, the diff and the labels again.")
        there = self.table.feature.isin(diff.features.index)
        if diff.info["sae"].get("weights") != self.info["sae"] or not there.all():
            what = "the diff is of another SAE than the labels"
            raise TsaeError(what, where="Explanations.mark", fix="Use the diff that `tsae explain` read.")
        known = self.table.set_index("feature")
        labels = known.label.where(known.shown, "").reindex(diff.features.index, fill_value="")
        features = diff.features.assign(label=labels, label_score=known.score.reindex(diff.features.index))
        told = {"labeller": self.info["labeller"], "control": float(known.control.mean())}
        return replace(diff, features=features, info={**diff.info, "explanations": told})

    def save(self, folder: str | Path) -> Path:
        """Write explanations.parquet, and explanations.json last."""
        return write_whole(folder, FILE, self.info, {_TABLE: partial(write_table, table=self.table)})

    @classmethod
    def load(cls, folder: str | Path) -> Explanations:
        """Read a folder that `save` wrote.

        Raises:
            TsaeError: where a file is missing or damaged, or holds what no labels are.
        """
        folder = as_path(folder)
        info = read_whole(folder, (FILE, _TABLE), _FIX, "Make it with `tsae explain`.")
        with reading(folder / FILE, _FIX):
            if not isinstance(info["labeller"], str) or not isinstance(info["sae"], str | None):
                raise ValueError("its labeller or its SAE is no text")
        with reading(folder / _TABLE, _FIX):
            table = pd.read_parquet(folder / _TABLE)
            _check(table)
        return cls(table, info)


def _check(table: pd.DataFrame) -> None:
    """Refuse what is no table of labels.

    Raises:
        ValueError: where a column is missing or of another kind, a feature is there twice, or a score is none.
    """
    missing = [name for name in _KINDS if name not in table]
    if missing:
        raise ValueError(f"it is no table of labels: it has no column {missing[0]}")
    for name, kind in _KINDS.items():
        found = pd.api.types.infer_dtype(table[name], skipna=False)
        if len(table) and found != kind:
            raise ValueError(f"its column {name} holds {found} values, expected {kind} ones")
    if table.feature.duplicated().any() or (table.feature < 0).any():
        raise ValueError("it has a feature twice, or a negative one")
    scores = table[list(_SCORES)]
    if not (scores.isna() | ((scores >= 0) & (scores <= 1))).all(axis=None):
        raise ValueError("it has scores beyond 0 to 1")

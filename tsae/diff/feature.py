"""One feature of a diff: its effects, and where it fires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.base.views import views
from tsae.errors import TsaeError
from tsae.features.contexts import Context, top_contexts
from tsae.features.feature_table import FeatureTable


@dataclass(frozen=True)
class Feature:
    """One feature of a diff."""

    index: int
    described: pd.Series
    """Its row of `FeatureDiff.features`."""
    effects: pd.DataFrame
    """Its rows of `FeatureDiff.table`."""
    span: str
    """The part of the trajectories that was compared, such as response."""
    strings: Mapping[str, str]
    """Texts of token ids, where they are known."""
    source: FeatureTable | None
    """The features that the diff was computed from."""

    def table(self) -> pd.DataFrame:
        """Every row of `FeatureDiff.table` that is this feature's."""
        return self.effects.copy()

    def contexts(self, n: int = 4, *, reader: str | None = None) -> list[Context]:
        """See `tsae.features.contexts.top_contexts`.

        Raises:
            TsaeError: where the diff was loaded without its features.
        """
        if self.source is None:
            raise TsaeError(
                "examples need the features that the diff was computed from",
                where=f"feature {self.index}",
                fix="Give them: FeatureDiff.load(folder, features=FeatureTable.load(folder))",
            )
        return top_contexts(self.source, self.index, n, reader=reader)

    def show(self, n: int = 4, *, reader: str | None = None) -> None:
        """Display its effects and the n trajectories on which it is most active, at most one a problem."""
        views().show_feature(self, n, reader)

    def __repr__(self) -> str:
        return views().feature_line(self)

    def _repr_html_(self) -> Any:
        return views().feature_card(self)

"""`feature_diff`: every contrast of a FeatureTable, its controls, and what the features respond to; and its answer,
`FeatureDiff`, as tables with their evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base import display
from tsae.base.artefact import Kind, versions, write_artefact
from tsae.base.files import as_path
from tsae.base.filters import feature_number, need_names, several
from tsae.base.table_export import Tables, read_tables, table_files
from tsae.base.untrusted import visible
from tsae.checkpoints.tokenizers import text_of
from tsae.diff.comparisons import CONTRAST, MAIN_PARTS, Rows, comparisons, main_part
from tsae.diff.config import DiffConfig
from tsae.diff.confounds import CONTROLS, confound_table, survival
from tsae.diff.descriptions import Families, assign_families, describe, family_shifts
from tsae.diff.dynamics import dynamics
from tsae.diff.effects import REPEATS, contrast_table, draw_all, shift_table
from tsae.diff.inference import q_values
from tsae.diff.noise import NoiseNull
from tsae.diff.reinforcement import Reinforcement
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError
from tsae.features.contexts import Annotator, Context, annotate_tokens, top_contexts
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.bands import bands_info, kind_of_bands
from tsae.rollouts.behaviours import behaviour_table, by_thirds, measures
from tsae.rollouts.schema import BANDS
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
        token_strings: text of every token id; by default as the features know it.
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
    features, config = FeatureTable.of(features), config or DiffConfig()
    if families is not None and annotator is None:
        raise TsaeError("families are made of an annotator's classes", where="families", fix="Give its annotator too.")
    stable = features.stability
    if stability is not None:
        given = stability if isinstance(stability, Stability) else Stability.load(stability)
        stable = given.of(features.made_from["sae"], "stability" if isinstance(stability, Stability) else stability)
    of_steps = features if steps is None else _steps_of(features, steps)
    # Which rows are compared with which, and every contrast of them.
    rows = Rows.of(features, config)
    drawn = draw_all(rows, comparisons(features, rows, config), config, progress)
    # What the features respond to.
    # A padded vocabulary has ids that no tokenizer knows, and a model may sample them.
    known = list(token_strings or features.token_strings)
    strings = known + [f"#{i}" for i in range(len(known), int(features.token_ids.max()) + 1)]
    classes = None if annotator is None else annotate_tokens(features, annotator, strings)
    described, by_family = describe(features, rows, config, classes, strings), pd.DataFrame()
    if families is not None and classes is not None:
        described = described.join(assign_families(features, classes, families, config))
        by_family = family_shifts(features, rows, described.family, config)
    if stable is not None:
        described["stability"] = stable.per_latent
    if logits is not None:
        described = described.join(logits)
    along = dynamics(of_steps, config)
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
            "shares": [name for name, of in measures(features.rollouts).items() if of.dropna().isin([0, 1]).all()],
            "bands": bands_info(features.rollouts.info, features.rollouts.origin),
            "rollouts": features.made_from["rollouts"],
            "second_look": (features.rollouts.info.get("log") or {}).get("second_look"),
            "labels": features.made_from["labels"],
            **({"without_span": left_out} if (left_out := rows.without_tokens(features)) else {}),
            "stability": None if stable is None else stable.summary(described.firing_rate.to_numpy() > 0),
            "steps": [] if along is None else _flagged(of_steps, config),
            "no_dynamics": {} if along is None else along.notes,
            "causally_tested": False,
            "token_strings": _strings_of(features, strings) if known else {},
        },
        source=features,
    )


def _steps_of(features: FeatureTable, given: FeatureTable | str | Path) -> FeatureTable:
    steps = FeatureTable.of(given)
    expected, found = (table.made_from["sae"] for table in (features, steps))
    if expected != found or steps.n_features != features.n_features:
        what = f"the steps were encoded with another SAE ({found}) than the features ({expected})"
        raise TsaeError(what, where=steps.origin, fix="Encode both with one SAE.")
    return steps


def _flagged(features: FeatureTable, config: DiffConfig) -> list[dict[str, Any]]:
    """The readers, flagged where the SAE reconstructs them badly or leaves out many of their tokens."""

    def bad(reader: Mapping[str, Any]) -> bool:
        too_many = reader.get("outlier_share", 0) > config.max_outliers
        return reader["fve"] is None or reader["fve"] < config.min_fve or too_many

    return [{**reader, "flagged": bad(reader)} for reader in features.info["readers"]]


def _strings_of(features: FeatureTable, strings: Sequence[str]) -> dict[str, str]:
    """Text of the token ids that occur, by id as text (JSON has no other keys)."""
    # UTF-8 cannot hold lone surrogates.
    ids = np.unique(features.token_ids).tolist()
    return {str(i): text_of(strings, i).encode("utf-8", "replace").decode() for i in ids}


_NAMES = {
    "kind": ("shift", "outcome", "interaction"),
    "checkpoint": (),
    "part": ("total", "policy", "representation", "same_trajectories", "success_minus_failure"),
    "band": ("all", *BANDS),
    "outcome": ("all", "success", "failure"),
}
"""Keys of contrasts, and the names that every diff knows, whether it drew them or not."""
_TABLES = ("shifts", "contrasts", "features", "behaviours", "confounds", "families")
_OPTIONAL = ("dynamics", "behaviour_dynamics", "baselines", "insertion", "reinforcement", "predicted", "noise")


@dataclass(frozen=True)
class FeatureDiff(Tables):
    """Feature shifts of every checkpoint against the base and outcome effects within problems, with their evidence.

    Sizes are Δ: a difference in standard deviations of the feature over base trajectories. A feature *moved* if |Δ| is
    larger than the config's minimum_effect, at the config's q. A difference alone is not enough. All of this is
    correlational: nothing has been tested causally.
    """

    shifts: pd.DataFrame
    """One row a contrast and tested feature:

    kind            shift, outcome or interaction
    checkpoint      whose shift, or whose trajectories
    run, step       of the checkpoint
    part            shift: total, policy, representation, same_trajectories; others: success_minus_failure
    band            all, easy, medium, hard; of an interaction the two bands, such as hard-medium
    outcome         all, success, failure: trajectories counted
    feature         index
    mean, reference mean activation of the two sides, over problems (checkpoint and base; successes and failures); of an
                    interaction the outcome effects in the two bands
    difference      mean − reference, in units of activation; low, high its bootstrap interval
    delta           Δ: the difference / the feature's standard deviation over base trajectories; delta_low, delta_high
    p, q            of the null |Δ| ≤ minimum_effect; q is Benjamini–Hochberg (or -Yekutieli) over the contrast's
                    features
    p_differs, q_differs  of the null Δ = 0: whether there is any difference
    scale           base; pooled where the feature is silent at base (active in fewer than min_problems problems, or the
                    same in all trajectories): Δ is then in the deviation within base and checkpoint; floored where
                    half of the deviation over both together is larger: |Δ| is at most 4
    auroc           chance that the first side of a problem has the larger value; of an interaction, over problems
    active, active_reference    share of the trajectories of either side in which the feature is active, over problems
    """
    contrasts: pd.DataFrame
    """One row a contrast:

    its keys        as in `shifts`
    n_problems, n_trajectories, n_tokens  of its rows
    rows            names its rows: contrasts and controls with the same name rest on the same rows
    n_left_out      problems that lack a side
    n_tested, n_discoveries, n_differs    features tested; with q, and with q_differs, at most the config's q
    n_null, null_any  discoveries where there is nothing to find (`tsae.diff.effects`): mean over
                    repeats, and share of repeats with any
    detectable_delta  the |Δ| that is found 8 times in 10; infinite where there are too few problems, NaN where refused
                    and where a typical feature is the same on both sides of every problem
    note            why it was refused
    """
    features: pd.DataFrame
    """One row a feature: group (high, low), firing_rate, responds_to, lift, share, top_tokens, top_token_share,
    length_correlation (Spearman, over the base's trajectories: a confound). Where known also thinking_share (of the
    activation in responses), stability (mean decoder cosine with the matched latents of other seeds' SAEs), promotes
    and suppresses (`tsae.features.contexts.logit_effects`)."""
    behaviours: pd.DataFrame
    """See `tsae.rollouts.behaviours.behaviour_table`; of a log with few problems a step by thirds of the run."""
    confounds: pd.DataFrame = field(default_factory=pd.DataFrame)
    """See `tsae.diff.confounds.confound_table`."""
    families: pd.DataFrame = field(default_factory=pd.DataFrame)
    """See `tsae.diff.descriptions.family_shifts`; empty where no families were given."""
    dynamics: pd.DataFrame | None = None
    """See `tsae.diff.dynamics.Dynamics.table`; None where no run has two steps."""
    behaviour_dynamics: pd.DataFrame | None = None
    """See `tsae.diff.dynamics.Dynamics.behaviours`."""
    baselines: pd.DataFrame | None = None
    """See `tsae.diff.baselines.baselines`; None where they were not computed."""
    insertion: pd.DataFrame | None = None
    """See `tsae.causal.insertion.insertion`; None where that was not done."""
    reinforcement: pd.DataFrame | None = None
    """The table of `tsae.diff.reinforcement.Reinforcement`; set by `with_reinforcement`."""
    predicted: pd.DataFrame | None = None
    """See `tsae.diff.reinforcement.Reinforcement.compare`; set by `with_reinforcement`."""
    noise: pd.DataFrame | None = None
    """The table of `NoiseNull`; set by `with_noise`."""
    info: dict[str, Any] = field(default_factory=dict)
    """config, sae, readers with their reconstruction, repeats of the nulls, shares (behaviours that responses have or
    lack), stability of active features, bands, texts of tokens, steps (the readers of the dynamics), why a run has
    none, and noise (`NoiseNull.info`)."""
    source: FeatureTable | None = None
    """The features that it was computed from, for examples; None after loading without them."""

    def table(self, *, discoveries: bool = False, **keys: Any) -> pd.DataFrame:
        """Shifts and outcome effects with the verdicts of the controls and the features' descriptions.

        Args:
            discoveries: only features that moved by more than the minimum effect.
            keys: select rows, such as kind="shift", part="total", band="all", outcome="all"; a value or several.

        Returns:
            `shifts` with the columns moved (q at most the config's), survives_length and the like, and `features`.

        Raises:
            TsaeError: for a column, band, checkpoint or other name that there is not; it lists those that there are.
        """
        where = "FeatureDiff.table"
        wanted = {name: several(value) for name, value in keys.items()}
        need_names("column", wanted, self.shifts.columns, where)
        self._need(wanted, where)
        if "feature" in wanted:
            wanted["feature"] = tuple(feature_number(f, len(self.features), where) for f in wanted["feature"])
        contrast = {name: value for name, value in wanted.items() if name in CONTRAST}
        table = self._of_contrasts(contrast)
        for name, value in wanted.items():
            if name not in contrast:
                table = table[table[name].isin(value)]
        if discoveries:
            table = table[table.moved]
        return table.join(self.features, on="feature").reset_index(drop=True)

    @property
    def names(self) -> pd.Series:
        """What every feature responds to, by feature: its label (`tsae.explain`) where that passed its test."""
        table = self.features
        return table.label.where(table.label != "", table.responds_to) if "label" in table else table.responds_to

    @cached_property
    def _judged(self) -> pd.DataFrame:
        """`shifts` with moved and the controls' verdicts, which take long to look up."""
        return self.shifts.assign(moved=self.shifts.q <= self.q, **survival(self.confounds, self.shifts))

    @cached_property
    def _places(self) -> dict[tuple[str, ...], np.ndarray]:
        """Rows of every contrast's shifts. Comparing names over all rows at every call takes seconds."""
        return self.shifts.groupby(list(CONTRAST), sort=False).indices

    def _need(self, keys: Mapping[str, Sequence[Any]], where: str) -> None:
        """Refuse names of contrasts that cannot be: those of a typo. One that was not drawn has no rows."""
        for name in (name for name in _NAMES if name in keys):
            there = [*self.contrasts[name].unique()] if len(self.contrasts) else []
            readers = [self.base, *self.checkpoints] if name == "checkpoint" else []
            need_names(name, keys[name], [*readers, *there, *_NAMES[name]], where)

    def _of_contrasts(self, keys: dict[str, tuple[Any, ...]]) -> pd.DataFrame:
        """Judged shifts of the contrasts with these keys, in their order."""
        if not keys or not len(self.shifts):
            return self._judged
        wanted = [(CONTRAST.index(key), values) for key, values in keys.items()]
        found = [rows for of, rows in self._places.items() if all(of[i] in values for i, values in wanted)]
        return self._judged.iloc[np.sort(np.concatenate(found)) if found else []]

    @property
    def q(self) -> float:
        """False-discovery rate at which a feature counts as a discovery."""
        return float(self.info["config"]["q"])

    @property
    def minimum_effect(self) -> float:
        """|Δ| up to which a feature did not move."""
        return float(self.info["config"]["minimum_effect"])

    @property
    def made_from(self) -> dict[str, str | None]:
        """Fingerprints of rollouts, labels and the SAE's weights, as far as they are known."""
        sae = (self.info.get("sae") or {}).get("weights")
        return {"rollouts": self.info.get("rollouts"), "labels": self.info.get("labels"), "sae": sae}

    @property
    def base(self) -> str:
        """The checkpoint that the others are compared with: the first reader."""
        return str(self.info["readers"][0]["id"])

    @property
    def checkpoints(self) -> list[str]:
        """Checkpoints compared with the base."""
        return [reader["id"] for reader in self.info["readers"][1:]]

    @property
    def final_checkpoints(self) -> list[str]:
        """The last step of every run, in the series' order."""
        last: dict[str, tuple[int, str]] = {}
        for reader in self.info["readers"][1:]:
            run, step = reader.get("run") or reader["id"], reader.get("step") or 0
            if run not in last or step >= last[run][0]:
                last[run] = (step, reader["id"])
        return [id for _, id in last.values()]

    def top(self, n: int = 10, **keys: Any) -> pd.DataFrame:
        """The n discoveries of the selected contrasts, by default of all main shifts, that separate both sides best.

        Rows of `table`, of which the columns that matter are shown. By AUROC, whose distance from ½ no feature has by
        being rare; then by |Δ|.
        """
        if keys:
            table = self.table(discoveries=True, **keys)
        else:
            parts = [self.main_shift(checkpoint, discoveries=True) for checkpoint in self.checkpoints]
            table = pd.concat(parts, ignore_index=True) if parts else self.table(discoveries=True, kind="shift")
        order = np.lexsort((-table.delta.abs(), -(table.auroc - 0.5).abs()))
        return Clearest(table.iloc[order].head(n).reset_index(drop=True))

    def check(self, claims: Mapping[str, tuple[str, str, str, str]]) -> pd.DataFrame:
        """Whether behaviours and families of features change as claims say.

        Args:
            claims: by a sentence: a checkpoint, "raises" or "lowers", a behaviour or family, and a band.

        Returns:
            claim; measured: the paired change of a behaviour, or the Δ of a family, with its interval; holds: yes, no,
            not clear (the interval holds 0), or not measured.
        """
        columns = (
            (self.behaviours, ["policy", "behaviour", "band", "change", "change_low", "change_high"]),
            (self.families, ["checkpoint", "family", "band", "delta", "delta_low", "delta_high"]),
        )
        names = ["who", "name", "band", "value", "low", "high"]
        known = pd.concat([table[some].set_axis(names, axis=1) for table, some in columns if len(table)]).dropna()
        rows = []
        for claim, (checkpoint, way, name, band) in claims.items():
            found = known[(known.who == checkpoint) & (known.name == name) & (known.band == band)]
            if found.empty:
                rows.append((claim, "–", "not measured"))
                continue
            value, low, high = (float(found[column].iloc[0]) for column in names[3:])
            seen = "raises" if low > 0 else "lowers" if high < 0 else "neither"
            holds = "not clear" if seen == "neither" else "yes" if seen == way else "no, the opposite"
            rows.append((claim, f"{value:+.2f} [{low:+.2f}, {high:+.2f}]", holds))
        return pd.DataFrame(rows, columns=["claim", "measured", "holds"])

    @property
    def gates(self) -> str:
        """How far to believe it: reconstruction, nulls, noise, stability, and what was tested causally, as text."""
        return display.gates_text(self)

    def main_part(self, checkpoint: str) -> str | None:
        """The shift that speaks for a checkpoint: total, or same_trajectories where total cannot be drawn.

        None for the base, and for a checkpoint that the diff does not know.
        """
        return self._main_parts.get(checkpoint)

    @cached_property
    def _main_parts(self) -> dict[str, str | None]:
        if self.contrasts.empty:
            return {}
        drawn = self.contrasts.query("kind == 'shift' and band == outcome == 'all'").groupby("checkpoint", sort=False)
        return {name: main_part(dict(zip(mine.part, mine.note, strict=True))) for name, mine in drawn}

    def main_shift(self, checkpoint: str, *, band: str = "all", discoveries: bool = False) -> pd.DataFrame:
        """`table` of a checkpoint's main shift, over all outcomes."""
        part = self.main_part(checkpoint) or MAIN_PARTS[0]
        return self.table(
            discoveries=discoveries, kind="shift", checkpoint=checkpoint, part=part, band=band, outcome="all"
        )

    def compare(self, other: FeatureDiff) -> pd.DataFrame:
        """Set every effect beside that of another diff of the same SAE: another seed, span or set of rollouts.

        Returns:
            the contrast's keys and feature; difference, low, high, delta and q of both (`_other`); agreement: both, one
            or neither found it, or opposite where both did with different signs. Effects that one diff lacks are left
            out.

        Raises:
            TsaeError: where the diffs are of different SAEs.
        """
        ours, theirs = (diff.info["sae"].get("weights") for diff in (self, other))
        if ours != theirs or len(self.features) != len(other.features):
            what = f"a diff of the SAE {ours} cannot be compared with one of {theirs}: their features are not the same"
            raise TsaeError(what, where="FeatureDiff.compare", fix="Encode both with one SAE.")
        keys = [*CONTRAST, "feature"]
        numbers = ["difference", "low", "high", "delta", "q"]
        both = self.shifts[keys + numbers].merge(other.shifts[keys + numbers], on=keys, suffixes=("", "_other"))
        found = (both.q <= self.q).astype(int) + (both.q_other <= other.q).astype(int)
        both["agreement"] = found.map({0: "neither", 1: "one", 2: "both"})
        both.loc[(found == 2) & (both.difference * both.difference_other < 0), "agreement"] = "opposite"
        return both

    def opposed(self, up: str, down: str, *, part: str | None = None, band: str = "all") -> pd.DataFrame:
        """Features that one checkpoint raised and the other lowered, both by more than the minimum effect.

        This is a test of its own. p is the larger of both, 1 where the signs are not these, and q is over all features
        that either contrast tested. Intersecting the two lists of discoveries would not do: a share q of many
        discoveries is false, and these may be all that seem opposed.

        Args:
            up: checkpoint id with a positive shift.
            down: checkpoint id with a negative shift.
            part: of the shift; by default the main part of both, or same_trajectories where they have different ones.
            band: of the problems.

        Returns:
            indexed by feature, strongest first (by the smaller |Δ| of the two), with the features' descriptions.
        """
        self._need({"checkpoint": (up, down), "band": (band,), "part": (part,) if part else ()}, "FeatureDiff.opposed")
        if part is None:
            mains = {self.main_part(up), self.main_part(down)}
            part = str(mains.pop()) if len(mains) == 1 else "same_trajectories"
        keys = {"kind": ("shift",), "part": (part,), "band": (band,), "outcome": ("all",)}
        raised, lowered = (self._of_contrasts({**keys, "checkpoint": (c,)}).set_index("feature") for c in (up, down))
        both = raised.index.intersection(lowered.index)
        p = np.where(
            (raised.delta[both] > 0) & (lowered.delta[both] < 0), np.maximum(raised.p[both], lowered.p[both]), 1.0
        )
        others = len(raised.index.union(lowered.index)) - len(both)
        opposed = q_values(np.concatenate([p, np.ones(others)]), self.info["config"]["fdr"])[: len(both)] <= self.q
        both = both[opposed]
        strength = pd.concat([raised.delta[both].abs(), lowered.delta[both].abs()], axis=1).min(axis=1)
        order = strength.sort_values(ascending=False, kind="stable").index
        found = self.features.loc[order].copy()
        found.insert(0, "strength", strength[order])
        return found

    def feature(self, feature: int | str) -> Feature:
        """One feature, by its number: `table()`, `contexts()`, and `show()` for a notebook or a terminal."""
        feature = feature_number(feature, len(self.features), "FeatureDiff.feature")
        table = self.table()
        return Feature(
            feature,
            described=self.features.loc[feature],
            effects=table[table.feature == feature].reset_index(drop=True),
            span=self.info["config"]["span"],
            strings=self.info.get("token_strings", {}),
            source=self.source,
        )

    @property
    def plot(self) -> display.Plots:
        """Figures: overview, behaviours, bands, volcano, decomposition, opposed, outcomes and feature."""
        return display.Plots(self)

    def __str__(self) -> str:
        return display.diff_text(self)

    def __repr__(self) -> str:
        of = {c: {"checkpoint": c, "part": self.main_part(c)} for c in self.checkpoints}
        shifts = {c: self.contrast(kind="shift", band="all", **keys) for c, keys in of.items()}
        told = [f"{visible(c)}: {row.n_discoveries} of {row.n_tested}" for c, row in shifts.items() if row is not None]
        found = ", ".join(told)
        moved = f"moved, |Δ| > {self.minimum_effect:g} at q <= {self.q:g}"
        return f"FeatureDiff({len(self.features)} features; {moved}: {found or 'none'})"

    def contrast(self, **keys: str | None) -> Any:
        """The first row of `contrasts` with these keys, such as kind="outcome", checkpoint=…, band="all", or None."""
        table = self.contrasts
        if table.empty:
            return None
        self._need({name: (value,) for name, value in keys.items() if value is not None}, "FeatureDiff.contrast")
        for name, value in {"outcome": "all", **keys}.items():
            table = table[table[name] == value]
        return None if table.empty else table.iloc[0]

    def with_reinforcement(self, found: Reinforcement) -> FeatureDiff:
        """Add what its rollouts reinforce, and predicted beside realised shifts.

        Raises:
            TsaeError: where that is of other rollouts.
        """
        return replace(self, reinforcement=found.table, predicted=found.compare(self))

    def with_noise(self, found: NoiseNull) -> FeatureDiff:
        """Add the null for changed weights: what noise as large as each update moves."""
        return replace(self, noise=found.table, info={**self.info, "noise": found.info})

    def _repr_html_(self) -> str:
        return display.diff_card(self)

    def to_markdown(self, n: int = 10, **keys: str) -> str:
        """The rows of `top` as a Markdown table; text of rollouts is escaped."""
        table = self.top(n, **keys)
        table = table.assign(responds_to=self.names[table.feature].to_numpy())
        columns = ["kind", "checkpoint", "part", "band", "feature", "responds_to", "difference", "low", "high"]
        columns += ["delta", "delta_low", "delta_high", "auroc", "q", *(f"survives_{control}" for control in CONTROLS)]
        return display.markdown_table(table[columns])

    def to_html(
        self, path: str | Path, *, title: str | None = None, attribution: Any = None, claims: Any = None
    ) -> Path:
        """Write the self-contained report; see `tsae.report.page.write_report`.

        An attribution (`tsae.attribute`) of the run adds which samples did that, and its claims (`tsae.claims_of`) what
        the literature would expect.
        """
        return display.write_report(self, path, title=title, attribution=attribution, claims=claims)

    def save(self, folder: str | Path) -> Path:
        """Write the tables as Parquet, and diff.json last."""
        tables = {name: getattr(self, name) for name in (*_TABLES, *_OPTIONAL) if name != "features"}
        files = table_files(tables, compression="zstd")
        files |= table_files({"features": self.features}, index=True, compression="zstd")
        return write_artefact(folder, DIFF, self.info, files, config=self.info.get("config"), inputs=self.made_from)

    @classmethod
    def load(cls, folder: str | Path, *, features: FeatureTable | None = None) -> FeatureDiff:
        """Read a folder that `save` wrote; `features` gives the report its examples.

        Raises:
            TsaeError: where a file is missing or damaged, or the features are others than those that were compared.
        """
        folder = as_path(folder)
        info, tables = read_tables(folder, DIFF, _TABLES, _OPTIONAL)
        if features is not None and "bands_beside" in features.rollouts.info:
            features = features.by(kind_of_bands(info.get("bands")))  # type: ignore[arg-type]
        if features is not None and (other := features.differing(info)) is not None:
            what = f"was drawn from other features (of other {other}) than these"
            raise TsaeError(what, where=folder, fix="Give the features that `tsae diff` read.")
        return cls(**tables, info=info, source=features)


DIFF = Kind("diff", 1, "diff.json", "Make it with `tsae diff`.", FeatureDiff.load)


class Clearest(pd.DataFrame):
    """Rows of `FeatureDiff.table`, shown with the columns that a reader wants first. It holds all of them."""

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    def __repr__(self) -> str:
        return display.shown_effects(self).to_string(index=False)

    def _repr_html_(self) -> str:
        return display.shown_effects(self).to_html(index=False)


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
            what = "examples need the features that the diff was computed from"
            fix = "Give them: FeatureDiff.load(folder, features=FeatureTable.load(folder))"
            raise TsaeError(what, where=f"feature {self.index}", fix=fix)
        return top_contexts(self.source, self.index, n, reader=reader)

    def show(self, n: int = 4, *, reader: str | None = None) -> None:
        """Display its effects and the n trajectories on which it is most active, at most one a problem."""
        display.show_feature(self, n, reader)

    def __repr__(self) -> str:
        return display.feature_line(self)

    def _repr_html_(self) -> Any:
        return display.feature_card(self)

"""Intervention: what changing features did, beside what the controls did."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base import display
from tsae.base.artefact import Kind, write_artefact
from tsae.base.files import as_path
from tsae.base.filters import need_names, several
from tsae.base.statistics import counts, percentile_interval, too_few, wilson_interval
from tsae.base.table_export import Tables, read_tables, table_files
from tsae.causal.controls import beyond_random
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.rollouts.behaviours import behaviour_table, measures
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_SET = re.compile(r"_\d+$")
"""Matches the name of a single random set, such as random_1; the pooled sets have no number."""
_KEYS = ["condition", "band", "behaviour"]
_BEYOND = ["beyond_random", "beyond_low", "beyond_high"]
_SHARE = ["share", "share_low", "share_high"]
_NEEDED = ["none", "features", "random", "same_norm", "wrong_sign"]
_SHOWN = [*_NEEDED[1:], "mean_difference", "all_features", "whole", "donor"]
_DRAWS = 2000


def folders_of_tests(folder: Path) -> list[Path]:
    """Folders of causal tests in the folder of a run, by name."""
    found = (folder / "causal").glob("*")
    return sorted(test for test in found if test.is_dir() and test.name[0] != ".")


def outcome_table(rollouts: Rollouts, *, confidence: float, shared: float = 0.0) -> pd.DataFrame:
    """See `Intervention.outcomes`; policies of the rollouts are the conditions, "none" among them.

    Args:
        rollouts: of all conditions.
        confidence: of the intervals.
        shared: see `tsae.causal.controls.overlap`.
    """
    policies = rollouts.table["policy"].to_pylist()
    pooled = rollouts.with_column("policy", [_SET.sub("", name) for name in policies])
    every = behaviour_table(rollouts, reference="none", confidence=confidence)
    # In the order of the conditions, the pooled random sets before the single ones.
    table = behaviour_table(pooled, reference="none", confidence=confidence)
    table = pd.concat([table, every[every.policy.str.contains(_SET)]], ignore_index=True)
    beyond = _beyond(rollouts, confidence, shared)
    table = table.merge(beyond, on=["policy", "band", "behaviour"], how="left")
    bounds = pd.DataFrame([_wilson(row, rollouts, pooled, confidence) for row in table.to_dict("records")])
    table = pd.concat([table, bounds], axis=1).rename(columns={"policy": "condition"})
    names = [*_KEYS, "mean", "low", "high", "wilson_low", "wilson_high", "n_problems", "n_trajectories"]
    names += ["change", "change_low", "change_high", "n_paired", *_BEYOND]
    if "donor" not in rollouts.policies:
        return table[names]
    found = _shares(pooled, table, confidence)
    return table[names].merge(found, on=_KEYS, how="left")


def _shares(pooled: Rollouts, table: pd.DataFrame, confidence: float) -> pd.DataFrame:
    """Change of every condition divided by that of the donor, where the latter's interval leaves out 0.

    The interval is the percentile bootstrap's, over the problems that all three answered.
    """
    frame, measured = pooled.frame, measures(pooled)
    of_donor = table[(table.condition == "donor") & (table.change_low * table.change_high > 0)]
    rows = []
    for band, name in zip(of_donor.band, of_donor.behaviour, strict=True):
        inside = (frame.band == band) | (band == "all")
        by_problem = measured.loc[inside, name].groupby([frame.problem_id[inside], frame.policy[inside]]).mean()
        changes = by_problem.unstack().dropna()
        if changes.empty:
            continue
        changes = changes.sub(changes["none"], axis=0).drop(columns="none")
        drawn = pd.DataFrame(counts(len(changes), _DRAWS, 0) @ changes.to_numpy(), columns=changes.columns)
        share = changes.sum() / changes["donor"].sum()
        low, high = percentile_interval(drawn.div(drawn["donor"], axis=0).to_numpy(), confidence)
        rows += [(who, band, name, *of) for who, *of in zip(changes.columns, share, low, high, strict=True)]
    return pd.DataFrame(rows, columns=[*_KEYS, *_SHARE]).astype(dict.fromkeys(_SHARE, float))


def _beyond(rollouts: Rollouts, confidence: float, shared: float) -> pd.DataFrame:
    """How far each edit goes beyond the random sets, by band and behaviour."""
    frame, measured = rollouts.frame, measures(rollouts)
    sets = [name for name in rollouts.policies if re.fullmatch(r"random_\d+", name)]
    edits = [name for name in rollouts.policies if name not in ("none", "no_op") and not _SET.search(name)]
    rows = []
    for band in ("all", *(b for b in BANDS if (frame.band == b).any())) if sets else ():
        inside = (frame.band == band) | (band == "all")
        by_problem = measured[inside].groupby([frame.policy[inside], frame.problem_id[inside]]).mean()
        for name in measured:
            means = by_problem[name].unstack(0).reindex(columns=[*edits, *sets])  # (n_problems, n_conditions)
            drawn = means[sets].to_numpy().T
            for edit in edits:
                found = beyond_random(means[edit].to_numpy(), drawn, confidence, shared)
                rows.append((edit, band, name, found.difference, found.low, found.high))
    return pd.DataFrame(rows, columns=["policy", "band", "behaviour", *_BEYOND])


def _wilson(row: dict[str, Any], rollouts: Rollouts, pooled: Rollouts, confidence: float) -> dict[str, float]:
    frame = (rollouts if _SET.search(row["policy"]) else pooled).frame
    picked = frame[(frame.policy == row["policy"]) & ((frame.band == row["band"]) | (row["band"] == "all"))]
    values = pd.Series([np.nan])
    if row["behaviour"] == "accuracy":
        values = (picked.outcome == "success")[picked.outcome != "unknown"].astype(float)
    elif row["behaviour"] in picked.columns:
        values = picked[row["behaviour"]].dropna().astype(float)
    if not values.isin([0.0, 1.0]).all():
        return {"wilson_low": np.nan, "wilson_high": np.nan}
    low, high = wilson_interval(float(values.sum()), len(values), confidence)
    return {"wilson_low": float(low), "wilson_high": float(high)}


@dataclass(frozen=True)
class Intervention(Tables):
    """Features changed during generation, and what that did to the responses."""

    outcomes: pd.DataFrame
    """One row a condition, band and behaviour:

    condition                    see `tsae.causal.intervene`: none, no_op, features, random, same_norm (sets pooled),
                                 wrong_sign, mean_difference, random_1 …, same_norm_1 …; of transplants also donor,
                                 whole, all_features
    band                         all, and the bands of the problems
    behaviour                    accuracy, response_length (tokens), direct_answer, …: `tsae.rollouts.behaviours`
    mean, low, high              over problems of the mean over a problem's responses; bootstrap over problems
    wilson_low, wilson_high      of the share of responses, taken as independent; NaN for behaviours that are not shares
    n_problems, n_trajectories
    change, change_low, _high    paired over the n_paired problems: condition − none; bootstrap over problems. Of
                                 random and same_norm the mean over the sets that were drawn, taken as they are
    beyond_random, beyond_low, _high   single edits − the mean over the random sets, with an interval that leaves out 0
                                 where a further random set would not be expected to do that: sets and problems are
                                 both a sample (`tsae.causal.controls`); no interval for fewer than 8 problems
    share, share_low, share_high   of a transplant: the change divided by that from the checkpoint to the donor (1 moves
                                 all of it), with a bootstrap interval over problems; NaN where the donor itself does
                                 not clearly differ
    """
    rollouts: Rollouts
    """Every response; the policy is the condition."""
    info: dict[str, Any] = field(default_factory=dict)
    """checkpoint, features, config, sae, fve, no_op_identical, random sets and how well they match, and rows: problems,
    and of the condition features trajectories and response tokens (every condition has as many trajectories).
    n_problems, and n_of_features: those of them that the features' rollouts have too."""

    def table(self, **keys: str | Sequence[str]) -> pd.DataFrame:
        """Rows of `outcomes`, such as behaviour="direct_answer", band="all"; one value or several."""
        table = self.outcomes
        for name, value in keys.items():
            need_names("key", [name], _KEYS, "Intervention.table")
            need_names(name, several(value), self.outcomes[name], "Intervention.table")
            table = table[table[name].isin(several(value))]
        return table.reset_index(drop=True)

    def changes(self, *behaviours: str, band: str = "all") -> pd.DataFrame:
        """A row a condition, a column a behaviour (by default all `measured`), in words: the change against "none" with
        its interval; of "none" itself the mean. The random sets are pooled."""
        names = list(behaviours) or self.measured
        table = self.table(band=band, behaviour=names)
        table = table[~table.condition.str.contains(_SET)]
        cells = [f"{row['mean']:.3g}" if row.condition == "none" else _change(row) for _, row in table.iterrows()]
        wide = table.assign(cell=cells).pivot(index="condition", columns="behaviour", values="cell")
        return wide.loc[table.condition.unique(), names].fillna("–").rename_axis(index=None, columns=None)

    def summary(self, behaviour: str = "direct_answer", band: str = "all") -> str:
        """One sentence with the change, its interval, and the same of the controls."""
        rows = self.table(behaviour=behaviour, band=band).set_index("condition")
        unmeasured = [n for n in _NEEDED if n not in rows.index or not (n == "none" or rows.loc[n].n_paired > 0)]
        if unmeasured:
            raise TsaeError(
                f"{behaviour} could not be measured under {', '.join(unmeasured)}",
                where="Intervention.summary",
                fix="Name another behaviour, or see table().",
            )
        main, base = rows.loc["features"], rows.loc["none"]
        few = pd.isna(main.change_low)
        unclear = "was measured on too few problems for" if few else "does not clearly change"
        verb = "raises" if main.change_low > 0 else "lowers" if main.change_high < 0 else unclear
        ids = self.info["features"]
        named = f"feature {ids[0]}" if len(ids) == 1 else f"{len(ids)} features"
        where = "" if band == "all" else f" on {band} problems"
        sets = rows[rows.index.str.match(r"random_\d")].change
        controls = [
            f"matched random features: {_change(rows.loc['random'])}, "
            f"single sets {sets.min():+.3g} to {sets.max():+.3g} ({len(sets)})",
            f"random directions of the same norm: {_change(rows.loc['same_norm'])}",
            f"wrong sign: {_change(rows.loc['wrong_sign'])}",
        ]
        if "mean_difference" in rows.index:
            controls.append(f"mean difference, same norm: {_change(rows.loc['mean_difference'])}")
        beyond = f"beyond random {main.beyond_random:+.3g}"
        if np.isfinite(main.beyond_low):
            beyond += f" [{main.beyond_low:+.3g}, {main.beyond_high:+.3g}]"
            if main.beyond_low <= 0 <= main.beyond_high:
                beyond += ", as a further random set might"
        else:
            why = "too few problems" if few else f"{len(sets)} random {'set' if len(sets) == 1 else 'sets'}"
            beyond += f" (no interval: {why})"
        place, share = f"in {self.info['checkpoint']}", ""
        if "donor" in rows.index:
            place = f"of {self.info['donor']} into {self.info['checkpoint']}"
            share = f"; {self.info['donor']} itself: {_change(rows.loc['donor'])}"
            if np.isfinite(main.share):
                of = {"the features": main, "all features": rows.loc["all_features"], "no SAE": rows.loc["whole"]}
                share += f", of which move: {', '.join(f'{what} {_share(row)}' for what, row in of.items())}"
        text = (
            f"{self._done()} {named} {place} {verb} {behaviour.replace('_', ' ')}{where}: "
            f"{base['mean']:.3g} → {main['mean']:.3g}, {_change(main)}, {beyond}; {'; '.join(controls)}{share} "
            f"({int(main.n_paired)} problems, {int(main.n_trajectories)} responses)."
        )
        if not self.info["no_op_identical"]:
            text += " The hooks alone changed responses: compare with the condition no_op."
        return text

    def _done(self) -> str:
        config = self.info["config"]
        names = {"ablate": "Ablating", "mean": "Setting to the mean", "transplant": "Transplanting"}
        amounts = {"clamp": "Clamping", "steer": "Steering"}
        mode = config["mode"]
        return names[mode] if mode in names else f"{amounts[mode]} ({config['amount']:+g} × typical)"

    def __repr__(self) -> str:
        return f"Intervention({self.info['checkpoint']}; {self.summary()})"

    def _repr_html_(self) -> str:
        config = self.info["config"]
        return display.card(
            "Intervention",
            {
                "checkpoint": self.info["checkpoint"],
                "features": self.info["features"],
                "done": self._done().lower(),
                "where": config["tokens"],
                "hooks alone change nothing": self.info["no_op_identical"],
            },
            ("mean over problems without an edit (none), and changes against it", self.changes()),
            note="Read features beside random, same_norm and wrong_sign: what these do too is not the features' doing.",
        )

    def mark(self, diff: FeatureDiff) -> FeatureDiff:
        """The diff with this test noted: info["causally_tested"] then lists what was tested.

        Raises:
            TsaeError: where the diff is of another SAE.
        """
        if diff.info["sae"].get("weights") != self.info["sae"].get("weights"):
            what = "the diff is of another SAE than the intervention"
            raise TsaeError(what, where="Intervention.mark", fix="Use the diff of the features that were tested.")
        tested = [*(diff.info.get("causally_tested") or []), self.record()]
        return replace(diff, info={**diff.info, "causally_tested": tested})

    def record(self) -> dict[str, Any]:
        """Facts for reports: checkpoint, features, how they were edited, numbers of problems, a sentence for every
        behaviour, and the changes over all problems that these sentences name."""
        config = self.info["config"]
        shown = self.outcomes[
            (self.outcomes.band == "all")
            & self.outcomes.behaviour.isin(self.measured)
            & self.outcomes.condition.isin(_SHOWN)
        ]
        columns = ["condition", "behaviour", "mean", "change", "change_low", "change_high", "n_paired", *_BEYOND]
        columns += [name for name in _SHARE if name in shown]
        return {
            "checkpoint": self.info["checkpoint"],
            **({"donor": self.info["donor"]} if "donor" in self.info else {}),
            "features": self.info["features"],
            **{name: config[name] for name in ("mode", "amount", "tokens", "n_random", "confidence")},
            "n_problems": self.info["n_problems"],
            "n_of_features": self.info.get("n_of_features"),
            "rows": self.info["rows"],
            "summaries": {name: self.summary(name) for name in self.measured},
            "changes": shown[columns].to_dict("records"),
        }

    @property
    def measured(self) -> list[str]:
        """Behaviours that every condition a summary names could be measured for, and compared on a problem at least."""
        table = self.table(band="all")
        found = table[table.condition.isin(_NEEDED) & ((table.condition == "none") | (table.n_paired > 0))]
        counts = found.groupby("behaviour", sort=False).size()
        return [str(name) for name in counts.index[counts == len(_NEEDED)]]

    def save(self, folder: str | Path) -> Path:
        """Write outcomes.parquet, rollouts.parquet and causal.json, which comes last."""
        files = {**table_files({"outcomes": self.outcomes}), "rollouts.parquet": self.rollouts.write}
        sae = self.info.get("sae") or {}
        inputs = {"rollouts": self.info.get("features_encoded_with"), "sae": sae.get("weights")}
        return write_artefact(folder, CAUSAL, {**self.info, "record": self.record()}, files, inputs=inputs, gives={})

    @classmethod
    def load(cls, folder: str | Path) -> Intervention:
        """Read a folder that `save` wrote."""
        folder = as_path(folder)
        info, tables = read_tables(folder, CAUSAL, ["outcomes"], others=["rollouts.parquet"])
        info.pop("record", None)
        return cls(**tables, rollouts=Rollouts.read(folder / "rollouts.parquet"), info=info)


CAUSAL = Kind("causal test", 1, "causal.json", "Make it with `tsae causal`.", Intervention.load)


def _share(row: pd.Series) -> str:
    return f"{row.share:.0%} [{row.share_low:.0%}, {row.share_high:.0%}]"


def _change(row: pd.Series) -> str:
    if pd.isna(row.change_low):
        return f"{row.change:+.3g}, {too_few(int(row.n_paired))}"
    return f"{row.change:+.3g} [{row.change_low:+.3g}, {row.change_high:+.3g}]"

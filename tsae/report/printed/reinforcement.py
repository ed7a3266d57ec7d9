"""Reinforcement, its predictions, and influence, as plain text for the terminal."""

from __future__ import annotations

import pandas as pd

from tsae.diff.influence import Influence
from tsae.diff.reinforcement import Reinforcement
from tsae.report.text import visible

_ASSUMED = {
    "natural": "natural gradient, Cov(A, f): a policy free in every response, every step of like size in probability",
    "vanilla": "vanilla gradient, Cov(πA, f): a policy free in every response, probable responses move faster",
}


def reinforcement_text(found: Reinforcement, n: int = 5) -> str:
    """Per gradient one line a part, and its features with the largest Δ."""
    q = found.config.q
    lines = ["Reinforced features (covariance of advantage and mean activation within groups; shares of the whole)"]
    for gradient in found.per_group:
        lines.append(f"  {_ASSUMED[gradient]}")
        mine = found.table[found.table.gradient == gradient]
        for (by, part), rows in mine.groupby(["by", "part"], sort=False):
            count = f"{(rows.q <= q).sum()} of {len(rows)} features at q <= {q}"
            name = f"{by} {part}" if by != "all" else "all"
            lines.append(f"    {name:<26}{count} ({rows.n_problems.iloc[0]} problems)")
            for row in found.top(n, str(part), gradient=gradient).itertuples():
                delta = f"Δ {row.delta:+.3f} [{row.delta_low:+.3f}, {row.delta_high:+.3f}]"
                lines.append(f"      {row.feature:<8}{delta:<30}{row.reinforcement:+.4f}  q {row.q:.4f}")
    return "\n".join([*lines, *(f"  {note}" for note in found.notes)])


def prediction_text(compared: pd.DataFrame) -> str:
    """One line a row of `Reinforcement.compare`; * marks predictions on what the run was trained on."""
    lines = ["Predicted against realised shifts (Spearman over features, interval, p; ceiling by split halves)"]
    head = f"  {'checkpoint':<16}{'part':<9}{'gradient':<10}{'predicted on':<14}{'realised on':<13}"
    lines.append(f"{head}{'rho':<24}{'p':<8}ceiling")
    for row in compared.to_dict("records"):
        place = f"  {row['checkpoint']:<16}{row['part']:<9}{row['gradient']:<10}"
        place += f"{row['predicted_on'] + ' *' * row['matched']:<14}{row['realised_on']:<13}"
        if row["note"]:
            lines.append(place + row["note"])
            continue
        rho = f"{row['rho']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
        lines.append(f"{place}{rho:<24}{row['p']:<8.3f}{row['ceiling']:.2f}")
    lines.append("  Not causally tested.")
    return "\n".join(lines)


def influence_text(found: Influence, n: int = 3) -> str:
    """Per feature the sums by band and outcome, and the samples that push most."""
    lines = [f"{found}: change of the feature's mean per unit of learning rate"]
    for feature, mean in found.info["means"].items():
        sums = found.by("band", "outcome")
        sums = sums[sums.feature == int(feature)]
        lines.append(f"  feature {feature}, mean {mean:.4g}: total {sums.total.sum():+.4g}")
        for row in sums.itertuples():
            band = row.band if isinstance(row.band, str) else "no band"
            lines.append(
                f"    {f'{band}, {row.outcome}':<20}{row.total:+.4g} (reading {row.representation:+.4g}, policy "
                f"{row.policy_part:+.4g}; {row.n_samples} samples)"
            )
        for row in found.top(int(feature), n).itertuples():
            lines.append(
                f"    row {row.trajectory}, {visible(row.problem_id)}: {row.total:+.4g} "
                f"({row.outcome}, advantage {row.advantage:+.2f}, {row.response_length} tokens)"
            )
    return "\n".join(lines)

"""Findings as plain text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.intervals import FEWEST
from tsae.diff.dynamics import KINDS, align
from tsae.diff.result import FeatureDiff
from tsae.diff.significance.power import power_text
from tsae.report.findings import bands_warning, feature_sentences, null_sentences, survival_sentences
from tsae.report.text import visible
from tsae.report.views import (
    BANDS,
    PART_NAMES,
    bands_of,
    final_checkpoints,
    has_stability,
    least_text,
    opposed_pairs,
    outlier_text,
    stability_text,
    survivors_text,
    without_span_text,
)
from tsae.sae.evaluation import Evaluation


def print_findings(diff: FeatureDiff, evaluation: Evaluation | None = None, *, n: int = 6) -> None:
    """Behaviours per checkpoint, features that runs moved in opposite directions, and the gates."""
    if warning := bands_warning(diff):
        print()
        print(textwrap.fill(visible(warning), 118))
        print(bands_by_step_text(diff))
    print()
    print(behaviour_text(diff.behaviours))
    for checkpoint in final_checkpoints(diff):
        print()
        told = " ".join(feature_sentences(diff, checkpoint))
        print(textwrap.fill(visible(f"{checkpoint}: {told}"), 118, subsequent_indent="  "))
    pairs = opposed_pairs(diff)[:2]
    for up, down, _ in pairs:
        print()
        print(opposed_text(diff, up, down, n))
    for checkpoint in diff.checkpoints if not pairs else ():
        print()
        print(shift_text(diff, checkpoint, n))
    print()
    print(outcome_text(diff, n))
    if (diff.contrasts.kind == "interaction").any():
        print()
        print(interaction_text(diff, n))
    if "family" in diff.features:
        print()
        print(family_text(diff))
    if diff.dynamics is not None:
        print()
        print(dynamics_text(diff))
    print()
    print(gates_text(diff, evaluation))


def bands_by_step_text(diff: FeatureDiff) -> str:
    """Problems of every band by the step at which they were asked; empty where that was not measured."""
    found = (diff.info.get("bands") or {}).get("confounded_with_step")
    if not found:
        return ""
    table = pd.DataFrame(found["table"]).fillna(0).astype(int)
    table.index = table.index.astype(int)
    table = table.sort_index().T.reindex([band for band in BANDS if band in table])
    return table.rename_axis(columns="  problems at step").to_string()


def behaviour_text(table: pd.DataFrame) -> str:
    """One line a checkpoint: every behaviour of `behaviour_table` by band, with 95 % intervals."""
    bands = [band for band in ("easy", "medium", "hard") if (table.band == band).any()] or ["all"]
    lines = ["Behaviour on each band (mean over problems, interval; ↑ ↓ where the paired change is clear)"]
    if ((table.n_paired > 0) & (table.n_paired < FEWEST)).any():
        lines[0] += f"\n  ?: too few problems to say whether it changed ({FEWEST} are needed)"
    for behaviour in table.behaviour.unique():
        lines.append(f"  {behaviour.replace('_', ' '):<17}" + "".join(f"{band:>24}" for band in bands))
        for policy in table.policy.unique():
            cells = []
            for band in bands:
                row = table[(table.policy == policy) & (table.band == band) & (table.behaviour == behaviour)]
                cells.append(_behaviour_cell(row.iloc[0]) if len(row) else "–")
            lines.append(f"    {policy:<15}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def format_text(table: pd.DataFrame) -> str:
    """One line a policy and band of `format_table`."""
    lines = ["Formats (entropy in bits, interval; ↑ ↓ where its paired change is clear; the most frequent format)"]
    if ((table.n_paired > 0) & (table.n_paired < FEWEST)).any():
        lines[0] += f"\n  ?: too few problems to say whether it changed ({FEWEST} are needed)"
    for row in table.to_dict("records"):
        ends = "" if pd.isna(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
        lines.append(
            f"    {row['policy']:<19}{row['band']:<8}{row['entropy']:>6.2f}{ends:<14} {_mark(row)}  "
            f"{row['n_formats']} formats, {row['top_share']:.0%} {visible(str(row['top_format']))}"
        )
    return "\n".join(lines)


def opposed_text(diff: FeatureDiff, up: str, down: str, n: int) -> str:
    """Features that one run raised and another lowered, with the shift in every run."""
    found = diff.opposed(up, down)
    title = f"Features that {up} raised and {down} lowered: {len(found)} ({least_text(diff)} in both)"
    if found.empty:
        return title
    shifts = pd.concat([diff.main_shift(c) for c in diff.checkpoints]).set_index(["checkpoint", "feature"])
    more = f", the {n} largest" if len(found) > n else ""
    lines = [f"{title}{more}", "  (Δ: shift in standard deviations over base trajectories, interval, q)"]
    stable = f"{'stable':<8}" if has_stability(diff) else ""
    lines.append(f"  {'feature':<9}{'responds to':<34}{stable}" + "".join(f"{c:>32}" for c in diff.checkpoints))
    for feature, row in found.head(n).iterrows():
        cells = []
        for checkpoint in diff.checkpoints:
            if (checkpoint, feature) in shifts.index:
                shift = shifts.loc[(checkpoint, feature)]
                cells.append(f"{_delta(shift)} {shift.q:.4f}")
            else:
                cells.append("–")
        lines.append(
            f"  {f'{feature} {row.group}':<9}{_described(row):<34.33}{_stable(row)}"
            + "".join(f"{cell:>32}" for cell in cells)
        )
    return "\n".join(lines)


def shift_text(diff: FeatureDiff, checkpoint: str, n: int) -> str:
    """The clearest shifts of one checkpoint against the base, over all problems and per band."""
    part = diff.main_part(checkpoint)
    lines = [f"Shifts of {checkpoint} against {diff.base}, {PART_NAMES.get(str(part), 'none')} (Δ, interval, q)"]
    keys = {"kind": "shift", "checkpoint": checkpoint, "part": str(part)}
    for band in ("all", *bands_of(diff)):
        found = diff.contrast(**keys, band=band)
        if found is None:
            continue
        if found.note:
            lines.append(f"  {band}: {found.note}")
            continue
        counted = f"{found.n_problems} problems, {found.n_left_out} on one side only"
        lines.append(f"  {band}: {_counts(diff, found)} ({counted})")
        lines += _left(diff.table(discoveries=True, **keys, band=band, outcome="all"))
        lines += _effects(diff.top(n, **keys, band=band, outcome="all"))
    return "\n".join(lines)


def outcome_text(diff: FeatureDiff, n: int) -> str:
    """Success − failure within problem on the base's trajectories, over all problems and per band."""
    base = diff.base
    contrasts = diff.contrasts[(diff.contrasts.kind == "outcome") & (diff.contrasts.checkpoint == base)]
    lines = [f"Success − failure within problem, read by {base} (Δ, interval, q)"]
    for found in contrasts.itertuples():
        counted = f"{found.n_problems} problems with both outcomes, {found.n_left_out} without"
        if found.note:
            lines.append(f"  {found.band}: {found.note} ({counted})")
            continue
        lines += [
            f"  {found.band}: {_counts(diff, found)} ({counted})",
            f"    {power_text(found.n_problems, found.detectable_delta)}",
            *_left(diff.table(discoveries=True, kind="outcome", checkpoint=base, band=found.band)),
        ]
        lines += _effects(diff.top(n, kind="outcome", checkpoint=base, band=found.band))
    return "\n".join(lines)


def family_text(diff: FeatureDiff) -> str:
    """How many features every family has, and what each run did to it."""
    sizes = diff.features.family.value_counts()
    lines = ["Families of features (features; Δ, interval, q)"]
    for family in sorted(set(diff.features.family) - {"none"}):
        lines.append(f"  {family}: {sizes[family]} features")
        table = diff.families
        table = table[(table.family == family) & (table.band == "all")]
        for row in table.itertuples():
            shown = row.note or f"{_delta(row)} {row.q:.4f}"
            lines.append(f"    {row.checkpoint:<19}{shown}")
    lines.append(f"  none: {sizes.get('none', 0)} features")
    return "\n".join(lines)


def interaction_text(diff: FeatureDiff, n: int) -> str:
    """Whether the outcome effect on the base's trajectories is another in one band than in another."""
    contrasts = diff.contrasts[(diff.contrasts.kind == "interaction") & (diff.contrasts.checkpoint == diff.base)]
    lines = [f"Outcome effect in one band − in another, read by {diff.base} (Δ, interval, q)"]
    for found in contrasts.itertuples():
        bands = found.band.replace("-", " − ")
        if found.note:
            lines.append(f"  {bands}: {found.note}")
            continue
        lines += [
            f"  {bands}: {_counts(diff, found)} ({found.n_problems} problems)",
            f"    {power_text(found.n_problems, found.detectable_delta)}",
        ]
        lines += _effects(diff.top(n, kind="interaction", checkpoint=diff.base, band=found.band))
    return "\n".join(lines)


def dynamics_text(diff: FeatureDiff) -> str:
    """A run a block: how many features of every kind, when they set in, and what behaviours they went along with."""
    table, behaviours = diff.dynamics, diff.behaviour_dynamics
    assert table is not None
    assert behaviours is not None
    lines = ["Along the steps of a run (features by kind; onset: the first saved step with half of the shift)"]
    for run, rows in table.groupby("run", sort=False):
        last = rows[rows.step == rows.step.max()]
        counts = last.kind.value_counts().reindex(KINDS, fill_value=0)
        steps = ", ".join(str(step) for step in sorted(rows.step.unique()))
        lines.append(f"  {run}, steps {steps}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
        for kind, found in last[last.kind != "flat"].groupby("kind", sort=False):
            onsets = found.onset.astype(int).value_counts().sort_index()
            lines.append(f"    {kind:<10}onset at {', '.join(f'{step}: {n}' for step, n in onsets.items())}")
    lines += [f"  {run}: not followed: {why}" for run, why in diff.info["no_dynamics"].items()]
    flagged = [reader["id"] for reader in diff.info["steps"] if reader["flagged"]]
    if flagged:
        lines.append(f"  badly reconstructed: {', '.join(flagged)}")
    together = align(table, behaviours)
    if len(together):
        points = " or ".join(map(str, sorted(together.n_points.unique())))
        lines.append(
            f"  Features with |rank correlation| >= .9 with a behaviour, of {points} points a run, too few to test:"
        )
        strong = together.assign(strong=together.rho.abs() >= 0.9).groupby(["run", "behaviour"], sort=False).strong
        for run, shares in strong.agg(["sum", "size"]).groupby(level="run", sort=False):
            cells = [f"{name.replace('_', ' ')} {row['sum']}" for (_, name), row in shares.iterrows()]
            lines.append(f"    {run} (of {shares['size'].max()}): {', '.join(cells)}")
    return "\n".join(lines)


def _effects(top: pd.DataFrame) -> list[str]:
    """One line a feature."""
    lines = []
    for row in top.itertuples():
        effect = f"{_delta(row)} {row.q:.4f}"
        lines.append(f"    {f'{row.feature} {row.group}':<9}{_described(row):<34.33}{_stable(row)}{effect:>32}")
    return lines


def gates_text(diff: FeatureDiff, evaluation: Evaluation | None) -> str:
    """What a reader checks before believing the rest."""
    readers = ", ".join(
        f"{r['id']} {'none' if r['fve'] is None else format(r['fve'], '.3f')}{' (flagged)' if r['flagged'] else ''}"
        for r in diff.info["readers"]
    )
    lines = ["Before you believe it", f"  reconstruction (FVE) per reader: {readers}"]
    if outlier_text(diff):
        lines.append(f"  tokens beyond the SAE's norm limit, left out of every mean: {visible(outlier_text(diff))}")
    if left_out := without_span_text(diff):
        span = diff.info["config"]["span"].replace("_", " ")
        lines.append(f"  trajectories without a token of the span ({span}), left out: {visible(left_out)}")
    if evaluation is not None:
        known = evaluation.alive_in_training
        trained = "" if known is None else f" (in training {known:.0%})"
        lines.append(
            f"  T-SAE on held-out problems: FVE {evaluation.fve:.3f}, L0 {evaluation.l0:.1f}, "
            f"alive {evaluation.alive:.0%}{trained}, smoothness {evaluation.smoothness_high:.2f} (high-level), "
            f"{evaluation.smoothness_all:.2f} (all)"
        )
    if stability_text(diff):
        lines.append(f"  stability: {stability_text(diff)}")
    lines += [f"  {sentence}" for sentence in [*survival_sentences(diff), *null_sentences(diff)]]
    lines.append("  Not causally tested: what a feature responds to is not thereby what it does.")
    return "\n".join(lines)


def baseline_text(table: pd.DataFrame) -> str:
    """One line a contrast and way of `tsae.diff.controls.baselines.baselines`."""
    lines = ["Plain directions beside the best features (held-out AUROC within problem, interval)"]
    for (kind, checkpoint), ways in table.groupby(["kind", "checkpoint"], sort=False):
        lines.append(f"  {'success − failure, read by' if kind == 'outcome' else 'shift of'} {checkpoint}")
        for row in ways.itertuples():
            shown = row.note or f"{row.auroc:.2f} [{row.low:.2f}, {row.high:.2f}]"
            lines.append(f"    {row.way:<19}{shown}")
    return "\n".join(lines)


def statistics_text(table: pd.DataFrame) -> str:
    """`tsae.trajectory_statistics` by reader and policy: means over response tokens."""
    names = ["entropy", "choice_points", "logprob_reader", "kl_k3"]
    sums = table[names].mul(table.n_tokens, axis=0)
    keys = [table.reader, table.policy]
    # A mean over the trajectories whose policy and base are readers too.
    means = sums.groupby(keys, sort=False).sum() / (
        table[names].notna().mul(table.n_tokens, axis=0).groupby(keys, sort=False).sum()
    )
    count = table.groupby(keys, sort=False).size()
    wide = [max(8, *(len(visible(str(id))) for id in column)) for column in zip(*means.index, strict=True)]
    head = f"  {'reader':<{wide[0]}}  {'policy':<{wide[1]}}"
    lines = [
        "Nats per response token",
        f"{head}  trajectories   entropy  choice points  log-probability  KL(policy ‖ base)",
    ]
    for (reader, policy), row in means.iterrows():
        cells = [f"{row.entropy:>8.3f}", f"{row.choice_points:>13.1%}", f"{row.logprob_reader:>15.3f}"]
        kl = f"{'–' if np.isnan(row.kl_k3) else format(row.kl_k3, '.4f'):>17}"
        named = f"  {visible(str(reader)):<{wide[0]}}  {visible(str(policy)):<{wide[1]}}  {count[reader, policy]:>12,}"
        lines.append("  ".join([named, *cells, kl]))
    return "\n".join(lines)


def insertion_text(table: pd.DataFrame, strings: Sequence[str] | None = None) -> str:
    """One line a feature of `tsae.causal.insertion`: how much of its activation its top tokens bring elsewhere."""
    lines = ["Top tokens inserted where the feature is silent (part of its activation, interval; control; verdict)"]
    for row in table.to_dict("records"):
        names = [f"#{i}" if strings is None else repr(strings[i]) for i in row["top_ids"]]
        what = f"  {row['reader']:<12.12}{row['feature']:>6}  {visible(' '.join(names)):<32.31}"
        if pd.isna(row["kept"]):
            lines.append(f"{what}{row['verdict']}")
            continue
        kept = f"{row['kept']:.2f} [{row['kept_low']:.2f}, {row['kept_high']:.2f}]"
        control = row["control"] / row["typical"]
        lines.append(f"{what}{kept:>20} {control:>5.2f}  {row['verdict']}")
    return "\n".join(lines)


def _counts(diff: FeatureDiff, found: Any) -> str:
    """How many features a contrast found, and how many differ at all."""
    null = "" if np.isnan(found.n_null) else f", null {found.n_null:.1f}"
    counts = f"{found.n_discoveries} of {found.n_tested} features, {least_text(diff)}{null}"
    return f"{counts}; {found.n_differs} differ detectably"


def _left(found: pd.DataFrame) -> list[str]:
    """A line on what the controls leave of some discoveries."""
    left = survivors_text(found) if len(found) else ""
    return [f"    {left}"] if left else []


def _behaviour_cell(row: pd.Series) -> str:
    text = _interval(row, "mean") if pd.notna(row.low) else f"{row['mean']:.2f}"
    return f"{text} {_mark(row)}"


def _mark(row: Mapping[str, Any] | pd.Series) -> str:
    """Which way a paired change goes; a question mark where too few problems were answered by both."""
    if 0 < row["n_paired"] < FEWEST:
        return "?"
    return "↑" if row["change_low"] > 0 else "↓" if row["change_high"] < 0 else " "


def _described(row: Any) -> str:
    """What a feature responds to, with the share of its activation that falls there where that is known."""
    return f"{row.responds_to} {row.share:.0%}" if hasattr(row, "share") else str(row.responds_to)


def _stable(row: Any) -> str:
    """The matched cosine where other seeds were matched."""
    return f"{row.stability:<8.2f}" if hasattr(row, "stability") else ""


def _delta(row: Any) -> str:
    """Δ and its interval; an en dash where it was not computed."""
    if np.isnan(row.delta):
        return "–"
    return f"{row.delta:+.2f} [{row.delta_low:.2f}, {row.delta_high:.2f}]"


def _interval(row: pd.Series, column: str, *, sign: bool = False) -> str:
    largest = max(abs(row.low), abs(row.high))
    digits = 1 if largest >= 10 else 2 if largest >= 0.1 or largest == 0 else 3
    number = f"{row[column]:+.{digits}f}" if sign else f"{row[column]:.{digits}f}"
    return f"{number} [{row.low:.{digits}f}, {row.high:.{digits}f}]"

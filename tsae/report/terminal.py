"""Findings as plain text for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tsae.base.statistics.intervals import FEWEST
from tsae.diff.dynamics import FLAT, align
from tsae.diff.explain import Explanations
from tsae.diff.feature_diff import FeatureDiff
from tsae.diff.inference import power_text
from tsae.diff.influence import Influence
from tsae.diff.reinforcement import Reinforcement
from tsae.report.story import facts
from tsae.report.story.findings import feature_sentences, tested
from tsae.report.story.gates import bands_by_step, bands_warning, gates
from tsae.report.story.statements import Contrast, Effect, along_steps, contrasts, main_contrast
from tsae.report.text import number, visible
from tsae.sae.quality.evaluation import Evaluation


def print_findings(diff: FeatureDiff, evaluation: Evaluation | None = None, *, n: int = 6) -> None:
    """Behaviours per checkpoint, features that runs moved in opposite directions, and the gates."""
    if warning := bands_warning(diff):
        print(f"\n{textwrap.fill(visible(warning), 118)}\n{bands_by_step_text(diff)}")
    parts = [behaviour_text(diff.behaviours)]
    for checkpoint in facts.final_checkpoints(diff):
        told = visible(f"{checkpoint}: {' '.join(feature_sentences(diff, checkpoint))}")
        parts.append(textwrap.fill(told, 118, subsequent_indent="  "))
    pairs = facts.opposed_pairs(diff)[:2]
    parts += [opposed_text(diff, up, down, n) for up, down, _ in pairs]
    if not pairs:
        parts += [shift_text(diff, checkpoint, n) for checkpoint in diff.checkpoints]
    parts.append(outcome_text(diff, n))
    if (diff.contrasts.kind == "interaction").any():
        parts.append(interaction_text(diff, n))
    if "family" in diff.features:
        parts.append(family_text(diff))
    if diff.dynamics is not None:
        parts.append(dynamics_text(diff))
    for part in [*parts, gates_text(diff, evaluation)]:
        print(f"\n{part}")


def bands_by_step_text(diff: FeatureDiff) -> str:
    """Problems of every band by the step at which they were asked; empty where that was not measured."""
    steps, counts = bands_by_step(diff)
    table = pd.DataFrame.from_dict(counts, orient="index", columns=steps)
    return table.rename_axis(columns="  problems at step").to_string() if steps else ""


def behaviour_text(table: pd.DataFrame) -> str:
    """One line a checkpoint: every behaviour of `behaviour_table` by band, with 95 % intervals."""
    bands = [band for band in facts.BANDS if (table.band == band).any()] or ["all"]
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
    title = f"Features that {up} raised and {down} lowered: {len(found)} ({facts.least_text(diff)} in both)"
    if found.empty:
        return title
    shifts = {c: facts.main_shift(diff, c) for c in diff.checkpoints}
    more = f", the {n} largest" if len(found) > n else ""
    lines = [f"{title}{more}", "  (Δ: shift in standard deviations over base trajectories, interval, q)"]
    stable = f"{'stable':<8}" if facts.has_stability(diff) else ""
    lines.append(f"  {'feature':<9}{'responds to':<34}{stable}" + "".join(f"{c:>32}" for c in diff.checkpoints))
    for feature, row in found.head(n).iterrows():
        cells = [_sized(table.loc[feature]) if feature in table.index else "–" for table in shifts.values()]
        described = _described(int(feature), row.group, row.responds_to, row.get("share"), row.get("stability"))
        lines.append(f"  {described}" + "".join(f"{cell:>32}" for cell in cells))
    return "\n".join(lines)


def shift_text(diff: FeatureDiff, checkpoint: str, n: int) -> str:
    """The clearest shifts of one checkpoint against the base, over all problems and per band."""
    part = diff.main_part(checkpoint)
    lines = [f"Shifts of {checkpoint} against {diff.base}, {facts.PART_NAMES.get(str(part), 'none')} (Δ, interval, q)"]
    for band in ("all", *facts.bands_of(diff)):
        c = main_contrast(diff, checkpoint, band)
        if c is not None and c.refused:
            lines.append(f"  {band}: {c.refused}")
        elif c is not None:
            lines += _contrast(c, band, f"{c.n_problems} problems, {c.n_left_out} on one side only", n)
    return "\n".join(lines)


def outcome_text(diff: FeatureDiff, n: int) -> str:
    """Success − failure within problem on the base's trajectories, over all problems and per band."""
    lines = [f"Success − failure within problem, read by {diff.base} (Δ, interval, q)"]
    for c in contrasts(diff, kind="outcome", checkpoint=diff.base):
        counted = f"{c.n_problems} problems with both outcomes, {c.n_left_out} without"
        if c.refused:
            lines.append(f"  {c.band}: {c.refused} ({counted})")
        else:
            lines += _contrast(c, c.band, counted, n, power=True)
    return "\n".join(lines)


def interaction_text(diff: FeatureDiff, n: int) -> str:
    """Whether the outcome effect on the base's trajectories is another in one band than in another."""
    lines = [f"Outcome effect in one band − in another, read by {diff.base} (Δ, interval, q)"]
    for c in contrasts(diff, kind="interaction", checkpoint=diff.base):
        bands = c.band.replace("-", " − ")
        if c.refused:
            lines.append(f"  {bands}: {c.refused}")
        else:
            lines += _contrast(c, bands, f"{c.n_problems} problems", n, power=True, controls=False)
    return "\n".join(lines)


def _contrast(c: Contrast, name: str, counted: str, n: int, *, power: bool = False, controls: bool = True) -> list[str]:
    """How many features a contrast found and how many differ at all, what the controls leave, and the largest."""
    null = "" if math.isnan(c.n_null) else f", null {c.n_null:.1f}"
    found = f"{c.n_found} of {c.n_tested} features, {facts.least_text(c.diff)}{null}; {c.n_differs} differ detectably"
    lines = [f"  {name}: {found} ({counted})"]
    if power:
        lines.append(f"    {power_text(c.n_problems, c.detectable)}")
    if controls and len(c.found) and c.controls:
        lines.append(f"    {c.controls}")
    for e in c.strongest(n):
        lines.append(f"    {_described(e.feature, e.group, e.responds_to, e.share, e.stability)}{_sized(e):>32}")
    return lines


def family_text(diff: FeatureDiff) -> str:
    """How many features every family has, and what each run did to it."""
    sizes = diff.features.family.value_counts()
    lines = ["Families of features (features; Δ, interval, q)"]
    for family in sorted(set(diff.features.family) - {"none"}):
        lines.append(f"  {family}: {sizes[family]} features")
        table = diff.families
        for row in table[(table.family == family) & (table.band == "all")].itertuples():
            lines.append(f"    {row.checkpoint:<19}{row.note or _sized(row)}")
    lines.append(f"  none: {sizes.get('none', 0)} features")
    return "\n".join(lines)


def dynamics_text(diff: FeatureDiff) -> str:
    """A run a block: how many features of every kind, when they set in, and what behaviours they went along with."""
    table, behaviours = diff.dynamics, diff.behaviour_dynamics
    assert table is not None
    assert behaviours is not None
    lines = ["Along the steps of a run (features by kind; onset: the first saved step with half of the shift)"]
    for run in along_steps(diff):
        steps, kinds = ", ".join(map(str, run.steps)), ", ".join(f"{n} {kind}" for kind, n in run.kinds.items())
        lines.append(f"  {run.run}, steps {steps}: {kinds}")
        for kind, found in run.last[run.last.kind != FLAT].groupby("kind", sort=False):
            onsets = found.onset.astype(int).value_counts().sort_index()
            lines.append(f"    {kind:<10}onset at {', '.join(f'{step}: {n}' for step, n in onsets.items())}")
    lines += [f"  {run}: not followed: {why}" for run, why in diff.info["no_dynamics"].items()]
    if flagged := [reader["id"] for reader in diff.info["steps"] if reader["flagged"]]:
        lines.append(f"  badly reconstructed: {', '.join(flagged)}")
    together = align(table, behaviours)
    if len(together):
        points = " or ".join(map(str, sorted(together.n_points.unique())))
        lines.append(
            f"  Features with |rank correlation| >= .9 with a behaviour, of {points} points a run, too few to test:"
        )
        strong = together.assign(strong=together.rho.abs() >= 0.9).groupby(["run", "behaviour"], sort=False).strong
        for run_id, shares in strong.agg(["sum", "size"]).groupby(level="run", sort=False):
            cells = [f"{name.replace('_', ' ')} {row['sum']}" for (_, name), row in shares.iterrows()]
            lines.append(f"    {run_id} (of {shares['size'].max()}): {', '.join(cells)}")
    return "\n".join(lines)


def gates_text(diff: FeatureDiff, evaluation: Evaluation | None) -> str:
    """What a reader checks before believing the rest."""
    found = gates(diff)
    readers = ", ".join(
        f"{r['id']} {'none' if r['fve'] is None else format(r['fve'], '.3f')}{' (flagged)' if r['flagged'] else ''}"
        for r in found.readers
    )
    lines = ["Before you believe it", f"  reconstruction (FVE) per reader: {readers}"]
    if found.outliers:
        lines.append(f"  tokens beyond the SAE's norm limit, left out of every mean: {visible(found.outliers)}")
    if found.without_span:
        span = diff.info["config"]["span"].replace("_", " ")
        lines.append(f"  trajectories without a token of the span ({span}), left out: {visible(found.without_span)}")
    if evaluation is not None:
        known = evaluation.alive_in_training
        trained = "" if known is None else f" (in training {known:.0%})"
        lines.append(
            f"  T-SAE on held-out problems: FVE {evaluation.fve:.3f}, L0 {evaluation.l0:.1f}, "
            f"alive {evaluation.alive:.0%}{trained}, smoothness {evaluation.smoothness_high:.2f} (high-level), "
            f"{evaluation.smoothness_all:.2f} (all)"
        )
    if found.stability:
        lines.append(f"  stability: {found.stability}")
    lines += [f"  {sentence}" for sentence in (*found.controls, *found.nulls)]
    told = tested(diff)
    untested = ("Not causally tested: what a feature responds to is not thereby what it does.",)
    lines += [f"  {visible(sentence)}" for sentence in (untested if told is None else told.sentences)]
    return "\n".join(lines)


def baseline_text(table: pd.DataFrame) -> str:
    """One line a contrast and way of `tsae.diff.baselines.baselines`."""
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
        kl = f"{'–' if math.isnan(row.kl_k3) else format(row.kl_k3, '.4f'):>17}"
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


def _described(feature: int, group: str, responds_to: str, share: float | None, stability: float | None) -> str:
    """A feature, what it responds to with the share of its activation there, and the cosine matched in other seeds."""
    shown = responds_to if share is None else f"{responds_to} {share:.0%}"
    stable = "" if stability is None else f"{stability:<8.2f}"
    return f"{f'{feature} {group}':<9}{shown:<34.33}{stable}"


def _sized(of: Any) -> str:
    """Δ, its interval and q, of an `Effect` or of a row of `FeatureDiff.table`; – where Δ was not computed."""
    low, high = (of.low, of.high) if isinstance(of, Effect) else (of.delta_low, of.delta_high)
    size = "–" if math.isnan(of.delta) else f"{of.delta:+.2f} [{low:.2f}, {high:.2f}]"
    return f"{size} {of.q:.4f}"


def _behaviour_cell(row: pd.Series) -> str:
    largest = max(abs(row.low), abs(row.high))
    digits = 1 if largest >= 10 else 2 if largest >= 0.1 or largest == 0 else 3
    mean = row["mean"]
    text = f"{mean:.2f}" if pd.isna(row.low) else f"{mean:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"
    return f"{text} {_mark(row)}"


def _mark(row: Mapping[str, Any] | pd.Series) -> str:
    """Which way a paired change goes; a question mark where too few problems were answered by both."""
    if 0 < row["n_paired"] < FEWEST:
        return "?"
    return "↑" if row["change_low"] > 0 else "↓" if row["change_high"] < 0 else " "


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


def explanation_text(found: Explanations) -> str:
    """One line a feature: its label, or why it has none, and the scores."""
    lines = []
    for row in found.table.itertuples():
        said = f"“{visible(str(row.label))}”" if row.shown else f"unlabelled: {visible(str(row.note))}"
        parts = (row.detection, row.fuzzing, row.control)
        tested = "detection {}, fuzzing {}; another feature's label {}".format(*map(number, parts))
        lines.append(f"{row.feature:>6}  {said}" + (f" ({tested})" if row.score == row.score else ""))
    by = f"Labels by {visible(str(found.info['labeller']))}"
    return "\n".join(
        [f"{by}, tested on other problems' contexts (balanced accuracy: 0.5 says nothing, 1 is right always):", *lines]
    )

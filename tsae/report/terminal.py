"""Findings as plain text for the terminal."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.attribution.influence import Influence
from tsae.base.statistics import FEWEST
from tsae.diff.dynamics import align
from tsae.diff.explain import Explanations
from tsae.diff.feature_diff import FeatureDiff
from tsae.diff.inference import power_text
from tsae.diff.reinforcement import Reinforcement
from tsae.report import tables
from tsae.report.attribution import attribution_text, statement
from tsae.report.story import facts
from tsae.report.story.findings import BELIEF, NEXT, PREDICTED, findings, tested, verdicts
from tsae.report.story.gates import bands_warning, gates, stand_in_warning
from tsae.report.story.statements import Statement, contrasts, found_in, noise_lines, survivors
from tsae.report.tables import Cell, Table, table_text
from tsae.report.text import number, visible
from tsae.rollouts.bands import bands_label
from tsae.sae.quality.evaluation import Evaluation

_SAMPLES = 3
"""Samples to read that are printed."""
_LINES = 34
"""Most that `print_summary` prints. With what commands print around it, this fits a terminal of 40 lines."""
_APART = (PREDICTED, BELIEF, NEXT)


def print_run(
    diff: FeatureDiff,
    attribution: Attribution | None,
    page: Path,
    evaluation: Evaluation | None = None,
    *,
    everything: bool,
) -> None:
    """What a run's analysis found: the verdicts, or everything; and where its page is."""
    if everything:
        print_findings(diff, evaluation)
        if attribution is not None:
            print(f"\n{attribution_text(attribution, _SAMPLES)}")
    else:
        print_summary(diff, None if attribution is None else statement(attribution))
    more = "" if everything else "; with --all the same command prints every table"
    print(f"\nReport: {page.resolve()}{more}")


def print_summary(diff: FeatureDiff, samples: Statement | None = None) -> None:
    """The verdict on every run and what else was found, in at most 34 lines; `print_findings` prints all of it.

    Args:
        diff: what was found.
        samples: which samples did that, if it is known.
    """
    found = findings(diff)
    told = [one for one in found if one.heading not in _APART]
    told += [samples] if samples else []
    told += [replace(one, sentences=one.sentences[:1]) for one in found if one.heading == BELIEF]
    for detail in (2, 1, 0):
        lines = [line for one in told for line in ["", *_short(one, detail)]]
        if len(lines) <= _LINES:
            break
    print("\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 1], "…"]))


def _short(one: Statement, detail: int) -> list[str]:
    """A statement: of a verdict the sentence, with the answers of the lights (detail 1) and its features (detail 2)."""
    first, rest = " ".join(one.sentences), []
    if one.lights:
        first, *features = " ".join(one.sentences[:2]), *one.sentences[2:]
        answers = " ".join(f"{light.question}: {light.answer}." for light in one.lights)
        clearest = [text.replace("Clearest of these", "Features, the clearest of") for text in features[-1:]]
        rest = [answers, *clearest][:detail]
    return [line for text in (f"{one.heading}: {first}", *(f"  {text}" for text in rest)) for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    width = min(118, shutil.get_terminal_size((118, 24)).columns)
    return textwrap.wrap(visible(text), width, subsequent_indent="    ")


def print_findings(diff: FeatureDiff, evaluation: Evaluation | None = None) -> None:
    """The verdict on every run, behaviours, what runs moved, outcomes, families, steps, and the gates."""
    if warning := stand_in_warning(diff):
        print(f"\n{textwrap.fill(visible(warning), 118)}")
    if warning := bands_warning(diff):
        print(f"\n{textwrap.fill(visible(warning), 118)}\n{table_text(tables.problems_by_step(diff))}")
    parts = [*map(_verdict_text, verdicts(diff)), behaviour_text(diff.behaviours, bands_label(diff.info.get("bands")))]
    opposed = tables.opposed(diff)[:2]
    parts += [table_text(pair, 6) for pair in opposed]
    if not opposed:
        parts += [contrasts_text(diff, "shift", checkpoint, 6) for checkpoint in diff.checkpoints]
    parts += [contrasts_text(diff, kind, diff.base, 6) for kind in ("outcome", "interaction")]
    parts.append(table_text(tables.families(diff)))
    if diff.dynamics is not None:
        parts += [*map(table_text, tables.steps(diff)), _steps_text(diff)]
    for part in [*parts, gates_text(diff, evaluation)]:
        if part:
            print(f"\n{part}")


def _verdict_text(found: Statement) -> str:
    """The sentence, the lights, a line each, and the features."""
    first, limit, *features = found.sentences
    lights = [f"{light.question}: {light.answer}. {' '.join(light.sentences)}" for light in found.lights]
    lines = [f"{found.heading}: {first} {limit}", *(f"  {line}" for line in [*lights, *features])]
    return "\n".join(part for line in lines for part in _wrapped(line))


def behaviour_text(table: pd.DataFrame, label: str = "") -> str:
    """One line a checkpoint: every behaviour of `behaviour_table` by band, with 95 % intervals.

    Args:
        table: of `behaviour_table`.
        label: what the bands are, where they come from elsewhere (`tsae.rollouts.bands.bands_label`).
    """
    bands = [band for band in facts.BANDS if (table.band == band).any()] or ["all"]
    of = f"band ({visible(label)})" if label else "band"
    lines = [f"Behaviour on each {of} (mean over problems, interval; ↑ ↓ where the paired change is clear)"]
    lines += _few(table)
    for behaviour in table.behaviour.unique():
        lines.append(f"  {behaviour.replace('_', ' '):<17}" + "".join(f"{band:>24}" for band in bands))
        for policy in table.policy.unique():
            cells = []
            for band in bands:
                row = table[(table.policy == policy) & (table.band == band) & (table.behaviour == behaviour)]
                cells.append(_behaviour_cell(row.iloc[0]) if len(row) else "–")
            lines.append(f"    {policy:<15}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _few(table: pd.DataFrame) -> list[str]:
    """What a question mark means, where there is one."""
    few = ((table.n_paired > 0) & (table.n_paired < FEWEST)).any()
    return [f"  ?: too few problems to say whether it changed ({FEWEST} are needed)"] if few else []


def format_text(table: pd.DataFrame) -> str:
    """One line a policy and band of `format_table`."""
    lines = ["Formats (entropy in bits, interval; ↑ ↓ where its paired change is clear; the most frequent format)"]
    lines += _few(table)
    for row in table.to_dict("records"):
        ends = "" if pd.isna(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
        lines.append(
            f"    {row['policy']:<19}{row['band']:<8}{row['entropy']:>6.2f}{ends:<14} {_mark(row)}  "
            f"{row['n_formats']} formats, {row['top_share']:.0%} {visible(str(row['top_format']))}"
        )
    return "\n".join(lines)


def contrasts_text(diff: FeatureDiff, kind: str, checkpoint: str, n: int) -> str:
    """What the contrasts of a kind found over all problems and by band, how clearly they could, and the n largest."""
    part = diff.main_part(checkpoint) if kind == "shift" else None
    keys = {} if part is None else {"part": part, "outcome": "all"}
    found = contrasts(diff, kind=kind, checkpoint=checkpoint, **keys)
    title = {
        "shift": f"Shifts of {checkpoint} against {facts.compared_with(diff)}, "
        f"{facts.PART_NAMES.get(str(part), 'none')}",
        "outcome": f"Success − failure within problem, read by {checkpoint}",
        "interaction": f"Outcome effect in one band − in another, read by {checkpoint}",
    }[kind]
    if kind == "interaction" and not found:
        return ""
    lines = [f"{title} (Δ, interval, q)"]
    for c in found:
        counted = f"{c.n_problems} problems, {c.n_left_out} left out"
        null = "" if math.isnan(c.n_null) else f", null {c.n_null:.1f}"
        moves = f"{c.n_discoveries} of {c.n_tested} features, {facts.least_text(diff)}{null}"
        lines.append(
            f"  {c.band.replace('-', ' − ')}: {c.note or f'{moves}; {c.n_differs} differ detectably'} ({counted})"
        )
        moved = found_in(diff, c)
        if not c.note and kind != "shift":
            lines.append(f"    {power_text(c.n_problems, getattr(c, 'detectable_delta', math.nan))}")
        if not c.note and kind != "interaction" and (controls := survivors(moved)):
            lines.append(f"    {controls}")
        largest = [
            [*tables.described_cells(diff, e.feature), tables.delta_cell(e, diff.q)]
            for e in facts.records(moved.head(n))
        ]
        lines += [f"  {line}" for line in table_text(Table("", ["", "", ""], largest, 2)).splitlines()[2:]]
    return "\n".join(lines)


def _steps_text(diff: FeatureDiff) -> str:
    """What cannot be followed or trusted along the steps, and which behaviours features go along with."""
    assert diff.dynamics is not None
    assert diff.behaviour_dynamics is not None
    lines = [f"  {run}: not followed: {why}" for run, why in diff.info["no_dynamics"].items()]
    if flagged := [reader["id"] for reader in diff.info["steps"] if reader["flagged"]]:
        lines.append(f"  badly reconstructed: {', '.join(flagged)}")
    together = align(diff.dynamics, diff.behaviour_dynamics)
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


def gates_text(diff: FeatureDiff, evaluation: Evaluation | None = None) -> str:
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
    lines += [f"  {sentence}" for sentence in (*found.nulls, *noise_lines(diff.info.get("noise") or {}))]
    told = tested(diff)
    untested = ("Not causally tested: what a feature responds to may not be what it does.",)
    lines += [f"  {visible(sentence)}" for sentence in (untested if told is None else told.sentences)]
    return "\n".join(lines)


def statistics_text(table: pd.DataFrame) -> str:
    """`tsae.trajectory_statistics` by reader and policy: means over response tokens."""
    names = ["entropy", "choice_points", "logprob_reader", "kl_k3"]
    keys = [table.reader, table.policy]
    # A mean over the trajectories whose policy and base are readers too.
    sums = table[names].mul(table.n_tokens, axis=0).groupby(keys, sort=False).sum()
    means = sums / table[names].notna().mul(table.n_tokens, axis=0).groupby(keys, sort=False).sum()
    count = table.groupby(keys, sort=False).size()
    rows: list[list[str | Cell]] = [
        [
            *map(str, key), f"{count[key]:,}", f"{row.entropy:.3f}", f"{row.choice_points:.1%}",
            f"{row.logprob_reader:.3f}", tables.DASH if math.isnan(row.kl_k3) else f"{row.kl_k3:.4f}",
        ]
        for key, row in means.iterrows()
    ]  # fmt: skip
    head = ["reader", "policy", "trajectories", "entropy", "choice points", "log-probability", "KL(policy ‖ base)"]
    return table_text(Table("Nats per response token", head, rows, 2))


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


def reinforcement_text(found: Reinforcement) -> str:
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
            for row in found.top(5, str(part), gradient=gradient).itertuples():
                delta = f"Δ {row.delta:+.3f} [{row.delta_low:+.3f}, {row.delta_high:+.3f}]"
                lines.append(f"      {row.feature:<8}{delta:<30}{row.reinforcement:+.4f}  q {row.q:.4f}")
    return "\n".join([*lines, *(f"  {note}" for note in found.notes)])


def influence_text(found: Influence) -> str:
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
        for row in found.top(int(feature), 3).itertuples():
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

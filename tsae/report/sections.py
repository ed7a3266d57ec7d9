"""The report's sections below the first screen, as HTML. Everything that came from a file goes through `html_text`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from tsae.diff.result import FeatureDiff
from tsae.report import views
from tsae.report.findings import null_sentences, survival_sentences
from tsae.report.text import count, html_text, interval, number, percent, q_value
from tsae.rollouts.difficulty import found_how
from tsae.sae.quality.stability import FOUND_AGAIN

_STABILITY = (
    " Stability is the mean cosine of a feature's decoder direction with its matches in other seeds' SAEs. “Not found "
    f"again”: below {FOUND_AGAIN:g}, so that it may be of this one dictionary."
)
_MAX_OPPOSED, _MAX_PAIRS, _MAX_EXAMPLES = 12, 6, 12


def table(caption: str, head: Sequence[str], body: Iterable[Sequence[str]], *, numeric_from: int = 1) -> str:
    """A table of finished HTML cells; the first column heads its row, columns from `numeric_from` align right."""
    heads = "".join(f'<th scope="col"{_numeric(i, numeric_from)}>{cell}</th>' for i, cell in enumerate(head))
    lines = []
    for cells in body:
        first = f'<th scope="row">{cells[0]}</th>'
        rest = "".join(f"<td{_numeric(i, numeric_from)}>{cell}</td>" for i, cell in enumerate(cells[1:], start=1))
        lines.append(f"<tr>{first}{rest}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html_text(caption)}"><table>'
        f"<caption>{html_text(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _numeric(column: int, numeric_from: int) -> str:
    return ' class="n"' if column >= numeric_from else ""


def gates(diff: FeatureDiff, provenance: dict[str, str]) -> str:
    """Reconstruction, nulls, bands, SAE, versions."""
    info = diff.info
    readers = table(
        "Reconstruction per reader",
        ["reader", "run", "step", "trained on", "tokens", "left out", "variance explained", "active per token", "gate"],
        (
            [
                html_text(r["id"]),
                html_text(r.get("run") or "–"),
                html_text(r.get("step") if r.get("step") is not None else "–"),
                html_text(r.get("trained_on") or "–"),
                f"{r['n_tokens']:,}" if r.get("n_tokens") is not None else "–",
                f"{percent(r.get('outlier_share', 0.0))} %",
                "none" if r["fve"] is None else f"{r['fve']:.3f}",
                "–" if r.get("l0") is None else f"{r['l0']:.1f}",
                f'<strong class="warn">flagged ({why})</strong>' if (why := views.flag_reason(diff, r)) else "passed",
            ]
            for r in info["readers"]
        ),
        numeric_from=4,
    )
    facts = [
        ("Nulls", html_text(" ".join(null_sentences(diff)) or "Not computed.")),
        ("Controls", html_text(_controls_text(diff))),
        ("Bands", html_text(_bands_text(diff))),
        ("Statistics", html_text(_statistics_text(diff))),
        ("Temporal SAE", html_text(_sae_text(diff))),
        *([("Stability", html_text(f"{stable}."))] if (stable := views.stability_text(diff)) else []),
        ("Causality", html_text(_causality_text(diff))),
        (
            "Rollouts",
            f"<code>{html_text(info.get('rollouts', 'unknown'))}</code> (hash of problems, policies and token ids)",
        ),
        *([("Rollout log", looked)] if (looked := _second_look(diff)) else []),
        ("Computed with", html_text(_listed(info.get("versions", {})) or "unknown versions")),
        ("Written with", html_text(_listed(provenance))),
    ]
    listing = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts)
    return f"{readers}<dl>{listing}</dl>{_bands_by_step(diff)}"


def _bands_by_step(diff: FeatureDiff) -> str:
    """Problems of every band by the step at which they were asked, where the two cannot be told apart."""
    found = (diff.info.get("bands") or {}).get("confounded_with_step")
    if not found:
        return ""
    counts = {band: {int(step): n for step, n in row.items()} for band, row in found["table"].items()}
    steps = sorted({step for row in counts.values() for step in row})
    body = [[band, *(f"{counts[band].get(step, 0):,}" for step in steps)] for band in views.BANDS if band in counts]
    return table("Problems by band and training step", ["band", *(f"step {step}" for step in steps)], body)


def _controls_text(diff: FeatureDiff) -> str:
    if diff.confounds.empty:
        return "Not measured."
    if told := " ".join(survival_sentences(diff)):
        return told
    main = [len(diff.main_shift(run, discoveries=True)) for run in views.final_checkpoints(diff)]
    if any(main):
        return "Both sides of every shift found here read the same text, which no control can tell apart."
    return "Nothing was found to control."


def _causality_text(diff: FeatureDiff) -> str:
    tested = {feature for test in diff.info.get("causally_tested") or [] for feature in test["features"]}
    if not tested:
        return "Not causally tested. What a feature responds to is not thereby what it does."
    return f"{count(len(tested), 'feature')} tested below; all others are not causally tested."


def _second_look(diff: FeatureDiff) -> str:
    """What the rollout log says twice, and whether it says the same."""
    checks = diff.info.get("second_look") or {}
    if not any(check["compared"] for check in checks.values()):
        return "What it says could not be compared with anything else that it says." if checks else ""
    wrong = [name for name, check in checks.items() if check["disagrees"]]
    verdict = (
        f'<strong class="warn">does not agree with itself ({html_text(", ".join(wrong))})</strong>'
        if wrong
        else "agrees with itself where that can be compared"
    )
    lines = "".join(f"<li>{html_text(check['line'])}</li>" for check in checks.values())
    return f"The log that was imported {verdict}.<ul>{lines}</ul>"


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _bands_text(diff: FeatureDiff) -> str:
    bands = diff.info.get("bands")
    if not bands:
        return "The problems have no bands."
    who = bands.get("reference") or "all policies together"
    shares = bands.get("quantiles")
    how = f" (its easiest {shares['easy']:.0%} and hardest {shares['hard']:.0%} of the problems)" if shares else ""
    return (
        f"Pass rate of {who}, easy ≥ {bands['easy']:.3g}, hard ≤ {bands['hard']:.3g}{how}, medium between; "
        f"{found_how(bands)}."
    )


def _statistics_text(diff: FeatureDiff) -> str:
    c, left_out = diff.info["config"], views.without_span_text(diff)
    without = f" Trajectories without such a token are left out (of those read by {left_out})." if left_out else ""
    return (
        f"Mean activation over the {c['span'].replace('_', ' ')} tokens of a trajectory; the unit is the problem."
        f"{without} Δ is a difference in "
        f"standard deviations of the feature over base trajectories{_pooled_text(diff)}. A feature moved if |Δ| is "
        f"larger than {c['minimum_effect']:g}, not if it merely differs. {c['confidence']:.0%} bootstrap intervals "
        f"({c['n_bootstrap']:,} draws), permutation tests ({c['n_permutations']:,}), Benjamini–Hochberg at "
        f"q = {c['q']:g} over the features of a contrast. Features active in fewer than {c['min_problems']} problems "
        "of a contrast are not tested."
    )


def _pooled_text(diff: FeatureDiff) -> str:
    table = diff.shifts
    n = int(table.feature[(table.scale == "pooled") & (table.kind == "shift")].nunique())
    return f" (of {count(n, 'feature')} that the base hardly has, over those of base and run together)" if n else ""


def _sae_text(diff: FeatureDiff) -> str:
    sae = diff.info["sae"]
    known = {
        "site": "site {}",
        "d_model": "width of the model {}",
        "d_sae": "{} latents",
        "d_high": "of them {} high-level",
        "k": "k = {}",
        "temporal_weight": "temporal weight {}",
        "temperature": "temperature {}",
        "aux_weight": "AuxK weight {:g}",
    }
    return ", ".join(text.format(sae[name]) for name, text in known.items() if name in sae)


def behaviour_details(diff: FeatureDiff) -> str:
    """The behaviours' numbers, a row a checkpoint and band."""
    names = views.behaviours_of(diff)
    if not names:
        return ""
    data = diff.behaviours
    body = []
    for policy in data.policy.unique():
        for band in ["all", *[b for b in views.BANDS if (data.band == b).any()]]:
            cells = [views.behaviour(diff, policy, band, name) for name in names]
            present = next((c for c in cells if c is not None), None)
            if present is None:
                continue
            row = [html_text(policy), band, f"{present.n_problems:,}", f"{present.n_trajectories:,}"]
            for name, cell in zip(names, cells, strict=True):
                row.append("–" if cell is None else _behaviour_cell(cell, views.is_share(diff, name)))
            body.append(row)
    head = ["policy", "band", "problems", "responses", *[html_text(views.behaviour_name(n)) for n in names]]
    return folded("Numbers", table("Behaviours: mean over problems, with intervals", head, body, numeric_from=2))


def _behaviour_cell(cell: pd.Series, share: bool) -> str:
    if share:
        return f"{percent(cell['mean'])} % <small>[{percent(cell.low)}, {percent(cell.high)}]</small>"
    return f"{number(cell['mean'])} <small>{interval(cell.low, cell.high, like=cell['mean'])}</small>"


def opposed(diff: FeatureDiff) -> tuple[str, list[int]]:
    """Tables of the pairs of runs with most opposed features; the clearest features of the first pair, to draw."""
    pairs = views.opposed_pairs(diff)
    if not pairs:
        return '<p class="quiet">No feature was raised by one run and lowered by another.</p>', []
    runs = views.final_checkpoints(diff)
    shifts = {run: views.main_shift(diff, run) for run in runs}
    shares = views.has_classes(diff)
    parts: list[str] = []
    drawn: list[int] = []
    for up, down, found in pairs[:_MAX_PAIRS]:
        shown = found.head(_MAX_OPPOSED)
        more = f", the {len(shown)} clearest" if len(shown) < len(found) else ""
        body = [
            [
                feature_link(int(feature)),
                description(row),
                *[shift_cell(shifts[run], int(feature), diff.q) for run in runs],
                _confound_cell(row),
            ]
            for feature, row in shown.iterrows()
        ]
        caption = f"Raised by {up}, lowered by {down}: {count(len(found), 'feature')}{more}"
        head = ["feature", "responds to", *[html_text(run) for run in runs], "confounds"]
        content = table(caption, head, body, numeric_from=2)
        first_pair = {up, down} == {pairs[0][0], pairs[0][1]}
        parts.append(content if first_pair else folded(html_text(caption), content))
        if first_pair:
            drawn += [int(str(f)) for f in found.head(_MAX_OPPOSED // 2).index]
    legend = (
        '<p class="quiet">Δ with interval and q (▲ raised, ▼ lowered, · not moved)'
        + ("; the percentage is the share of a feature's activation that falls on the named tokens" if shares else "")
        + ". “One token”: at least half of the activation is on a single token, so it may be lexical. “Tracks length”: "
        "across the base's responses it correlates with their length (|ρ| ≥ 0.7), so a change of length alone would "
        "move it." + (_STABILITY if views.has_stability(diff) else "") + "</p>"
    )
    rest = f"<p class='quiet'>{len(pairs) - _MAX_PAIRS} more pairs are left out.</p>" if len(pairs) > _MAX_PAIRS else ""
    return legend + "".join(parts) + rest, drawn


def shift_counts(diff: FeatureDiff) -> str:
    """How many features moved, by part, band and outcome, for every checkpoint; refused contrasts with their reason."""
    data = diff.contrasts
    if data.empty or not (data.kind == "shift").any():
        return '<p class="quiet">No checkpoint was compared with the base.</p>'
    data = data[data.kind == "shift"]
    columns = list(dict.fromkeys(zip(data.band, data.outcome, strict=True)))
    # "all" alone reads as everything; a single key is enough elsewhere.
    names = [
        band if outcome == "all" else outcome if band == "all" else f"{band}, {outcome}" for band, outcome in columns
    ]
    body = []
    for (checkpoint, part), group in data.groupby(["checkpoint", "part"], sort=False):
        cells = {(r.band, r.outcome): r for r in views.records(group)}
        body.append(
            [
                html_text(checkpoint),
                views.PART_NAMES.get(str(part), html_text(part)),
                *[_count_cell(cells.get(key)) for key in columns],
            ]
        )
    return folded(
        "How many features moved in every contrast",
        table(
            f"Features moved ({views.least_text(diff)}), of features tested; below, how many differ at all",
            ["checkpoint", "shift", *names],
            body,
            numeric_from=2,
        ),
    ) + _refused(data)


def outcome_tables(diff: FeatureDiff, *, n: int = 5) -> str:
    """Success − failure: counts for every checkpoint and band, and the clearest features."""
    data = diff.contrasts
    data = data[data.kind == "outcome"] if not data.empty else data
    if data.empty:
        return '<p class="quiet">No trajectory has a known outcome.</p>'
    counts = table(
        f"Success − failure within problem: features that differ by {views.least_text(diff)}",
        ["reader", "band", "problems with both outcomes", "left out", "features tested", "differ so", "null", "at all"],
        (
            [
                html_text(r.checkpoint),
                html_text(r.band),
                f"{r.n_problems:,}",
                f"{r.n_left_out:,}",
                "–" if r.note else f"{r.n_tested:,}",
                "refused" if r.note else f"{r.n_discoveries:,}",
                "–" if math.isnan(r.n_null) else number(r.n_null),
                "–" if r.note else f"{r.n_differs:,}",
            ]
            for r in views.records(data)
        ),
        numeric_from=2,
    )
    parts = [_refused(data)]
    for checkpoint in dict.fromkeys(data.checkpoint):
        body = []
        for band in ["all", *views.bands_of(diff)]:
            found = views.strongest(views.rows(diff, kind="outcome", checkpoint=checkpoint, band=band), diff.q, n)
            for feature, row in found.iterrows():
                body.append(
                    [
                        band,
                        feature_link(int(str(feature))),
                        description(row),
                        number(row["mean"]),
                        number(row.reference),
                        shift_cell(found, int(str(feature)), diff.q),
                        _confound_cell(row),
                    ]
                )
        if body:
            head = ["band", "feature", "responds to", "successes", "failures", "Δ", "confounds"]
            caption = f"{checkpoint}: clearest features by band"
            parts.append(folded(html_text(caption), table(caption, head, body, numeric_from=3)))
    return folded("Counts for every reader and band", counts) + "".join(parts)


def example_features(diff: FeatureDiff, opposed_features: list[int]) -> list[int]:
    """Features worth examples: a few that runs moved apart, then each run's and outcome's strongest in turn."""
    half = max(len(opposed_features) // 2, 2)
    # The clearest of either direction.
    queues = [[*opposed_features[:2], *opposed_features[half : half + 2]]]
    for run in views.final_checkpoints(diff):
        queues.append([int(f) for f in views.strongest(views.main_shift(diff, run), diff.q, _MAX_EXAMPLES).index])
    for band in ["all", *views.bands_of(diff)]:
        found = views.rows(diff, kind="outcome", checkpoint=diff.base, band=band)
        queues.append([int(f) for f in views.strongest(found, diff.q, _MAX_EXAMPLES).index])
    chosen: dict[int, None] = dict.fromkeys(queues[0])
    for rank in range(_MAX_EXAMPLES):
        for queue in queues[1:]:
            if rank < len(queue) and len(chosen) < _MAX_EXAMPLES:
                chosen.setdefault(queue[rank])
    return list(chosen)


def feature_link(feature: int) -> str:
    """The feature's number; the page's script links it to its card."""
    return f'<span class="feature" data-feature="{feature}">{feature}</span>'


def linked(diff: FeatureDiff, sentence: str) -> str:
    """A finding's sentence as HTML; the numbers of features that it names, and that have a card, are links to these."""

    def is_named(match: re.Match[str]) -> bool:
        feature = int(match.group())
        if feature not in diff.features.index:
            return False
        # Its description follows, or it begins a test (`views.test_name`).
        before, after = sentence[: match.start()], sentence[match.start() :]
        return after.startswith(views.named(diff, feature)) or before == "Feature "

    parts, done = [], 0
    for match in filter(is_named, re.finditer(r"(?<!\S)[0-9]+(?= )", sentence)):
        parts += [html_text(sentence[done : match.start()]), feature_link(int(match.group()))]
        done = match.end()
    return "".join(parts) + html_text(sentence[done:])


def description(row: pd.Series) -> str:
    """What a feature responds to, for a cell."""
    share = f"{100 * row.share:.0f} %, " if "share" in row else ""
    stable = f", stability {number(row.stability)}" if "stability" in row else ""
    return f"<bdi>{html_text(row.responds_to)}</bdi> <small>{share}{html_text(row.group)}-level{stable}</small>"


def shift_cell(shifts: pd.DataFrame, feature: int, q: float) -> str:
    """A feature's Δ with direction, interval and q."""
    if feature not in shifts.index:
        return '<small class="quiet">not tested</small>'
    row = views.record(shifts, feature)
    kind = ("up" if row.difference > 0 else "down") if row.q <= q else "still"
    arrow = {"up": "▲", "down": "▼", "still": "·"}[kind]
    return (
        f'<span class="{kind}">{arrow} {number(row.delta, sign=True)}</span> '
        f"<small>{interval(row.delta_low, row.delta_high, sign=True, like=row.delta)} q {q_value(row.q)}</small>"
    )


def _confound_cell(row: pd.Series) -> str:
    words = views.confounds(row)
    if not words:
        return ""
    numbers = {
        "one token": f"{row.top_token_share:.0%} on its top token",
        "tracks length": f"ρ {number(row.length_correlation, sign=True)} with response length",
        "not found again": f"matched cosine {number(row.get('stability', math.nan))} with other seeds",
    }
    return ", ".join(f'<span class="warn" title="{html_text(numbers[w])}">{w}</span>' for w in words)


def _count_cell(cell: object) -> str:
    if cell is None:
        return "–"
    if getattr(cell, "note", ""):
        return "refused"
    row: Any = cell
    null = "" if math.isnan(row.n_null) else f", null {number(row.n_null)}"
    return f"{row.n_discoveries:,} <small>of {row.n_tested:,}{null}<br>{row.n_differs:,} differ</small>"


def _refused(data: pd.DataFrame) -> str:
    refused = data[data.note != ""]
    if refused.empty:
        return ""
    body = (
        [
            html_text(r.checkpoint),
            views.PART_NAMES.get(r.part, "success − failure"),
            html_text(r.band),
            html_text(r.outcome),
            html_text(r.note),
        ]
        for r in views.records(refused)
    )
    head = ["checkpoint", "contrast", "band", "outcome", "why"]
    caption = f"{count(len(refused), 'contrast')} refused"
    return folded(caption, table(f"{caption}, with the reason", head, body, numeric_from=9))


def folded(summary: str, content: str) -> str:
    """Content that opens on a click; both are finished HTML."""
    return f"<details><summary>{summary}</summary>{content}</details>"

"""Sections of what stands beside the shifts: families, interactions, plain directions, predictions, steps, causes.

Each is finished HTML, empty where the diff holds nothing of the kind, so that the page can leave its section out.
"""

from __future__ import annotations

import pandas as pd

from tsae.base.intervals import too_few
from tsae.diff.controls.baselines import WAYS
from tsae.diff.dynamics import FLAT, KINDS
from tsae.diff.result import FeatureDiff
from tsae.report import views
from tsae.report.evidence_figures import CONDITIONS
from tsae.report.sections import description, feature_link, folded, shift_cell, table
from tsae.report.text import count, html_text, interval, number, q_value

_MAX_TOP = 5


def families(diff: FeatureDiff) -> str:
    """Shift of every family by run and band."""
    data = diff.families
    if data.empty:
        return ""
    families = list(dict.fromkeys(data.family))
    body = []
    for (checkpoint, band), rows in data.groupby(["checkpoint", "band"], sort=False):
        by_family = {r.family: r for r in views.records(rows)}
        cells = [_effect(by_family[f], diff.q) if f in by_family else "–" for f in families]
        body.append([html_text(checkpoint), html_text(band), *cells])
    sizes = {r.family: r.n_features for r in views.records(data)}
    head = ["run", "band", *[f"{html_text(f)} <small>({sizes[f]} features)</small>" for f in families]]
    caption = "Δ of families: of the mean of their features, each in its standard deviation over base trajectories"
    return folded("Numbers", table(caption, head, body, numeric_from=2))


def _effect(row: object, q: float) -> str:
    note = getattr(row, "note", "")
    if note:
        return f'<small class="quiet">{html_text(note)}</small>'
    change, low, high, found = (float(getattr(row, name)) for name in ("delta", "delta_low", "delta_high", "q"))
    kind = ("up" if change > 0 else "down") if found <= q else "still"
    arrow = {"up": "▲", "down": "▼", "still": "·"}[kind]
    return (
        f'<span class="{kind}">{arrow} {number(change, sign=True)}</span> '
        f"<small>{interval(low, high, sign=True, like=change)} q {q_value(found)}</small>"
    )


def interactions(diff: FeatureDiff) -> str:
    """Whether success − failure is another in one band than in another, as the base reads its responses."""
    data = diff.contrasts
    data = data[(data.kind == "interaction") & (data.checkpoint == diff.base)] if len(data) else data
    if data.empty:
        return ""
    counts, found = [], []
    for r in views.records(data):
        bands = html_text(r.band.replace("-", " − "))
        numbers = ["–", "refused"] if r.note else [f"{r.n_tested:,}", f"{r.n_discoveries:,}"]
        counts.append([bands, f"{r.n_problems:,}", *numbers])
        rows = views.rows(diff, kind="interaction", checkpoint=diff.base, band=r.band)
        for feature, row in views.strongest(rows, diff.q, _MAX_TOP).iterrows():
            cells = [number(row["mean"], sign=True), number(row.reference, sign=True)]
            feature_cells = [feature_link(int(str(feature))), description(row)]
            found.append([bands, *feature_cells, *cells, shift_cell(rows, int(str(feature)), diff.q)])
    parts = [
        table(
            f"Bands whose outcome effects differ by {views.least_text(diff)}",
            ["bands", "problems", "features tested", "differ"],
            counts,
        )
    ]
    if found:
        head = ["bands", "feature", "responds to", "effect in the first", "in the second", "Δ"]
        parts.append(table("Clearest features", head, found, numeric_from=3))
    told = (
        '<p class="quiet">Is success − failure within problem another in one band than in another? Read by '
        f"{html_text(diff.base)}.</p>"
    )
    return folded("Outcome effects that differ between bands", told + "".join(parts))


def insertion(diff: FeatureDiff) -> str:
    """Whether a feature's top tokens fire it where they are put into other contexts."""
    data = diff.insertion
    if data is None or data.empty:
        return ""
    strings = diff.info.get("token_strings", {})
    body = []
    for r in views.records(data):
        tokens = " ".join(f"<code>{html_text(strings.get(str(i), f'#{i}'))}</code>" for i in r.top_ids)
        kept = "–"
        if not pd.isna(r.kept):
            kept = f"{number(r.kept)} <small>{interval(r.kept_low, r.kept_high, like=r.kept)}</small>"
        cells = [html_text(r.reader), feature_link(int(r.feature)), tokens, kept]
        body.append([*cells, "–" if pd.isna(r.kept) else number(r.control / r.typical), html_text(r.verdict)])
    told = (
        '<p class="quiet">The top tokens of a feature are put where it is silent. Kept: the part of its usual '
        "activation that they bring there; control: what tokens of like frequency bring.</p>"
    )
    head = ["reader", "feature", "tokens", "kept", "control", "verdict"]
    return folded("Tokens or contexts", told + table("Top tokens inserted elsewhere", head, body, numeric_from=3))


def baselines(diff: FeatureDiff) -> str:
    """AUROC of plain directions beside that of features."""
    data = diff.baselines
    if data is None or data.empty:
        return ""
    body = []
    for (kind, checkpoint), rows in data.groupby(["kind", "checkpoint"], sort=False):
        by_way = {r.way: r for r in views.records(rows)}
        what = f"success − failure, read by {checkpoint}" if kind == "outcome" else f"shift of {checkpoint}"
        cells = []
        for way in WAYS:
            r = by_way.get(way)
            if r is None or r.note:
                cells.append("–")
            else:
                cells.append(f"{r.auroc:.2f} <small>[{r.low:.2f}, {r.high:.2f}]</small>")
        body.append([html_text(what), *cells])
    told = (
        '<p class="quiet">How often a trajectory of one side scores above one of the other side of the same problem '
        "(AUROC, ½ is chance), on problems that were not used to choose or fit. Where a plain direction does no worse "
        "than features, features are a reading of it and no discovery beyond it.</p>"
    )
    caption = "Held-out AUROC within problem, with interval"
    return folded("Plain directions beside the best features", told + table(caption, ["contrast", *WAYS], body))


def predictions(diff: FeatureDiff) -> str:
    """What the base's rollouts reinforce, and how far that came true."""
    data = diff.predicted
    if data is None or data.empty:
        return ""
    body = []
    for r in views.records(data[data.checkpoint.isin(views.final_checkpoints(diff))]):
        where = [
            html_text(r.checkpoint),
            r.part,
            r.gradient,
            r.predicted_on + (" *" if r.matched else ""),
            r.realised_on,
        ]
        if r.note:
            body.append([*where, f'<small class="quiet">{html_text(r.note)}</small>', "–", "–", "–"])
            continue
        rho = f"{number(r.rho, sign=True)} <small>{interval(r.low, r.high, sign=True)}</small>"
        body.append([*where, rho, q_value(r.p), number(r.ceiling), number(r.rho_halves, sign=True)])
    head = ["run", "part", "gradient", "predicted on", "realised on"]
    head += ["rank correlation", "p", "ceiling", "separate halves"]
    parts = [table("Predicted against realised shifts; * what the run was trained on", head, body, numeric_from=5)]
    if diff.reinforcement is not None:
        parts.append(_reinforced(diff, diff.reinforcement))
    told = (
        '<p class="quiet">Natural policy gradient on a group of rollouts changes a feature, to first order, by the '
        "covariance of advantage and activation within the group, for a policy that could move every response on its "
        "own; the vanilla gradient weighs every response by its probability, too. Summed over the rollouts of "
        f"{html_text(diff.base)} that predicts a shift for every feature, with no look at any run; here its ranks are "
        "set against those of the shifts that runs realised. The ceiling is what noise alone would leave of a perfect "
        "prediction. Ranks do not test causes.</p>"
    )
    return told + folded("Numbers", "".join(parts))


def _reinforced(diff: FeatureDiff, data: pd.DataFrame) -> str:
    parts = []
    for gradient, rows in data[data["by"] == "all"].groupby("gradient", sort=False):
        found = rows[rows.q <= diff.q]
        top = found.loc[found.delta.abs().sort_values(ascending=False, kind="stable").index].head(2 * _MAX_TOP)
        body = [
            [
                feature_link(int(r.feature)),
                description(diff.features.loc[r.feature]),
                f"{number(r.delta, sign=True)} "
                f"<small>{interval(r.delta_low, r.delta_high, sign=True, like=r.delta)}</small>",
                q_value(r.q),
            ]
            for r in views.records(top)
        ]
        if not body:
            parts.append(f'<p class="quiet">No feature is clearly reinforced by the {gradient} gradient.</p>')
            continue
        caption = (
            f"Features that the {gradient} gradient on the base's rollouts reinforces: {count(len(found), 'feature')}"
        )
        head = ["feature", "responds to", "covariance with advantage, in the feature's standard deviations", "q"]
        parts.append(table(f"{caption}, the largest", head, body, numeric_from=2))
    return "".join(parts)


def step_features(diff: FeatureDiff, n: int = 6) -> list[int]:
    """Features to draw along steps: the largest shifts in standard deviations, of every run in turn."""
    data = diff.dynamics
    if data is None or data.empty:
        return []
    clear = data[data.kind != FLAT]
    queues = []
    for _, rows in clear.groupby("run", sort=False):
        size = rows.groupby("feature").delta.agg(lambda d: d.abs().max()).sort_values(ascending=False, kind="stable")
        queues.append([int(feature) for feature in size.index[:n]])
    chosen: dict[int, None] = {}
    for rank in range(n):
        for queue in queues:
            if rank < len(queue) and len(chosen) < n:
                chosen.setdefault(queue[rank])
    return list(chosen)


def steps(diff: FeatureDiff) -> str:
    """How many features of each kind every run has, and when they set in."""
    data = diff.dynamics
    if data is None or data.empty:
        return ""
    counts, onsets = [], []
    for run, rows in data.groupby("run", sort=False):
        last = rows[rows.step == rows.step.max()]
        kinds = last.kind.value_counts()
        saved = ", ".join(f"{step:g}" for step in sorted(rows.step.unique()))
        counts.append([html_text(run), html_text(saved), *(f"{int(kinds.get(kind, 0)):,}" for kind in KINDS)])
        strong = last[last.kind != FLAT]
        strong = strong.loc[strong.delta.abs().sort_values(ascending=False, kind="stable").index].head(_MAX_TOP)
        onsets += [
            [
                html_text(run),
                feature_link(int(r.feature)),
                description(diff.features.loc[r.feature]),
                html_text(r.kind),
                f"{r.onset:g} <small>[{r.onset_low:g}, {r.onset_high:g}]</small>",
                f"{number(r.shift, sign=True)} <small>{interval(r.low, r.high, sign=True, like=r.shift)}</small>",
            ]
            for r in views.records(strong)
        ]
    told = (
        '<p class="quiet">Emerging: hardly there in the base; growing: there already; fading: below the base at the '
        "end; passing: moved at an earlier step, but not found at the last; flat: not found to move. Onset: the first "
        "saved step with half of the shift, with its interval over problems. Another seed of training could go another "
        "way.</p>"
    )
    notes = [f"{run}: {note}." for run, note in (diff.info.get("no_dynamics") or {}).items()]
    noted = f'<p class="quiet">{html_text(" ".join(notes))}</p>' if notes else ""
    parts = [table("Features by kind", ["run", "steps", *KINDS], counts, numeric_from=2)]
    if onsets:
        head = ["run", "feature", "responds to", "kind", "onset", "shift at the last step"]
        parts.append(table("Clearest features", head, onsets, numeric_from=4))
    return told + noted + folded("Numbers", "".join(parts))


def causal(diff: FeatureDiff) -> str:
    """What interventions changed, beside their controls."""
    tests = diff.info.get("causally_tested") or []
    if not tests:
        return (
            '<p class="quiet">Nothing was tested causally: what a feature responds to is not thereby what it does. '
            "Test features with <code>tsae causal</code> and name its folders with <code>tsae report --causal</code>."
            "</p>"
        )
    parts = []
    for test in tests:
        links = ", ".join(feature_link(int(feature)) for feature in test["features"])
        sentences = "".join(
            f"<p>{html_text(test['summaries'][name])}</p>" for name in views.behaviour_order(test["summaries"])[:2]
        )
        rows = pd.DataFrame(test.get("changes") or [])
        shown = _changes(rows) if len(rows) else ""
        name = views.test_name(test)
        parts.append(
            folded(
                html_text(name[0].upper() + name[1:]),
                f'<p class="quiet">Features {links}; {count(test["n_problems"], "problem")}.</p>{sentences}{shown}',
            )
        )
    return "".join(parts)


def _changes(rows: pd.DataFrame) -> str:
    names = views.behaviour_order(rows.behaviour)
    cells = {(r.condition, r.behaviour): r for r in views.records(rows)}
    body = []
    for condition, word in CONDITIONS.items():
        if not any((condition, name) in cells for name in names):
            continue
        line = [word]
        for name in names:
            r = cells.get((condition, name))
            ends = "" if r is None else interval(r.change_low, r.change_high, sign=True, like=r.change)
            if r is not None and pd.isna(r.change_low):
                ends = too_few(int(r.n_paired))
            line.append("–" if r is None else f"{number(r.change, sign=True)} <small>{ends}</small>")
        body.append(line)
    head = ["edited", *[html_text(views.behaviour_name(name)) for name in names]]
    return table("Change against no edit, paired over problems", head, body)

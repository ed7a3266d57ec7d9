"""The page: one HTML file that loads nothing.

The content security policy forbids every request and every script but ours and Plotly's, by hash. Text from files is
escaped on its way in; if some of it ever were not, it still could not run. What the explorer shows comes as packed JSON
and is written as text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from tsae.diff.result import FeatureDiff
from tsae.report import evidence, figures, sections, views
from tsae.report.explorer import explorer
from tsae.report.figures.overview import overview, overview_caption
from tsae.report.figures.steps import steps_figure
from tsae.report.findings import Finding, findings, lead
from tsae.report.noise import noise_caption, noise_figure, noise_html
from tsae.report.packing import packed_plotly
from tsae.report.text import html_text, script_json, shortened

_TITLE = "What changed inside the model"


def render(diff: FeatureDiff, title: str | None = None) -> str:
    """The report as one string of HTML; the same diff gives the same string."""
    title, diff = title or _TITLE, _readable(diff)
    drawn: dict[str, go.Figure | None] = {}
    parts: dict[str, str] = {}
    body = _body(diff, title, drawn, parts)
    return document(title, body, drawn, parts)


def document(title: str, body: str, drawn: dict[str, go.Figure | None], parts: Mapping[str, str] | None = None) -> str:
    """A whole page of finished HTML, whose elements of class plot name the figures to draw in them.

    Args:
        title: of the page.
        body: its HTML.
        drawn: figures by name.
        parts: packed data of the explorer by name; without it the page has none.
    """
    data = script_json({name: _plain(figure) for name, figure in drawn.items() if figure is not None})
    modules = (
        ["data.js", "figures/fit.js", "report.js"]
        if parts is None
        else ["data.js", "card.js", "explorer.js", "figures/fit.js", "report.js"]
    )
    ours = "\n".join(map(_resource, modules)) + ("" if parts is None else "startExplorer();\n")
    plotly = get_plotlyjs()
    packs = "".join(
        f'<script type="text/plain" id="part-{name}">{text}</script>\n' for name, text in (parts or {}).items()
    )
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {_digest(plotly)} {_digest(ours)}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html_text(title)}</title><style>{_resource('report.css')}</style></head>\n"
        f'<body>{body}<script type="application/json" id="figures">{data}</script>\n{packs}'
        f'<script type="text/plain" id="plotly">{packed_plotly()}</script>\n<script>{ours}</script></body></html>\n'
    )


def _readable(diff: FeatureDiff) -> FeatureDiff:
    """The diff with descriptions and top tokens of a length that tables can hold."""
    features = diff.features.assign(
        responds_to=[shortened(str(text), 80) for text in diff.features.responds_to],
        top_tokens=[[shortened(str(token), 40) for token in tokens] for tokens in diff.features.top_tokens],
    )
    return replace(diff, features=features)


def _body(diff: FeatureDiff, title: str, drawn: dict[str, go.Figure | None], packs: dict[str, str]) -> str:
    opposed_tables, opposed_features = sections.opposed(diff)
    runs = views.final_checkpoints(diff)
    behaviours = figure_block(
        drawn,
        "behaviours-figure",
        figures.behaviour_figure(diff),
        "Mean over problems with intervals; colour and shape mark the band. The table below has the numbers.",
    )
    parts = [
        (
            "gates",
            "Before you believe it",
            sections.gates(diff, _written_with())
            + figure_block(drawn, "noise-figure", noise_figure(diff), noise_caption(diff))
            + (noise_html(diff) if runs else ""),
        ),
        (
            "behaviours",
            "Behaviour by band",
            behaviours + (sections.behaviour_details(diff) or '<p class="quiet">No behaviours were measured.</p>'),
        ),
    ]
    if runs:
        parts.append(("shifts", "What moved, by run, band and part", _shifts(diff, drawn)))
    if len(runs) > 1:
        caption = "".join(
            f"Shift in every run of the features that {one} and {other} moved apart most clearly."
            for one, other, _ in views.opposed_pairs(diff)[:1]
        )
        picture = figures.opposed_figure(diff, opposed_features)
        parts.append(
            (
                "opposed",
                "Moved in opposite directions",
                figure_block(drawn, "opposed-figure", picture, caption) + opposed_tables,
            )
        )
    if families := evidence.families(diff):
        caption = (
            "Mean shift of a family's features, each in units of its standard deviation over trajectories, with its "
            "interval."
        )
        picture = figures.family_figure(diff)
        parts.append(
            ("families", "Families of features", figure_block(drawn, "family-figure", picture, caption) + families)
        )
    parts.append(
        (
            "outcomes",
            "Success against failure",
            figure_block(
                drawn,
                "outcomes-figure",
                figures.outcome_figure(diff),
                f"Success − failure within problem, as {diff.base} reads the responses: the clearest "
                "features of every band. Problems whose responses all agree carry no such contrast and are left out; "
                "how many is in the table.",
            )
            + sections.outcome_tables(diff)
            + evidence.interactions(diff)
            + evidence.baselines(diff),
        )
    )
    if predicted := evidence.predictions(diff):
        caption = (
            "Rank correlation over features of the shift that rewards predict with the one that came, over all "
            "problems, with interval; the grey line is the ceiling that noise sets."
        )
        picture = figures.prediction_figure(diff)
        told = figure_block(drawn, "prediction-figure", picture, caption) + predicted
        parts.append(("predicted", "Predicted against realised", told))
    if along := evidence.steps(diff):
        caption = (
            "Along the steps of every run, with intervals: accuracy, and the shift of the features that moved most."
        )
        picture = steps_figure(diff, evidence.step_features(diff))
        parts.append(("steps", "Along the steps", figure_block(drawn, "steps-figure", picture, caption) + along))
    caption = (
        "Change of the share of responses against no edit, paired over problems, with interval: the tested features "
        "(diamond) beside their controls (rings)."
    )
    picture = figures.causal_figure(diff)
    parts.append(
        ("causal", "Tested causally", figure_block(drawn, "causal-figure", picture, caption) + evidence.causal(diff))
    )
    explored = explorer(diff, sections.example_features(diff, opposed_features))
    packs |= explored.parts
    parts.append(("explorer-section", "All features", explored.frame))
    links = "".join(f'<a href="#{id}">{heading}</a>' for id, heading, _ in parts)
    rest = "".join(
        f'<section id="{id}" aria-labelledby="{id}-h"><h2 id="{id}-h">{heading}</h2>{content}</section>'
        for id, heading, content in parts
    )
    return (
        f"{_first_screen(diff, title, drawn)}<nav aria-label='Sections'>{links}</nav><main>{rest}</main>"
        "<noscript><p class='warn'>Figures need JavaScript; the tables hold the same numbers.</p></noscript>"
    )


def _first_screen(diff: FeatureDiff, title: str, drawn: dict[str, go.Figure | None]) -> str:
    found = findings(diff)
    # Beside the picture stand the sentences on the runs that it shows; where there are none, all but the gates.
    beside = [f for f in found if f.checkpoint or f.warns] or found[:-1]
    spoken = " ".join(f"{f.heading}: {' '.join(f.sentences)}" for f in found)
    picture = overview(diff)
    drawn["overview"] = picture
    drawn["overview-narrow"] = overview(diff, columns=1)
    figure = (
        '<p class="quiet">Nothing moved: there is no picture to draw.</p>'
        if picture is None
        else '<figure class="overview"><div class="plot" role="img" data-figure="overview" '
        f'data-narrow="overview-narrow" style="min-height:{int(picture.layout.height)}px" '
        f'aria-label="{html_text(spoken)}"></div>'
        f"<figcaption>{html_text(overview_caption(diff))}</figcaption></figure>"
    )
    return (
        f'<header><h1>{html_text(title)}</h1><p class="lead">{html_text(lead(diff))}</p></header>'
        f'<div class="first">{_findings(diff, beside, "Findings", "beside")}{figure}'
        f"{_findings(diff, [f for f in found if f not in beside], 'Further findings', 'below')}</div>"
    )


def _findings(diff: FeatureDiff, found: list[Finding], label: str, place: str) -> str:
    items = "".join(_finding(diff, finding) for finding in found)
    return f'<div class="findings {place}" role="list" aria-label="{label}">{items}</div>' if found else ""


def _finding(diff: FeatureDiff, finding: Finding) -> str:
    note = f" <small>{html_text(finding.note)}</small>" if finding.note else ""
    sentences = "".join(f"<p>{sections.linked(diff, sentence)}</p>" for sentence in finding.sentences)
    return (
        f'<div class="finding" role="listitem"><h2><bdi>{html_text(finding.heading)}</bdi>{note}'
        f'<a href="#{finding.evidence}" aria-label="Evidence: {html_text(finding.heading)}">evidence</a></h2>'
        f"{sentences}</div>"
    )


def _shifts(diff: FeatureDiff, drawn: dict[str, go.Figure | None]) -> str:
    by_band = figure_block(
        drawn,
        "bands-figure",
        figures.band_figure(diff),
        "Δ of each run's most moved features, in standard deviations over base trajectories: orange raised, blue "
        "lowered, a dot where it did not move, blank where it was not tested. Success and failure count only such "
        "responses.",
    )
    parts = figure_block(
        drawn,
        "decomposition-figure",
        figures.decomposition_figure(diff),
        "Total shift = policy part (the base reads what the run writes, against what the base writes) + representation "
        "part (the run reads its own responses, against the base reading them). The diamond is the total.",
    )
    spread = figure_block(
        drawn,
        "spread-figure",
        figures.spread_figure(diff),
        "Every tested feature, by how active it is and how far it moved; a click leads to its card."
        + figures.thinned_text(diff),
    )
    return f"{spread}{by_band}{parts}{sections.shift_counts(diff)}{evidence.insertion(diff)}"


def figure_block(drawn: dict[str, go.Figure | None], name: str, figure: go.Figure | None, caption: str) -> str:
    if figure is None:
        return ""
    drawn[name] = figure
    return (
        '<figure><div class="scroll" tabindex="0" role="region" aria-label="Figure">'
        f'<div class="plot" role="img" data-figure="{name}" style="min-height:{int(figure.layout.height)}px" '
        f'aria-label="{html_text(caption)}"></div></div>'
        f"<figcaption>{html_text(caption)}</figcaption></figure>"
    )


def _plain(figure: go.Figure) -> dict[str, object]:
    content = json.loads(figure.to_json())
    return {"data": content["data"], "layout": content["layout"]}


def _written_with() -> dict[str, str]:
    found = {}
    for package in ("tsae", "plotly"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _resource(name: str) -> str:
    return files("tsae.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode()}'"

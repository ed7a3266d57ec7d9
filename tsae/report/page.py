"""The report of a feature diff as one HTML file that opens with no network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup

from tsae.attribution.attribution import Attribution
from tsae.claims.run_claims import ONE_RUN, Claims
from tsae.diff.feature_diff import FeatureDiff
from tsae.report import tables
from tsae.report.attribution import attributed, pushed, statement
from tsae.report.claims import HEADING, expected, told_claims
from tsae.report.document import GLOSSARY, macro, packed, render_page, target, write_page, written_with
from tsae.report.examples import side_by_side
from tsae.report.explorer import explorer
from tsae.report.figures import checks, features
from tsae.report.figures.overview import overview, overview_caption
from tsae.report.story import facts, gates
from tsae.report.story.findings import NEXT, findings, lead
from tsae.report.story.statements import Statement, noise_text, predictions, step_features, tests, with_stand_in
from tsae.report.text import capitalised, shortened, visible
from tsae.rollouts.bands import bands_label
from tsae.sae.quality.stability import FOUND_AGAIN

_TITLE = "What changed inside the model"
_MAX_EXAMPLES = 12


def write_report(
    diff: FeatureDiff,
    path: str | Path,
    *,
    title: str | None = None,
    attribution: Attribution | None = None,
    claims: Claims | None = None,
) -> Path:
    """Write the report.

    Args:
        diff: with its `source` the report shows examples.
        path: the .html file; its folder is made.
        title: of the page; by default the one that the run gave its diff.
        attribution: of the run: the report then says which samples did that.
        claims: of the run: the report then says what the literature would expect.

    Raises:
        TsaeError: where the file cannot be written, or the claims are of other rollouts.
    """
    path = target(path)  # before the work
    return write_page(path, render(diff, title, attribution, claims))


def render(
    diff: FeatureDiff,
    title: str | None = None,
    attribution: Attribution | None = None,
    claims: Claims | None = None,
    *,
    served: bool = False,
    playground: bool = False,
) -> Iterator[str]:
    """The report's HTML in pieces; the same diff gives the same page.

    A page that is `served` asks its server for examples (`tsae.report.serving`), and links to its `playground`.
    """
    diff = _readable(diff)
    more = [] if attribution is None else [with_stand_in(diff, statement(attribution))]
    found = findings(diff, [*more, *([] if claims is None else [expected(diff, claims)])])
    if attribution is not None and not attribution.info["gate"]:
        read = "Read the samples that moved most, in “Which samples did that”."
        found = [replace(one, sentences=(read, *one.sentences)) if one.heading == NEXT else one for one in found]
    pairs = facts.opposed_pairs(diff)
    to_draw = tables.opposed_features(diff)
    explored = explorer(diff, example_features(diff, to_draw), served=served)
    drawn = _figures(diff, to_draw)
    shown = side_by_side(diff)
    parts = explored.parts | ({"problems": packed(shown)} if shown else {})
    if on_cards := pushed(attribution, diff):
        parts["pushed"] = packed(on_cards)
    return render_page(
        "report.html",
        ", ".join(part for part in (title or diff.info.get("title") or _TITLE, facts.stand_in(diff)) if part),
        drawn,
        parts,
        connect="'self'" if served else "'none'",
        playground=playground,
        diff=diff,
        lead=lead(diff),
        warning=gates.stand_in_warning(diff),
        told=found,
        limit=_common_limit(found),
        spoken=" ".join(f"{f.heading}: {' '.join(f.sentences)}" for f in found),
        overview_caption=overview_caption(diff),
        sections=list(_sections(diff, shown is not None, attribution, claims)),
        task=visible(str(diff.info.get("task", ""))),
        worked=_worked(shown) if shown and diff.info.get("task") else [],
        glossary=GLOSSARY,
        claims=[] if claims is None else told_claims(claims),
        one_run=ONE_RUN,
        linked=lambda sentence: linked(diff, sentence),
        runs=diff.final_checkpoints,
        pairs=pairs,
        thinned=features.thinned_text(diff),
        noise=noise_text(diff),
        gates=gates,
        found=gates.gates(diff),
        causal_records=tests(diff),
        tests=[(test, capitalised(facts.test_name(test)), tables.changes(test)) for test in tests(diff)],
        attributed=None if attribution is None else attributed(attribution, diff),
        behaviour_order=facts.behaviour_order,
        written=written_with(),
        has_classes=facts.has_classes(diff),
        has_stability=facts.has_stability(diff),
        explored=explored,
        tables=tables,
        predictions=predictions,
        found_again=FOUND_AGAIN,
    )


def _common_limit(found: list[Statement]) -> str:
    """What limits the verdicts on several runs, where it is the same; else empty, and each says its own."""
    limits = [one.sentences[1] for one in found if one.lights]
    return limits[0].replace("One run", "One run each") if len(limits) > 1 and len(set(limits)) == 1 else ""


def _readable(diff: FeatureDiff) -> FeatureDiff:
    """The diff with descriptions and top tokens of a length that tables can hold."""
    described = diff.features.assign(
        responds_to=[shortened(str(text), 80) for text in diff.features.responds_to],
        top_tokens=[[shortened(str(token), 40) for token in tokens] for tokens in diff.features.top_tokens],
    )
    return replace(diff, features=described)


def _figures(diff: FeatureDiff, opposed: list[int]) -> dict[str, go.Figure | None]:
    return {
        "overview": overview(diff),
        "noise-figure": checks.noise_figure(diff),
        "behaviours-figure": checks.behaviour_figure(diff),
        "spread-figure": features.spread_figure(diff),
        "bands-figure": features.band_figure(diff),
        "decomposition-figure": features.decomposition_figure(diff),
        "opposed-figure": features.opposed_figure(diff, opposed),
        "family-figure": checks.family_figure(diff),
        "outcomes-figure": features.outcome_figure(diff),
        "prediction-figure": checks.prediction_figure(diff),
        "steps-figure": checks.steps_figure(diff, step_features(diff)),
        "causal-figure": checks.causal_figure(diff),
    }


def _worked(shown: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """One problem as everyone answers it, the usual way: policy, answer, outcome and how often that is right.

    The first row is the problem. A problem of the band medium shows most.
    """
    _, _, prompt, answers = next((one for one in shown["problems"] if one[1] == "medium"), shown["problems"][0])
    rows = [("problem", prompt, "", "")]
    for policy, (right, n, responses) in answers.items():
        outcome, _, tokens, _ = responses[0 if 2 * right >= n else -1]
        text = "".join(shown["strings"][token] for token in tokens)
        rows.append((policy, shortened(text, 400), outcome, f"{right} of {n} right"))
    return rows


def _sections(
    diff: FeatureDiff, shown: bool, attribution: Attribution | None, claims: Claims | None
) -> Iterator[tuple[str, str, str]]:
    """Id, heading, and word for the table of contents, of each section that has something to show.

    A template is named after its section's id.
    """
    runs = diff.final_checkpoints
    if shown:
        yield "show", "Show me: the same problem, before and after", "Show me"
    yield "gates", "Before you believe it", "Checks"
    label = bands_label(diff.info.get("bands"))
    yield "behaviours", f"Behaviour by {label}" if label else "Behaviour by band", "Behaviour"
    if runs:
        yield "shifts", "What moved, by run, band and part", "Moved"
    if len(runs) > 1:
        yield "opposed", "Moved in opposite directions", "Opposed"
    if len(diff.families):
        yield "families", "Families of features", "Families"
    yield "outcomes", "Success against failure", "Outcomes"
    if diff.predicted is not None and len(diff.predicted):
        yield "predicted", "Predicted against realised", "Predicted"
    if diff.dynamics is not None and len(diff.dynamics):
        yield "steps", "Along the steps", "Steps"
    if attribution is not None:
        yield "samples", "Which samples did that", "Samples"
    yield "causal", "Tested causally", "Causal"
    if claims is not None:
        yield "claims", HEADING, "Literature"
    yield "explorer-section", "All features", "Features"
    yield "glossary", "Words of this page", "Glossary"


def example_features(diff: FeatureDiff, opposed: list[int]) -> list[int]:
    """Features worth examples: a few that runs moved apart, then each run's and outcome's strongest in turn."""
    half = max(len(opposed) // 2, 2)
    tables = [facts.main_shift(diff, run) for run in diff.final_checkpoints]
    for band in ["all", *facts.bands_of(diff)]:
        tables.append(facts.rows(diff, kind="outcome", checkpoint=diff.base, band=band))
    queues = [[int(f) for f in facts.strongest(table, diff.q, _MAX_EXAMPLES).index] for table in tables]
    # The clearest of either direction come first.
    return facts.in_turn(queues, _MAX_EXAMPLES, [*opposed[:2], *opposed[half : half + 2]])


def linked(diff: FeatureDiff, sentence: str) -> Markup:
    """A finding's sentence; the numbers of features that it names, and that have a card, are links to these."""
    pieces: list[str | int] = []
    done = 0
    for match in re.finditer(r"(?<!\S)[0-9]+(?= )", sentence):
        feature, before, after = int(match.group()), sentence[: match.start()], sentence[match.start() :]
        # Its description follows, or it begins a test (`facts.test_name`).
        if feature in diff.features.index and (after.startswith(facts.named(diff, feature)) or before == "Feature "):
            pieces += [sentence[done : match.start()], feature]
            done = match.end()
    return Markup(macro("macros.html", "sentence", [*pieces, sentence[done:]]))

"""The tables of the report's section on which samples did that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.pages.tables import DASH, Cell, Table
from tsae.report.story.attribution import MEANING, Moved, Said, amount, belief, lead, moved
from tsae.report.text import shortened, visible

_MAX_TARGETS, _MAX_GROUPS, _SAMPLES = 40, 20, 10
_TEXT, _BEGINNING, _NAME = 2000, 40, 40
"""Characters of a response, of its beginning, and of a name."""
_STRANGE = "Features here are of another SAE than those of the diff: their numbers do not mean the features above."


class Attributed(NamedTuple):
    """What the section tells."""

    lead: str
    meaning: tuple[str, ...]
    changes: Table
    targets: list[tuple[Moved, list[Table]]]
    belief: list[Said]
    recipe: str
    notes: list[str]


def attributed(found: Attribution, diff: FeatureDiff) -> Attributed:
    """All that the section tells but its figure; targets in the order of the attribution."""
    sae, own = found.info.get("sae"), (diff.info.get("sae") or {}).get("weights")
    same_sae = sae is not None and sae == own
    named = any(name.startswith("feature ") for name in found.targets.target)
    strange = [Said(_STRANGE, warns=True)] if named and None not in (sae, own) and not same_sae else []
    described = {f"feature {i}": (int(i), str(diff.features.responds_to[i])) for i in diff.features.index if same_sae}
    every = [moved(found, name, _SAMPLES) for name in found.targets.target[:_MAX_TARGETS]]
    return Attributed(
        lead(found),
        MEANING,
        _changes(every, described),
        [(one, list(_tables(one))) for one in every],
        strange + belief(found),
        str(found.info["recipe"]),
        list(found.info["notes"]),
    )


def _changes(told: list[Moved], described: Mapping[str, tuple[int, str]]) -> Table:
    """Every target: what it changed by, what shares leave of that, and what the simulation makes of it."""
    validated = any(one.validated for one in told)
    rows: list[list[str | Cell]] = [
        [
            _target(one.name, described.get(one.name)),
            one.change,
            amount(one.simulated),
            Cell(f"{one.unexplained} (flagged)", tone="warn") if one.flagged else one.unexplained,
            *([one.validated or DASH] if validated else []),
        ]
        for one in told
    ]
    head = ["target", "change", "by simulation", "unexplained by shares"]
    head += ["simulation against replayed trainings"] if validated else []
    return Table("What moved", head, rows)


def _target(name: str, feature: tuple[int, str] | None) -> Cell:
    """A feature of the diff links to its card."""
    if feature is None:
        return Cell(name, tone="isolated")
    return Cell(f" “{feature[1]}”", tone="isolated", feature=feature[0])


def _tables(one: Moved) -> Iterator[Table]:
    if len(one.groups):
        yield _kinds(one.groups.head(_MAX_GROUPS))
    if len(one.problems):
        yield _problems(one.problems, one.about_problems)
    if len(one.samples):
        yield _samples(one.samples)


def _kinds(table: pd.DataFrame) -> Table:
    rows: list[list[str | Cell]] = [
        [
            Cell(shortened(str(row.group), _NAME), tone="isolated"),
            f"{row.n:,}",
            *(amount(value) for value in (row.share, row.effect, row.without, row.alone)),
        ]
        for row in table.itertuples()
    ]
    return Table("Kinds of samples, by effect", ["kind", "samples", "share", "effect", "without", "alone"], rows)


def _problems(table: pd.DataFrame, about: str) -> Table:
    rows: list[list[str | Cell]] = [
        [
            Cell(shortened(str(row.problem_id), _NAME), tone="isolated"),
            f"{row.n:,}",
            amount(row.share),
            Cell(amount(row.effect), f"[{amount(row.low)}, {amount(row.high)}]"),
        ]
        for row in table.itertuples()
    ]
    return Table(about[:1].upper() + about[1:], ["problem", "samples", "share", "effect"], rows)


def _samples(table: pd.DataFrame) -> Table:
    rows: list[list[str | Cell]] = [
        [
            f"row {row.trajectory}",
            _text(row.prompt, row.response),
            Cell(shortened(str(row.problem_id), _NAME), tone="isolated"),
            str(row.outcome),
            f"{row.step}",
            amount(row.advantage),
            amount(row.share),
            DASH if pd.isna(row.effect) else amount(row.effect),
        ]
        for row in table.itertuples()
    ]
    head = ["sample", "response", "problem", "outcome", "step", "advantage", "share", "effect"]
    return Table("Samples with the largest shares, for and against", head, rows, 4)


def _text(prompt: object, response: object) -> str | Cell:
    """The beginning of a response, which opens prompt and response on a click."""
    if pd.isna(response):
        return DASH
    asked = "" if pd.isna(prompt) else shortened(str(prompt), _TEXT)
    told = shortened(str(response), _TEXT)
    return Cell(shortened(visible(told), _BEGINNING), opens=(asked, told))

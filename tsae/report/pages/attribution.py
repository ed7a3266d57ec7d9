"""The tables of the report's section on which samples did that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.pages.tables import Cell, Table
from tsae.report.story.attribution import (
    Moved,
    Read,
    Said,
    amount,
    belief,
    lead,
    meaning,
    moved,
    signal,
    to_read,
    told_targets,
)
from tsae.report.text import shortened

_MAX_GROUPS, _SAMPLES = 20, 10
_TEXT, _TOKENS, _TOKEN, _NAME = 2000, 400, 40, 40
"""Characters of a prompt, tokens of a response, characters of a token, and of a name."""
_MARKS = 9
"""Shades of tokens."""
_STRANGE = "Features here are of another SAE than those of the diff: their numbers do not mean the features above."


class Piece(NamedTuple):
    """A stretch of a response."""

    text: str
    shade: int = 0
    """1 to 9 by the size of its share; 0 where that is small."""
    against: bool = False
    """Whether it lowered the target."""
    share: str = ""


class Attributed(NamedTuple):
    """What the section tells."""

    gate: str
    """Why nothing but belief, recipe and notes is told; empty where all is."""
    lead: str
    meaning: tuple[str, ...]
    bands: list[tuple[Cell, Moved, list[list[str | Cell]]]]
    """Targets, and of each the rows of its bands."""
    lone: Table | None
    signal: Table | None
    samples: list[tuple[Read, str, list[Piece]]]
    """Samples to read, with prompt and response."""
    others: list[tuple[Moved, Table]]
    belief: list[Said]
    steps: Table | None
    recipe: str
    notes: list[str]


def attributed(found: Attribution, diff: FeatureDiff) -> Attributed:
    """All that the section tells but its figure."""
    sae, own = found.info.get("sae"), (diff.info.get("sae") or {}).get("weights")
    same_sae = sae is not None and sae == own
    named = any(name.startswith("feature ") for name in found.targets.target)
    strange = [Said(_STRANGE, warns=True)] if named and None not in (sae, own) and not same_sae else []
    described = {f"feature {i}": (int(i), str(diff.features.responds_to[i])) for i in diff.features.index if same_sae}
    gate = str(found.info["gate"])
    every = [] if gate else [moved(found, name) for name in told_targets(found)]
    return Attributed(
        gate,
        lead(found),
        meaning(found),
        [(_target(one, described), one, [_row(row.band, row) for row in one.bands.itertuples()]) for one in every],
        _lone(every),
        _signal(found, every),
        [] if gate else [(one, shortened(one.prompt, _TEXT), _pieces(one)) for one in to_read(found, _SAMPLES)],
        [(one, _others(one.others.head(_MAX_GROUPS))) for one in every if len(one.others)],
        (strange if not gate else []) + belief(found),
        _steps(found.steps),
        str(found.info["recipe"]),
        list(found.info["notes"]),
    )


def _target(one: Moved, described: Mapping[str, tuple[int, str]]) -> Cell:
    """A feature of the diff links to its card."""
    if one.target in described:
        feature, responds_to = described[one.target]
        return Cell(f" “{responds_to}”", tone="isolated", feature=feature)
    return Cell(shortened(one.name, 2 * _NAME), tone="isolated")


def _row(name: str, row: Any) -> list[str | Cell]:
    return [
        Cell(shortened(str(name), _NAME), tone="isolated"),
        f"{row.n:,}",
        *(amount(value) for value in (row.share, row.without, row.alone)),
        str(row.how),
    ]


_HEAD = ["samples", "share", "without them", "alone", "how"]


def _lone(every: list[Moved]) -> Table | None:
    rows = [_row(one.name, row) for one in every for row in one.lone.itertuples()]
    return Table("Lone successes: the only right response of their group", ["target", *_HEAD], rows) if rows else None


def _others(table: pd.DataFrame) -> Table:
    return Table("By effect", ["kind", *_HEAD], [_row(row.group, row) for row in table.itertuples()])


def _signal(found: Attribution, every: list[Moved]) -> Table | None:
    rows: list[list[str | Cell]] = []
    for one in every:
        if (grid := signal(found, one.target)) is not None:
            rows += [
                [Cell(one.name, tone="isolated"), Cell(band, tone="isolated"), *map(amount, line)]
                for band, line in zip(grid.bands, grid.share, strict=True)
            ]
    head = ["target", "samples", *(f"fifth {fifth}" for fifth in range(1, 6))]
    return Table("Shares of tokens by fifth of the policy's entropy", head, rows, 2) if rows else None


def _steps(table: pd.DataFrame) -> Table | None:
    rows: list[list[str | Cell]] = [
        [
            f"{row.step}",
            f"{row.n:,}",
            *(amount(v, sign=False) for v in (row.grad_norm, row.logged_grad_norm)),
            *(amount(v, sign=False) for v in (row.mean_length, row.logged_mean_length)),
            "–" if pd.isna(row.distance) else f"{amount(100 * row.distance, sign=False)} %",
        ]
        for row in table.head(_TOKENS).itertuples()
    ]
    head = ["step", "samples", "gradient norm", "logged", "mean length (tokens)", "logged", "distance to checkpoint"]
    return Table("The replay beside what the run logged and saved", head, rows) if rows else None


def _pieces(one: Read) -> list[Piece]:
    """At most _TOKENS tokens around the one with the largest share; those that carry much of it have a shade."""
    table = one.tokens
    if table.empty:
        return [Piece(shortened(one.response, _TEXT))]
    size = table.share.abs().to_numpy()
    largest, first = float(size.max()), max(0, min(int(size.argmax()) - _TOKENS // 2, len(table) - _TOKENS))
    shades = np.ceil(_MARKS * size / largest - 0.5) if largest > 0 else np.zeros(len(size))
    found = [Piece("…")] if first else []
    for row, shade in list(zip(table.itertuples(), shades.astype(int), strict=True))[first : first + _TOKENS]:
        text = shortened(str(row.token), _TOKEN)
        if shade == 0 and found and found[-1].shade == 0:
            found[-1] = Piece(found[-1].text + text)
        else:
            found.append(Piece(text, int(shade), row.share < 0, amount(row.share)))
    return [*found, Piece("…")] if first + _TOKENS < len(table) else found

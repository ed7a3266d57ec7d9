"""What `tsae attribute` prints: what bands of samples did, where in the text, what to read, how far to believe it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tsae.attribution.attribution import Attribution
from tsae.report.story.attribution import (
    FIFTHS,
    Read,
    amount,
    belief,
    lead,
    meaning,
    moved,
    shown_name,
    signal,
    to_read,
    told_targets,
)
from tsae.report.text import shortened, visible

_TEXT, _WIDTH = 90, 118
"""Characters of a response, and of a line."""
_HEAD = f"{'samples':>9}{'share':>11}{'without them':>14}{'alone':>11}  how"


def attribution_text(found: Attribution, n: int = 10) -> str:
    """The three bands by target, lone successes, where the signal sits, n samples to read, and how far to believe it.

    Where the gate is closed, the reason stands in the place of all of these but the last.
    """
    gate = str(found.info["gate"])
    lines = [visible(lead(found)), *_wrapped(f"settings: {found.info['recipe']}")]
    lines += ["", *_wrapped(gate, "")] if gate else [*_answer(found, n)]
    lines += ["", "How far to believe it"]
    for said in belief(found):
        lines += _wrapped(f"{'beware: ' if said.warns else ''}{said.text}")
    return "\n".join([*lines, *(line for note in found.info["notes"] for line in _wrapped(f"note: {note}"))])


def _answer(found: Attribution, n: int) -> Iterator[str]:
    for sentence in meaning(found):
        yield from _wrapped(sentence)
    told = [moved(found, name) for name in told_targets(found)]
    if any(len(one.bands) for one in told):
        yield from ("", f"{'Easy, medium and hard samples':<46}{_HEAD}")
    for one in told:
        if len(one.bands):
            flag = f"  (beware: {one.unexplained} unexplained by shares)" if one.flagged else ""
            yield f"  {visible(one.name)}: {one.change}{flag}"
        yield from (_numbers(f"  {row.band} samples", row) for row in one.bands.itertuples())
    if any(len(one.lone) for one in told):
        yield from ("", f"{'Lone successes: the only one of their group':<46}{_HEAD}")
    yield from (_numbers(one.name, row) for one in told for row in one.lone.itertuples())
    grids = {name: grid for name in told_targets(found) if (grid := signal(found, name)) is not None}
    if grids:
        yield from ("", "Where in the text: shares of tokens by fifth of the policy's entropy", *_wrapped(FIFTHS))
        yield f"  {'':<44}{''.join(f'{fifth:>11}' for fifth in range(1, 6))}"
    for name, grid in grids.items():
        yield f"  {visible(shown_name(found, name))}"
        for band, shares in zip(grid.bands, grid.share, strict=True):
            yield f"    {visible(f'{band} samples'):<42}{''.join(f'{amount(share):>11}' for share in shares)}"
    samples = to_read(found, n)
    if samples:
        yield from ("", "Samples to read, with the tokens that carry their share")
    for sample in samples:
        yield from _sample(sample)


def _numbers(name: str, row: Any) -> str:
    cells = f"{amount(row.share):>11}{amount(row.without):>14}{amount(row.alone):>11}"
    return f"  {shortened(visible(name), 43):<44}{row.n:>9,}{cells}  {visible(str(row.how))}"


def _sample(one: Read) -> Iterator[str]:
    yield from _wrapped(f"row {one.trajectory}, {one.about}: share {one.share}")
    if one.response:
        yield f"      {shortened(visible(one.response).replace(chr(10), '⏎'), _TEXT)}"
    if one.carried:
        yield from _wrapped(f"carried by {one.carried}", "      ")


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    shown = visible(text).replace("\n", "⏎")
    return textwrap.wrap(shown, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)

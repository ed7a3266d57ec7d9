"""What the literature would expect, as plain text for the terminal."""

from __future__ import annotations

import textwrap

from tsae.claims.run_claims import ONE_RUN, Claims
from tsae.report.story.claims import HEADING, counted, told_claims
from tsae.report.text import visible

_WIDTH = 118


def claims_text(claims: Claims) -> str:
    """A line a claim with its verdict, below it a line a part; then what cannot be tested, and why."""
    told = told_claims(claims)
    tested, others = [one for one in told if one.parts], [one for one in told if not one.parts]
    lines = [HEADING, *textwrap.wrap(f"{counted(claims)} {ONE_RUN}", _WIDTH), ""]
    wide = max((len(part.statement) for one in tested for part in one.parts), default=0)
    wide = min(max(wide, 40), 72)
    for one in tested:
        lines.append(f"{one.key}  {one.title}: {one.verdict}")
        for part in one.parts:
            statement = textwrap.wrap(visible(part.statement), wide)
            least = f" (must be {part.least})" if part.least else ""
            lines += [f"     {line}" for line in statement[:-1]]
            lines.append(f"     {statement[-1]:<{wide}}  {part.effect:<24}  {part.rows:>13}  {part.said}{least}")
        lines += textwrap.wrap(visible(one.caveat), _WIDTH, initial_indent="     ", subsequent_indent="     ")
    if others:
        lines += ["", "Cannot be tested on this run:"] if tested else ["Cannot be tested on this run:"]
    for one in others:
        told_of = f"{one.key}  {one.title}: {visible(one.missing)}"
        lines += textwrap.wrap(told_of, _WIDTH, subsequent_indent="     ", break_on_hyphens=False)
    return "\n".join(lines)

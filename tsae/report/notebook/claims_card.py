"""What the literature would expect, as a card in a notebook."""

from __future__ import annotations

import pandas as pd

from tsae.claims.run_claims import ONE_RUN, Claims
from tsae.report.notebook.cards import card
from tsae.report.story.claims import HEADING, counted, told_claims


def claims_card(claims: Claims) -> str:
    """Tables of the effects behind the verdicts, of what was not tested of these, and of what the others lack."""
    told = told_claims(claims)
    tested = [
        {"claim": f"{one.key}  {one.title}", "verdict": one.verdict, "statement": part.statement, "effect": part.effect,
         "rows": part.rows, "says": part.said}
        for one in told
        for part in one.parts
    ]  # fmt: skip
    others = [
        {"claim": f"{one.key}  {one.title}", "cannot be tested on this run": one.missing} for one in told if one.missing
    ]
    minded = [
        {"claim": f"{one.key}  {one.title}", "what to mind": one.caveat} for one in told if one.parts and one.caveat
    ]
    tables = [("effects, with 95 % intervals", pd.DataFrame(tested)), ("what to mind", pd.DataFrame(minded))]
    tables.append(("cannot be tested", pd.DataFrame(others)))
    return card(HEADING, {"found": counted(claims)}, *(t for t in tables if len(t[1])), note=ONE_RUN)

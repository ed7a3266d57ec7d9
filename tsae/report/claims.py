"""What the literature would expect: a verdict on every claim, its effects, and what is missing for a test."""

from __future__ import annotations

import textwrap
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pandas as pd

from tsae.claims.judging import CLAIMS, REPLAYED, Verdict
from tsae.claims.run_claims import ONE_RUN, Claims
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import refuse
from tsae.report.notebook import card
from tsae.report.story.statements import Statement, with_stand_in
from tsae.report.text import count, interval, listed, number, visible

HEADING = "What the literature would expect"
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not reproduced", "undecided", "cannot be tested")
_SAID = {True: "as claimed", False: "against it", None: "undecided"}
_OPEN, _CANNOT = VERDICTS[-2:]


def told_claims(claims: Claims) -> list[SimpleNamespace]:
    """The claims, those with a verdict first, each kind in order of their letters.

    Each has key, title, sentence and source of `tsae.claims.judging.Claim`, verdict and caveat, missing (“needs …;
    add it by …”, empty where it was tested), and parts: statement, effect (“+0.17 [+0.12, +0.21]”), least (what the
    effect has to exceed, where that is not 0), rows (“180 problems”) and said (as claimed, against it or undecided).
    """
    found = [
        SimpleNamespace(
            **vars(CLAIMS[record["claim"]])
            | {
                "verdict": record["verdict"],
                "caveat": record["caveat"],
                "missing": f"needs {record['needs']}; add it by {record['add']}" if record["needs"] else "",
                "parts": [_part(of) for of in record["parts"]],
            }
        )
        for record in claims.records
    ]
    return sorted(found, key=lambda one: one.verdict == _CANNOT)


def expected(diff: FeatureDiff, claims: Claims) -> Statement:
    """The finding: how many claims this run shows.

    Raises:
        TsaeError: where the claims are of other rollouts than the diff.
    """
    of = claims.info.get("rollouts")
    what = f"were tested on other rollouts ({of}) than those of the diff"
    refuse("claims", (of not in (None, diff.info.get("rollouts")), what, "tsae claims RUN"))
    return with_stand_in(diff, Statement(HEADING, (counted(claims),), "claims"))


def counted(claims: Claims) -> str:
    """“Of 26 claims about sample difficulty, this run shows 2 as claimed (“Hard harms” and “Two phases”), …”."""
    of = Counter(record["verdict"] for record in claims.records)
    said = {"reproduced": "as claimed", "partly": "in part", "not reproduced": "not"}
    titles: dict[str, str] = {
        verdict: listed([f"“{CLAIMS[r['claim']].title}”" for r in claims.records if r["verdict"] == verdict])
        for verdict in VERDICTS
    }
    clauses = [f"{of[verdict]} {words} ({titles[verdict]})" for verdict, words in said.items() if of[verdict]]
    left = f"; {of[_OPEN]} {'is' if of[_OPEN] == 1 else 'are'} undecided ({titles[_OPEN]})" if of[_OPEN] else ""
    left += f"; {of[_CANNOT]} cannot be tested on it" if of[_CANNOT] and (clauses or left) else ""
    shown = f"this run shows {listed(clauses)}" if clauses else f"this run {'shows' if left else 'can test'} none"
    bands = f" Easy, medium and hard are the {claims.info['bands']} here." if claims.info.get("bands") else ""
    return f"Of {count(len(claims.records), 'claim')} about sample difficulty, {shown}{left}.{bands}"


def _part(of: dict[str, Any]) -> SimpleNamespace:
    margin = of.get("margin") or 0
    least = f"within ±{margin:g}" if of.get("equal") else f"> {number(margin)}" if margin else ""
    effect, rows = number(of["mean"], sign=True), str(of["unit"])
    if rows != REPLAYED:
        effect += f" {interval(of['low'], of['high'], sign=True, like=of['mean'])}"
        rows = f"{of['n']:,} {rows}"
    said = _SAID[of["holds"]]
    return SimpleNamespace(statement=of["statement"], effect=effect, least=least, rows=rows, said=said)


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


def claims_card(claims: Claims) -> str:
    """Tables of the effects behind the verdicts, of what was not tested of these, and of what the others lack."""
    told = [(f"{one.key}  {one.title}", one) for one in told_claims(claims)]
    tested = [
        {"claim": claim, "verdict": one.verdict, "statement": part.statement, "effect": part.effect,
         "rows": part.rows, "says": part.said}
        for claim, one in told
        for part in one.parts
    ]  # fmt: skip
    others = [{"claim": claim, "cannot be tested on this run": one.missing} for claim, one in told if one.missing]
    minded = [{"claim": claim, "what to mind": one.caveat} for claim, one in told if one.parts and one.caveat]
    tables = {"effects, with 95 % intervals": tested, "what to mind": minded, "cannot be tested": others}
    shown = [(caption, pd.DataFrame(rows)) for caption, rows in tables.items() if rows]
    return card(HEADING, {"found": counted(claims)}, *shown, note=ONE_RUN)

"""Judge the claims anew, and compare the verdicts with docs/claims.md.

Reads the records of the study's runs, which `scripts/claims_study.py` of commit 1a85fd33 trained. With --write, the
table of docs/claims.md is written from the records. The verdicts stand nowhere else.

    python scripts/check_claims.py

The last line is JSON: `ratio` is the share of all claims that have a verdict, and the same as in docs/claims.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from organism.claims import FAMILIES, Records, judge, judge_claim
from organism.pages import fill, markdown

from tsae.claims.judging import CLAIMS, STUDIED, Judgement, Part
from tsae.errors import TsaeError

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "data" / "claims" / "runs.jsonl.gz"
PREDICTIONS = ROOT / "data" / "claims" / "predictions.json"
OF_LLM = ROOT / "data" / "llm" / "results.json"
DOC = ROOT / "docs" / "claims.md"


def main(arguments: list[str] | None = None) -> int:
    """Judge, compare, report; 1 where the user has something to put right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS, help="default: the shipped ones")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/claims.md")
    options = parser.parse_args(arguments)
    try:
        check(options)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check(options: argparse.Namespace) -> None:
    """See the module."""
    records = Records.of(read_records(options.records))
    judgements = judge(records)
    if options.write:
        write(records, judgements)
        print(f"wrote {DOC}")
        return
    written = verdicts_of(DOC)
    for key, judgement in judgements.items():
        print(f"{key}  {judgement.verdict:18} docs: {written.get(key, 'no row'):18} {judgement.claim.title}")
        for part in judgement.parts:
            print(f"     {shown(part)}  {part.statement}")
    agree = [k for k, j in judgements.items() if j.verdict != "cannot be tested" and j.verdict == written.get(k)]
    counts = Counter(judgement.verdict for judgement in judgements.values())
    line = {
        "name": "claims",
        "ratio": round(len(agree) / len(STUDIED), 4),
        "reproduced": counts["reproduced"],
        "partly": counts["partly"],
        "not": counts["not reproduced"],
        "untestable": counts["cannot be tested"],
        "differing": [key for key in STUDIED if key not in agree],
    }
    print(json.dumps(line))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of all runs."""
    if not path.is_file():
        raise TsaeError("is missing", where=path, fix="Give the file that the study wrote.")
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def verdicts_of(doc: Path) -> dict[str, str]:
    """Verdicts by letter, from the table of the page."""
    found = {}
    for line in doc.read_text(encoding="utf-8").splitlines() if doc.is_file() else ():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        letter = cells[0].removeprefix("**").removesuffix("**")
        if letter in CLAIMS and len(cells) == _COLUMNS:
            found[letter] = cells[4]
    return found


_COLUMNS = 6


def write(records: Records, judgements: Mapping[str, Judgement]) -> None:
    """The tables of the page, between its marker lines."""
    predictions = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    llm = json.loads(OF_LLM.read_text(encoding="utf-8"))["claims"] if OF_LLM.is_file() else {}
    head, lines = ["", "claim", "predicted", "result", "verdict", "on SmolLM2"], []
    for key, judgement in judgements.items():
        claim = judgement.claim
        source = f"arXiv {claim.source}" if claim.source[0].isdigit() else claim.source
        said = f"**{claim.title}.** {claim.sentence} ({source})"
        result = "<br>".join(f"{part.statement} {shown(part)}" for part in judgement.parts)
        result += f"<br>*{judgement.caveat}*" if judgement.caveat else ""
        of_llm = llm.get(key, {}).get("verdict", "–")
        lines.append([f"**{key}**", said, predictions[key]["verdict"], result, judgement.verdict, of_llm])
    fill(DOC, "claims", markdown(head, lines))
    fill(DOC, "dictionaries", dictionary_table(records))


def dictionary_table(records: Records) -> str:
    """Claims e, f and g through every dictionary, without the causal part."""
    found = records.by_arm["features"][0]["dictionaries"]
    head = ["dictionary", "features in families", "e: direct, computation, deliberation", "f: deliberation, outcome"]
    head, lines = [*head, "g: computation, deliberation"], []
    for name, cell in found.items():
        counts = ", ".join(str(n) for family, n in cell["features"].items() if family != "none")
        row = [name, counts]
        for key in FAMILIES:
            judgement = judge_claim(key, records, name)
            parts = judgement.parts[: len(judgement.parts) - ("ablations" in cell)]
            without = Judgement(judgement.claim, parts)
            row.append(f"{'; '.join(shown(part) for part in parts)}: {without.verdict}")
        lines.append(row)
    return markdown(head, lines)


def shown(part: Part) -> str:
    """Such as +.12 [.10, .14]."""
    mean, low, high = (f"{value:+.2f}" for value in part.interval)
    n = "" if len(part.values) == 5 else f" (n = {len(part.values)})"
    held = {True: "✓", False: "✗", None: "?"}[part.holds]
    return f"{mean} [{low}, {high}]{n} {held}"


if __name__ == "__main__":
    raise SystemExit(main())

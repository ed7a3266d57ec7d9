"""The records of the study in one file, and what is shown of them: tables, verdicts and a page."""

from __future__ import annotations

import html
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from real_llm.analysis import UNTESTED
from real_llm.measuring import by_problem, of_log
from real_llm.problems import WordProblem
from real_llm.verdicts import BANDS, Records, contradicted, judge, verdict
from tsae.base.files import write_json, write_text
from tsae.base.provenance import versions
from tsae.base.statistics.intervals import change_interval, mean_interval
from tsae.claims.judging import Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.errors import TsaeError
from tsae.report.text import markdown_table
from tsae.rollouts.difficulty import estimate
from tsae.rollouts.table import Rollouts

BEGINS, ENDS = "<!-- llm bands: begin -->", "<!-- llm bands: end -->"
RECORDS, RESULTS = "records.json", "results.json"


def collect(out: Path, study: Any, problems: Mapping[str, WordProblem]) -> dict[str, Any]:
    """Everything that verdicts and tables are made of, from the folders of the stages.

    Raises:
        TsaeError: where nothing was measured yet.
    """
    files = sorted((out / "measured").glob("*.parquet"))
    if not files:
        raise TsaeError("nothing was measured yet", where=out / "measured", fix="Run the stage measure.")
    bands = _json(out / "bands.json")
    inside = {file.stem: _json(file) for file in sorted((out / "inside").glob("*.json"))}
    sparse = {name: own["sparsity"] for name, own in inside.items()}
    return {
        "made": {
            "study": asdict(study),
            "seconds": _json(out / "seconds.json"),
            "versions": versions(),
            "machine": f"{study.threads} CPU thread of {os.cpu_count()} shared cores",
            "date": time.strftime("%d %B %Y"),
        },
        "problems": {id: {**facts, "steps": len(problems[id].steps)} for id, facts in bands.items()},
        "measured": {file.stem: by_problem(Rollouts.read(file).frame, problems) for file in files},
        "logs": {
            file.parent.name: of_log(file.parent, problems) for file in sorted(out.glob("runs/*/training_args.json"))
        },
        "inside": {
            "sparsity": {name: {id: layers[-1] for id, layers in own.items()} for name, own in sparse.items()},
            "by_layer": {
                name: {
                    band: np.mean([own[id] for id in own if bands[id]["band"] == band], axis=0).tolist()
                    for band in BANDS
                    if any(bands[id]["band"] == band for id in own)
                }
                for name, own in sparse.items()
            },
            "halves": {name: {h: own[h] for h in ("lower", "upper")} for name, own in inside.items() if "lower" in own},
        },
        "features": _json(out / "features.json") if (out / "features.json").is_file() else {},
    }


def records_of(found: Mapping[str, Any]) -> Records:
    """For `judge`."""
    return Records(
        found["measured"],
        {id: facts["band"] for id, facts in found["problems"].items()},
        found["logs"],
        found["inside"],
        {key: _judgement(own) for key, own in found["features"].items()},
    )


def _judgement(record: Mapping[str, Any]) -> Judgement:
    """Of `dataclasses.asdict`."""
    parts = tuple(Part(**part) for part in record["parts"])
    whole = record.get("whole", True) and not record["caveat"].startswith(UNTESTED)
    return Judgement(CLAIMS[record["claim"]["key"]], parts, record["needs"], record["add"], record["caveat"], whole)


def results(found: Mapping[str, Any]) -> dict[str, Any]:
    """Verdicts with their figures, and the tables, ready for JSON."""
    claims = {}
    for key, judgement in judge(records_of(found)).items():
        record = judgement.record()
        parts = record["parts"]
        held = sum(part["holds"] is True for part in parts)
        why = f"{held} of {len(parts)} parts hold." if parts else f"Needs {record['needs']}. {record['add']}"
        if against := len(contradicted(judgement)):
            why += f" Refuted in the other seed: {against} of these."
        claims[key] = {
            "title": record["title"],
            "verdict": verdict(judgement),
            "why": f"{why} {record['caveat']}".strip(),
            "figures": {
                part["statement"]: {k: part[k] for k in ("mean", "low", "high", "n", "unit")} for part in parts
            },
            "parts": parts,
        }
    return {"made": found["made"], "claims": claims, "table": accuracy_table(found).to_dict("records")}


def in_order(names: Iterable[str]) -> list[str]:
    """The base, then the runs: easy, medium, hard, further ones; by seed."""
    first = ["base", *BANDS]
    return sorted(names, key=lambda name: (*(name.partition("-")[0] != one for one in first), name))


def accuracy_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """One row a policy and band of held-out problems, with 95 % intervals over problems."""
    records, rows = records_of(found), []
    for policy in in_order(found["measured"]):
        for band in BANDS:
            right = records.mean(policy, "right", band)
            if len(right) < 2:
                continue
            row: dict[str, Any] = {"policy": policy, "problems": f"{band} ({len(right)})"}
            row["accuracy"] = _with(np.array(list(right.values())))
            change = np.array(list(records.gain(policy, "right", band).values()))
            row["change"] = "" if policy == "base" else _with(change, change_interval(change, 0.95), sign="+")
            for name, field in (("direct", "direct"), ("steps carried out", "carried"), ("flawless", "flawless")):
                row[name] = f"{np.mean(list(records.mean(policy, field, band).values())):.2f}"
            row["tokens"] = f"{np.mean(list(records.mean(policy, 'length', band).values())):.1f}"
            lists = [own["right"] for id, own in found["measured"][policy].items() if records.bands[id] == band]
            n, successes = np.array([len(own) for own in lists]), np.array([sum(own) for own in lists])
            row["pass@k"] = f"{estimate(n, successes, int(n.min())).mean():.2f} (k {n.min()})"
            rows.append(row)
    return pd.DataFrame(rows)


def log_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """One row a run: its log's first and last quarter, and what its lone successes were."""
    rows = []
    for run in in_order(found["logs"]):
        log = found["logs"][run]
        steps = max(1, len(log) // 4)
        row: dict[str, Any] = {"run": run, "steps": len(log)}
        for name, field in (("reward", "right"), ("direct", "direct"), ("tokens", "length"), ("silent", "silent")):
            first, last = (np.mean([step[field] for step in part]) for part in (log[:steps], log[-steps:]))
            row[name] = f"{first:.2f} → {last:.2f}"
        for name in ("lone", "others"):
            n = sum(step[name] for step in log)
            shares = [f"{sum(step[f'{name}_{what}'] for step in log) / n:.2f}" for what in ("direct", "flawed") if n]
            row[f"{name}: n, direct, flawed"] = ", ".join([f"{n:.0f}", *shares])
        rows.append(row)
    return pd.DataFrame(rows)


def verdict_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """One row a claim."""
    claims = results(found)["claims"]
    return pd.DataFrame(
        [
            {"claim": f"{key}: {one['title']}", "verdict": one["verdict"], "why": one["why"]}
            for key, one in claims.items()
        ]
    )


def part_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """One row a part of a claim."""
    rows = []
    for key, one in results(found)["claims"].items():
        for part in one["parts"]:
            interval = f"{part['mean']:+.3f} [{part['low']:+.3f}, {part['high']:+.3f}]"
            holds = {True: "holds", False: "refuted", None: "not decided"}[part["holds"]]
            rows.append(
                {
                    "claim": key,
                    "what must be true": part["statement"],
                    "effect": interval,
                    "n": f"{part['n']} {part['unit']}",
                    "": holds,
                }
            )
    return pd.DataFrame(rows)


def made_where(found: Mapping[str, Any]) -> str:
    """A paragraph on what was computed where, and when."""
    made, study = found["made"], found["made"]["study"]
    recipe, warm = study["recipe"], study["warm_up"]
    seconds = {name: own["wall"] for name, own in made["seconds"].items()}
    runs = [seconds[name] for name in found["logs"] if name in seconds]
    counts = {band: [0, 0] for band in BANDS}
    for facts in found["problems"].values():
        counts[facts["band"]][facts["held_out"]] += 1
    bands = "; ".join(f"{band} {trained} and {held}" for band, (trained, held) in counts.items())
    fifth = " Runs named fifth: medium problems, the loss on the fifth of the tokens with the highest entropy."
    minutes = f"{min(runs, default=0) / 60:.0f} to {max(runs, default=0) / 60:.0f}"
    return (
        f"Computed on {made['machine']}, {made['date']}: SmolLM2-135M-Instruct in bfloat16; "
        f"a warm-up of {warm['steps']} supervised steps of {warm['batch']} examples; "
        f"{len(found['logs'])} GRPO runs of {recipe['steps']} steps of {recipe['prompts']} problems × "
        f"{recipe['samples']} responses of at most {recipe['max_new_tokens']} tokens, LoRA of rank {recipe['rank']}, "
        f"learning rate {recipe['lr']:g}; {study['k']} responses to a problem for its band, "
        f"{study['answers']} of every policy to a held-out one. "
        f"Problems to train on and held out: {bands}."
        f"{fifth if any(name.startswith('fifth') for name in found['logs']) else ''} "
        f"The cores were shared with other work: a run took {minutes} minutes on the wall, everything "
        f"{sum(seconds.values()) / 60:.0f}. "
        "This page is made from shipped records; only intervals and verdicts are computed for it."
    )


def ship(found: Mapping[str, Any], to: Path) -> None:
    """Write records and results; numbers with five significant digits."""
    write_text(to / RECORDS, json.dumps(_rounded(found), separators=(",", ":")) + "\n")
    write_json(to / RESULTS, _rounded(results(found)))


def fill(document: Path, found: Mapping[str, Any]) -> None:
    """Put paragraph and tables between the two marker lines of a Markdown file.

    Raises:
        TsaeError: where the file lacks them.
    """
    text = document.read_text(encoding="utf-8")
    before, opening, rest = text.partition(BEGINS)
    _, closing, after = rest.partition(ENDS)
    if not opening or not closing:
        raise TsaeError("has no place for the tables", where=document, fix=f"Write the lines {BEGINS} and {ENDS}.")
    tables = "\n".join(
        markdown_table(table) for table in (accuracy_table(found), log_table(found), verdict_table(found))
    )
    write_text(document, f"{before}{opening}\n\n{made_where(found)}\n\n{tables}\n{closing}{after}")


def write_page(found: Mapping[str, Any], to: Path, report: Path | None = None) -> Path:
    """One HTML page that opens with no network.

    Args:
        found: the records.
        to: the file.
        report: the page of `tsae`, if it is there, to be linked.
    """
    sections = [
        ("What the field's claims come to here", verdict_table(found)),
        ("Held-out problems, by policy and band (95 % intervals over problems)", accuracy_table(found)),
        ("Logs of the runs: first quarter → last quarter", log_table(found)),
        ("Parts of the claims", part_table(found)),
    ]
    body = [f"<h1>A real LLM on three bands</h1><p>{html.escape(made_where(found))}</p>"]
    if report is not None:
        body.append(f'<p><a href="{html.escape(report.as_uri())}">What features did: the page of tsae</a></p>')
    gains = "Change of accuracy on held-out problems, by run (95 % intervals)"
    body.append(f"<h2>{gains}</h2>{_gains(found)}<h2>Along the steps of the runs</h2>{_charts(found)}")
    for title, table in sections:
        body.append(f"<h2>{html.escape(title)}</h2>{table.to_html(index=False, border=0)}")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1c2330}"
        "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.25rem .6rem;text-align:left;"
        "border-bottom:1px solid #dde2ea;vertical-align:top}svg{max-width:100%}h2{margin-top:2rem}"
    )
    head = '<meta charset="utf-8"><title>A real LLM on three bands</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{style}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'
    return write_text(to, page)


_COLOURS = {"easy": "#2a7f62", "medium": "#2f5fb3", "hard": "#b3452f", "fifth": "#7a5ab3"}


def _gains(found: Mapping[str, Any]) -> str:
    """A panel for each band of held-out problems; in it a dot and a 95 % interval for each run."""
    records = records_of(found)
    runs = in_order(found["measured"])[1:]
    left, width, line, top = 90, 900, 17, 34
    panel = (width - left) / len(BANDS)
    rows = {
        (band, run): (values.mean(), *change_interval(values, 0.95))
        for band in BANDS
        for run in runs
        if len(values := np.array(list(records.gain(run, "right", band).values()))) > 1
    }
    ends = [end for row in rows.values() for end in row]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    height = top + line * len(runs) + 22
    parts = []
    for place, band in enumerate(BANDS):
        begin = left + place * panel
        base = np.mean(list(records.mean("base", "right", band).values()) or [np.nan])

        def x(value: float, begin: float = begin) -> float:
            return begin + 8 + (value - low) / (high - low or 1.0) * (panel - 24)

        parts.append(f'<text x="{begin + 8:.0f}" y="14" font-size="13">{band} problems (base {base:.2f})</text>')
        parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="22" y2="{height - 18}" stroke="#9aa3b2"/>')
        for fifth in range(int(low * 5), int(high * 5) + 1):
            at, words = x(fifth / 5), f"{fifth / 5:+.1f}" if fifth else "0"
            parts.append(f'<text x="{at:.1f}" y="{height - 4}" font-size="11" text-anchor="middle">{words}</text>')
        for at, run in enumerate(runs):
            y, colour = top + line * at, _COLOURS.get(run.partition("-")[0], "#555")
            if not place:
                parts.append(f'<text x="0" y="{y + 4}" font-size="12" fill="{colour}">{html.escape(run)}</text>')
            if (band, run) in rows:
                mean, below, above = rows[band, run]
                parts.append(f'<line x1="{x(below):.1f}" x2="{x(above):.1f}" y1="{y}" y2="{y}" stroke="{colour}"/>')
                parts.append(f'<circle cx="{x(mean):.1f}" cy="{y}" r="4" fill="{colour}"><title>{mean:+.2f} ')
                parts.append(f"[{below:+.2f}, {above:+.2f}]</title></circle>")
    label = 'role="img" aria-label="change of accuracy by run and band of problems"'
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" {label}>{"".join(parts)}</svg>'


def _charts(found: Mapping[str, Any]) -> str:
    """Reward and share of direct answers along the steps, a line a run."""
    return "".join(
        _chart(found["logs"], field, title) for field, title in (("right", "reward"), ("direct", "direct answers"))
    )


def _chart(logs: Mapping[str, Sequence[Mapping[str, float]]], field: str, title: str) -> str:
    width, height, left, right, top = 520, 220, 40, 430, 24

    def y(share: float) -> float:
        return top + (1 - share) * (height - 50)

    last = max((step["step"] for log in logs.values() for step in log), default=2)
    parts = [f'<text x="{left}" y="14" font-size="13">{title} by step</text>']
    for share in (0, 0.5, 1):
        parts.append(f'<text x="4" y="{y(share) + 4:.1f}" font-size="11">{share:g}</text>')
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#dde2ea"/>')
    lowest = float(height)
    # From the lowest end up, so that a name makes room for the one below it.
    for run, log in sorted(logs.items(), key=lambda item: item[1][-1][field]):
        band, _, seed = run.partition("-")
        colour, dash = _COLOURS.get(band, "#555"), "" if seed == "0" else ' stroke-dasharray="5 3"'
        x = [left + (step["step"] - 1) / max(1, last - 1) * (right - left) for step in log]
        points = " ".join(f"{at:.1f},{y(step[field]):.1f}" for at, step in zip(x, log, strict=True))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{points}"/>')
        lowest = min(y(log[-1][field]) + 4, lowest - 12)
        name = f'<text x="{right + 4}" y="{lowest:.1f}" font-size="11" fill="{colour}">'
        parts.append(f"{name}{html.escape(run)}</text>")
    label = f'role="img" aria-label="{title} by step"'
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" {label}>{"".join(parts)}</svg>'


def _with(values: np.ndarray, interval: tuple[float, float] | None = None, sign: str = "") -> str:
    low, high = interval or mean_interval(values, 0.95)
    return f"{values.mean():{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def _json(file: Path) -> Any:
    if not file.is_file():
        raise TsaeError("is missing", where=file, fix="Run the stages before this one.")
    return json.loads(file.read_text(encoding="utf-8"))


def _rounded(value: Any) -> Any:
    """The same with floats of five significant digits; whole ones as integers."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float | np.floating):
        number = float(f"{value:.5g}")
        return int(number) if number.is_integer() else number
    return value

"""A real LLM on three bands: the page of what was recorded of SmolLM2-135M-Instruct, trained by GRPO with LoRA.

It was trained on easy, medium or hard word problems. `data/llm/records.json` has what every response to a held-out
problem did, and the logs by step. `data/llm/results.json` has the verdicts on claims and the table of accuracies.
Commit 1a85fd33 has the training.

    python scripts/llm_bands.py --out runs/llm-bands      # make demo-llm: page.html, in seconds
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.files import read_object, write_text
from tsae.base.statistics import change_interval

STORED = Path(__file__).parent.parent / "data" / "llm"
BANDS = ("easy", "medium", "hard")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/llm-bands"), help="folder; made if missing")
    out = parser.parse_args(arguments).out
    fix = "It is part of the repository: get it from there."
    found, results = (read_object(STORED / f"{name}.json", fix) for name in ("records", "results"))
    page = write_page(found, results, out / "page.html")
    table = verdict_table(results["claims"])[["claim", "verdict"]]
    print(f"{made_where(found)}\n\n{table.to_string(index=False)}\n\nPage: {page.resolve()}")


def in_order(names: Iterable[str]) -> list[str]:
    """The base, then the runs: easy, medium, hard, further ones; by seed."""
    first = ["base", *BANDS]
    return sorted(names, key=lambda name: (*(name.partition("-")[0] != one for one in first), name))


def right(found: Mapping[str, Any], policy: str, band: str) -> dict[str, float]:
    """Accuracy of a policy on every held-out problem of a band."""
    measured = found["measured"][policy].items()
    return {id: float(np.mean(own["right"])) for id, own in measured if found["problems"][id]["band"] == band}


def gain(found: Mapping[str, Any], run: str, band: str) -> list[float]:
    """Change of accuracy against the base, problem by problem."""
    base = right(found, "base", band)
    return [value - base[id] for id, value in right(found, run, band).items() if id in base]


def verdict_table(claims: Mapping[str, Any]) -> pd.DataFrame:
    """One row a claim."""
    rows = [(f"{key}: {one['title']}", one["verdict"], one["why"]) for key, one in claims.items()]
    return pd.DataFrame(rows, columns=["claim", "verdict", "why"])


def part_table(claims: Mapping[str, Any]) -> pd.DataFrame:
    """One row a part of a claim."""
    rows = []
    for key, one in claims.items():
        for part in one["parts"]:
            interval = f"{part['mean']:+.3f} [{part['low']:+.3f}, {part['high']:+.3f}]"
            holds = {True: "holds", False: "refuted", None: "not decided"}[part["holds"]]
            rows.append((key, part["statement"], interval, f"{part['n']} {part['unit']}", holds))
    return pd.DataFrame(rows, columns=["claim", "what must be true", "effect", "n", ""])


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


def write_page(found: Mapping[str, Any], results: Mapping[str, Any], to: Path) -> Path:
    """One HTML page that opens with no network, from the records and the results."""
    sections = [
        ("What the field's claims come to here", verdict_table(results["claims"])),
        ("Held-out problems, by policy and band (95 % intervals over problems)", pd.DataFrame(results["table"])),
        ("Logs of the runs: first quarter → last quarter", log_table(found)),
        ("Parts of the claims", part_table(results["claims"])),
    ]
    body = [f"<h1>A real LLM on three bands</h1><p>{html.escape(made_where(found))}</p>"]
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
    runs = in_order(found["measured"])[1:]
    left, width, line, top = 90, 900, 17, 34
    panel = (width - left) / len(BANDS)
    rows = {
        (band, run): (values.mean(), *change_interval(values, 0.95))
        for band in BANDS
        for run in runs
        if len(values := np.array(gain(found, run, band))) > 1
    }
    ends = [end for row in rows.values() for end in row]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    height = top + line * len(runs) + 22
    parts = []
    for place, band in enumerate(BANDS):
        begin = left + place * panel
        base = np.mean(list(right(found, "base", band).values()) or [np.nan])

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


if __name__ == "__main__":
    main()

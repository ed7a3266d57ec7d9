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
import plotly.express as px
import plotly.graph_objects as go

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
    gains = "Change of accuracy on held-out problems, by run (95 % intervals)"
    figures = {gains: _gains, "Along the steps of the runs": _logs}
    body = [f"<h1>A real LLM on three bands</h1><p>{html.escape(made_where(found))}</p>"]
    for number, (title, draw) in enumerate(figures.items()):
        drawn = draw(found).to_html(full_html=False, include_plotlyjs=not number)
        body.append(f"<h2>{html.escape(title)}</h2>{drawn}")
    for title, table in sections:
        body.append(f"<h2>{html.escape(title)}</h2>{table.to_html(index=False, border=0)}")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1c2330}"
        "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.25rem .6rem;text-align:left;"
        "border-bottom:1px solid #dde2ea;vertical-align:top}h2{margin-top:2rem}"
    )
    head = '<meta charset="utf-8"><title>A real LLM on three bands</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{style}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'
    return write_text(to, page)


def _gains(found: Mapping[str, Any]) -> go.Figure:
    """A panel for each band of held-out problems; in it a mark and a 95 % interval for each run."""
    rows = []
    for run in in_order(found["measured"])[1:]:
        for band in BANDS:
            if len(values := np.array(gain(found, run, band))) > 1:
                mean, (low, high) = values.mean(), change_interval(values, 0.95)
                rows.append({"run": run, "problems": band, "change": mean, "up": high - mean, "down": mean - low})
    sizes = {"error_x": "up", "error_x_minus": "down", "facet_col": "problems"}
    return px.scatter(pd.DataFrame(rows), x="change", y="run", color="run", template="plotly_white", **sizes)


def _logs(found: Mapping[str, Any]) -> go.Figure:
    """Reward and share of direct answers along the steps, a line a run."""
    names = {"right": "reward", "direct": "direct answers"}
    steps = pd.concat([pd.DataFrame(log).assign(run=run) for run, log in found["logs"].items()])
    long = steps.rename(columns=names).melt(["run", "step"], list(names.values()), "what", "share")
    order = {"run": in_order(found["logs"])}
    return px.line(
        long, x="step", y="share", color="run", facet_col="what", category_orders=order, template="plotly_white"
    )


if __name__ == "__main__":
    main()

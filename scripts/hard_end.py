"""The hard end of the cure, tried again: 80 steps on hard chains and their reformulations, several arms and seeds.

    python scripts/hard_end.py --out runs/hard-end --development          # to choose between arms
    python scripts/hard_end.py --out runs/hard-end --gather data/hard_end/runs.jsonl
    python scripts/hard_end.py --stored                                   # the table from the records in data/

Arms are described in `organism.hard_end`. Development has its own seeds and its own problems to evaluate on; what was
chosen there is then run with other seeds, and evaluated on the problems of docs/remedies.md. Predictions were written
before the runs that test them (data/hard_end/predictions.json). Finished runs are skipped, so that an interrupted
series goes on. The first run prepares the reference: rollouts of the base, a T-SAE, credit (`scripts/run_remedies.py`).
The same seed gives the same run on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from organism.hard_end import HardArm, evaluate, locate_slips, problem_sets, train
from run_remedies import prepare

from tsae.base.files import write_json, write_text
from tsae.errors import TsaeError

STORED = Path(__file__).parent.parent / "data" / "hard_end" / "runs.jsonl"

FAST = 3e-4
"""Three times the learning rate of docs/remedies.md."""
ARMS: dict[str, HardArm] = {
    "plain": HardArm(adaptive=False),
    "oracle": HardArm(adaptive=False, rule="oracle"),
    "draws": HardArm(),
    "credit": HardArm(rule="credit"),
    "choices": HardArm(rule="credit", choices=True),
    "relearned": HardArm(rule="relearned", plausible=True),
    "path": HardArm(rule="path"),
    "slips": HardArm(rule="slips"),
    "slips, hard only": HardArm(adaptive=False, rule="slips"),
    "slips, shuffled": HardArm(rule="slips", shuffled=True),
    "oracle, draws": HardArm(rule="oracle"),
    "fast plain": HardArm(adaptive=False, learning_rate=FAST),
    "fast oracle": HardArm(adaptive=False, rule="oracle", learning_rate=FAST),
    "fast draws": HardArm(learning_rate=FAST),
    "fast credit": HardArm(rule="credit", learning_rate=FAST),
    "fast shuffled": HardArm(rule="credit", shuffled=True, learning_rate=FAST),
    "fast choices": HardArm(rule="credit", choices=True, learning_rate=FAST),
    "fast relearned": HardArm(rule="relearned", plausible=True, learning_rate=FAST),
    "fast path": HardArm(rule="path", learning_rate=FAST),
}
"""In the order in which they are run."""
SEEDS, DEVELOPMENT = (0, 1, 2), (100,)
LENGTHS = (9, 10, 11, 12, 13, 14)


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing and print the table; 1 where the user has something to put right."""
    options = parse(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch.set_num_threads(1)
    try:
        if options.stored:
            print(tabulate(records_of(STORED)))
            return 0
        prepare(options.out / "reference", quick=options.quick)
        if options.where:
            model, _ = train(ARMS["credit"], DEVELOPMENT[0], options.steps // 2, options.out / "reference")
            write_json(STORED.with_name("slips.json"), locate_slips(model, options.out / "reference", 77))
            return 0
        seeds = options.seeds or (DEVELOPMENT if options.development else SEEDS)
        for seed in seeds:
            for name in options.arms:
                if not record_file(options, name, seed).is_file():
                    run(name, seed, options)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.out.glob("*.json"))]
        found = sorted(
            found, key=lambda record: (record["development"], list(ARMS).index(record["arm"]), record["seed"])
        )
        print(tabulate(found))
        if options.gather is not None:
            options.gather.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in found)
            write_text(options.gather, "".join(lines))
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/hard-end"), help="folder of the runs; made if missing")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}, in development {DEVELOPMENT}")
    parser.add_argument("--steps", type=int, default=80, help="batches per run (default: 80)")
    parser.add_argument("--development", action="store_true", help="other seeds and other problems to evaluate on")
    parser.add_argument("--gather", type=Path, help="file to gather the records of all finished runs in")
    parser.add_argument("--stored", action="store_true", help="only print the table of the records in data/")
    parser.add_argument("--where", action="store_true", help="write where slips are seen to data/, half-way of a run")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 steps, nothing is learned")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps = 2
    return options


def record_file(options: argparse.Namespace, name: str, seed: int) -> Path:
    """Such as fast-credit-0.json, or dev-credit-100.json."""
    kind = "dev-" if options.development else ""
    return Path(options.out / f"{kind}{name.replace(',', '').replace(' ', '-')}-{seed}.json")


def run(name: str, seed: int, options: argparse.Namespace) -> None:
    """One run: train, evaluate, write the record."""
    started = time.monotonic()
    model, told = train(ARMS[name], seed, options.steps, options.out / "reference")
    trained = time.monotonic()
    problems = problem_sets(options.development, 0.02 if options.quick else 1.0)
    measured = evaluate(model, problems, 2, seed)
    record: dict[str, Any] = {
        "arm": name,
        "seed": seed,
        "development": options.development,
        "steps": options.steps,
        "settings": asdict(ARMS[name]),
        **measured,
        "training": told,
        "seconds": [round(trained - started, 1), round(time.monotonic() - trained, 1)],
    }
    write_json(record_file(options, name, seed), record)
    hard = measured["levels"]["hard"]
    print(f"{name}, seed {seed}: hard {hard['accuracy']:.3f}, flawless {hard['flawless']:.3f}, {record['seconds']} s")


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file, a line each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tabulate(records: Iterable[dict[str, Any]]) -> str:
    """Markdown tables: mean over seeds ± standard deviation; test seeds, then development."""
    head = ["arm", "seeds", "medium accuracy", "long flawless", "hard accuracy", "hard flawless"]
    head += [f"{n} operations" for n in LENGTHS]
    parts = []
    for development in (False, True):
        lines = [head, ["---"] * len(head)]
        for name in ARMS:
            found = [r for r in records if r["arm"] == name and r["development"] == development]
            if found:
                lines.append([name, str(len(found)), *map(cell, columns(found))])
        if len(lines) > 2:
            parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
    return "\n".join(parts)


def columns(records: list[dict[str, Any]]) -> list[list[float]]:
    """The numbers of a row, by column and run."""
    cells = [("medium", "accuracy"), ("long", "flawless"), ("hard", "accuracy"), ("hard", "flawless")]
    found = [[record["levels"][level][name] for record in records] for level, name in cells]
    counts = [[record["lengths"].get(str(n), (0, 0)) for record in records] for n in LENGTHS]
    return found + [[well / n if n else float("nan") for well, n in some] for some in counts]


def cell(values: list[float]) -> str:
    """.20 ± .02"""
    mean = sum(values) / len(values)
    text = _share(mean)
    if len(values) > 1:
        spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        text += f" ± {_share(spread)}"
    return text


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


if __name__ == "__main__":
    raise SystemExit(main())

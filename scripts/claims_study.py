"""The runs behind docs/claims.md: arms of GRPO on the arithmetic testbed, several seeds each, each examined.

Every run leaves a JSON file and its final weights; finished ones are skipped, so that an
interrupted study goes on. Last the records of all runs are gathered in one file. `scripts/check_claims.py` judges the
claims from that file. `scripts/claims_features.py` adds what features show.

    python scripts/claims_study.py --out runs/claims --gather data/claims/runs.jsonl.gz

The same seed gives the same run on the same machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from organism import examining, planning
from organism.arms import EASY, HARD, LONG, MEDIUM, SAMPLES, Arm, Batch, TokenCredit, answer, run_arm
from organism.corpus import CorpusConfig
from organism.pretraining import BaseConfig, train_base

from tsae.base.files import write_json, write_text
from tsae.errors import TsaeError
from tsae.testbed import series
from tsae.testbed.chains import generate_problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASES = {"quarter": 0.25, "direct": 1.0}
"""Other bases than the shipped one, by the share of direct answers in their training text. The shipped one has ½: both
formats are latent. "quarter" mostly writes scratchpads, the better format on medium problems; "direct" has no other."""
PLANNING, PLANNING_BASE = "planning", "planning-base"
"""The arm and the base of the task of `organism.planning`."""
ALL_BASES = ("base", *BASES, PLANNING_BASE)

_MIX = (EASY, MEDIUM, LONG)
_SMALL = 4
"""Problems of each kind, where data are few."""

ARMS: dict[str, Arm] = {
    "easy": Arm((EASY,)),
    "medium": Arm((MEDIUM,)),
    "hard": Arm((HARD,)),
    "mixed": Arm(_MIX),
    "no-easy": Arm(_MIX[1:]),
    "mixed-few": Arm(_MIX, pool=_SMALL),
    "no-easy-few": Arm(_MIX[1:], pool=_SMALL),
    "no-lone": Arm((HARD,), advantages="no lone"),
    "mean-only": Arm((HARD,), advantages="mean"),
    "backward": Arm((HARD,), backward=True),
    "guided": Arm((HARD,), backward=True, credit="features"),
    "shuffled": Arm((HARD,), backward=True, credit="shuffled"),
    "expert-steps": Arm((HARD,), reward="steps"),
    "adaptive": Arm((), adaptive=True),
    "top-fifth": Arm((MEDIUM,), tokens="top"),
    "rest": Arm((MEDIUM,), tokens="rest"),
    "random": Arm((MEDIUM,), reward="random", reuses=4, steps=40),
    "random-quarter": Arm((MEDIUM,), start="quarter", reward="random", reuses=4, steps=40),
    "random-direct": Arm((MEDIUM,), start="direct", reward="random", reuses=4, steps=40),
    "anchored": Arm((MEDIUM,), beta=0.3),
    "second-base": Arm((EASY, (2, 2)), reward="direct", steps=20),
    "second-near": Arm((EASY, (2, 2)), start="near", reward="direct", steps=20),
    "second-far": Arm((EASY, (2, 2)), start="far", reward="direct", steps=20),
    PLANNING: Arm((planning.OPERATIONS,), start=PLANNING_BASE, steps=60),
}
"""In the order in which they are run. "near" is the model of the arm "anchored", and "far" the step of the arm "medium"
whose accuracy on medium problems is closest to it."""

EXAMINED = ("easy", "medium", "hard", "mixed")
"""Arms with pass@k, slips and sparsity."""
MEASURED_AT = {"hard": 5, "medium": 10, PLANNING: 5}
"""Steps between two measurements on medium problems, or on the planning task; others are measured at the end only."""
DRIFTED = 40
"""Step at which the accuracy by length is measured again, in the arm "mixed"."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2 * 10**9), "MALLOC_TRIM_THRESHOLD_": str(8 * 10**9)}
"""glibc keeps memory that is freed: a fifth of the time went into fetching it again."""
SEED = 2000
"""Of what is measured: the same problems for every run."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing; 1 where the user has something to put right."""
    options = parse(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if options.one is not None:
            do(options.one[0], int(options.one[1]), options.out, options.steps)
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        if not options.gather_only:
            run_all(options)
        if options.gather is not None:
            gather(options.out, options.gather)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; made if missing")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="runs per arm (default: 5)")
    parser.add_argument("--steps", type=int, help="optimiser steps of every run: a smoke run (default: its arm's)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    parser.add_argument("--gather", type=Path, help="file to gather the records of all finished runs in")
    parser.add_argument("--gather-only", action="store_true", help="run nothing")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace) -> None:
    """All runs, seed by seed, so that every arm has its first result early."""
    from run_remedies import prepare
    from tqdm import tqdm

    if any(ARMS[arm].credit for arm in options.arms):
        prepare(options.out / "reference")
    os.environ.update(MALLOC)
    bases = [(name, 0) for name in ALL_BASES if any(ARMS[arm].start == name for arm in options.arms)]
    runs = [(arm, seed) for seed in range(options.seeds) for arm in options.arms]
    waiting = [(name, seed) for name, seed in [*bases, *runs] if not record_of(options.out, name, seed).is_file()]
    running = dict[Future[None], tuple[str, int]]()
    # Processes of their own, which last: importing everything takes as long as a short run.
    processes = ProcessPoolExecutor(options.jobs, get_context("spawn"))
    with processes, tqdm(total=len(waiting), desc="runs", unit="run") as bar:
        while waiting or running:
            for item in list(waiting):
                if len(running) < options.jobs and all(
                    record_of(options.out, *need).is_file() for need in needs(*item)
                ):
                    waiting.remove(item)
                    running[processes.submit(do, *item, options.out, options.steps)] = item
            if not running:
                raise TsaeError(f"{waiting[0][0]} waits for an arm that is not asked for", where="--arms")
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                future.result()
                bar.update()


def do(name: str, seed: int, out: Path, steps: int | None = None) -> None:
    """One run, or one base."""
    torch.set_num_threads(1)
    if name in ALL_BASES:
        do_base(name, seed, out)
    else:
        arm = ARMS[name]
        do_run(name, seed, out, replace(arm, steps=steps or arm.steps))


def needs(name: str, seed: int) -> list[tuple[str, int]]:
    """Runs that one builds on."""
    start = ARMS[name].start if name in ARMS else "base"
    if start in ("near", "far"):
        return [("medium", seed), ("anchored", seed)]
    return [(start, 0)] if name in ARMS else []


def record_of(out: Path, name: str, seed: int) -> Path:
    """Such as hard-0.json."""
    return out / f"{name}-{seed}.json"


def weights_of(out: Path, name: str, seed: int, step: int | None = None) -> Path:
    return out / "weights" / (f"{name}-{seed}" + (f"-{step}" if step is not None else ""))


def do_base(name: str, seed: int, out: Path) -> None:
    """Train a base, unless it is the shipped one, and measure it."""
    started, folder = time.monotonic(), weights_of(out, name, seed)
    if name == PLANNING_BASE and not folder.exists():
        keep(planning.train_base(seed), folder)
    elif name in BASES and not folder.exists():
        keep(train_base(BaseConfig(corpus=CorpusConfig(direct_share=BASES[name])), seed), folder)
    model = load(out, name, seed)
    if name == PLANNING_BASE:
        record: dict[str, Any] = {"arm": name, "seed": seed, "measured": {"0": levels(model, PLANNING)}}
    else:
        # Every run from this base is compared with these numbers: eight times as many responses.
        found = {"0": levels(model, samples=32)}
        record = {"arm": name, "seed": seed, "measured": found, "lengths": {"0": lengths(model)}}
        record |= examined(model, model)
    record["seconds"] = time.monotonic() - started
    write_json(record_of(out, name, seed), examining.rounded(record))


def do_run(name: str, seed: int, out: Path, arm: Arm) -> None:
    """Train one arm, measure on the way and at the end, write the record."""
    started = time.monotonic()
    base = load(out, "base" if arm.start in ("near", "far") else arm.start, 0)
    model = load(out, *start_of(arm, seed, out))
    moved = examining.distance(model, base, problems_of("medium", 64), SEED) if arm.start in ("near", "far") else 0.0
    every = MEASURED_AT.get(name, arm.steps)
    of_base = json.loads(record_of(out, arm.start, 0).read_text()) if arm.start in ALL_BASES else {}
    steps, by_length = list[dict[str, float]](), dict(of_base.get("lengths", {})) if name == "mixed" else {}
    measured = dict(of_base["measured"] if of_base else {"0": levels(model)})
    on_the_way = PLANNING if name == PLANNING else "medium"

    def after(number: int, model: PreTrainedModel, batch: Batch) -> None:
        steps.append(planning.behaviour(batch) if name == PLANNING else examining.of_step(batch, SAMPLES))
        if number % every == 0 or number == arm.steps:
            measured[str(number)] = levels(model, *((on_the_way,) if number < arm.steps or name == PLANNING else ()))
            if name == "medium":
                keep(model, weights_of(out, name, seed, number))
        if name == "mixed" and number == DRIFTED:
            by_length[str(number)] = lengths(model)

    generate = planning.generate_problems if name == PLANNING else generate_problems
    run_arm(arm, seed, model, base, after, credit_of(arm, seed, out), generate)
    keep(model, weights_of(out, name, seed))
    record: dict[str, Any] = {
        "arm": name,
        "seed": seed,
        "settings": asdict(arm),
        "start": list(start_of(arm, seed, out)),
        "steps": steps,
        "measured": measured,
        "lengths": by_length,
        "start_distance": moved,
    }
    level = PLANNING if name == PLANNING else "medium"
    record["distance"] = examining.distance(model, base, problems_of(level, 64), SEED)
    if name in EXAMINED:
        record |= examined(model, base)
    if name == "hard":
        record["layers"] = examining.restored(model, base, problems_of("medium", 128), 4, SEED)
    record["seconds"] = time.monotonic() - started
    write_json(record_of(out, name, seed), examining.rounded(record))


def levels(model: PreTrainedModel, *some: str, samples: int = 4) -> dict[str, dict[str, float]]:
    """Measurements on some levels, by default those of the chains."""
    return {
        level: (planning if level == PLANNING else examining).measure(model, problems_of(level, 100), samples, SEED)
        for level in some or examining.LEVELS
    }


def lengths(model: PreTrainedModel) -> list[float]:
    return examining.by_length(model, 32, 4, SEED)


def problems_of(level: str, n: int) -> list[Any]:
    if level == PLANNING:
        return planning.generate_problems(planning.OPERATIONS, n, SEED)
    return generate_problems("easy" if level == "easy" else examining.LEVELS[level], n, SEED)


def examined(model: PreTrainedModel, base: PreTrainedModel) -> dict[str, Any]:
    """pass@k, slips and sparsity."""
    batch = answer(model.eval(), problems_of("long", 64), torch.Generator().manual_seed(SEED), samples=8)
    return {
        "successes": {
            level: examining.successes(model, problems_of(level, 40), 64, SEED) for level in ("medium", "hard")
        },
        "slips": examining.natural_slips(batch) | examining.planted_slips(model, problems_of("long", 64), SEED),
        "sparsity": examining.sparsity(model, 64, SEED),
    }


def start_of(arm: Arm, seed: int, out: Path) -> tuple[str, int] | tuple[str, int, int]:
    """The model that an arm starts from: name, seed, and the step where it is not the last."""
    if arm.start == "near":
        return "anchored", seed
    if arm.start != "far":
        return arm.start, 0
    anchored, medium = (
        json.loads(record_of(out, name, seed).read_text())["measured"] for name in ("anchored", "medium")
    )
    goal = list(anchored.values())[-1]["medium"]["accuracy"]
    kept = [step for step in medium if step != "0"]
    return "medium", seed, int(min(kept, key=lambda step: abs(medium[step]["medium"]["accuracy"] - goal)))


def credit_of(arm: Arm, seed: int, out: Path) -> TokenCredit | None:
    """Credit from features, learned on the base's rollouts (`scripts/run_remedies.py`, stage prepare)."""
    if not arm.credit:
        return None
    from run_remedies import SHAPINGS

    from tsae.rl.credit import Credit
    from tsae.rl.trl import FeatureCredit

    credit = Credit.load(out / "reference" / "credit")
    if arm.credit == "shuffled":
        credit = credit.shuffled(seed)
    return FeatureCredit(series().base, out / "reference" / "sae", credit, SHAPINGS["guided"])


def load(out: Path, name: str, seed: int, step: int | None = None) -> PreTrainedModel:
    from transformers import LlamaForCausalLM

    path = series().base.path if name == "base" else weights_of(out, name, seed, step)
    return LlamaForCausalLM.from_pretrained(path, dtype="float32").eval()


def keep(model: PreTrainedModel, to: Path) -> None:
    """Save weights and tokenizer, entered under the final name only when complete."""
    from build_testbed import save_checkpoint

    to.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, to)


def gather(out: Path, to: Path) -> None:
    """Put the records of all finished runs into one compressed file, a line each."""
    order = {name: place for place, name in enumerate([*ALL_BASES, *ARMS])}
    found = sorted(
        (json.loads(path.read_text(encoding="utf-8")) for path in out.glob("*-*.json")),
        key=lambda record: (order.get(record["arm"], len(order)), record["arm"], record["seed"]),
    )
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in found)
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.suffix == ".gz":
        to.write_bytes(gzip.compress(lines.encode(), mtime=0))
    else:
        write_text(to, lines)
    print(f"{len(found)} runs in {to}")


if __name__ == "__main__":
    raise SystemExit(main())

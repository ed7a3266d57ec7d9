"""The hard paradox: why training on hard chains teaches direct answers, by kind of sample, step and token.

The hard run loses the scratchpad, although Cov(advantage, direct) at the base does not say so. Here the run is trained
for 40 steps with all its checkpoints, taken apart, and really repeated without each kind of sample.

    python scripts/explain_hard_run.py --to /data/hard          # train, attribute, repeat; goes on where it stopped
    python scripts/explain_hard_run.py --stored                 # print what data/hard_run.json holds

Kinds are direct or scratchpad, by the first token, and right or wrong. The target is the probability of a direct answer
on 24 held-out problems of four bands. Repetitions replay the log, or sample anew (two seeds); in both the advantages of
the samples that are kept stay as they were.

Predicted before the run:

1. Direct answers rise by .05 to .25 in all four bands.
2. Shares by kind have the signs + (direct, right), − (direct, wrong), − (scratchpad, right), + (scratchpad, wrong).
   Each is at least twice the net change; the four add up to it within 1 %.
3. The first token carries at least 80 % of the absolute share of every kind.
4. Cov(advantage, direct) at the base is within two standard errors of zero.
5. Left out, every kind changes direct answers against the sign of its share, in the simulation and really, replayed and
   sampled anew. The simulated effect is within .1 of the replayed one for at least three of the four kinds: without a
   kind, advantages no longer add up to zero, and the run goes further from its path than any left-out band did.

Found:

1. Wrong: the rise was .26 to .43 (.16 to .29 with another seed of the sampling).
2. Right in the signs and the sum (.03 %), wrong in the size: the smallest share is 1.6 times the change.
3. Right for direct answers. Of scratchpads it is .55, since many tokens have small shares of both signs; the sum over
   all tokens is the first one's by 97 %.
4. Right: .9 standard errors.
5. Right in 47 of 48 signs, wrong in the size: the errors against replays are .17, .05, .06, .27. Against new sampling,
   for which the simulation stands by default, they are .03 to .11, and for failed scratchpads .11 and .22.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import tyro
from organism.hard import HardConfig, held_out_hard
from organism.mixed import Sample, logged_probabilities, prompt_ids, replayed, retrain, train

import tsae
from tsae.attribution.replay.forward_passes import Known, Rows
from tsae.attribution.replay.path import Replayed
from tsae.attribution.replay.shares import Shares, shares, token_shares
from tsae.attribution.replay.simulation import simulate
from tsae.attribution.targets import NextToken
from tsae.attribution.training.loss import Again
from tsae.base.files import write_json
from tsae.errors import TsaeError
from tsae.rollouts.importing import import_log
from tsae.rollouts.table import Rollouts
from tsae.testbed.tokenizer import TOKEN_IDS

STORED = Path(__file__).parent.parent / "data" / "hard_run.json"
DIRECT = TOKEN_IDS["#"]
KINDS = ("direct, right", "direct, wrong", "scratchpad, right", "scratchpad, wrong")


@dataclass(frozen=True)
class Options:
    """Explain the hard run."""

    to: Path = Path("runs/hard")
    """Folder of the run, its replayed path and the repetitions."""
    stored: bool = False
    """Only print the figures that the repository holds."""
    seeds: tuple[int, ...] = (1, 2)
    """Of the repetitions that sample anew."""
    per_kind: int = 60
    """Samples of each kind whose shares are split by token."""
    config: HardConfig = field(default_factory=HardConfig)
    """The run."""


def main(options: Options) -> int:
    """Explain; 1 where the user has something to put right."""
    torch.set_num_threads(1)
    try:
        found = json.loads(STORED.read_text(encoding="utf-8")) if options.stored else explain(options)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not options.stored:
        write_json(options.to / "hard_run.json", found)
    show(found)
    print(json.dumps({"name": "hard_run", **found["checks"]}))
    return 0


def explain(options: Options) -> dict[str, Any]:
    """Train, attribute, and repeat without each kind."""
    config, run = options.config, options.to / "run"
    base = tsae.testbed.series().base
    if not run.exists():
        train(config, base, run)
    log = options.to / "rollouts.parquet"
    if not log.is_file():
        import_log(run, log)
    rollouts = Rollouts.read(log)
    path = replayed(base, rollouts, run, options.to / "path")
    problems = held_out_hard(config)
    prompts = [np.array(prompt_ids(problem)) for some in problems.values() for problem in some]
    target = NextToken(prompts, [band for band, some in problems.items() for _ in some], DIRECT, what="direct")
    kind = kinds_of(rollouts)
    by_tokens = ByTokens(path, kind, options.per_kind)
    split = shares(path, target, points=config.steps, seen=by_tokens)
    before = split.before
    kept = np.array([np.ones(len(kind), dtype=bool), *(kind != k for k in range(len(KINDS)))])
    simulated = {}
    for again in get_args(Again):
        changes = np.array([measured(path, target, end) for end in simulate(path, kept, again=again)])
        simulated[again] = (changes[1:] - changes[0]).round(4).tolist()
    found: dict[str, Any] = {
        "config": asdict(config),
        "bands": list(problems),
        "before": before.round(4).tolist(),
        "after": (before + split.realised).round(4).tolist(),
        "n": [int((kind == k).sum()) for k in range(len(KINDS))],
        "share": [split.shares[kind[split.rows] == k].sum(0).round(4).tolist() for k in range(len(KINDS))],
        "remainder": split.remainder.round(5).tolist(),
        "by_step": by_step(split, kind, config.steps),
        "covariance": covariance(rollouts, kind),
        "tokens": by_tokens.sums(),
        "simulated": simulated,
        "repeated": [],
    }
    found["repeated"] = repeat(options, rollouts, kind, path, target, before)
    found["checks"] = checks(found)
    return found


class ByTokens:
    """Splits shares in direct answers on medium problems by token, of some samples of each kind."""

    def __init__(self, path: Replayed, kind: np.ndarray, per_kind: int) -> None:
        self.path, self.kind, self.found = path, kind, dict[int, np.ndarray]()
        rng, acts = np.random.default_rng(0), path.run.rollouts.frame.advantage.to_numpy() != 0
        some = [rng.permutation(np.flatnonzero((kind == k) & acts))[:per_kind] for k in range(len(KINDS))]
        self.chosen = np.concatenate(some)

    def begin(self, before: np.ndarray, after: np.ndarray) -> None:
        pass

    def __call__(self, step: int, directions: torch.Tensor, those: Rows, known: Known, found: np.ndarray) -> None:
        rows = np.intersect1d(those.rows, self.chosen)
        self.found |= token_shares(self.path.run, those, known, rows, directions[1]) if len(rows) else {}

    def sums(self) -> list[dict[str, float]]:
        """By kind: of the first tokens, of all, and of absolute values."""
        table = []
        for k in range(len(KINDS)):
            parts = [tokens for row, tokens in self.found.items() if self.kind[row] == k]
            first, whole = (np.array([f(part) for part in parts]) for f in (lambda part: part[0], np.sum))
            others = np.array([np.abs(part[1:]).sum() for part in parts])
            sums = {"sum": whole, "first": first, "absolute_first": np.abs(first), "absolute_others": others}
            table.append({"n": len(parts)} | {name: float(values.sum()) for name, values in sums.items()})
        return table


def measured(path: Replayed, target: NextToken, weights: torch.Tensor) -> np.ndarray:
    path.run.trained.put(weights)
    return target.values(path.run.trained)


def kinds_of(rollouts: Rollouts) -> np.ndarray:
    """(n,) place in KINDS."""
    scratchpad = np.array([rollouts.tokens(row)[1][0] != DIRECT for row in range(len(rollouts))])
    return 2 * scratchpad + (rollouts.frame.reward.to_numpy() <= 0)


def kind_of(sample: Sample) -> int:
    """The same of one sample."""
    return 2 * (sample.response[0] != DIRECT) + (sample.reward <= 0)


def by_step(split: Shares, kind: np.ndarray, steps: int) -> list[list[float]]:
    """(kinds, fifths of the run) shares in direct answers on medium problems."""
    fifth = (split.steps - 1) * 5 // steps
    return [
        [round(float(split.shares[(kind[split.rows] == k) & (fifth == f), 1].sum()), 4) for f in range(5)]
        for k in range(len(KINDS))
    ]


def covariance(rollouts: Rollouts, kind: np.ndarray) -> list[dict[str, float]]:
    """Cov(advantage, direct) within prompt groups, at every eighth step, with its standard error over groups."""
    direct, frame, found = (kind < 2).astype(float), rollouts.frame, []
    for step in range(1, int(frame["step"].max()) + 1, 8):
        of = [
            float(np.mean(frame.advantage.to_numpy()[rows] * (direct[rows] - direct[rows].mean())))
            for rows in frame[frame["step"] == step].groupby("problem_id").indices.values()
            for rows in [frame.index[frame["step"] == step].to_numpy()[rows]]
        ]
        error = float(np.std(of, ddof=1) / np.sqrt(len(of)))
        found.append({"step": step, "covariance": round(float(np.mean(of)), 4), "standard_error": round(error, 4)})
    return found


def repeat(
    options: Options, rollouts: Rollouts, kind: np.ndarray, path: Replayed, target: NextToken, before: np.ndarray
) -> list[dict[str, Any]]:
    """Really train without each kind; a line of results a training, kept in the folder."""
    file, base, config = options.to / "repeated.jsonl", tsae.testbed.series().base, options.config
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    done = {(line["without"], str(line["sampling"])) for line in lines}
    every, logged = {problem.id for problem in config.problems}, logged_probabilities(config, base, rollouts)
    samplings: list[Literal["replayed"] | int] = ["replayed", *options.seeds]
    for sampling in samplings:
        for k in (None, *range(len(KINDS))):
            name = "nothing" if k is None else KINDS[k]
            if (name, str(sampling)) in done:
                continue
            rows = np.flatnonzero(kind != k) if k is not None else np.arange(len(kind))
            keep: Callable[[Sample], bool] | None = None if k is None else lambda one, k=k: kind_of(one) != k
            weights = retrain(config, base, rollouts.select(rows), every, sampling, [logged[row] for row in rows], keep)
            values = (measured(path, target, weights) - before).round(4).tolist()
            line = {"without": name, "sampling": sampling, "changes": values}
            lines.append(line)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            print(line, flush=True)
    return lines


def real_effects(found: dict[str, Any], sampling: str) -> np.ndarray:
    """(kinds, bands) changes without each kind less those with all."""
    changes = {
        line["without"]: np.array(line["changes"]) for line in found["repeated"] if str(line["sampling"]) == sampling
    }
    return np.array([changes[name] - changes["nothing"] for name in KINDS])


def checks(found: dict[str, Any]) -> dict[str, Any]:
    """What was predicted, in figures."""
    share, change = np.array(found["share"]), np.array(found["after"]) - np.array(found["before"])
    samplings = list(dict.fromkeys(str(line["sampling"]) for line in found["repeated"]))
    errors = {
        s: np.abs(np.array(found["simulated"]["replayed" if s == "replayed" else "on-policy"]) - real_effects(found, s))
        for s in samplings
    }
    signs = {s: np.sign(real_effects(found, s)) == -np.sign(share) for s in samplings}
    base = found["covariance"][0]
    tokens = found["tokens"]
    return {
        "change": change.round(3).tolist(),
        "signs_of_shares": np.sign(share).astype(int).tolist(),
        "smallest_share_by_change": round(float((np.abs(share) / np.abs(change)).min()), 2),
        "remainder": round(float(np.abs(np.array(found["remainder"]) / change).max()), 4),
        "first_token": [
            round(one["absolute_first"] / (one["absolute_first"] + one["absolute_others"]), 3) for one in tokens
        ],
        "covariance_at_base_in_standard_errors": round(base["covariance"] / base["standard_error"], 2),
        "effects_against_shares": {s: f"{int(right.sum())} of {right.size}" for s, right in signs.items()},
        "error_of_simulation": {s: error.mean(1).round(3).tolist() for s, error in errors.items()},
    }


def show(found: dict[str, Any]) -> None:
    """Tables, in the order of the prediction."""
    print(f"{'direct answers':26s}", *(f"{band:>9s}" for band in found["bands"]))
    row("before", found["before"])
    row("after", found["after"])
    print("\nshares, which add up to the change")
    for name, n, share in zip(KINDS, found["n"], found["share"], strict=True):
        row(f"{name} ({n})", share)
    print("\nshares on medium problems, by fifth of the run")
    for name, parts in zip(KINDS, found["by_step"], strict=True):
        row(name, parts)
    print(
        "\nCov(advantage, direct) by step:",
        *(f"{c['covariance']:+.3f}±{c['standard_error']:.3f}" for c in found["covariance"]),
    )
    print("\nshare of the first token in the share on medium problems (absolute, samples)")
    for name, one in zip(KINDS, found["tokens"], strict=True):
        print(f"{name:26s} {one['absolute_first'] / (one['absolute_first'] + one['absolute_others']):.2f} ({one['n']})")
    for s in dict.fromkeys(str(line["sampling"]) for line in found["repeated"]):
        again = "replayed" if s == "replayed" else "on-policy"
        print(
            f"\nwithout a kind, {'replayed' if s == 'replayed' else f'sampled anew, seed {s}'}: really, and simulated"
        )
        for name, real, said in zip(KINDS, real_effects(found, s), found["simulated"][again], strict=True):
            row(f"without {name}", real)
            row("   simulated", said)


def row(name: str, values: Any) -> None:
    print(f"{name:26s}", *(f"{value:+9.3f}" for value in values))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

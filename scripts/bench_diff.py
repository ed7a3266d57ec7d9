"""A whole feature diff on a large table, its time and memory, and on a small one against the plain way.

The table: two checkpoints that each read their own trajectories, without bands, which makes five contrasts (total shift
of all, of successful and of failed trajectories; success − failure of both checkpoints), every one with studentised
intervals, permutation tests, AUROC, controls and nulls, as `tsae diff` draws them. Codes are sparse: in each of k slots
a token has one of d_sae / k features by Zipf's law, three of ten times a favourite of the problem, two of the
trajectory, two of the token id, so that trajectories of a problem are alike. The run raises a feature in 64, success
another.

The plain way: feature by feature, its dense column of codes, loops over rows and problems, one product with all sign
flips, label permutations and bootstrap draws for each of the two tests, of a difference of 0 and of a least size, all
drawn once for all features; controls cell by cell. It does the
five contrasts and their controls, without nulls and descriptions, and its results are asserted to be ours: to rounding,
p-values up to what the number of draws allows.

    python scripts/bench_diff.py                              # 20,000 trajectories, 1.6 GB on disk
    python scripts/bench_diff.py --trajectories 5000          # a quarter

Ends with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import tyro
from statements.tables import feature_table

import tsae.diff.effects as tables
import tsae.diff.feature_diff as whole
from tsae.diff.config import DiffConfig
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts

_IDS = 8000
_STAGES = {
    "contrasts": (whole, "draw_all"),
    "controls": (whole, "confound_table"),
    "nulls": (tables, "null_counts"),
    "descriptions": (whole, "describe"),
}


@dataclass(frozen=True)
class Bench:
    """Size of the tables."""

    trajectories: int = 20_000
    """Of both checkpoints together."""
    samples: int = 8
    """Trajectories of a problem and checkpoint."""
    tokens: int = 300
    """Of a trajectory on average, prompt included."""
    k: int = 32
    """Active features of a token."""
    d_sae: int = 16_384
    n_bootstrap: int = 1000
    n_permutations: int = 10_000
    threads: int = 2
    """Of the diff; each of its threads multiplies matrices on its own."""
    small: tuple[int, int, int, int] = (480, 60, 8, 512)
    """Trajectories, tokens, k and d_sae of the table that the plain way is done on as well."""
    to: Path | None = None
    """Folder for the large table, which is kept and used again; by default a temporary one."""


def make_table(bench: Bench) -> FeatureTable:
    """The table, written problem by problem into arrays of the final size."""
    rng = np.random.default_rng(0)
    n_problems, per = bench.trajectories // (2 * bench.samples), bench.d_sae // bench.k
    zipf = np.cumsum(1 / np.arange(1, per + 1))
    zipf /= zipf[-1]
    id_zipf = np.cumsum(1 / np.arange(10, _IDS + 10))
    id_zipf /= id_zipf[-1]

    def ranks(*shape: int) -> np.ndarray:
        return np.searchsorted(zipf, rng.random(shape, dtype=np.float32)).clip(max=per - 1).astype(np.int16)

    of_id = ranks(_IDS, bench.k)
    n_rows = 2 * n_problems * bench.samples
    prompt = bench.tokens // 15
    response = rng.integers(bench.tokens * 2 // 3, bench.tokens * 4 // 3 + 1, n_rows) - prompt
    offsets = np.concatenate([[0], np.cumsum(response + prompt)])
    indices = np.empty(offsets[-1] * bench.k, dtype=np.int32)
    values = np.empty(offsets[-1] * bench.k, dtype=np.float32)
    token_ids = np.empty(offsets[-1], dtype=np.int32)
    level = rng.lognormal(0, 0.5, bench.d_sae).astype(np.float32)
    slot = np.arange(bench.k, dtype=np.int32)
    records = []
    state = [(rng.integers(0, _IDS, 40), ranks(4, bench.k), rng.random()) for _ in range(n_problems)]
    for side, policy in enumerate(("base", "run")):
        for problem, (own_ids, favourites, rate) in enumerate(state):
            strength = level * rng.lognormal(0, 0.2, bench.d_sae).astype(np.float32)
            if side:
                strength[::64] *= 1.3
            for sample in range(bench.samples):
                row = (side * n_problems + problem) * bench.samples + sample
                right = bool(rng.random() < 0.2 + 0.6 * rate)
                n, start = int(response[row] + prompt), int(offsets[row])
                ids = np.searchsorted(id_zipf, rng.random(n)).clip(max=_IDS - 1)
                ids = np.where(rng.random(n) < 0.5, own_ids[rng.integers(0, len(own_ids), n)], ids)
                choice = rng.random((n, bench.k), dtype=np.float32)
                rank = ranks(n, bench.k)
                of_row = ranks(4, bench.k)
                which = rng.integers(0, 4, (n, bench.k))
                rank = np.where(choice < 0.3, favourites[which, slot], rank)
                rank = np.where((choice >= 0.3) & (choice < 0.5), of_row[which, slot], rank)
                rank = np.where((choice >= 0.5) & (choice < 0.7), of_id[ids], rank)
                feature = np.sort(rank * np.int32(bench.k) + slot, axis=1)
                value = strength[feature] * (0.3 + rng.random((n, bench.k), dtype=np.float32))
                if right:
                    value[feature % 64 == 1] *= np.float32(1.3)
                span = slice(start * bench.k, (start + n) * bench.k)
                indices[span], values[span] = feature.ravel(), value.ravel()
                token_ids[start : start + n] = ids
                records.append(
                    {
                        "problem_id": f"p{problem}", "policy": policy, "outcome": "success" if right else "failure",
                        "prompt_ids": ids[:prompt].astype(np.int32), "response_ids": ids[prompt:].astype(np.int32),
                    }
                )  # fmt: skip
    shape = (int(offsets[-1]), bench.d_sae)
    codes = sp.csr_array((values, indices, np.arange(shape[0] + 1) * bench.k), shape=shape)
    rows = np.arange(n_rows)
    readers = list(zip(("base", "run"), np.split(rows, 2), strict=True))
    return feature_table(Rollouts.from_records(records), codes, readers, d_high=bench.d_sae // 5, special=())


def measure(folder: Path, config: DiffConfig) -> dict[str, Any]:
    """Seconds of load, diff and save with their parts, and peak memory of this process."""
    stages: dict[str, float] = {}
    stages_cpu: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            found = function(*args, **kwargs)
            stages[name] = round(time.perf_counter() - start, 2)
            stages_cpu[name] = round(time.process_time() - cpu, 2)
            return found

        return wrapper

    for name, (module, function) in _STAGES.items():
        setattr(module, function, timed(name, getattr(module, function)))
    start = time.perf_counter()
    table = timed("load", FeatureTable.load)(folder)
    diff = whole.feature_diff(table, config, progress=False)
    timed("save", diff.save)(folder / "diff")
    seconds, cpu = time.perf_counter() - start, time.process_time()
    # Not getrusage: a child's ru_maxrss starts from its parent's.
    status = Path("/proc/self/status").read_text()
    drawn = diff.contrasts[diff.contrasts.note == ""]
    least, least_cpu = floor(table)
    return {
        "floor": {
            "seconds": round(least, 1),
            "cpu_seconds": round(least_cpu, 1),
            "ratio": round(seconds / least, 1),
            "cpu_ratio": round(cpu / least_cpu, 1),
        },
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_gb": round(int(status.partition("VmHWM:")[2].split()[0]) / 1e6, 2),
        "stages": stages,
        "stages_cpu": stages_cpu,
        "non_zeros": int(table.codes.nnz),
        "contrasts": len(drawn),
        "tested": drawn.n_tested.tolist(),
        "discoveries": drawn.n_discoveries.tolist(),
        "null": drawn.n_null.round(2).tolist(),
    }


def floor(table: FeatureTable) -> tuple[float, float]:
    """Seconds, and of CPU, of one pass that reads all codes and sums every feature per trajectory on one thread.

    No diff does without it.
    """
    start, cpu = time.perf_counter(), time.process_time()
    for _, tokens, ends in table.row_blocks():
        codes, shape = table.codes[tokens], (len(ends) - 1, ends[-1])
        member = sp.csr_array((np.ones(ends[-1], np.float32), np.arange(ends[-1]), ends), shape=shape)
        _ = member @ codes
    return time.perf_counter() - start, time.process_time() - cpu


@dataclass(frozen=True)
class Sides:
    """Rows of the two sides by problem, and draws that all features share."""

    keys: dict[str, str]
    a: list[np.ndarray]
    b: list[np.ndarray]
    weights: np.ndarray
    signs: np.ndarray
    labels: np.ndarray | None
    """(draws, n_rows) weights of permuted labels, for outcomes."""


def plain_sides(table: FeatureTable, config: DiffConfig) -> list[Sides]:
    frame, rng = table.rollouts.frame, np.random.default_rng(1)
    problem = pd.factorize(frame.problem_id)[0]
    run, right = (frame.policy == "run").to_numpy(), (frame.outcome == "success").to_numpy()
    wanted = [
        ({"kind": "shift", "checkpoint": "run", "outcome": name}, run & mask, ~run & mask)
        for name, mask in (("all", run | ~run), ("success", right), ("failure", ~right))
    ]
    for name, mask in (("base", ~run), ("run", run)):
        wanted.append(({"kind": "outcome", "checkpoint": name, "outcome": "all"}, mask & right, mask & ~right))
    found = []
    for keys, on_a, on_b in wanted:
        both = np.intersect1d(problem[on_a], problem[on_b])
        a, b = ([np.flatnonzero(side & (problem == j)) for j in both] for side in (on_a, on_b))
        n = len(both)
        drawn = np.random.default_rng([config.seed, 3]).multinomial(n, np.full(n, 1 / n), size=config.n_bootstrap)
        signs = rng.integers(0, 2, size=(config.n_permutations, n)) * 2.0 - 1
        labels = None
        if keys["kind"] == "outcome":
            labels = np.zeros((config.n_permutations, len(problem)))
            for x, y in zip(a, b, strict=True):
                rows = rng.permuted(np.tile(np.concatenate([x, y]), (config.n_permutations, 1)), axis=1)
                np.put_along_axis(labels, rows[:, : len(x)], 1 / (len(x) * n), 1)
                np.put_along_axis(labels, rows[:, len(x) :], -1 / (len(y) * n), 1)
        found.append(Sides(keys, a, b, drawn / n, signs, labels))
    return found


def plain_diff(table: FeatureTable, config: DiffConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(contrasts, controls) of every feature."""
    contrasts, controls, frame = [], [], table.rollouts.frame
    every = plain_sides(table, config)
    counted, row = table.span_mask("response"), table.row_of_token
    token = np.flatnonzero(counted)
    by_row = np.split(token, np.flatnonzero(np.diff(row[token])) + 1)
    place = np.concatenate([np.arange(len(tokens)) for tokens in by_row])
    octave = np.full(len(row), -1)
    octave[token] = np.floor(2 * np.log2(place + 1))
    length = np.array([np.floor(2 * np.log2(len(tokens))) for tokens in by_row])

    def on_rows(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([by_row[r] for r in rows])

    cells = {}
    for number, sides in enumerate(every):
        if sides.keys["outcome"] == "all":
            of_rows = [(x, y, length[x], length[y]) for x, y in zip(sides.a, sides.b, strict=True)]
            tokens = [(on_rows(x), on_rows(y)) for x, y in zip(sides.a, sides.b, strict=True)]
            of_tokens = [(x, y, octave[x], octave[y]) for x, y in tokens]
            cells[number] = (plain_cells(of_rows), plain_cells(of_tokens), plain_halves(tokens, config))
    for feature in range(table.n_features):
        column = table.codes[:, [feature]].toarray()[:, 0]
        means = np.array([column[tokens].mean(dtype=float) for tokens in by_row])
        for number, sides in enumerate(every):
            pairs = list(zip(sides.a, sides.b, strict=True))
            each = np.array([means[x].mean() - means[y].mean() for x, y in pairs])
            signs = [np.sign(means[x][:, None] - means[y]).mean() for x, y in pairs]
            scale = plain_scale(means, frame, sides.keys["checkpoint"], config)
            if scale == 0:
                continue
            found = plain_interval(each, sides.weights, config)
            found |= {f"delta{end}": found[of] / scale for end, of in (("", "difference"), ("_low", "low"))}
            p_differs = plain_p(sides, each, means, 0.0, found["error"], found["t"])
            p = max(p_differs, plain_p(sides, each, means, config.minimum_effect * scale, found["error"], found["t"]))
            numbers = {"p": p, "p_differs": p_differs, "auroc": 0.5 + np.mean(signs) / 2}
            contrasts.append({**sides.keys, "feature": feature, **found, **numbers})
            if number not in cells:
                continue
            by_length, by_position, halves = cells[number]
            residual = column.astype(float)
            for seen, mine in halves:
                count = np.bincount(table.token_ids[seen], minlength=_IDS)
                mean = np.bincount(table.token_ids[seen], column[seen], _IDS) / np.maximum(count, 1)
                mean[count == 0] = column[seen].mean()
                residual[mine] -= mean[table.token_ids[mine]]
            left = np.array([residual[tokens].mean() for tokens in by_row])
            controlled = {
                "length": plain_matched(means, by_length),
                "position": plain_matched(column, by_position),
                "token": np.array([left[x].mean() - left[y].mean() for x, y in pairs]),
            }
            for control, values in controlled.items():
                n = len(values)
                drawn = np.random.default_rng([config.seed, 3]).multinomial(n, np.full(n, 1 / n), config.n_bootstrap)
                found = plain_interval(values, drawn / n, config)
                ends = {name: found[name] for name in ("difference", "low", "high")}
                controls.append({**sides.keys, "feature": feature, "control": control, **ends})
    return pd.DataFrame(contrasts), pd.DataFrame(controls)


def plain_interval(each: np.ndarray, weights: np.ndarray, config: DiffConfig) -> dict[str, Any]:
    n, mean = len(each), each.mean()
    centred = each - mean
    spread = (centred**2).mean()
    shift = weights @ centred
    variance = np.maximum(weights @ centred**2 - shift**2, spread / n) / (n - 1)
    t = np.abs(shift) / np.sqrt(np.maximum(variance, np.finfo(np.float32).tiny))
    half = np.quantile(t, config.confidence) * np.sqrt(spread / (n - 1))
    return {"difference": mean, "low": mean - half, "high": mean + half, "error": np.sqrt(spread / (n - 1)), "t": t}


def plain_scale(means: np.ndarray, frame: pd.DataFrame, checkpoint: str, config: DiffConfig) -> float:
    """Standard deviation over base trajectories; pooled with the checkpoint's where the base hardly has the feature; at
    least half of that over both."""
    base, other = (means[(frame.policy == policy).to_numpy()] for policy in ("base", checkpoint))
    active = frame.problem_id[(frame.policy == "base").to_numpy() & (means > 0)].nunique()
    variance = base.var(ddof=1)
    if active < config.min_problems:
        sides = (base, other)
        variance = sum(x.var(ddof=1) * (len(x) - 1) for x in sides) / sum(len(x) - 1 for x in sides)
    both = (base.var(ddof=1) + other.var(ddof=1)) / 2 + (other.mean() - base.mean()) ** 2 / 4
    return float(np.sqrt(max(variance, both / 4)))


def plain_p(sides: Sides, each: np.ndarray, means: np.ndarray, least: float, error: float, t: np.ndarray) -> float:
    """p of the null that the mean of `each` is at most least, or the bootstrap's where the interval reaches it."""
    size, sign = abs(each.mean()), -1.0 if each.mean() < 0 else 1.0
    if size <= least:
        return 1.0
    right = np.zeros(len(means))
    right[np.concatenate(sides.a)] = 1
    drawn = [sides.signs @ (each * sign - least) / len(each)]
    if sides.labels is not None:
        drawn.append(sides.labels @ (means * sign - least * right))
    beyond = [(x >= (size - least) * (1 - 1e-9)) | (x <= -(size + least) * (1 - 1e-9)) for x in drawn]
    p = max(float(1 + x.sum()) / (1 + len(x)) for x in beyond)
    bootstrap = (1 + (t * error >= size - least).sum()) / (1 + len(t))
    return max(p, bootstrap) if np.quantile(t, 0.95) * error >= size - least else p


def plain_cells(pairs: Sequence[tuple[np.ndarray, ...]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of every problem its cells with both sides."""
    return [
        [(x[s == cell], y[t == cell]) for cell in np.intersect1d(s, t)]
        for x, y, s, t in pairs
        if len(np.intersect1d(s, t))
    ]


def plain_matched(values: np.ndarray, problems: list[list[tuple[np.ndarray, np.ndarray]]]) -> np.ndarray:
    return np.array(
        [
            np.average([values[x].mean(dtype=float) - values[y].mean(dtype=float) for x, y in cells],
                       weights=[min(len(x), len(y)) for x, y in cells])
            for cells in problems
        ]
    )  # fmt: skip


def plain_halves(
    tokens: list[tuple[np.ndarray, np.ndarray]], config: DiffConfig
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of both halves of the problems: tokens of the other half, and its own."""
    half = np.random.default_rng([config.seed, 6]).permutation(len(tokens)) % 2
    of = [
        np.concatenate([np.concatenate(pair) for pair, h in zip(tokens, half, strict=True) if h == i]) for i in (0, 1)
    ]
    return [(of[1], of[0]), (of[0], of[1])]


def compare(bench: Bench, config: DiffConfig) -> dict[str, Any]:
    """Both ways on a small table: their seconds of CPU, and that they agree."""
    table = make_table(bench)
    start = time.process_time()
    diff = whole.feature_diff(table, config, progress=False)
    ours, start = time.process_time() - start, time.process_time()
    contrasts, controls = plain_diff(table, config)
    plain = time.process_time() - start
    keys = ["kind", "checkpoint", "outcome", "feature"]
    worst = {}
    for name, found, theirs, on, columns in (
        ("contrasts", diff.shifts, contrasts, keys, ("difference", "low", "high", "delta", "delta_low", "auroc")),
        ("controls", diff.confounds, controls, [*keys, "control"], ("difference", "low", "high")),
    ):
        both = found.merge(theirs, on=on, suffixes=("", "_plain"))
        assert len(both) == len(found) > 0
        for column in columns:
            x, y = both[column].to_numpy(), both[f"{column}_plain"].to_numpy()
            worst[f"{name}.{column}"] = float(np.abs(x - y).max())
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        if name == "contrasts":
            for p in ("p", "p_differs"):
                x, y = both[p].to_numpy(), both[f"{p}_plain"].to_numpy()
                error = np.sqrt(x**2 / 100 + y * (1 - y) / config.n_permutations + 1e-8)
                worst[f"{p}, standard errors"] = float((np.abs(x - y) / error).max())
                assert worst[f"{p}, standard errors"] < 5.5
    return {"seconds": {"ours": ours, "plain": plain}, "largest_difference": worst, "rows": len(contrasts)}


def step(name: str, bench: Bench, folder: Path) -> Any:
    """What a step gives, in a process of its own: the script calls itself with `step` and its arguments as JSON."""
    size = json.dumps({name: value for name, value in vars(bench).items() if name != "to"})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "step", name, size, str(folder)]
    text = subprocess.check_output(command, env=environment, text=True)
    return json.loads(text.splitlines()[-1]) if text else None


def run_step(name: str, size: str, folder: Path) -> None:
    """The process of a step."""
    bench = Bench(**json.loads(size))
    config = DiffConfig(n_bootstrap=bench.n_bootstrap, n_permutations=bench.n_permutations, threads=bench.threads)
    if name == "compare":
        print(json.dumps(compare(bench, config)))
    elif name == "make":
        make_table(bench).save(folder)
    else:
        print(json.dumps(measure(folder, config)))


def main() -> None:
    if sys.argv[1:2] == ["step"]:
        run_step(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    bench = tyro.cli(Bench, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = bench.to or Path(temporary) / "features"
        trajectories, tokens, k, d_sae = bench.small
        small = replace(bench, trajectories=trajectories, tokens=tokens, k=k, d_sae=d_sae)
        compared = step("compare", small, folder)
        seconds = compared["seconds"]
        ratio = seconds["plain"] / seconds["ours"]
        print(f"{trajectories} trajectories × {tokens} tokens × k {k}, {d_sae} features")
        print(f"  plain {seconds['plain']:.1f} s of CPU, ours {seconds['ours']:.1f} s (with nulls), ratio {ratio:.1f}")
        if not (folder / "features.json").is_file():
            step("make", bench, folder)
        found = step("measure", bench, folder)
    print(f"{bench.trajectories:,} trajectories × {bench.tokens} tokens × k {bench.k}, {bench.d_sae:,} features")
    print(
        f"  {found['seconds']} s, {found['cpu_seconds']} s of CPU, peak {found['peak_gb']} GB, {bench.threads} threads"
    )
    print("  " + ", ".join(f"{name} {s:.1f} s" for name, s in found["stages"].items()))
    print("  of CPU: " + ", ".join(f"{name} {s:.1f} s" for name, s in found["stages_cpu"].items()))
    least = found["floor"]
    print(f"  one pass that sums every feature per trajectory: {least['seconds']} s, {least['ratio']} ×", end="")
    print(f"; of CPU {least['cpu_seconds']} s, {least['cpu_ratio']} ×")
    print(f"  discoveries {found['discoveries']} of {found['tested']}; nulls {found['null']}")
    size = {name: value for name, value in vars(bench).items() if name != "to"}
    print(json.dumps({"name": "bench_diff", "ratio": round(ratio, 2), **found, "small": compared, "size": size}))


if __name__ == "__main__":
    main()

"""Check first-order influence against steps that are really taken, on what `tsae demo` left.

    tsae demo --to demo
    python scripts/check_influence.py --demo demo

A batch of the base's rollouts is one step of plain SGD (TRL's dapo loss at ratio 1). The change of feature means on
trajectories of other problems, measured with the stepped weights, is compared with the learning rate times the summed
influence. The policy part is measured by importance weights on the same trajectories, which is exact for them; the
representation part as it is, and with the codes that the base has active, no others (held).

With --predict, the policy part from a batch of every band is ranked against the shifts that the run on that band
realised, beside the covariance of advantage and feature in the same batch; intervals draw the batch's problems.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import tsae
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.diff.reinforcement import spearman

LEARNING_RATES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder that `tsae demo` wrote")
    parser.add_argument("--features", type=int, default=40, help="features, drawn from the active ones (default: 40)")
    parser.add_argument("--problems", type=int, default=16, help="problems of the batch and of the fixed half each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", action="store_true", help="rank influence against what the runs realised")
    options = parser.parse_args()
    if options.predict:
        predict(options.demo, options.features, options.problems, options.seed)
        return
    rng = np.random.default_rng(options.seed)
    base = tsae.testbed.series().base
    rollouts = tsae.Rollouts.read(options.demo / "rollouts.parquet").where(policy=base.id)
    sae = tsae.TemporalSAE.load(options.demo / "sae")
    drawn = rng.permutation(rollouts.frame.problem_id.unique())
    batch = rollouts.where(problem_id=drawn[: options.problems].tolist())
    fixed = rollouts.where(problem_id=drawn[options.problems : 2 * options.problems].tolist())
    pre, log_before = measure(base.load_model(), sae, fixed)
    before = np.stack([codes(p, sae).mean(0) for p in pre])
    active = np.flatnonzero((before > 0).any(0))
    features = np.sort(rng.choice(active, min(options.features, len(active)), replace=False))
    start = time.perf_counter()
    found = tsae.influence(base, batch, sae, features.tolist(), on=fixed)
    seconds = time.perf_counter() - start
    sums = found.by().set_index("feature").loc[features]
    print(f"{found}, averaged over {len(fixed)} trajectories, in {seconds:.0f} s")
    print(f"{'learning rate':>14}{'part':>22}{'r':>9}{'slope':>9}{'largest change':>16}{'switched':>10}")
    problem = np.unique(fixed.frame.problem_id, return_inverse=True)[1]
    size = np.bincount(problem)
    weight = 1 / (size[problem] * len(size))
    means = np.stack([before[problem == p].mean(0) for p in range(len(size))])[problem]
    for lr in LEARNING_RATES:
        model = step(base, batch, lr)
        pre_after, log = measure(model, sae, fixed)
        after = np.stack([codes(p, sae).mean(0) for p in pre_after])
        pairs = list(zip(pre, pre_after, strict=True))
        held = np.stack([np.where(codes(a, sae) > 0, b - a, 0).mean(0) for a, b in pairs])
        ratio = np.exp(log - log_before)[:, None]
        scores = (ratio - 1) * (before - means) * (size / (size - 1))[problem, None]
        measured = {
            "representation, held": weight @ held,
            "representation": weight @ (after - before),
            "policy_part": weight @ scores,
            "total": weight @ (ratio * (after - before) + scores),
        }
        switched = sum(int(((codes(a, sae) > 0) != (codes(b, sae) > 0))[:, features].sum()) for a, b in pairs)
        for part, change in measured.items():
            x, y = lr * sums[part.split(",")[0]].to_numpy(), change[features]
            r, slope = np.corrcoef(x, y)[0, 1], (x @ y) / (x @ x)
            print(f"{lr:>14g}{part:>22}{r:>9.4f}{slope:>9.3f}{np.abs(y).max():>16.2g}{switched:>10}")


def predict(demo: Path, n_features: int, n_problems: int, seed: int) -> None:
    """Exact influence and covariance, from a batch of one band, against the shift of the run on that band."""
    series, rng = tsae.testbed.series(), np.random.default_rng(seed)
    rollouts = tsae.Rollouts.read(demo / "rollouts.parquet").where(policy=series.base.id)
    table, diff = tsae.FeatureTable.load(demo / "features"), tsae.FeatureDiff.load(demo / "diff")
    values = table.row_means()[table.rows(reader=series.base.id, policy=series.base.id)]
    only = tsae.InfluenceConfig(parts=("policy",))
    for checkpoint in diff.checkpoints:
        band = series[checkpoint].trained_on
        realised = diff.table(kind="shift", checkpoint=checkpoint, part="policy", band=band, outcome="all")
        realised = realised.set_index("feature").difference
        features = np.sort(rng.choice(realised.index, min(n_features, len(realised)), replace=False))
        problems = rng.permutation(rollouts.where(band=band).frame.problem_id.unique())
        batch = rollouts.where(problem_id=problems[:n_problems].tolist())
        on = rollouts.where(problem_id=problems[n_problems : 2 * n_problems].tolist())
        found = tsae.influence(series.base, batch, demo / "sae", features.tolist(), on=on, config=only)
        pushed = found.by("problem_id").pivot(index="problem_id", columns="feature", values="total")
        rows = np.flatnonzero(np.isin(rollouts.frame.problem_id, problems[:n_problems]))
        frame = rollouts.frame.iloc[rows]
        products = values[rows][:, features].toarray() * frame.advantage.to_numpy()[:, None]
        covariance = np.stack([products[frame.problem_id == p].mean(0) for p in pushed.index])
        weights = rng.multinomial(len(pushed), np.full(len(pushed), 1 / len(pushed)), size=1000)
        print(f"{checkpoint} from {len(batch)} rollouts of {len(pushed)} {band} problems, {len(features)} features")
        for name, each in (("exact influence", pushed.to_numpy()), ("covariance", covariance)):
            rho = spearman(each.sum(0)[None], realised[features].to_numpy()[None])[0]
            drawn = spearman(weights @ each, realised[features].to_numpy()[None])
            low, high = np.quantile(drawn, [0.025, 0.975])
            print(f"  {name:<18}{rho:+.2f} [{low:+.2f}, {high:+.2f}]")
        print(found.by("outcome").groupby("outcome").total.apply(lambda x: x.abs().sum()).to_string())


def codes(pre: np.ndarray, sae: tsae.TemporalSAE) -> np.ndarray:
    """(n_tokens, d_sae) of pre-activations."""
    return np.where(pre > max(float(sae.threshold), 0.0), pre, 0.0)


def step(base: tsae.Checkpoint, batch: tsae.Rollouts, lr: float) -> torch.nn.Module:
    """The base after one step of SGD on the batch."""
    model = base.load_model(dtype="float32")
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    advantages = batch.frame.advantage.to_numpy()
    n_tokens = int(batch.lengths("response_ids").sum())
    for row in np.flatnonzero(advantages):
        loss = -float(advantages[row]) * log_probability(model, batch, int(row)) / n_tokens
        loss.backward()
    optimizer.step()
    return model.requires_grad_(False)


def log_probability(model: torch.nn.Module, rollouts: tsae.Rollouts, row: int) -> torch.Tensor:
    prompt, response = rollouts.tokens(row)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    log = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], dim=-1)
    return log.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


def measure(model: torch.nn.Module, sae: tsae.TemporalSAE, fixed: tsae.Rollouts) -> tuple[list[np.ndarray], np.ndarray]:
    """(per trajectory the (n_tokens, d_sae) pre-activations of its response, special tokens aside;
    (n,) log-probabilities)."""
    reader = HuggingFaceReader(model, [sae.site])
    special = list(tsae.testbed.make_tokenizer().all_special_ids)
    weight, bias = sae.W_enc.detach().double(), (sae.b_enc - sae.b_dec @ sae.W_enc).detach().double()
    found, logs = [], []
    for row in range(len(fixed)):
        prompt, response = fixed.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        x = reader.read(ids, torch.ones_like(ids))[sae.site][0].double()
        counted = ~np.isin(ids[0].numpy(), special)
        counted[: len(prompt)] = False
        if not counted.any():
            raise SystemExit("a response has no tokens but special ones: give other problems (--seed)")
        found.append((x @ weight + bias).numpy()[counted])
        with torch.no_grad():
            logs.append(log_probability(model, fixed, row).item())
    return found, np.array(logs)


if __name__ == "__main__":
    main()

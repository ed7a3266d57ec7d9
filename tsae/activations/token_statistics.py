"""Token statistics by trajectory: log-probabilities, choice points, and a policy's divergence from the base.

A store captured with `CaptureConfig.token_statistics` holds, for every token, the entropy of the reader's prediction of
it and the log-probability that the reader gave it, at temperature 1.

- A choice point is a response token that was predicted with an entropy above the 80th percentile of the run's response
  tokens (Wang et al., arXiv 2506.01939: a fifth of the tokens carries most of what RLVR changes).
- KL(policy ‖ base) is estimated on the responses that the policy sampled (Schulman, joschu.net/blog/kl-approx.html).
  With d = log π(token) − log base(token), k1 = d, and k3 = exp(−d) − 1 + d, which is never negative and varies less.
  Sums of both over responses are unbiased where tokens were sampled from π itself: at temperature 1, without top-k or
  top-p. The end-of-sequence token counts, because the policy chose it like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from tsae.activations.store import ActivationStore
from tsae.errors import TsaeError, refuse
from tsae.rollouts.table import Rollouts


class _Response(NamedTuple):
    """One reader's predictions of the tokens that the policy sampled of one response; views of the store if it sampled
    all."""

    entropy: np.ndarray
    logprob: np.ndarray


def trajectory_statistics(store: ActivationStore, *, quantile: float = 0.8) -> pd.DataFrame:
    """One row a (reader, trajectory).

    Args:
        store: captured with `token_statistics=True`. Log-probabilities of the policy and of the base are those that
            they gave as readers. A subset gives rows for its readers and trajectories, with the whole store's
            thresholds.
        quantile: entropies above it are choice points.

    Returns:
        a DataFrame with the columns

        - reader, trajectory (row id), problem_id, policy, band, outcome;
        - n_tokens: of the response that the policy sampled, the end-of-sequence token among them;
        - entropy: the reader's, mean over these, in nats;
        - choice_points: share of these whose entropy is above `threshold`, the quantile over all response tokens that
          the checkpoints of the reader's run read;
        - logprob_reader, logprob_policy, logprob_base: mean over these, in nats. NaN where the policy or the base is no
          reader of the trajectory;
        - kl_k1, kl_k3: estimates of KL(policy ‖ base) in nats per token, mean over these; times n_tokens they are the
          trajectory's. They are the same for every reader.

    Raises:
        TsaeError: where the store holds no token statistics.
    """
    if not store.has_token_statistics:
        fix = "Capture into a new folder with token_statistics=True (--token-statistics)."
        raise TsaeError("holds no entropies and log-probabilities", where=store.path, fix=fix)
    refuse("trajectory_statistics", (not 0 < quantile < 1, f"quantile={quantile} is not between 0 and 1", None))
    prompts = store.rollouts.lengths("prompt_ids")
    several = store.rollouts.n_sampled < store.rollouts.lengths("response_ids")
    read: dict[tuple[str, int], _Response] = {}
    for shard in store.whole.shards():
        entropy, logprob = shard.entropy, shard.logprob
        starts, ends = shard.offsets[:-1] + prompts[shard.trajectory], shard.offsets[1:]
        for row, start, end in zip(shard.trajectory.tolist(), starts.tolist(), ends.tolist(), strict=True):
            response = _Response(entropy[start:end], logprob[start:end])
            if several[row]:
                sampled = store.rollouts.sampled(row)
                response = _Response(*(values[sampled] for values in response))
            read[shard.reader, row] = response
    infos = [store.whole.reader_info(id) for id in store.whole.readers]
    run_of = {info["id"]: info["run"] or info["id"] for info in infos}
    thresholds = {}
    for run in dict.fromkeys(run_of[reader] for reader, _ in read):
        entropies = [response.entropy for (reader, _), response in read.items() if run_of[reader] == run]
        thresholds[run] = float(np.quantile(np.concatenate(entropies), quantile))
    columns = [store.rollouts.table[name].to_pylist() for name in ("problem_id", "policy", "band", "outcome")]
    base = next((info["id"] for info in infos if info["run"] is None), "")
    records = []
    for (reader, row), response in read.items():
        if reader not in store.readers or not store.rows[row]:
            continue
        problem, policy, band, outcome = (column[row] for column in columns)
        unknown = np.full(len(response.logprob), np.nan)
        of_policy, of_base = (
            read[id, row].logprob.astype(np.float64) if (id, row) in read else unknown for id in (policy, base)
        )
        d, threshold = of_policy - of_base, thresholds[run_of[reader]]
        records.append(
            {
                "reader": reader,
                "trajectory": row,
                "problem_id": problem,
                "policy": policy,
                "band": band,
                "outcome": outcome,
                "n_tokens": len(response.entropy),
                "entropy": response.entropy.mean(dtype=np.float64),
                "choice_points": float((response.entropy > threshold).mean()),
                "threshold": threshold,
                "logprob_reader": response.logprob.mean(dtype=np.float64),
                "logprob_policy": of_policy.mean(),
                "logprob_base": of_base.mean(),
                "kl_k1": d.mean(),
                "kl_k3": (np.expm1(-d) + d).mean(),
            }
        )
    return pd.DataFrame(records)


def with_entropy(store: ActivationStore) -> Rollouts:
    """The store's rollouts with the behaviour entropy: nats per response token, of each policy on its own responses.

    They are unchanged where the store holds no token statistics, or no policy read what it sampled.
    """
    if not store.has_token_statistics:
        return store.rollouts
    read = trajectory_statistics(store)
    own = read[read.reader == read.policy]
    if own.empty:
        return store.rollouts
    entropy = np.full(len(store.rollouts), np.nan)
    entropy[own.trajectory.to_numpy()] = own.entropy
    info = store.rollouts.info
    named = list(dict.fromkeys([*info.get("behaviours", []), "entropy"]))
    table = store.rollouts.with_column("entropy", entropy).table
    return Rollouts(table, {**info, "behaviours": named}, store.rollouts.origin)

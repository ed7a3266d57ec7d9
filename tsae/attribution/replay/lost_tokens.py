"""Special tokens that a log of texts lost inside responses, put back where the policy makes them most likely.

The trainer logged the mean length of a generation: where it counted more tokens than the log has, some were decoded to
nothing. Without one, the token after it looks improbable to the policy that sampled it. So at the most improbable
tokens every special token is tried, and the one that raises the response's likelihood most is put back. The gradient
norm that the trainer logged says whether that was right.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tsae.attribution.replay.passes import Logs, Run, log_probabilities_of

_MOST = 16
"""Tokens that are put back in a generation, at most; each takes some forward passes."""
_SUSPECTS = 6
"""Improbable tokens before which special tokens are tried."""


def restored(run: Run, generation: np.ndarray, counted: float) -> tuple[Run, int]:
    """Put lost tokens of a generation back; the model has the weights that sampled it.

    Args:
        run: has the rows.
        generation: rows of the rollouts.
        counted: tokens of the generation, by the trainer.

    Returns:
        the run with longer responses, and how many tokens were put back.
    """
    lost = round(counted - float(run.rollouts.n_sampled[generation].sum()))
    if not 0 < lost <= _MOST or not run.special or "parts" in run.rollouts.frame.columns:
        return run, 0
    logs, n = log_probabilities_of(run, generation, generation), 0
    for _ in range(lost):
        found = _best(run, logs)
        if found is None:
            break
        row, ids = found
        longer = [run.rollouts.tokens(i)[1] for i in range(len(run.rollouts))]
        longer[row] = ids
        changed = run.rollouts.with_column("response_ids", longer)
        run = replace(run, rollouts=changed.with_column("response_length", changed.lengths("response_ids")))
        logs |= log_probabilities_of(run, np.array([row]), generation)
        n += 1
    return run, n


def _best(run: Run, logs: Logs) -> tuple[int, np.ndarray] | None:
    """The row and the longer response that gain most log-probability; None where none gains."""
    suspects = sorted((float(log), row, place) for row, of in logs.items() for place, log in enumerate(of.tolist()))
    tried: list[tuple[int, np.ndarray]] = []
    for _, row, place in suspects[:_SUSPECTS]:
        ids = run.rollouts.tokens(row)[1]
        tried += [(row, np.insert(ids, at, s)) for at in {max(0, place - 1), place} for s in run.special]
    rows = np.array([row for row, _ in tried])
    some = run.rollouts.select(rows).with_column("response_ids", [ids for _, ids in tried])
    every = np.arange(len(tried))
    new = log_probabilities_of(replace(run, rollouts=some), every, every)
    gain = [float(new[i].sum() - logs[row].sum()) for i, (row, _) in enumerate(tried)]
    best = int(np.argmax(gain))
    return tried[best] if gain[best] > 0 else None

"""Linear probes: how well labels are predicted from sparse codes of tokens never seen in fitting.

1. Multinomial logistic regression with an L2 penalty, fitted by L-BFGS on weighted tokens. Codes are divided by one
   number, the root mean square of their rows: scaling each latent by itself would inflate the rare ones.
2. K-fold cross-validation in which all tokens of a unit (a problem, or a trajectory) fall into one fold. Within each
   fold's training part one further fold chooses the penalty; the probe is then fitted on all of that part.
3. The score is weighted accuracy. Weights make all classes weigh the same, so that chance is 1 / number of classes.
4. Intervals are percentile bootstraps over units. Probes of the same tokens share their draws, so that differences
   between SAEs are paired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from einops import reduce

from tsae.base.statistics.bootstrap import counts
from tsae.errors import TsaeError

PENALTIES = (1e-2, 1e-3, 1e-4)
"""L2 penalties to choose from, strongest first; the loss is a weighted mean in nats."""

_DRAWS = 1000


@dataclass(frozen=True)
class Task:
    """What a probe predicts: a label of some tokens."""

    label: str
    token: np.ndarray
    """(n,) which tokens, as rows of the codes."""
    y: np.ndarray
    """(n,) class of each, 0 … n_classes − 1."""
    weight: np.ndarray
    """(n,) weights; each class sums to the same."""
    unit: np.ndarray
    """(n,) what falls into one fold, and is drawn in the bootstrap: 0 … n_units − 1."""
    fold: np.ndarray
    """(n_units,) fold of each unit."""

    @property
    def n_classes(self) -> int:
        return int(self.y.max()) + 1

    @property
    def n_units(self) -> int:
        return len(self.fold)


@dataclass(frozen=True)
class Probe:
    """Score of one probe."""

    hit: np.ndarray
    """(n_units,) weight of the tokens predicted right."""
    weight: np.ndarray
    """(n_units,) weight of all tokens."""

    @property
    def accuracy(self) -> float:
        return float(self.hit.sum() / self.weight.sum())

    def draws(self, seed: int = 0) -> np.ndarray:
        """(n_draws,) accuracies under the bootstrap over units; the same draws for probes of the same task."""
        times = counts(len(self.hit), _DRAWS, seed)
        return (times @ self.hit) / (times @ self.weight)


def probe(codes: sp.csr_array | np.ndarray, task: Task) -> Probe:
    """Cross-validated predictions of a task.

    Args:
        codes: (n_tokens, n_features), sparse codes or dense activations; dense ones are centred.
        task: of some of these tokens.
    """
    features = codes[task.token]
    fold = task.fold[task.unit]
    n_folds = int(task.fold.max()) + 1
    right = np.zeros(len(task.y), dtype=bool)

    def fit(scaled: Callable[[np.ndarray], Any], rows: np.ndarray, penalty: float, start: Any = None) -> np.ndarray:
        return fit_logistic(scaled(rows), task.y[rows], task.n_classes, task.weight[rows], penalty, start)

    for k in range(n_folds):
        inner, test, train = fold == (k + 1) % n_folds, fold == k, fold != k
        penalty = PENALTIES[0]
        if n_folds > 2:
            scaled, best, weights = _scaling(features, train & ~inner), -np.inf, None
            for candidate in PENALTIES:
                weights = fit(scaled, train & ~inner, candidate, weights)
                score = float(task.weight[inner] @ (_predict(scaled(inner), weights) == task.y[inner]))
                if score > best:
                    best, penalty = score, candidate
        scaled = _scaling(features, train)
        right[test] = _predict(scaled(test), fit(scaled, train, penalty)) == task.y[test]
    return Probe(
        hit=np.bincount(task.unit, weights=task.weight * right, minlength=task.n_units),
        weight=np.bincount(task.unit, weights=task.weight, minlength=task.n_units),
    )


def fit_logistic(
    x: sp.csr_array | np.ndarray,
    y: np.ndarray,
    n_classes: int,
    weight: np.ndarray,
    penalty: float,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """argmin over W, b of mean_weighted[−log softmax(x W + b)[y]] + penalty / 2 · ‖W‖².

    Args:
        x: (n, d).
        y: (n,) classes.
        n_classes: how many there are.
        weight: (n,) non-negative.
        penalty: on W; b is free.
        start: weights to begin from.

    Returns:
        (d + 1, n_classes): W, and b in the last row.
    """
    n, d = x.shape
    weight = weight / weight.sum()
    rows = np.arange(n)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logits = np.asarray(x @ parameters[:d]) + parameters[d]
        logits -= logits.max(1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(1)
        value = -weight @ (logits[rows, y] - np.log(total)) + penalty / 2 * (parameters[:d] ** 2).sum()
        p *= (weight / total)[:, None]
        p[rows, y] -= weight
        gradient = np.empty_like(parameters)
        gradient[:d] = np.asarray(x.T @ p) + penalty * parameters[:d]
        gradient[d] = p.sum(0)
        return float(value), gradient

    return minimize(loss, np.zeros((d + 1, n_classes)) if start is None else start)


def minimize(loss: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray) -> np.ndarray:
    """Minimum of a convex function that gives its value and gradient: L-BFGS with backtracking (Nocedal & Wright, 7.4).

    scipy's L-BFGS-B stops at other points within the same tolerance: accuracies on the testbed move by up to .013.
    Where cores are shared it also waits for BLAS threads: thousands of small problems took ten times as long.
    """
    at, (value, gradient) = start, loss(start)
    steps: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=10)
    for _ in range(200):
        if np.abs(gradient).max() <= 1e-5:
            break
        direction, shares = gradient, []
        for s, y, scale in reversed(steps):
            shares.append((s * direction).sum() / scale)
            direction = direction - shares[-1] * y
        if steps:
            s, y, scale = steps[-1]
            direction = direction * (scale / (y * y).sum())
        else:
            direction = direction / max(1.0, float(np.linalg.norm(gradient)))
        for s, y, scale in steps:
            direction = direction + (shares.pop() - (y * direction).sum() / scale) * s
        slope, length = float((gradient * direction).sum()), 1.0
        while length > 1e-10:
            moved = at - length * direction
            new_value, new_gradient = loss(moved)
            if new_value <= value - 1e-4 * length * slope:
                break
            length /= 2
        else:
            break
        s, y = moved - at, new_gradient - gradient
        curvature = float((s * y).sum())
        if curvature > 1e-14:
            steps.append((s, y, curvature))
        at, value, gradient = moved, new_value, new_gradient
    return at


def folds(n_units: int, n_folds: int, seed: int, *, within: np.ndarray | None = None) -> np.ndarray:
    """(n_units,) a random fold for every unit, of equal sizes; `within` spreads each class of units over the folds.

    Raises:
        TsaeError: where there are fewer units than two.
    """
    if n_units < 2:
        raise TsaeError(f"{n_units} units cannot be split into folds", where="probes", fix="Use more problems.")
    rng = np.random.default_rng(seed)
    order = rng.permutation(n_units)
    if within is not None:
        order = order[np.argsort(within[order], kind="stable")]
    fold = np.empty(n_units, dtype=np.int64)
    fold[order] = np.arange(n_units) % min(n_folds, n_units)
    return fold


def _predict(x: sp.csr_array | np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(np.asarray(x @ weights[:-1]) + weights[-1]).argmax(1)


def _scaling(features: Any, train: np.ndarray) -> Callable[[np.ndarray], Any]:
    """Rows of features by mask, divided by the root mean square of the training rows; dense ones are centred first."""
    rows = features[train]
    mean = None if sp.issparse(features) else reduce(rows, "token feature -> feature", "mean")
    values = rows.data if mean is None else rows - mean
    size = float(np.sqrt((values**2).sum() / max(train.sum(), 1))) or 1.0

    def scaled(wanted: np.ndarray) -> Any:
        picked = features[wanted]
        return (picked if mean is None else picked - mean) / size

    return scaled

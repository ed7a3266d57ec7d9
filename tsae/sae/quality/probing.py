"""Temporal separation: do high-level codes say what the trajectory is about, and low-level codes what the token is?

From the codes of single response tokens, linear probes predict

- of the trajectory: band, outcome, behaviours that the rollouts name (style), and which problem it is;
- of the token: its identity among the commonest, and a class where an annotator gives one.

A T-SAE separates if its high-level codes predict the first better, and its low-level codes the second no worse, than
those of a plain Matryoshka SAE (temporal_weight = 0) of the same data, width and k. Activations themselves are probed
too: information that is not linearly in them cannot be in the codes.

Shortcuts that are ruled out:

- The problem: folds are over problems, so that a probe never sees the problems that it is tested on. Only the label
  "problem" needs every problem in training: there folds are over trajectories, and only problems with several count.
- Difficulty: outcome and behaviours are balanced within each problem (only problems that have both kinds count), so
  that knowing the problem does not help.
- The prompt: only response tokens are probed.
- Frequent classes: all classes weigh the same; chance is 1 / number of classes.

The probe:

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from einops import reduce

from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.base import display
from tsae.base.statistics import counts, percentile_interval
from tsae.checkpoints.tokenizers import text_of
from tsae.errors import TsaeError, refuse
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.evaluation import counted_texts, plain, spread

if TYPE_CHECKING:
    import pandas as pd


GROUPS = ("high", "low", "all")
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class Score:
    """How well one group of one SAE's latents predicts one label."""

    sae: str
    """Name of the SAE, or "activations"."""
    group: str
    """high, low or all."""
    label: str
    level: str
    """trajectory or token."""
    accuracy: float
    """Weighted so that all classes count the same."""
    low: float
    """Bounds of the 95 % interval."""
    high: float
    chance: float
    l0: float
    """Mean number of the group's latents active on the probed tokens."""
    n_classes: int
    n_tokens: int
    n_units: int
    """Problems; for the label "problem", trajectories."""


@dataclass(frozen=True)
class Gain:
    """Accuracy of one SAE minus that of the baseline, on the same tokens and folds."""

    group: str
    label: str
    level: str
    gain: float
    low: float
    """Bounds of the 95 % interval, paired."""
    high: float


@dataclass(frozen=True)
class Separation:
    """Scores of all SAEs, and gains of the first over the second."""

    scores: tuple[Score, ...]
    gains: tuple[Gain, ...]
    skipped: Mapping[str, str]
    """Labels that could not be probed, and why."""

    def table(self) -> pd.DataFrame:
        """One row for each probe."""
        import pandas as pd

        return pd.DataFrame([asdict(score) for score in self.scores])

    def gain_table(self) -> pd.DataFrame:
        """One row for each label and group; empty without a baseline."""
        import pandas as pd

        return pd.DataFrame([asdict(gain) for gain in self.gains])

    def as_dict(self) -> dict[str, Any]:
        """The content as JSON, with None for NaN."""
        return plain(asdict(self))

    def _repr_html_(self) -> str:
        kept = ["sae", "group", "level", "label", "accuracy", "low", "high", "chance", "l0", "n_classes", "n_tokens"]
        return display.card(
            "Separation",
            {"not probed": [f"{label} ({why})" for label, why in self.skipped.items()] or None},
            ("probes of single response tokens: accuracy, all classes weighing the same", self.table()[kept]),
            ("gain over the baseline, 95 % interval over problems", self.gain_table()),
        )

    def __str__(self) -> str:
        by_probe = {(s.sae, s.group, s.label): s for s in self.scores}
        columns = list(dict.fromkeys((s.sae, s.group) for s in self.scores))
        lines = ["probes of single response tokens: accuracy, all classes weighing the same", ""]
        lines.append(f"{'':<32}{'':>8}" + "".join(f"{sae:>12.11}" for sae, _ in columns))
        lines.append(f"{'':<32}{'chance':>8}" + "".join(f"{group:>12}" for _, group in columns))
        for label in dict.fromkeys(s.label for s in self.scores):
            of = next(s for s in self.scores if s.label == label)
            cells = "".join(f"{by_probe[(*column, label)].accuracy:>12.3f}" for column in columns)
            lines.append(f"{of.level + ' ' + label:<32.31}{of.chance:>8.3f}{cells}")
        if self.gains:
            lines += ["", "gain over the baseline, 95 % interval over problems"]
        for g in self.gains:
            lines.append(f"{g.level + ' ' + g.label:<32.31}{g.group:>8}{g.gain:>+12.3f}  [{g.low:+.3f}, {g.high:+.3f}]")
        lines += [f"not probed: {label} ({why})" for label, why in self.skipped.items()]
        return "\n".join(lines)


def separation(
    saes: Mapping[str, TemporalSAE | str | Path],
    store: ActivationStore | str | Path,
    *,
    reader: str | None = None,
    tokens_per_trajectory: int = 4,
    max_trajectories: int = 1000,
    max_problems: int = 20,
    max_tokens: int = 12,
    annotator: Annotator | None = None,
    token_strings: Sequence[str] | None = None,
    seed: int = 0,
) -> Separation:
    """Probe the codes of SAEs on the same tokens.

    Args:
        saes: by name; with two, the second is the baseline that gains are measured against.
        store: activations of one site that all SAEs fit. All problems are used: labels took no part in training.
        reader: whose activations; by default the base's.
        tokens_per_trajectory: response tokens drawn from each trajectory.
        max_trajectories: where there are more, this many are used, evenly spread.
        max_problems: classes of the label "problem".
        max_tokens: classes of the label "identity", the commonest tokens.
        annotator: gives the label "class"; needs token_strings.
        token_strings: text of every token id.
        seed: of the draws and folds.

    Raises:
        TsaeError: where an SAE does not fit, or nothing can be probed.
    """
    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    loaded = {name: TemporalSAE.of(sae) for name, sae in saes.items()}
    if not loaded or ACTIVATIONS in loaded:
        raise TsaeError(
            f"SAEs are named {list(loaded)}", where="separation", fix='Give at least one, not "activations".'
        )
    for sae in loaded.values():
        check_fits(sae, store)
    sites = {sae.site for sae in loaded.values()}
    refuse("separation", (len(sites) > 1, f"the SAEs are of different sites: {', '.join(sorted(sites))}", None))
    reader = reader or store.readers[0]
    limited = [sae for sae in loaded.values() if sae.norm_limit is not None]
    x, places = _sample(store, sites.pop(), reader, limited, tokens_per_trajectory, max_trajectories, seed)
    found = _tasks(store.rollouts, places, max_problems, max_tokens, annotator, token_strings, seed)
    tasks = [task for task in found.values() if isinstance(task, Task)]
    skipped = {label: reason for label, reason in found.items() if isinstance(reason, str)}
    what = "no label can be probed: " + "; ".join(f"{label}: {reason}" for label, reason in skipped.items())
    refuse(store.path, (not tasks, what, "Use more problems, with bands and several responses each."))
    probes: dict[tuple[str, str, str], Probe] = {}
    scores, gains = [], []
    for name, group, codes in _inputs(loaded, x):
        for task in tasks:
            probes[name, group, task.label] = fitted = probe(codes, task)
            low, high = map(float, percentile_interval(fitted.draws(seed)))
            l0 = float((codes[task.token] > 0).sum() / len(task.token)) if name != ACTIVATIONS else float("nan")
            of, sizes = (name, group, task.label, task.level), (task.n_classes, len(task.token), task.n_units)
            scores.append(Score(*of, fitted.accuracy, low, high, 1 / task.n_classes, l0, *sizes))
    for task in tasks if len(loaded) > 1 else ():
        for group in GROUPS:
            first, second = (probes.get((name, group, task.label)) for name in list(loaded)[:2])
            if first is not None and second is not None:
                low, high = map(float, percentile_interval(first.draws(seed) - second.draws(seed)))
                gains.append(Gain(group, task.label, task.level, first.accuracy - second.accuracy, low, high))
    return Separation(tuple(scores), tuple(gains), skipped)


def _sample(
    store: ActivationStore,
    site: str,
    reader: str,
    limited: Sequence[TemporalSAE],
    per_trajectory: int,
    max_trajectories: int,
    seed: int,
) -> tuple[np.ndarray, Places]:
    """Activations (n, d_model) and places of response tokens of a reader, without the outliers of any of these SAEs;
    without SAEs, up to 10 times the median norm."""
    store.reader_info(reader)
    windows = Windows(store, site, span="response", held_out=None)
    texts = spread([t for t in counted_texts(windows) if windows.shards[t.shard].reader == reader], max_trajectories)
    limits = [sae.outliers for sae in limited] or [windows.norms.beyond]
    prompt_lengths = store.rollouts.lengths("prompt_ids")
    rng = np.random.default_rng([seed, 1])
    activations, parts = [], []
    for text in texts:
        shard = windows.shards[text.shard]
        tokens = np.sort(rng.choice(text.tokens, min(per_trajectory, len(text.tokens)), replace=False))
        x = shard.read(site, tokens)
        wide = torch.from_numpy(x)
        inside = ~np.logical_or.reduce([beyond(wide).numpy() for beyond in limits])
        place = tokens - shard.offsets[text.place] - prompt_lengths[text.row]
        row = np.full(len(tokens), text.row)
        activations.append(x[inside])
        parts.append(Places(row[inside], shard.token_ids[tokens][inside], place[inside]))
    refuse(store.path, (not parts, f"reader {reader} has no response tokens", "Choose another reader."))
    return np.concatenate(activations), Places(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _inputs(saes: Mapping[str, TemporalSAE], x: np.ndarray) -> list[tuple[str, str, Any]]:
    """(name, group, features) of everything that is probed."""
    found: list[tuple[str, str, Any]] = []
    for name, sae in saes.items():
        with torch.no_grad():
            parts = torch.from_numpy(x).split(8192)
            dense = (sae.encode(part.to(sae.W_dec.device)).double().cpu().numpy() for part in parts)
            codes = sp.csr_array(sp.vstack([sp.csr_array(part) for part in dense]))
        d_high = sae.config.d_high
        if d_high < sae.config.d_sae:
            found += [(name, "high", codes[:, :d_high]), (name, "low", codes[:, d_high:])]
        found.append((name, "all", codes))
    found.append((ACTIVATIONS, "all", x.astype(np.float64)))
    return found


Annotator = Callable[[str, Sequence[str]], Sequence[str]]
"""(prompt text, response tokens as strings) -> class of each response token."""

_FOLDS, _MIN_UNITS = 5, 10


class Places(NamedTuple):
    """Which response tokens are probed."""

    row: np.ndarray
    """(n,) row id of the trajectory."""
    token_id: np.ndarray
    """(n,)."""
    place: np.ndarray
    """(n,) position in the response."""


def _tasks(
    rollouts: Rollouts,
    places: Places,
    max_problems: int,
    max_tokens: int,
    annotator: Annotator | None,
    token_strings: Sequence[str] | None,
    seed: int,
) -> dict[str, Task | str]:
    """The task of every label, or why it cannot be probed; arguments as for `separation`."""
    frame = rollouts.frame
    problem = np.unique(frame.problem_id.to_numpy(), return_inverse=True)[1]
    of_token = problem[places.row]
    band = np.array([BANDS.index(b) if b in BANDS else -1 for b in frame.band])
    outcome = np.array([{"failure": 0, "success": 1}.get(o, -1) for o in frame.outcome])
    found = {
        "band": _between("band", band[places.row], of_token, seed),
        "outcome": _within("outcome", outcome[places.row], of_token, seed),
    }
    for name in rollouts.info.get("behaviours", []):
        values = frame[name].to_numpy(dtype=float)
        if set(np.unique(values[~np.isnan(values)])) <= {0.0, 1.0}:
            code = np.where(np.isnan(values), -1, values).astype(int)
            found[name] = _within(name, code[places.row], of_token, seed)
    found["problem"] = _which_problem(problem, places.row, max_problems, seed)
    labels = {"identity": places.token_id}
    if annotator is not None:
        if token_strings is None:
            raise TsaeError("an annotator needs the text of tokens", where="separation", fix="Give token_strings.")
        labels["class"] = _classes(rollouts, places, annotator, token_strings)
    for label, values in labels.items():
        names, code, count = np.unique(values, return_inverse=True, return_counts=True)
        common = np.argsort(-count, kind="stable")[:max_tokens]
        rank = np.full(len(names), -1)
        rank[common] = np.arange(len(common))
        found[label] = _between(label, rank[code], of_token, seed)
    return found


def _classes(rollouts: Rollouts, places: Places, annotator: Annotator, token_strings: Sequence[str]) -> np.ndarray:
    """(n,) class names of the drawn tokens."""
    prompts = rollouts.table["prompt"].to_pylist()
    found: list[str] = []
    classes: Sequence[str] = ()
    for i, row in enumerate(places.row.tolist()):
        if not i or row != places.row[i - 1]:
            _, response = rollouts.tokens(row)
            classes = annotator(prompts[row] or "", [text_of(token_strings, id) for id in response])
        found.append(classes[places.place[i]])
    return np.array(found)


def _between(label: str, code: np.ndarray, problem: np.ndarray, seed: int) -> Task | str:
    """A label that other problems have too: classes weigh the same; classes of few problems are left out."""
    classes = [c for c in np.unique(code[code >= 0]) if len(np.unique(problem[code == c])) >= _MIN_UNITS]
    if len(classes) < 2:
        return f"fewer than two classes occur in {_MIN_UNITS} problems"
    return _of_classes(label, code, classes, problem, _FOLDS, seed)


def _of_classes(label: str, code: np.ndarray, classes: Any, units: np.ndarray, n_folds: int, seed: int) -> Task:
    """Tokens of some classes, which weigh the same. Where every unit has one class, each is spread over the folds."""
    token = np.flatnonzero(np.isin(code, classes))
    y = np.searchsorted(classes, code[token])
    unit = np.unique(units[token], return_inverse=True)[1]
    first = np.zeros(unit.max() + 1, dtype=int)
    first[unit[::-1]] = y[::-1]
    return Task(label, token, y, 1 / np.bincount(y)[y], unit, folds(len(first), n_folds, seed, within=first))


def _within(label: str, code: np.ndarray, problem: np.ndarray, seed: int) -> Task | str:
    """A binary label that varies within problems: both classes weigh the same in each problem that has both."""
    zeros, ones = (np.bincount(problem[code == c], minlength=problem.max() + 1) for c in (0, 1))
    mixed = (zeros > 0) & (ones > 0)
    if mixed.sum() < _MIN_UNITS:
        return f"{mixed.sum()} problems have both kinds, fewer than {_MIN_UNITS}"
    token = np.flatnonzero(mixed[problem] & (code >= 0))
    y = code[token]
    weight = 1 / np.stack([zeros, ones])[y, problem[token]]
    unit = np.unique(problem[token], return_inverse=True)[1]
    return Task(label, token, y, weight, unit, folds(unit.max() + 1, _FOLDS, seed))


def _which_problem(problem: np.ndarray, row: np.ndarray, most: int, seed: int) -> Task | str:
    """Which problem a token's trajectory answers: folds over trajectories."""
    n_trajectories = np.bincount(problem[np.unique(row)])
    several = np.flatnonzero(n_trajectories >= 3)
    if len(several) < 2:
        return "fewer than two problems have three trajectories"
    chosen = several[np.linspace(0, len(several) - 1, min(most, len(several))).astype(int)]
    n_folds = min(_FOLDS, int(n_trajectories[chosen].min()))
    return _of_classes("problem", problem[row], chosen, row, n_folds, seed)


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
    def level(self) -> str:
        """trajectory or token."""
        return "token" if self.label in ("identity", "class") else "trajectory"

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
    """(n_units,) a random fold for every unit, of equal sizes; `within` spreads each class of units over the folds."""
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

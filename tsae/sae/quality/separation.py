"""Temporal separation: do high-level codes say what the trajectory is about, and low-level codes what the token is?

From the codes of single response tokens, linear probes (`tsae.sae.quality.probes`) predict

- of the trajectory: band, outcome, behaviours that the rollouts name (style), and which problem it is;
- of the token: its identity among the commonest, and a class where an annotator gives one.

A T-SAE separates if its high-level codes predict the first better, and its low-level codes the second no worse, than
those of a plain Matryoshka SAE (temporal_weight = 0) of the same data, width and k. Activations themselves are probed
too: what is not linearly in them cannot be in the codes.

`tsae.sae.quality.probe_tasks` says which tokens a label is probed on, and which shortcuts are ruled out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch

from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.base.statistics.bootstrap import percentile_interval
from tsae.base.views import views
from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.counted_texts import counted_texts, spread
from tsae.sae.quality.evaluation import plain
from tsae.sae.quality.probe_tasks import Annotator, Places, token_tasks, trajectory_tasks
from tsae.sae.quality.probes import Probe, probe

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
        return views().card(
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
    if len(sites) > 1:
        raise TsaeError(f"the SAEs are of different sites: {', '.join(sorted(sites))}", where="separation")
    reader = reader or store.readers[0]
    limited = [sae for sae in loaded.values() if sae.norm_limit is not None]
    x, places = _sample(store, sites.pop(), reader, limited, tokens_per_trajectory, max_trajectories, seed)
    tasks, skipped = trajectory_tasks(store.rollouts, places, max_problems, seed)
    of_tokens, token_skipped = token_tasks(store.rollouts, places, max_tokens, annotator, token_strings, seed)
    levels = dict.fromkeys((task.label for task in tasks), "trajectory")
    levels |= dict.fromkeys((task.label for task in of_tokens), "token")
    tasks += of_tokens
    if not tasks:
        what = "no label can be probed: " + "; ".join(f"{k}: {v}" for k, v in {**skipped, **token_skipped}.items())
        raise TsaeError(what, where=store.path, fix="Use more problems, with bands and several responses each.")
    probes: dict[tuple[str, str, str], Probe] = {}
    scores = []
    for name, group, codes in _inputs(loaded, x):
        for task in tasks:
            found = probe(codes, task)
            probes[name, group, task.label] = found
            low, high = map(float, percentile_interval(found.draws(seed)))
            active = codes[task.token]
            scores.append(
                Score(
                    sae=name,
                    group=group,
                    label=task.label,
                    level=levels[task.label],
                    accuracy=found.accuracy,
                    low=low,
                    high=high,
                    chance=1 / task.n_classes,
                    l0=float((active > 0).sum() / len(task.token)) if name != ACTIVATIONS else float("nan"),
                    n_classes=task.n_classes,
                    n_tokens=len(task.token),
                    n_units=task.n_units,
                )
            )
    gains = []
    names = list(loaded)
    for task in tasks if len(names) > 1 else ():
        for group in GROUPS:
            pair = [probes.get((name, group, task.label)) for name in names[:2]]
            if pair[0] is None or pair[1] is None:
                continue
            low, high = map(float, percentile_interval(pair[0].draws(seed) - pair[1].draws(seed)))
            gain = pair[0].accuracy - pair[1].accuracy
            gains.append(Gain(group, task.label, levels[task.label], gain, low, high))
    return Separation(tuple(scores), tuple(gains), {**skipped, **token_skipped})


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
    if per_trajectory < 1:
        raise TsaeError(f"{per_trajectory} tokens a trajectory are none", where="separation")
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
    if not parts:
        raise TsaeError(f"reader {reader} has no response tokens", where=store.path, fix="Choose another reader.")
    return np.concatenate(activations), Places(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _inputs(saes: Mapping[str, TemporalSAE], x: np.ndarray) -> list[tuple[str, str, Any]]:
    """(name, group, features) of everything that is probed."""
    found: list[tuple[str, str, Any]] = []
    for name, sae in saes.items():
        with torch.no_grad():
            parts = torch.from_numpy(x).split(8192)
            codes = sp.csr_array(
                sp.vstack(
                    [sp.csr_array(sae.encode(part.to(sae.W_dec.device)).double().cpu().numpy()) for part in parts]
                )
            )
        d_high = sae.config.d_high
        if d_high < sae.config.d_sae:
            found += [(name, "high", codes[:, :d_high]), (name, "low", codes[:, d_high:])]
        found.append((name, "all", codes))
    found.append((ACTIVATIONS, "all", x.astype(np.float64)))
    return found

"""What a crosscoder says is new, lost or shared, and which of that is an artefact: relative norms and latent scaling.

A latent whose decoder row lies in one checkpoint's half looks as if the other checkpoint lacked it. It may not: the
training may have left the other's share in its error, or in other latents (Minder et al., arXiv 2504.02922). Latent
scaling asks how much of the latent's own direction d the other checkpoint has on the tokens on which it fires with f:

    β(y) = Σ f ⟨d, y⟩ / (‖d‖² Σ f²)         the least-squares scale of f d in y
    ν_error          = β(other's error) / β(own error + f d)
    ν_reconstruction = β(other's reconstruction) / β(own reconstruction)      both less the decoder's bias

Both are near 0 for a latent that the other checkpoint lacks, and near 1 for one that it has all the same. Intervals
come from a bootstrap over problems.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from tsae.activations.batches import Windows
from tsae.activations.spans import TokenSpan
from tsae.activations.store import Pair
from tsae.base.statistics.bootstrap import counts, percentile_interval
from tsae.base.views import views
from tsae.errors import TsaeError
from tsae.sae.crosscoder.crosscoder import Crosscoder
from tsae.sae.model import check_fits
from tsae.sae.quality.counted_texts import counted_texts, spread

ONE_SIDED = 0.9
"""Relative norm from which a latent is one checkpoint's alone; 1 − this for the base."""
MOST_ERROR, MOST_RECONSTRUCTION = 0.2, 0.5
"""ν up to which the other checkpoint lacks the latent, as in Minder et al."""
FEWEST_PROBLEMS = 5
"""Problems in which a latent must fire to be judged."""


@dataclass(frozen=True)
class CrosscoderChanges:
    """The latents of a crosscoder, judged."""

    compared: tuple[str, str]
    """Ids of the base and the other checkpoint."""
    latents: pd.DataFrame
    """One row a latent that fires:

    latent             index
    relative_norm      0 base alone, ½ shared, 1 the other alone
    cosine             of both decoder rows; NaN where one is 0
    firing_rate        share of tokens
    n_problems         in which it fires
    nu_error, nu_reconstruction  of the weaker side against the stronger, with _low and _high
    verdict            new or lost: one-sided, and both intervals below the limits; artefact: one-sided, and the other
                       checkpoint has it; unclear: one-sided, and an interval holds a limit; shared; rare: fires in
                       fewer than `FEWEST_PROBLEMS` problems
    """
    fve: tuple[float, float]
    """Variance explained of the base's activations and of the other's."""
    n_tokens: int

    def table(self, verdict: str | None = None) -> pd.DataFrame:
        """The latents with a verdict, or all, the most active first."""
        found = self.latents if verdict is None else self.latents[self.latents.verdict == verdict]
        return found.sort_values("firing_rate", ascending=False, kind="stable").reset_index(drop=True)

    def count(self, verdict: str) -> int:
        """Number of latents with a verdict."""
        return int((self.latents.verdict == verdict).sum())

    def __str__(self) -> str:
        base, other = self.compared
        counted = ", ".join(f"{self.count(v)} {v}" for v in ("new", "lost", "unclear", "artefact", "shared", "rare"))
        lines = [
            f"{other} against {base}: {counted} (of {len(self.latents)} latents that fire on {self.n_tokens:,} tokens)",
            f"variance explained: {base} {self.fve[0]:.3f}, {other} {self.fve[1]:.3f}",
        ]
        one_sided = self.table()
        one_sided = one_sided[one_sided.verdict.isin(["new", "lost", "unclear", "artefact"])].head(20)
        if len(one_sided):
            lines += [
                "",
                f"{'latent':>7} {'verdict':<9}{'rel. norm':>10}{'fires':>9}  ν error [interval]    ν reconstr.",
            ]
        for row in one_sided.itertuples():
            intervals = "  ".join(
                f"{getattr(row, name):5.2f} [{getattr(row, name + '_low'):.2f}, {getattr(row, name + '_high'):.2f}]"
                for name in ("nu_error", "nu_reconstruction")
            )
            lines.append(
                f"{row.latent:>7} {row.verdict:<9}{row.relative_norm:>10.3f}{row.firing_rate:>9.2%}  {intervals}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        facts = {"base": self.compared[0], "compared": self.compared[1], "tokens": self.n_tokens}
        counted = self.latents.verdict.value_counts().rename_axis("verdict").reset_index(name="latents")
        one_sided = self.latents[self.latents.verdict.isin(["new", "lost", "unclear", "artefact"])]
        note = "Correlational: not causally tested."
        return views().card("CrosscoderChanges", facts, ("verdicts", counted), ("one-sided", one_sided), note=note)


@torch.no_grad()
def crosscoder_changes(
    crosscoder: Crosscoder,
    pair: Pair,
    *,
    span: TokenSpan = "all",
    held_out: bool | None = True,
    max_trajectories: int = 2000,
    n_bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> CrosscoderChanges:
    """Judge every latent of a crosscoder on the tokens of a pair.

    Args:
        crosscoder: of `tsae.train`, `Crosscoder.load` or `read_published`.
        pair: of the checkpoints that it was trained on.
        span: which tokens count; special tokens never do.
        held_out: True for the problems that training left out, False for the others, None for all.
        max_trajectories: where there are more, this many are read, evenly spread.
        n_bootstrap: draws of problems.
        confidence: of the intervals.
        seed: of the draws.

    Raises:
        TsaeError: where the crosscoder is of other checkpoints or another site, or there are no tokens.
    """
    if crosscoder.compared != pair.compared:
        what = f"the crosscoder is of {' and '.join(crosscoder.compared)}, the pair of {' and '.join(pair.compared)}"
        raise TsaeError(what, where=pair.path, fix="Give the pair that it was trained on.")
    check_fits(crosscoder, pair)
    windows = Windows(pair, crosscoder.site, span=span, held_out=held_out)
    beyond = windows.norms.beyond if crosscoder.norm_limit is None else crosscoder.outliers
    problems = pair.rollouts.table["problem_id"].to_pylist()
    sums: dict[str, _Sums] = {}
    fit = torch.zeros(2, 2, dtype=torch.float64)
    mean = crosscoder.b_dec.reshape(2, -1)
    for text in spread(counted_texts(windows), max_trajectories):
        x = torch.from_numpy(windows.shards[text.shard].read(crosscoder.site, text.tokens)).to(crosscoder.W_dec.device)
        x = x[~beyond(x)]
        codes = crosscoder.encode(x)
        made = crosscoder.decode(codes)
        fit += torch.stack([((x - y).reshape(len(x), 2, -1) ** 2).sum((0, 2)) for y in (made, crosscoder.b_dec)]).cpu()
        sums.setdefault(problems[text.row], _Sums(crosscoder)).add(x.reshape(len(x), 2, -1), made, codes, mean)
    if not sums or not sum(part.n_tokens for part in sums.values()):
        raise TsaeError("no tokens to judge the latents on", where=pair.path, fix="Use all problems (held_out=None).")
    return _judged(crosscoder, list(sums.values()), fit, n_bootstrap, confidence, seed)


class _Sums:
    """Sums over the tokens of a problem.

    Attributes:
        fired: (d_sae,) tokens on which a latent fires.
        square: (d_sae,) Σ f².
        scales: (4, d_sae) Σ f ⟨d, y⟩ for the other's error, the own error, the other's and the own reconstruction.
    """

    def __init__(self, crosscoder: Crosscoder) -> None:
        base, other = crosscoder.decoders
        self.of_other = crosscoder.relative_norm >= 0.5  # (d_sae,)
        self.rows = torch.where(self.of_other[:, None], other, base)
        self.n_tokens, d_sae = 0, len(self.rows)
        self.fired, self.square = np.zeros(d_sae), np.zeros(d_sae)
        self.scales = np.zeros((4, d_sae))

    def add(self, x: torch.Tensor, made: torch.Tensor, codes: torch.Tensor, mean: torch.Tensor) -> None:
        self.n_tokens += len(x)
        made = made.reshape(x.shape)
        parts = []
        for y in (x - made, made - mean):
            along = [(codes * (y[:, side] @ self.rows.T)).sum(0) for side in (0, 1)]
            own, weaker = torch.where(self.of_other, along[1], along[0]), torch.where(self.of_other, along[0], along[1])
            parts += [weaker, own]
        self.scales += torch.stack(parts).double().cpu().numpy()
        self.square += codes.pow(2).sum(0).double().cpu().numpy()
        self.fired += (codes > 0).sum(0).cpu().numpy()


def _judged(
    crosscoder: Crosscoder, sums: list[_Sums], fit: torch.Tensor, n_bootstrap: int, confidence: float, seed: int
) -> CrosscoderChanges:
    fired = np.stack([part.fired for part in sums])
    active = np.flatnonzero(fired.sum(0))
    norm = sums[0].rows.pow(2).sum(1).double().cpu().numpy()[active]
    scales = np.stack([part.scales[:, active] for part in sums])  # (n_problems, 4, n)
    scales[:, 1] += norm * np.stack([part.square[active] for part in sums])
    n_tokens = sum(part.n_tokens for part in sums)
    base, other = crosscoder.decoders
    table: dict[str, np.ndarray] = {
        "latent": active,
        "relative_norm": crosscoder.relative_norm.cpu().numpy()[active],
        "cosine": torch.cosine_similarity(base, other, dim=1).cpu().numpy()[active],
        "firing_rate": fired.sum(0)[active] / n_tokens,
        "n_problems": (fired > 0).sum(0)[active],
    }
    drawn = counts(len(sums), n_bootstrap, seed)
    for name, of_weaker, of_own in (("nu_error", 0, 1), ("nu_reconstruction", 2, 3)):
        weaker, own = scales[:, of_weaker], scales[:, of_own]
        table[name] = _ratio(weaker.sum(0), own.sum(0))
        draws = _ratio(drawn @ weaker, drawn @ own)
        # Where the latent's own side has nothing along its direction, the ratio is infinite, and it stays unjudged.
        table[f"{name}_low"], table[f"{name}_high"] = percentile_interval(draws, confidence, method="nearest")
    latents = pd.DataFrame(table)
    latents["verdict"] = _verdicts(latents)
    fve = 1 - fit[0] / fit[1]
    return CrosscoderChanges(crosscoder.compared, latents, (float(fve[0]), float(fve[1])), n_tokens)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(above.shape, np.inf), where=below > 0)


def _verdicts(latents: pd.DataFrame) -> np.ndarray:
    limits = {"nu_error": MOST_ERROR, "nu_reconstruction": MOST_RECONSTRUCTION}
    below = np.logical_and.reduce([latents[f"{name}_high"] < most for name, most in limits.items()])
    above = np.logical_or.reduce([latents[f"{name}_low"] > most for name, most in limits.items()])
    one_sided = np.where(latents.relative_norm >= ONE_SIDED, "new", "lost")
    judged = np.where(below, one_sided, np.where(above, "artefact", "unclear"))
    shared = (latents.relative_norm > 1 - ONE_SIDED) & (latents.relative_norm < ONE_SIDED)
    rare = latents.n_problems < FEWEST_PROBLEMS
    return np.where(rare, "rare", np.where(shared, "shared", judged))

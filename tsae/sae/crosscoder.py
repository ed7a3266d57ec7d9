"""The crosscoder of a base and another checkpoint (Lindsey et al. 2024), as a BatchTopK SAE of both activations.

A token is x = (x_base, x_other), from `tsae.activations.store.Pair`. One code stands for both, and a latent's decoder
row has a part for each:

    f = BatchTopK(ReLU((x − b_dec) W_enc + b_enc)),   x̂_m = f W_dec[:, m] + b_dec[m]      m = base, other

So the loss, the trainer and AuxK are those of the T-SAE. Rows have norm 1 over both parts together: sparsity does not
depend on how a latent is divided between the checkpoints. An L1 penalty on the sum of both norms would push shared
latents to one side (Minder et al., arXiv 2504.02922); nothing here does.

`crosscoder_changes` judges which latents are new, lost or shared, and which of those are artefacts. A latent whose
decoder row lies in one checkpoint's half looks as if the other checkpoint lacked it. It may not: the training may have
left the other's share in its error, or in other latents (Minder et al., arXiv 2504.02922). Latent scaling asks how much
of the latent's own direction d the other checkpoint has on the tokens on which it fires with f:

    β(y) = Σ f ⟨d, y⟩ / (‖d‖² Σ f²)         the least-squares scale of f d in y
    ν_error          = β(other's error) / β(own error + f d)
    ν_reconstruction = β(other's reconstruction) / β(own reconstruction)      both less the decoder's bias

Both are near 0 for a latent that the other checkpoint lacks, and near 1 for one that it has all the same. Intervals
come from a bootstrap over problems.

`read_published` reads crosscoders of the library dictionary_learning, as its fork science-of-finetuning writes them. A
folder holds `model_final.pt` or `ae.pt` (read with weights_only, never as a pickle), or `model.safetensors`:

    encoder.weight (2, d_model, d_sae)   encoder.bias (d_sae,)       codes: ReLU(Σ_m x_m W_m + b)
    decoder.weight (2, d_sae, d_model)   decoder.bias (2, d_model)
    k, threshold                         of BatchTopK: a code counts where code · norm > threshold
    code_normalization_id                which norm: 1 sum of both rows' norms, 2 norm of both together, 3 a mixture,
                                         4 none, 5 one for each model
    activation_mean, activation_std (2, d_model), activation_global_scale (2,)   NaN, or how inputs are normalised

All of it is folded into the form of `Crosscoder`: raw activations in, decoder rows of norm 1 over both models. Codes
are theirs times those norms; reconstructions are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from tsae.activations.batches import Windows
from tsae.activations.shard import TokenSpan
from tsae.activations.store import Pair
from tsae.base import display
from tsae.base.array_files import read_torch_file
from tsae.base.files import as_path, read_object, reading
from tsae.base.statistics import counts, percentile_interval
from tsae.errors import TsaeError, refuse
from tsae.sae.config import SAEConfig
from tsae.sae.exchange.saelens_files import as_weights, check_site, number, shown, whole
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.evaluation import counted_texts, spread

OF_PAIR = "crosscoder"
"""In training.json: ids of the two checkpoints."""


class Crosscoder(TemporalSAE):
    """A dictionary of two checkpoints; d_model is of both together. `tsae.train` of a `Pair` makes it."""

    def __repr__(self) -> str:
        c = self.config
        return f"Crosscoder({' and '.join(self.compared)}, d_model=2·{self.width}, d_sae={c.d_sae}, k={c.k})"

    @property
    def compared(self) -> tuple[str, str]:
        """Ids of the base and the other checkpoint."""
        base, other = self.training_info[OF_PAIR]
        return str(base), str(other)

    @property
    def width(self) -> int:
        """d_model of each checkpoint."""
        return self.d_model // 2

    @property
    def decoders(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(d_sae, width) decoder rows for the base, and for the other checkpoint."""
        rows = self.W_dec.detach()
        return rows[:, : self.width], rows[:, self.width :]

    @property
    def relative_norm(self) -> torch.Tensor:
        """(d_sae,) ‖other's row‖ / (‖base's row‖ + ‖other's row‖): 0 base alone, ½ shared, 1 the other alone."""
        base, other = (rows.norm(dim=1) for rows in self.decoders)
        return other / (base + other).clamp_min(1e-12)

    @classmethod
    def from_sae(cls, sae: TemporalSAE) -> Self:
        """The same weights as a crosscoder.

        Raises:
            TsaeError: where it was not trained on a pair.
        """
        if isinstance(sae, cls):
            return sae
        if OF_PAIR not in sae.training_info:
            fix = "Train one: tsae crosscoder, or tsae.train(tsae.Pair(store, reader))."
            raise TsaeError("is an SAE of single activations, a crosscoder is needed here", where=repr(sae), fix=fix)
        found = cls(sae.d_model, sae.config, site=sae.site, training=sae.training_info)
        found.load_state_dict(sae.state_dict())
        return found.requires_grad_(False).to(sae.W_enc.device).eval()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # Published crosscoders have a threshold for every latent.
        self.threshold = torch.empty_like(state_dict["threshold"]) if "threshold" in state_dict else self.threshold
        return super().load_state_dict(state_dict, *args, **kwargs)


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
        return display.card("CrosscoderChanges", facts, ("verdicts", counted), ("one-sided", one_sided), note=note)


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
    what = f"the crosscoder is of {' and '.join(crosscoder.compared)}, the pair of {' and '.join(pair.compared)}"
    refuse(pair.path, (crosscoder.compared != pair.compared, what, "Give the pair that it was trained on."))
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


_FILES = ("model_final.pt", "ae.pt", "model.safetensors")
_SHAPES = {
    "encoder.weight": "2 d_model d_sae", "encoder.bias": "d_sae", "decoder.weight": "2 d_sae d_model",
    "decoder.bias": "2 d_model", "activation_mean": "2 d_model", "activation_std": "2 d_model",
    "activation_global_scale": "2", "threshold": "", "target_rms": "",
}  # fmt: skip
_WHOLE = ("k", "code_normalization_id")
_NORMALISER = ("activation_mean", "activation_std", "activation_global_scale")
_FIX = "Give a crosscoder of two models that dictionary_learning wrote."


def read_published(folder: str | Path, *, site: str, compared: tuple[str, str]) -> Crosscoder:
    """Read a crosscoder of dictionary_learning.

    Args:
        folder: that holds it, or the file.
        site: TransformerLens name of where its activations come from, which the file does not say.
        compared: ids of the base and the other checkpoint, in the order of its two halves.

    Raises:
        TsaeError: where there is no such file, it needs a pickle, or it is computed in another way.
    """
    with reading(str(folder)[:200], _FIX):
        path = as_path(folder)
        files = [path] if path.is_file() else [path / name for name in _FILES if (path / name).is_file()]
        if not files or files[0].suffix not in (".pt", ".safetensors"):
            raise TsaeError(f"holds none of {', '.join(_FILES)}", where=folder, fix=_FIX)
        return _folded(files[0], check_site(site, files[0]), compared)


def _folded(file: Path, site: str, compared: tuple[str, str]) -> Crosscoder:
    found = _loaded(file)
    weights = _checked(found, file)
    encoder, decoder = weights["encoder.weight"], weights["decoder.weight"]
    k = whole(found["k"], "k", file) if "k" in found else None
    limits = _limits(weights, whole(found.get("code_normalization_id", 1), "code_normalization_id", file), file)
    scale, mean = _normaliser(weights, file)
    # Into raw activations: x ↦ (x − mean) · scale on the way in, and back on the way out.
    encoder = encoder * scale[:, :, None]
    bias = weights["encoder.bias"] - torch.einsum("md,mdf->f", mean, encoder)
    decoder = decoder / scale[:, None]
    centre = (weights["decoder.bias"] / scale + mean).flatten()
    rows, weight = decoder.transpose(0, 1).flatten(1), encoder.flatten(0, 1)
    norm = rows.norm(dim=1).clamp_min(1e-12)
    config = SAEConfig(d_sae=len(rows), k=k or 1, groups=(1.0,), temporal_weight=0.0)
    info = {OF_PAIR: list(compared), "dictionary_learning": {"k": k}}
    crosscoder = Crosscoder(len(centre), config, site=site, training=info)
    tensors = {"W_enc": weight * norm, "b_enc": (bias + centre @ weight) * norm, "W_dec": rows / norm[:, None]}
    tensors |= {"b_dec": centre, "threshold": limits * norm}
    crosscoder.load_state_dict(as_weights(tensors, file, _FIX, infinite=()))
    return crosscoder.requires_grad_(False).eval()


def _loaded(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, by the names that its class has for them."""
    if file.suffix == ".safetensors":
        found = load_file(file)
    else:
        refused = "Save its state_dict again with torch.save, or as safetensors."
        found = read_torch_file(file, refused=refused, damaged=_FIX)
    return {name.removeprefix("_orig_mod."): value for name, value in dict(found).items()}


def _checked(found: Mapping[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """All but the whole numbers as float32, of the shapes that `_SHAPES` names. A normaliser of NaN alone is none."""
    if unknown := sorted(set(found) - set(_SHAPES) - set(_WHOLE)):
        what = f"is not a crosscoder: it has the unknown tensor {shown(unknown[0])}"
        raise TsaeError(what, where=file, fix=_FIX)
    without = [name for name in _NORMALISER if name in found and bool(found[name].isnan().all())]
    kept = {name: value for name, value in found.items() if name not in (*_WHOLE, *without)}
    weights, sizes = as_weights(kept, file, _FIX, infinite=()), {"2": 2}
    for name, value in weights.items():
        axes = _SHAPES[name].split()
        weights[name] = value = value.reshape(()) if not axes and value.numel() == 1 else value
        if value.ndim != len(axes) or any(
            sizes.setdefault(axis, size) != size for axis, size in zip(axes, value.shape, strict=True)
        ):
            what = f"{name} has shape {tuple(value.shape)}, expected ({', '.join(axes)})"
            raise TsaeError(f"{what} with {', '.join(f'{a} = {n}' for a, n in sizes.items())}", where=file, fix=_FIX)
    return weights


def _limits(weights: Mapping[str, torch.Tensor], kind: int, file: Path) -> torch.Tensor:
    """(d_sae,) what a code must exceed to count, in the units of dictionary_learning's codes."""
    decoder, threshold = weights["decoder.weight"], weights.get("threshold", torch.zeros(()))
    together, apart = decoder.norm(dim=(0, 2)), decoder.norm(dim=2).sum(0)
    norms = {1: apart, 2: together, 4: torch.ones_like(apart)}
    if kind == 3:
        sae, cc = _mixture(file)
        norms[3] = together * sae + apart * cc
    if kind not in norms:
        raise TsaeError(
            "selects codes for each model on its own (DECOUPLED), so that a token has two codes"
            if kind == 5
            else f"code_normalization_id is {kind}, expected 1 to 5",
            where=file,
            fix="Give a crosscoder with the normalisation CROSSCODER, SAE, MIXED or NONE.",
        )
    # Below 0 the threshold was never set: ReLU alone decides.
    return threshold.clamp_min(0) / norms[kind].clamp_min(1e-12)


def _mixture(file: Path) -> list[float]:
    """Weights of both norms in a mixture, from config.json where there is one."""
    path = file.parent / "config.json"
    content = read_object(path, _FIX) if path.is_file() else {}
    trainer, weights = content.get("trainer", content), []
    for name, default in (("code_normalization_alpha_sae", 1.0), ("code_normalization_alpha_cc", 0.1)):
        value = trainer.get(name)
        weights.append(default if value is None else number(value, name, path))
    if min(weights) < 0 or max(weights) == 0:
        raise TsaeError(f"its code_normalization_alpha are {weights}, expected none below 0", where=path, fix=_FIX)
    return weights


def _normaliser(weights: Mapping[str, torch.Tensor], file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """((2, d_model) factors of the inputs, (2, d_model) what is subtracted before); ones and zeros without one."""
    if not any(name in weights for name in _NORMALISER[:2]):
        return torch.ones_like(weights["decoder.bias"]), torch.zeros_like(weights["decoder.bias"])
    mean, deviation, scale = *(weights[name] for name in _NORMALISER[:2]), weights.get(_NORMALISER[2])
    rms = weights.get("target_rms", torch.ones(()))
    for name, value in (("activation_std", deviation), ("activation_global_scale", scale), ("target_rms", rms)):
        refuse(file, (value is not None and not bool((value > 0).all()), f"{name} holds values of 0 or less", _FIX))
    whole_model = rms / (deviation.pow(2).sum(-1) + 1e-8).sqrt()
    if scale is not None and torch.allclose(scale, whole_model, rtol=1e-3):
        return scale[:, None].expand_as(mean).clone(), mean
    return 1 / (deviation + 1e-8), mean  # every neuron on its own

"""Measure how good a T-SAE is, on problems that its training left out.

- FVE, cosine, L0, silent, alive, of everything and of its parts: see `tsae.sae.quality.reconstruction`.
- smoothness: see `tsae.sae.quality.smoothness`; the paper's, fragile, and a robust one beside it.
- loss recovered and KL, where the checkpoints are given: see `tsae.sae.quality.splice`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tsae.activations.batches import Windows, warn_of_outliers
from tsae.activations.spans import TokenSpan
from tsae.activations.store import ActivationStore
from tsae.base.views import views
from tsae.checkpoints.loading import ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.token_parts import THINKING
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.counted_texts import counted_texts, spread
from tsae.sae.quality.reconstruction import Cell, Slice, TokenSums, slices_of
from tsae.sae.quality.smoothness import smoothness
from tsae.sae.quality.splice import LossRecovered, loss_recovered

if TYPE_CHECKING:
    import pandas as pd

_OF_ALL_TOKENS = ("fve", "fve_high", "cosine", "cosine_high", "l0", "l0_high", "silent_high")


@dataclass(frozen=True)
class Evaluation:
    """Measures of one SAE over one set of tokens. Of an SAE of one group, all latents count as high-level."""

    n_tokens: int
    n_trajectories: int
    fve: float
    """Fraction of variance explained by all codes."""
    fve_high: float
    """Fraction of variance explained by the high-level codes alone."""
    cosine: float
    cosine_high: float
    """Cosine with the reconstruction from the high-level codes alone."""
    l0: float
    l0_high: float
    silent_high: float
    """Share of tokens on which no high-level latent is active."""
    alive: float
    alive_high: float
    """Share of the high-level latents."""
    smoothness_high: float
    """The paper's measure, over the high-level features."""
    smoothness_all: float
    """The paper's measure, over all features."""
    smoothness_high_mean: float
    """The mean over adjacent tokens in place of the largest, over the high-level features."""
    smoothness_high_robust: float
    """The ratio of sums, over the high-level features."""
    smoothness_all_robust: float
    """The ratio of sums, over all features."""
    slices: tuple[Slice, ...] = ()
    """Everything, then by reader, by band (where bands are known), by prompt and response, and, where any response has
    thinking, by thinking and answer."""
    losses: tuple[LossRecovered, ...] = ()
    """One for each reader whose checkpoint was given."""
    alive_in_training: float | None = None
    """Share of latents that fired in the last `dead_after_tokens` tokens of training; None where that is not known.
    The tokens measured on may be too few for a rare latent to fire."""
    sae: str | None = None
    """Fingerprint of the SAE; None where that is not known."""

    def table(self) -> pd.DataFrame:
        """Reconstruction: one row a slice."""
        import pandas as pd

        return pd.DataFrame([asdict(s) for s in self.slices])

    def loss_table(self) -> pd.DataFrame:
        """Loss recovered and KL: one row a reader; empty where no checkpoints were given."""
        import pandas as pd

        return pd.DataFrame([asdict(loss) for loss in self.losses])

    def as_dict(self) -> dict[str, Any]:
        """The content as JSON, with None for NaN."""
        return plain(asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Evaluation:
        """The inverse of `as_dict`.

        Raises:
            TypeError, ValueError, KeyError: where a value is missing, of another type, or not finite.
        """
        slices = tuple(Slice(**_values(Slice, part)) for part in content["slices"])
        losses = tuple(LossRecovered(**_values(LossRecovered, part)) for part in content["losses"])
        if not slices:
            raise ValueError("it measures nothing")
        return cls(**_values(cls, content), slices=slices, losses=losses)

    def _repr_html_(self) -> str:
        import pandas as pd

        measures = pd.DataFrame(
            [
                ("FVE", self.fve, self.fve_high),
                ("cosine", self.cosine, self.cosine_high),
                ("L0, latents a token", self.l0, self.l0_high),
                ("alive, share of latents", self.alive, self.alive_high),
                ("smoothness, the paper's (lower is smoother)", self.smoothness_all, self.smoothness_high),
                ("smoothness, robust", self.smoothness_all_robust, self.smoothness_high_robust),
            ],
            columns=["measure", "all latents", "high-level"],
        )
        return views().card(
            "Evaluation",
            {"tokens": self.n_tokens, "trajectories": self.n_trajectories, "silent tokens": self.silent_high},
            ("", measures),
            ("by reader, band and span", self.table()),
            ("nats per token with the reconstruction spliced in", self.loss_table()),
        )

    def __str__(self) -> str:
        lines = [f"{self.n_tokens:,} tokens of {self.n_trajectories:,} trajectories", ""]
        lines.append(_row("", ["all", "high-level"]))
        for name, values in {
            "FVE": (self.fve, self.fve_high),
            "cosine": (self.cosine, self.cosine_high),
            "L0": (self.l0, self.l0_high),
            "silent tokens": (float("nan"), self.silent_high),
            "alive": (self.alive, self.alive_high),
            "smoothness (the paper's)": (self.smoothness_all, self.smoothness_high),
            "smoothness (robust)": (self.smoothness_all_robust, self.smoothness_high_robust),
        }.items():
            lines.append(_row(name, map(_number, values)))
        if self.alive_in_training is not None:
            lines.insert(-2, _row("alive in training", [_number(self.alive_in_training), "–"]))
        if len(self.slices) > 1:
            lines += ["", _row("", ["tokens", "FVE", "FVE high", "cosine", "L0", "alive"])]
        for s in self.slices[1:]:
            measures = map(_number, (s.fve, s.fve_high, s.cosine, s.l0, s.alive))
            lines.append(_row(f"{s.by} {s.value}", [f"{s.n_tokens:,}", *measures]))
        if self.losses:
            lines += ["", _row("nats per token", ["loss", "spliced", "ablated", "KL", "recovered"])]
        for r in self.losses:
            cells = map(_number, (r.loss, r.loss_spliced, r.loss_ablated, r.kl, r.recovered))
            interval = f"  [{r.recovered_low:.4f}, {r.recovered_high:.4f}]"
            lines.append(_row(f"reader {r.reader}", cells) + interval)
        return "\n".join(lines)


@torch.no_grad()
def evaluate(
    sae: TemporalSAE | str | Path,
    store: ActivationStore | str | Path,
    *,
    span: TokenSpan = "all",
    held_out: bool | None = True,
    max_norm: float | None = None,
    max_trajectories: int = 2000,
    series: CheckpointSeries | None = None,
    splice_trajectories: int = 64,
) -> Evaluation:
    """Measure an SAE on a store.

    Args:
        sae: or its folder.
        store: or its folder; a subset of it where not all readers and trajectories are to be measured.
        span: which tokens count; special tokens never do.
        held_out: True for the problems that training left out, False for the others, None for all.
        max_norm: tokens beyond this multiple of the median norm about the centre are left out; by default those beyond
            the limit that the SAE's training stored, or beyond 10 times the median where it stored none.
        max_trajectories: where there are more, this many are measured, evenly spread over readers and shards.
        series: the readers' checkpoints; with them, the loss recovered by the reconstruction in each is measured too.
        splice_trajectories: trajectories per reader on which that is measured.

    Raises:
        TsaeError: where the SAE does not fit the store, or there is nothing to measure.
    """
    sae = TemporalSAE.of(sae)
    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    check_fits(sae, store)
    windows = Windows(store, sae.site, span=span, held_out=held_out, max_norm=10.0 if max_norm is None else max_norm)
    beyond = windows.norms.beyond if max_norm is not None or sae.norm_limit is None else sae.outliers
    texts = counted_texts(windows)
    texts = [text for text in texts if text.has_steps]
    chosen = spread(texts, max_trajectories)
    if not chosen:
        raise TsaeError(
            "no trajectories to measure on", where=store.path, fix="Measure on all problems (held_out=None)."
        )

    d_high, device = sae.config.d_high, sae.W_dec.device
    bands = store.rollouts.table["band"].to_pylist()
    prompt_lengths = store.rollouts.lengths("prompt_ids")
    thinks = store.rollouts.has_thinking
    cells: dict[Cell, TokenSums] = {}
    smooth: list[list[float]] = []
    for text in chosen:
        shard = windows.shards[text.shard]
        x = torch.from_numpy(shard.read(sae.site, text.tokens)).to(device)
        inside = ~beyond(x)
        adjacent = inside[1:] & inside[:-1] & torch.from_numpy(np.diff(text.tokens) == 1).to(device)
        if not bool(adjacent.any()):
            continue
        codes = sae.encode(x)
        found = smoothness(x, codes, inside, adjacent)
        high_only = (found.largest[:d_high], found.mean[:d_high], found.robust[:d_high])
        smooth.append([v.nanmean().item() for v in (found.largest, found.robust, *high_only)])
        position = torch.from_numpy(text.tokens - shard.offsets[text.place]).to(device)
        in_prompt = position < int(prompt_lengths[text.row])
        spans = {"prompt": in_prompt, "response": ~in_prompt}  # Nothing else is counted in the windows.
        if thinks:
            parts = np.append(np.zeros(prompt_lengths[text.row]), store.rollouts.response_parts(text.row))
            of_thinking = torch.from_numpy(parts == THINKING).to(device)[position]
            spans = {"prompt": in_prompt, "thinking": of_thinking, "answer": ~in_prompt & ~of_thinking}
        for name, mask in spans.items():
            part = inside & mask
            if bool(part.any()):
                key = (shard.reader, bands[text.row], name)
                cells.setdefault(key, TokenSums(sae)).add(x[part], codes[part])
    if not smooth:
        raise TsaeError("all tokens are beyond the outlier limit", where=store.path, fix="Raise max_norm (--max-norm).")
    largest, robust, high, high_mean, high_robust = (_mean(column) for column in np.array(smooth).T)
    slices = list(slices_of(cells, store.readers))
    everything, whole = slices[0], TokenSums.union(cells.values())
    warn_of_outliers(1 - whole.n / sum(len(text.tokens) for text in chosen), sae.site)
    result = Evaluation(
        n_tokens=whole.n,
        n_trajectories=len(smooth),
        **{name: getattr(everything, name) for name in _OF_ALL_TOKENS},
        alive=everything.alive,
        alive_high=whole.fired[:d_high].float().mean().item(),
        smoothness_high=high,
        smoothness_all=largest,
        smoothness_high_mean=high_mean,
        smoothness_high_robust=high_robust,
        smoothness_all_robust=robust,
        slices=tuple(slices),
        alive_in_training=sae.training_info.get("last", {}).get("alive"),
        sae=sae.fingerprint,
    )
    if series is None:
        return result
    losses, loader = [], ModelLoader(device=str(device))
    targets: TokenSpan = "response" if span in ("all", "last_prompt") else span
    for id in store.readers:
        rows = [text.row for text in texts if windows.shards[text.shard].reader == id]
        if rows:
            some = spread(rows, splice_trajectories)
            losses.append(
                loss_recovered(sae, store, series[id], some, span=span, targets=targets, beyond=beyond, loader=loader)
            )
    return replace(result, losses=tuple(losses))


def _mean(values: np.ndarray) -> float:
    """Mean over trajectories in which something is active; NaN where there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def plain(value: Any) -> Any:
    """None in place of NaN, lists in place of tuples, at any depth."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def _values(kind: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass of numbers and texts, from JSON in which None stands for NaN."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in ("slices", "losses"):
            continue
        value, annotated = content[field.name], str(field.type)
        if value is None:
            value = None if "None" in annotated else float("nan")
        elif annotated.startswith("str"):
            if not isinstance(value, str):
                raise TypeError(f"{field.name}={value!r} is no text")
        elif isinstance(value, bool) or not isinstance(value, int if annotated == "int" else (int, float)):
            raise TypeError(f"{field.name}={value!r} is no number, as was expected")
        elif not np.isfinite(float(value)):
            raise ValueError(f"{field.name}={value!r} is not finite")
        found[field.name] = value
    if unknown := sorted(set(content) - {field.name for field in fields(kind)}):
        raise ValueError(f"{unknown[0]} is unknown")
    return found


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<26.25}" + "".join(f"{cell:>12}" for cell in cells)


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.4f}"

"""How well an SAE reconstructs tokens, as sums over tokens: the sums of parts add up to those of the whole.

- FVE: 1 − Σ‖x − x̂‖² / Σ‖x − x̄‖², sums over tokens; from all codes, and from the high-level codes alone. In a
  slice (a reader, a band, prompts or responses) x̄ is the slice's own mean: differences between slices do not count as
  explained.
- cosine: mean over tokens of cos(x, x̂), of whole activations as in the paper: a large mean brings it near 1, whatever
  else is reconstructed.
- L0: mean number of active latents per token, at the inference threshold.
- silent: share of tokens on which no high-level latent is active. Such tokens look smooth, as nothing can change.
- alive: share of latents that are active on at least one token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import reduce

from tsae.rollouts.schema import BANDS
from tsae.sae.model import TemporalSAE

Cell = tuple[str, str | None, str]
"""(reader, band, span): the finest slice. The span is prompt, thinking or answer; or, where no response has thinking,
prompt or response."""

_SPANS = {
    "prompt": ("prompt",),
    "response": ("response", "thinking", "answer"),
    "thinking": ("thinking",),
    "answer": ("answer",),
}
"""Spans, and of which cells each is made up."""


_ROUNDING = 1e-12
"""Share of Σ‖x‖² below which a variance is rounding: x has 24 bits at most."""

_MEANS = ("cosine", "cosine_high", "l0", "l0_high", "silent_high")


@dataclass(frozen=True)
class Slice:
    """Reconstruction of some of the tokens."""

    by: str
    """What the tokens were divided by: all, reader, band or span."""
    value: str
    n_tokens: int
    fve: float
    fve_high: float
    cosine: float
    cosine_high: float
    l0: float
    l0_high: float
    silent_high: float
    """Share of tokens on which no high-level latent is active."""
    alive: float
    """Share of latents active on at least one of these tokens."""


class TokenSums:
    """Running sums over tokens, from which slices are made."""

    def __init__(self, sae: TemporalSAE) -> None:
        self.sae, self.n = sae, 0
        self.sums: dict[str, float] = defaultdict(float)  # cosine, …: the means of a `Slice`; error; square: Σ‖x‖²
        self.x = torch.zeros(sae.d_model, dtype=torch.float64)
        self.fired = torch.zeros(sae.config.d_sae, dtype=torch.bool)

    @classmethod
    def union(cls, parts: Iterable[TokenSums]) -> TokenSums:
        """The sums over the tokens of all parts; there is at least one."""
        parts = list(parts)
        whole = cls(parts[0].sae)
        for part in parts:
            whole.n, whole.x, whole.fired = whole.n + part.n, whole.x + part.x, whole.fired | part.fired
            for name, value in part.sums.items():
                whole.sums[name] += value
        return whole

    def add(self, x: torch.Tensor, codes: torch.Tensor) -> None:
        """Tokens x (n, d_model) with their codes (n, d_sae)."""
        sae, d_high = self.sae, self.sae.config.d_high
        high = codes[:, :d_high]
        x_high = high @ sae.W_dec[:d_high] + sae.offset(x)
        for suffix, x_hat, active in (("", sae.decode(codes, x), codes > 0), ("_high", x_high, high > 0)):
            self.sums["error" + suffix] += (x - x_hat).pow(2).sum().item()
            self.sums["cosine" + suffix] += torch.cosine_similarity(x, x_hat, dim=1).sum().item()
            self.sums["l0" + suffix] += int(active.sum())
        self.sums["silent_high"] += int((~reduce(high > 0, "token latent -> token", "any")).sum())
        self.sums["square"] += x.double().pow(2).sum().item()
        self.n += len(x)
        self.x += reduce(x.double(), "token d_model -> d_model", "sum").cpu()
        self.fired |= reduce(codes > 0, "token latent -> latent", "any").cpu()

    def slice(self, by: str, value: str) -> Slice:
        """The reconstruction of these tokens."""
        fve, fve_high = (
            explained(self.sums[name], self.sums["square"], self.x, self.n) for name in ("error", "error_high")
        )
        means = {name: self.sums[name] / self.n for name in _MEANS}
        alive = self.fired.float().mean().item()
        return Slice(by, value, n_tokens=self.n, fve=fve, fve_high=fve_high, **means, alive=alive)


def explained(error: float, square: float, total: torch.Tensor, n: int) -> float:
    """FVE from sums over n tokens; NaN where the tokens are all alike, but for rounding: there is nothing to explain.

    Args:
        error: Σ‖x − x̂‖².
        square: Σ‖x‖².
        total: (d_model,) float64 Σx.
        n: tokens, one at least.
    """
    variance = square - total.pow(2).sum().item() / n
    return 1 - error / variance if variance > _ROUNDING * square else float("nan")


def slices_of(cells: Mapping[Cell, TokenSums], readers: Sequence[str]) -> Iterator[Slice]:
    """Everything, then by reader, by band and by span, where there are tokens of these."""
    yield TokenSums.union(cells.values()).slice("all", "all")
    for axis, (by, values) in enumerate((("reader", readers), ("band", BANDS), ("span", _SPANS))):
        for value in values:
            wanted = _SPANS.get(value, (value,)) if by == "span" else (value,)
            parts = [sums for key, sums in cells.items() if key[axis] in wanted]
            if parts:
                yield TokenSums.union(parts).slice(by, value)

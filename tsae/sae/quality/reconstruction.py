"""How well an SAE reconstructs tokens, in sums over them, so that parts add up to the whole.

- FVE: 1 − Σ‖x − x̂‖² / Σ‖x − x̄‖², sums over tokens; from all codes, and from the high-level codes alone. Of a slice
  (a reader, a band, prompts or responses) x̄ is the slice's own mean, so that what tells the slices apart does not count
  as explained.
- cosine: mean over tokens of cos(x, x̂).
- L0: mean number of active latents per token, at the inference threshold.
- silent: share of tokens on which no high-level latent is active, smooth for want of anything to change.
- alive: share of latents that are active on at least one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tsae.rollouts.table import BANDS
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
    """Running sums over tokens, of which slices are made."""

    def __init__(self, sae: TemporalSAE) -> None:
        self.sae, self.d_high = sae, sae.config.d_high
        self.n, self.active, self.active_high, self.silent = 0, 0, 0, 0
        self.error = self.error_high = self.cosine = self.cosine_high = self.square = 0.0
        self.x = torch.zeros(sae.d_model, dtype=torch.float64)
        self.fired = torch.zeros(sae.config.d_sae, dtype=torch.bool)

    @classmethod
    def union(cls, parts: Iterable[TokenSums]) -> TokenSums:
        """Of the tokens of all parts, of which there is at least one."""
        parts = list(parts)
        whole = cls(parts[0].sae)
        for part in parts:
            whole.n, whole.square = whole.n + part.n, whole.square + part.square
            whole.error, whole.error_high = whole.error + part.error, whole.error_high + part.error_high
            whole.cosine, whole.cosine_high = whole.cosine + part.cosine, whole.cosine_high + part.cosine_high
            whole.active, whole.active_high = whole.active + part.active, whole.active_high + part.active_high
            whole.x, whole.fired = whole.x + part.x, whole.fired | part.fired
            whole.silent += part.silent
        return whole

    def add(self, x: torch.Tensor, codes: torch.Tensor) -> None:
        """Tokens x (n, d_model) with their codes (n, d_sae)."""
        high, sae = codes[:, : self.d_high], self.sae
        x_hat, x_high = sae.decode(codes), high @ sae.W_dec[: self.d_high] + sae.b_dec
        self.n += len(x)
        self.error += (x - x_hat).pow(2).sum().item()
        self.error_high += (x - x_high).pow(2).sum().item()
        self.cosine += torch.cosine_similarity(x, x_hat, dim=1).sum().item()
        self.cosine_high += torch.cosine_similarity(x, x_high, dim=1).sum().item()
        self.active += int((codes > 0).sum())
        self.active_high += int((high > 0).sum())
        self.silent += int((high > 0).any(1).logical_not().sum())
        self.square += x.double().pow(2).sum().item()
        self.x += x.sum(0).double().cpu()
        self.fired |= (codes > 0).any(0).cpu()

    def slice(self, by: str, value: str) -> Slice:
        """What these tokens' reconstruction is like."""
        variance = self.square - self.x.pow(2).sum().item() / self.n
        # A slice of tokens that are all alike has no variance to explain.
        explained = (1 - e / variance if variance > 0 else float("nan") for e in (self.error, self.error_high))
        fve, fve_high = explained
        return Slice(
            by,
            value,
            n_tokens=self.n,
            fve=fve,
            fve_high=fve_high,
            cosine=self.cosine / self.n,
            cosine_high=self.cosine_high / self.n,
            l0=self.active / self.n,
            l0_high=self.active_high / self.n,
            silent_high=self.silent / self.n,
            alive=self.fired.float().mean().item(),
        )


def slices_of(cells: Mapping[Cell, TokenSums], readers: Sequence[str]) -> Iterator[Slice]:
    """Everything, then by reader, by band and by span, where there are tokens of these."""
    yield TokenSums.union(cells.values()).slice("all", "all")
    for axis, (by, values) in enumerate((("reader", readers), ("band", BANDS), ("span", _SPANS))):
        for value in values:
            wanted = _SPANS.get(value, (value,)) if by == "span" else (value,)
            parts = [sums for key, sums in cells.items() if key[axis] in wanted]
            if parts:
                yield TokenSums.union(parts).slice(by, value)

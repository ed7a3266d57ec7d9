"""Measure how good a T-SAE is, on problems that its training left out.

Reconstruction, as sums over tokens; the sums of parts add up to those of the whole:

- FVE: 1 − Σ‖x − x̂‖² / Σ‖x − x̄‖²; from all codes, and from the high-level codes alone. In a slice (a reader, a band,
  prompts or responses) x̄ is the slice's own mean: differences between slices do not count as explained.
- cosine: mean over tokens of cos(x, x̂), of whole activations as in the paper: a large mean brings it near 1, whatever
  else is reconstructed.
- L0: mean number of active latents per token, at the inference threshold.
- silent: share of tokens on which no high-level latent is active. Such tokens look smooth, as nothing can change.
- alive: share of latents that are active on at least one token.

Smoothness: how much features change from token to token, relative to how far the residual stream moves. For feature f
and the steps t − 1 → t of a trajectory, with Δf and Δx the changes over a step:

- *largest* (the T-SAE paper's, arXiv 2511.05541): max_t |Δf_t| / ‖Δx_t‖₂.
- *mean*: the mean over all steps of the same ratio.
- *robust*: Σ_{t ∈ T} |Δf_t| / Σ_{t ∈ T} ‖Δx_t‖₂, over T, the steps at which f is active on either side.

Each is a Lipschitz-like ratio in the same units, lower is smoother, and is averaged over the features active in a
trajectory, then over trajectories. One step of a trajectory sets the largest ratio: a pair of nearly equal tokens (‖Δx‖
near 0) decides it. The expected maximum also grows with the number of steps, so that longer responses look rougher. The
mean suffers less from both, but counts steps at which a feature is silent on both sides as perfectly smooth: of two
equally abrupt features the sparser one looks smoother. The ratio of sums is the mean ratio over the steps that concern
the feature, each weighted by its ‖Δx‖. Neither length nor silence changes it. It never exceeds the largest ratio, and
equals it where all steps are alike.

Loss recovered and KL, where the checkpoints are given: see `tsae.sae.quality.splice`.

A published SAE still gives codes where its config names a wrong site, normalisation or bias, or where it is of another
model. Its FVE shows the mistake: the FVE on a sample is compared with the one that its makers name, where they do, else
with a half (`check_published_fve`).
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from einops import reduce

from tsae.activations.batches import Windows, warn_of_outliers
from tsae.activations.shard import TokenSpan
from tsae.activations.store import ActivationStore, Source
from tsae.base import display
from tsae.base.artefact import command_facts, read_record, write_record
from tsae.base.files import reading
from tsae.checkpoints.loading import ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import refuse
from tsae.rollouts.schema import BANDS
from tsae.rollouts.token_parts import THINKING
from tsae.sae.model import ForeignSAE, TemporalSAE, check_fits
from tsae.sae.quality.splice import LossRecovered, loss_recovered

if TYPE_CHECKING:
    import pandas as pd


_OF_ALL_TOKENS = ("fve", "fve_high", "cosine", "cosine_high", "l0", "l0_high", "silent_high")

_TOKENS = 4096
_DENSE = 1 << 24
"""Dense codes at once."""
_LEAST, _NEAR = 0.5, 0.1
"""Lowest FVE without a warning: `_LEAST` where its makers name none, else theirs less `_NEAR`."""
_TIMES = 3.0
"""A warning names more or fewer active latents than its makers do, from this factor on."""

_MADE = ("kind", "command", "from")
"""What the file of an evaluation also says."""


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

    def save(self, file: Path) -> Path:
        """Write it as JSON, with its hash."""
        return write_record(file, {"kind": "evaluation", **self.as_dict(), **command_facts(file)})

    @classmethod
    def load(cls, file: Path) -> Evaluation:
        """What `save` wrote.

        Raises:
            TsaeError: where the file is missing or damaged.
        """
        fix = "Remove it, and give the command that made it again."
        found = read_record(file, fix)
        with reading(file, fix):
            return cls.from_dict({name: value for name, value in found.items() if name not in _MADE})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Evaluation:
        """The inverse of `as_dict`."""
        slices = tuple(Slice(**_numbers(part)) for part in content["slices"])
        losses = tuple(LossRecovered(**_numbers(part)) for part in content["losses"])
        return cls(**{**_numbers(content), "slices": slices, "losses": losses})

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
        return display.card(
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
    refuse(store.path, (not chosen, "no trajectories to measure on", "Measure on all problems (held_out=None)."))

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
    refuse(store.path, (not smooth, "all tokens are beyond the outlier limit", "Raise max_norm (--max-norm)."))
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


def _numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass, from JSON in which None stands for NaN in all but the last two fields."""
    unknown = ("alive_in_training", "sae")
    return {key: float("nan") if value is None and key not in unknown else value for key, value in content.items()}


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<26.25}" + "".join(f"{cell:>12}" for cell in cells)


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.4f}"


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


class Smoothness(NamedTuple):
    """(d_sae,) one entry for each feature; NaN where it is not active, or active at no counted step."""

    largest: torch.Tensor
    mean: torch.Tensor
    robust: torch.Tensor


def smoothness(x: torch.Tensor, codes: torch.Tensor, inside: torch.Tensor, adjacent: torch.Tensor) -> Smoothness:
    """Smoothness of every feature in one trajectory.

    Args:
        x: (T, d_model) tokens.
        codes: (T, d_sae).
        inside: (T,) bool, tokens that count.
        adjacent: (T - 1,) bool, steps between two tokens that count and follow one another.
    """
    size = (x[1:] - x[:-1]).norm(dim=1)[adjacent].clamp_min(1e-12)  # (n_steps,)
    change = (codes[1:] - codes[:-1]).abs()[adjacent]  # (n_steps, d_sae)
    active = codes > 0
    concerned = (active[1:] | active[:-1])[adjacent].to(change.dtype)
    ratio = change / size[:, None]
    silent = ~active[inside].any(0)
    # 0 / 0, a feature active only on tokens without a counted neighbour, is NaN as it should be.
    robust = reduce(change, "step feature -> feature", "sum") / (size @ concerned)
    nan = float("nan")
    return Smoothness(
        largest=reduce(ratio, "step feature -> feature", "max").masked_fill(silent, nan),
        mean=reduce(ratio, "step feature -> feature", "mean").masked_fill(silent, nan),
        robust=robust.masked_fill(silent, nan),
    )


T = TypeVar("T")


class Text(NamedTuple):
    """The counted tokens of one trajectory as one reader read it."""

    shard: int
    """Index into the windows' shards."""
    place: int
    """Index of the trajectory in the shard."""
    row: int
    """Row id in the rollouts."""
    tokens: np.ndarray
    """Positions in the shard, ascending."""

    @property
    def has_steps(self) -> bool:
        """Whether two counted tokens follow one another."""
        return bool((np.diff(self.tokens) == 1).any())


def counted_texts(windows: Windows) -> list[Text]:
    """Every trajectory that has counted tokens, in the order of the store."""
    texts: list[Text] = []
    shard_of, start, length = windows.segments.T
    place = np.empty_like(start)
    for number, shard in enumerate(windows.shards):
        mine = shard_of == number
        place[mine] = np.searchsorted(shard.offsets, start[mine], side="right") - 1
    edges = np.flatnonzero(np.diff(shard_of, prepend=-1) | np.diff(place, prepend=-1))
    for low, high in zip(edges, [*edges[1:], len(start)], strict=True):
        tokens = np.concatenate([np.arange(start[i], start[i] + length[i]) for i in range(low, high)])
        shard = windows.shards[shard_of[low]]
        texts.append(Text(int(shard_of[low]), int(place[low]), int(shard.trajectory[place[low]]), tokens))
    return texts


def spread(items: list[T], most: int) -> list[T]:
    """At most this many, evenly spread over the list."""
    if len(items) <= most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, max(0, most)).astype(int)]


def named_measures(sae: TemporalSAE) -> dict[str, float] | None:
    """FVE and L0 that its makers name, as far as they are numbers; None for an SAE that was not published."""
    found = sae.training_info.get("promised", _metadata(sae).get("promised"))
    if found is None and not isinstance(sae, ForeignSAE):
        return None
    named = found if isinstance(found, dict) else {}
    return {
        name: float(named[name])
        for name in ("fve", "l0")
        if type(named.get(name)) in (int, float) and abs(named[name]) <= sys.float_info.max
    }


def _metadata(sae: TemporalSAE) -> dict[str, Any]:
    """Metadata of sae_lens's cfg.json, where it has such."""
    found = sae.training_info.get("sae_lens")
    return found if isinstance(found, dict) else {}


@torch.no_grad()
def check_published_fve(sae: TemporalSAE, store: Source) -> tuple[float, float] | None:
    """Measure a published SAE on about 4,096 tokens of a store without outliers, and warn where it falls short.

    Returns:
        (FVE, L0); None for an SAE that was not published.
    """
    if named_measures(sae) is None:
        return None
    sample = store.windows(sae.site, held_out=None, partner=None).first_tokens
    sums, device = TokenSums(sae), sae.W_dec.device
    for x in torch.from_numpy(sample[:: max(1, len(sample) // _TOKENS)]).split(max(64, _DENSE // sae.config.d_sae)):
        sums.add(x.to(device), sae.encode(x.to(device)))
    found = sums.slice("all", "all")
    warn_where_short(sae, store, found.fve, found.l0, sums.n)
    return found.fve, found.l0


def warn_where_short(sae: TemporalSAE, store: Source, fve: float, l0: float, n_tokens: int) -> None:
    """Warn where a published SAE explains less than it should, or with far more or fewer latents."""
    named = named_measures(sae)
    if named is None:
        return
    short = fve < (named["fve"] - _NEAR if "fve" in named else _LEAST)
    other = "l0" in named and not named["l0"] / _TIMES <= l0 <= named["l0"] * _TIMES
    if not short and not other:
        return
    says = [f"FVE {named['fve']:.2f}"] if "fve" in named else []
    says += [f"L0 {named['l0']:.0f}"] if "l0" in named else []
    expected = f"its makers name {' and '.join(says)}" if says else f"expected at least {_LEAST:g}"
    without_bos = _metadata(sae).get("prepend_bos") is True and not _begins_with_special(store)
    bos = " Its config says that texts begin with a BOS token; these do not." if without_bos else ""
    warnings.warn(
        f"this published SAE explains {fve:.2f} of the variance of {n_tokens:,} tokens at {sae.site}, with {l0:.1f} "
        f"active latents a token ({expected}). It may be of another model or layer, or these texts may be unlike those "
        f"that it was trained on. A diff finds only what it explains.{bos}",
        UserWarning,
        stacklevel=3,
    )


def _begins_with_special(store: Source) -> bool:
    """Whether most prompts begin with a special token."""
    prompts = store.rollouts.table["prompt_ids"].slice(0, 100).to_pylist()
    special = set(store.special_ids)
    return sum(bool(prompt) and prompt[0] in special for prompt in prompts) * 2 > len(prompts)

"""The optimizer steps of one training: first bias, weights, Adam, counters, state of a checkpoint, and threshold.

BatchTopK keeps k codes per token of a batch; inference keeps the codes above a threshold. A running mean of the
batches' smallest codes lags behind weights that still move: after 600 steps it left 12 % too few codes. The quantile of
the finished SAE's own codes has no lag, and needs one pass over a sample.

That sample comes from the problems that training leaves out. Training tokens have fewer codes than others, and the more
often they were seen, the fewer: after six passes over 300 problems, new problems had 9 % more than k codes. Only this
one number comes from those problems, and it is not set to make any error smaller. With fewer than `FEWEST` problems
chance would move the number more than that; the sample is then of training tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import numpy as np
import torch

from tsae.activations.batches import TokenBatch, Windows, warn_of_outliers
from tsae.base.distributed import Processes
from tsae.errors import TsaeError
from tsae.sae.config import InitialBias, SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training.finetuning import trainable
from tsae.sae.training.loss import LossTerms, temporal_loss, variance
from tsae.sae.training.sparse_codes import kernels_for, rounded_copy


class Trainer:
    """Weights, optimizer and counters of one training.

    Attributes:
        processes: that divide the batch.
        steps: optimizer steps taken.
        epoch: number of the epoch that the next batch comes from.
        next_batch: its number there.
    """

    def __init__(
        self,
        windows: Windows,
        config: SAEConfig,
        training: TrainingConfig,
        processes: Processes,
        start: TemporalSAE | None = None,
    ) -> None:
        self.windows, self.config, self.training = windows, config, training
        self.processes, self.device = processes, processes.device
        windows.pinned = torch.cuda.is_available() and torch.device(self.device).type == "cuda"
        self.n_steps = training.tokens // training.batch_tokens
        self.steps = self.epoch = self.next_batch = 0
        # Computed now: a live source holds these tokens only at the start. `finish` may need them.
        sample = windows.first_tokens
        self.scale = windows.d_model**0.5 / windows.norms.mean
        self.centre = torch.tensor(windows.norms.centre, dtype=torch.float32)
        warn_of_outliers(windows.norms.outlier_share, windows.site)
        # A start has its high-level latents already.
        self.temporal_rise = training.temporal_rise_share * self.n_steps if start is None else 0
        if start is None:
            bias = (torch.from_numpy(initial_bias(sample, training.initial_bias)) - self.centre) * self.scale
            generator = torch.Generator().manual_seed(training.seed)
            self.sae = TemporalSAE(windows.d_model, config, site=windows.site)
            self.sae.initialize(bias, generator)
        else:
            if (share := float(start.outliers(torch.from_numpy(sample)).float().mean())) > 0.5:
                what = f"its training would have left out {share:.0%} of the tokens at {windows.site} as outliers"
                raise TsaeError(what, where="start", fix="Train without a start, or start from an SAE of such tokens.")
            self.sae = trainable(start, config)
            self.sae.fold_scale(1 / self.scale, -self.scale * self.centre)
        self.sae.to(self.device)
        self.centre = self.centre.to(self.device)
        self.learning_rate = training.learning_rate or _learning_rate(config.d_sae, self.n_steps, start)
        self.optimizer = adam(self.sae, self.learning_rate)
        self.idle_tokens = torch.zeros(len(self.sae.b_enc), dtype=torch.long, device=self.device)

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on. Weights, moments and idle tokens are the live tensors."""
        state = {f"sae.{name}": tensor for name, tensor in self.sae.state_dict().items()}
        for name, parameter in self.sae.named_parameters():
            state.update({f"adam.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()})
        state["idle_tokens"] = self.idle_tokens
        state["position"] = torch.tensor([self.steps, self.epoch, self.next_batch])
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Resume from what `state` returned."""
        for name, live in self.state().items():
            live.copy_(state[name])
        self.steps, self.epoch, self.next_batch = state["position"].tolist()

    def batches(self) -> Iterator[TokenBatch]:
        """This process's shares of the batches that are left, epoch after epoch."""
        share = (self.processes.rank, self.processes.size)
        while self.steps < self.n_steps:
            usable = self.next_batch > 0
            for batch in self.windows.epoch(self.epoch, self.training.batch_tokens, start=self.next_batch, share=share):
                self.next_batch = batch.number + 1
                # Outliers may leave a share without any, or the whole batch, which one process is then not given.
                needed = batch.x if self.windows.partner is None else batch.pairs
                if not any(self.processes.counts(len(needed))):
                    continue
                usable = True
                yield batch
                if self.steps == self.n_steps:
                    return
            if not usable:
                raise TsaeError(
                    f"no two tokens that make a pair have norms below {self.windows.norms.limit:g} about the centre",
                    where=self.windows.store.path,
                    fix="Raise max_norm (--max-norm), or choose another token span.",
                )
            self.epoch, self.next_batch = self.epoch + 1, 0

    def step(self, batch: TokenBatch) -> dict[str, float] | None:
        """One optimizer step; metrics every 25th step and at the last."""
        assert self.config.dead_after_tokens is not None
        x = self.scaled(batch.x)
        dead = self.idle_tokens >= self.config.dead_after_tokens
        pairs, trajectory, copies = map(torch.from_numpy, (batch.pairs, batch.trajectory, batch.copies))
        others = None if batch.others is None else self.scaled(batch.others)
        precision, processes = self.training.precision, self.processes
        terms = temporal_loss(
            self.sae,
            x,
            pairs,
            dead,
            trajectory,
            others,
            copies,
            temporal_share=min(1.0, (self.steps + 1) / max(self.temporal_rise, 1)),
            precision=precision,
            processes=processes,
        )
        rate = self.learning_rate * self._schedule(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        terms.total.backward()
        self.processes.sum_gradients(self.sae.parameters())
        update(self.sae, self.optimizer, self.steps + 1)
        self.idle_tokens.add_(terms.n_tokens).masked_fill_(terms.fired, 0)
        # Read once all is under way: a GPU is waited for here.
        if not math.isfinite(self.processes.sum(terms.total.detach()).item()):
            self.windows.refuse_not_finite(batch.x, batch.trajectory)
            what = f"the loss is not finite at step {self.steps}"
            raise TsaeError(what, where=self.windows.store.path, fix="Lower the learning rate.")
        self.steps += 1
        if (self.steps - 1) % 25 and self.steps != self.n_steps:
            return None
        with torch.no_grad():
            return self._metrics(x, terms, rate)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """(n, d_model) tokens as the SAE takes them in training: about the centre, of mean norm √d_model."""
        return (x.to(self.device, non_blocking=True).float() - self.centre).mul_(self.scale)

    def _schedule(self, step: int) -> float:
        """Share of the full learning rate: up, level, down."""
        warmup, decay = self.training.warmup_share * self.n_steps, self.training.decay_share * self.n_steps
        return min(1.0, (step + 1) / max(warmup, 1), (self.n_steps - step) / max(decay, 1))

    def _metrics(self, x: torch.Tensor, terms: LossTerms, rate: float) -> dict[str, float]:
        parts = [terms.total, terms.reconstruction, terms.reconstruction_high, terms.temporal, terms.aux]
        total, everything, high, temporal, aux = self.processes.sum(torch.stack(parts))
        var = variance(x, terms.n_tokens, self.processes)
        alive = (self.idle_tokens < (self.config.dead_after_tokens or 0)).sum()
        return {
            "step": self.steps - 1,
            "loss": total.item(),
            "fve": 1 - (everything / var).item(),
            "fve_high": 1 - (high / var).item(),
            "temporal": temporal.item(),
            "aux": aux.item(),
            "alive": alive.item() / self.config.d_sae,
            "learning_rate": rate,
        }

    def finish(self, sample: np.ndarray) -> TemporalSAE:
        """The SAE of raw activations, with its threshold calibrated on (n, d_model) tokens."""
        self.sae.fold_scale(self.scale, self.centre)
        self.sae.requires_grad_(False)
        calibrate(self.sae, torch.from_numpy(sample))
        return self.sae.eval()


def adam(sae: TemporalSAE, rate: float) -> torch.optim.Adam:
    """Adam for an SAE's weights."""
    optimizer = torch.optim.Adam(sae.parameters(), lr=rate, betas=(0.9, 0.999), fused=True)
    for parameter in sae.parameters():
        # As Adam would make it at its first step; made here, so that every state has the same tensors.
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


@torch.no_grad()
def update(sae: TemporalSAE, optimizer: torch.optim.Adam, step: int) -> None:
    """One step of Adam, of the gradient clipped to norm 1, after which the decoder's rows have norm 1.

    The gradient's part along the rows is removed: renormalising would undo it, but Adam's moments would keep it.

    Args:
        sae: whose parameters have gradients.
        optimizer: of `adam`, with this step's learning rate.
        step: its number, from 1 on.
    """
    (group,) = optimizer.param_groups
    if (kernels := kernels_for(sae.W_dec)) is not None:
        state = optimizer.state
        every = [(p, p.grad, state[p]["exp_avg"], state[p]["exp_avg_sq"], rounded_copy(p)) for p in group["params"]]
        unit = next(i for i, parameter in enumerate(group["params"]) if parameter is sae.W_dec)
        kernels.update(every, unit, group["lr"], step, group["betas"], group["eps"], 1.0)
        torch._foreach_add_([state[p]["step"] for p in group["params"]], 1)
        return
    gradient, rows = sae.W_dec.grad, sae.W_dec
    assert gradient is not None
    gradient.sub_((gradient * rows).sum(1, keepdim=True) * rows)
    torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
    optimizer.step()
    rows.div_(rows.norm(dim=1, keepdim=True).clamp_min(1e-8))


def _learning_rate(d_sae: int, n_steps: int, start: TemporalSAE | None) -> float:
    """The default; see `TrainingConfig.learning_rate`."""
    short = min(2.0, max(1.0, (1500 / n_steps) ** 0.5)) if start is None else 1.0
    return 4e-4 * (16_384 / d_sae) ** 0.5 * short


_ROWS_AT_ONCE = 4096  # tokens in float64 at once
_CLOSE = 1e-8  # a step, as a share of the mean distance, after which the next ones change nothing that matters
_MOST = 10_000  # steps


def initial_bias(x: np.ndarray, kind: InitialBias) -> np.ndarray:
    """(d_model,) float64: where the decoder bias starts.

    Args:
        x: (n, d_model) sample of tokens.
        kind: their geometric median (Bricken et al. 2023, https://transformer-circuits.pub/2023/monosemantic-features,
            and the T-SAE authors' code), which a few large tokens move less than they move the mean; the mean; or zero.
    """
    if kind == "zero":
        return np.zeros(x.shape[1])
    return geometric_median(x) if kind == "geometric_median" else x.mean(0, dtype=np.float64)


def geometric_median(x: np.ndarray) -> np.ndarray:
    """(d,) float64: the point with the least sum of distances to the rows of x (n, d).

    Weiszfeld's iteration from the mean, with the step of Vardi and Zhang (2000, doi:10.1073/pnas.97.4.1423) where it
    stands on a row, until a step is shorter than 1e-8 of the mean distance.

    Raises:
        TsaeError: where it does not converge.
    """
    median = x.mean(0, dtype=np.float64)
    for step in count():
        distance = _distances(x, median)
        scale = distance.mean()
        if scale == 0:
            return median
        apart = distance > 0
        weight = np.divide(1, distance, out=np.zeros_like(distance), where=apart)
        target = _weighted_sum(x, weight) / weight.sum()
        # The rows that it stands on hold it with force 1 each, against the pull of the others.
        held, pull = len(x) - apart.sum(), weight.sum() * np.linalg.norm(target - median)
        move = (target - median) * (0 if held >= pull else 1 - held / pull)
        median = median + move
        if np.linalg.norm(move) <= _CLOSE * scale:
            break
        if step == _MOST:
            raise TsaeError(
                f"the geometric median of {len(x)} tokens has not converged after {step} steps",
                where="TrainingConfig.initial_bias",
                fix="Start from the mean (--initial-bias mean).",
            )
    # A median that is one of the rows is approached, but not reached.
    nearest = x[_distances(x, median).argmin()].astype(np.float64)
    return min(median, nearest, key=lambda point: _distances(x, point).sum())


def _distances(x: np.ndarray, point: np.ndarray) -> np.ndarray:
    parts = [x[low : low + _ROWS_AT_ONCE] - point for low in range(0, len(x), _ROWS_AT_ONCE)]
    return np.concatenate([np.sqrt(np.einsum("nd,nd->n", part, part)) for part in parts])


def _weighted_sum(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1])
    for low in range(0, len(x), _ROWS_AT_ONCE):
        total += weight[low : low + _ROWS_AT_ONCE] @ x[low : low + _ROWS_AT_ONCE].astype(np.float64)
    return total


FEWEST = 20
"""Problems left out, from which on the threshold is set on them."""

_TOKENS_AT_ONCE = 1024  # tokens whose pre-activations are held at once


@torch.no_grad()
def calibrate(sae: TemporalSAE, x: torch.Tensor) -> None:
    """Set the threshold so that x has k active codes per token on average, or all positive ones where they are fewer.

    Args:
        sae: in the units of x.
        x: (n, d_model) tokens, in any floating-point precision; chunks of it go to the SAE's device.
    """
    wanted, device = sae.config.k * len(x), sae.W_enc.device
    # The largest codes so far: one more than are to be active.
    largest, bound = torch.zeros(0, device=device), torch.zeros((), device=device)
    sae.threshold = torch.zeros((), device=device)
    for part in x.split(_TOKENS_AT_ONCE):
        codes = sae.encode(part.to(device).float())
        largest = torch.cat([largest, codes[codes > bound]])
        if len(largest) > wanted:
            largest = largest.topk(wanted + 1, sorted=False).values
            bound = largest.min()
    if len(largest) > wanted:
        # Between two codes, not at one: other batches round it to either side.
        largest = largest.topk(wanted + 1, sorted=False).values
        bound = largest.topk(2, largest=False).values.mean()
    else:
        bound = torch.zeros((), device=device)
    sae.threshold = bound

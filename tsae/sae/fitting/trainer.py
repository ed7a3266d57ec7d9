"""The optimizer steps of one training: weights, Adam, counters, and the state that a checkpoint keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from tsae.activations.batches import TokenBatch, Windows, warn_of_outliers
from tsae.base.distributed import Processes
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.fitting.finetuning import trainable
from tsae.sae.fitting.initial_bias import initial_bias
from tsae.sae.fitting.loss import LossTerms, temporal_loss, variance
from tsae.sae.fitting.threshold import calibrate
from tsae.sae.model import TemporalSAE


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
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=self.learning_rate, betas=(0.9, 0.999), fused=True)
        for parameter in self.sae.parameters():
            # As Adam would make it at its first step; made here, so that `state` has the same tensors at every step.
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
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
        arrays = (batch.pairs, batch.trajectory, batch.copies)
        pairs, trajectory, copies = (torch.from_numpy(a).to(self.device) for a in arrays)
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
        self._project_gradient()
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            self.sae.W_dec.div_(self.sae.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-8))
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
        return (x.to(self.device).float() - self.centre).mul_(self.scale)

    def _schedule(self, step: int) -> float:
        """Share of the full learning rate: up, level, down."""
        warmup, decay = self.training.warmup_share * self.n_steps, self.training.decay_share * self.n_steps
        return min(1.0, (step + 1) / max(warmup, 1), (self.n_steps - step) / max(decay, 1))

    def _project_gradient(self) -> None:
        """Remove the part along the rows: renormalising would undo it, but Adam's moments would keep it."""
        gradient, rows = self.sae.W_dec.grad, self.sae.W_dec.detach()
        assert gradient is not None
        gradient.sub_((gradient * rows).sum(1, keepdim=True) * rows)

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


def _learning_rate(d_sae: int, n_steps: int, start: TemporalSAE | None) -> float:
    """The default; see `TrainingConfig.learning_rate`."""
    short = min(2.0, max(1.0, (1500 / n_steps) ** 0.5)) if start is None else 1.0
    return 4e-4 * (16_384 / d_sae) ** 0.5 * short

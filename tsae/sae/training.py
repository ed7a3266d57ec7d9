"""Training a T-SAE on a store.

1. Norms are estimated on a sample; tokens beyond the outlier limit are left out; x is scaled to mean norm √d_model.
2. Adam on the loss of `tsae.sae.loss`; after every step decoder rows return to unit norm (their gradient's parallel
   part is removed before).
3. The inference threshold is the running mean of each batch's smallest active code.
4. The scale is folded into the saved weights, so that the SAE reads raw activations.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tsae.activations.store import ActivationStore
from tsae.activations.windows import TokenBatch, Windows
from tsae.errors import TsaeError
from tsae.provenance import write_run
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.loss import LossTerms, temporal_loss
from tsae.sae.model import TemporalSAE

_THRESHOLD_DECAY = 0.99


def train(
    store: ActivationStore | str | Path,
    sae: SAEConfig | None = None,
    *,
    to: str | Path | None = None,
    training: TrainingConfig | None = None,
    progress: bool = True,
) -> TemporalSAE:
    """Train a T-SAE on every reader of a store, leaving out every tenth problem for `tsae.sae.evaluation`.

    Args:
        store: activations.
        sae: what the SAE is; defaults of `SAEConfig`.
        to: folder for sae.safetensors, config.json, training.json and metrics.jsonl; None keeps it in memory.
        training: how it is trained; defaults of `TrainingConfig`.
        progress: show a bar with tokens/s, FVE, L0 and the share of latents alive.

    Raises:
        TsaeError: for an unknown site, a store without adjacent tokens, or activations or a loss that are not finite.
    """
    from tqdm.auto import tqdm

    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    config, training = sae or SAEConfig(), training or TrainingConfig()
    site = training.site or _only_site(store)
    windows = Windows(
        store,
        site,
        span=training.span,
        window=training.window,
        held_out=False,
        max_norm=training.max_norm,
        seed=training.seed,
    )
    n_steps = training.tokens // training.batch_tokens
    if config.dead_after_tokens is None:
        config = replace(config, dead_after_tokens=min(10_000_000, max(training.tokens // 10, training.batch_tokens)))
    trainer = _Trainer(windows, config, training, n_steps, site)
    metrics: list[dict[str, float]] = []
    with tqdm(
        total=n_steps * training.batch_tokens,
        desc="train",
        unit="token",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for step, batch in enumerate(_batches(windows, training.batch_tokens, n_steps)):
            row = trainer.step(step, batch)
            bar.update(training.batch_tokens)
            if row is not None:
                metrics.append(row)
                bar.set_postfix_str(f"FVE {row['fve']:.3f}, L0 {row['l0']:.1f}, alive {row['alive']:.1%}")
    model = trainer.finish()
    model.training_info = {
        "training": asdict(training),
        "store": {
            "rollouts": store.manifest["rollouts"],
            "readers": store.readers,
            "dtype": store.manifest["dtype"],
        },
        "norms": asdict(windows.norms),
        "tokens_in_store": windows.n_tokens,
        "last": metrics[-1],
    }
    if to is not None:
        to = model.save(to)
        (to / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
        write_run(to, "train", {"sae": config, "training": training}, {"store": store.manifest["rollouts"]})
    return model


class _Trainer:
    """Weights, optimizer and counters of one training."""

    def __init__(self, windows: Windows, config: SAEConfig, training: TrainingConfig, n_steps: int, site: str) -> None:
        self.config, self.n_steps, self.device = config, n_steps, training.device
        d_model = windows.d_model
        self.scale = d_model**0.5 / windows.norms.mean
        self.where = windows.store.path
        sample = next(windows.epoch(0, 16_384)).x
        mean = torch.from_numpy(sample.mean(0)) * self.scale
        generator = torch.Generator().manual_seed(training.seed)
        self.sae = TemporalSAE(d_model, config, site=site)
        self.sae.initialize(mean, generator)
        self.sae.to(self.device)
        rate = training.learning_rate or 2e-4 * (16_384 / config.d_sae) ** 0.5
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=rate, betas=(0.9, 0.999), fused=True)
        warmup, decay = training.warmup_share * n_steps, training.decay_share * n_steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / max(warmup, 1), (n_steps - s) / max(decay, 1))
        )
        self.idle_tokens = torch.zeros(config.d_sae, dtype=torch.long, device=self.device)
        self.smallest, self.weight = 0.0, 0.0

    def step(self, step: int, batch: TokenBatch) -> dict[str, float] | None:
        """One optimizer step; metrics every 25th step and at the last."""
        assert self.config.dead_after_tokens is not None
        x = torch.from_numpy(batch.x).to(self.device) * self.scale
        dead = self.idle_tokens >= self.config.dead_after_tokens
        terms = temporal_loss(self.sae, x, torch.from_numpy(batch.pairs).to(self.device), dead)
        if not torch.isfinite(terms.total):
            raise TsaeError(
                f"the loss is not finite at step {step}",
                where=self.where,
                fix="Lower the learning rate, or check the activations.",
            )
        self.optimizer.zero_grad(set_to_none=True)
        terms.total.backward()
        self._project_gradient()
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            self.sae.W_dec.div_(self.sae.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-8))
        self.idle_tokens.add_(len(x))
        self.idle_tokens[terms.fired] = 0
        # Bias-corrected running mean: no warm-up in which the threshold would be too low.
        self.smallest = _THRESHOLD_DECAY * self.smallest + (1 - _THRESHOLD_DECAY) * float(terms.smallest)
        self.weight = _THRESHOLD_DECAY * self.weight + (1 - _THRESHOLD_DECAY)
        if step % 25 and step != self.n_steps - 1:
            return None
        with torch.no_grad():
            return self._metrics(step, x, terms)

    def _project_gradient(self) -> None:
        """Without its part along the rows, which renormalising would undo but Adam's moments would remember."""
        gradient, rows = self.sae.W_dec.grad, self.sae.W_dec.detach()
        assert gradient is not None
        gradient.sub_((gradient * rows).sum(1, keepdim=True) * rows)

    def _metrics(self, step: int, x: torch.Tensor, terms: LossTerms) -> dict[str, float]:
        variance = (x - x.mean(0)).pow(2).mean()
        alive = self.idle_tokens < (self.config.dead_after_tokens or 0)
        return {
            "step": step,
            "loss": terms.total.item(),
            "fve": 1 - (terms.reconstruction / variance).item(),
            "fve_high": 1 - (terms.reconstruction_high / variance).item(),
            "temporal": terms.temporal.item(),
            "aux": terms.aux.item(),
            # At the threshold that inference would use now, not the k that the batch was given.
            "l0": (self.sae.preactivations(x) > self.smallest / self.weight).sum().item() / len(x),
            "alive": alive.float().mean().item(),
            "learning_rate": float(self.schedule.get_last_lr()[0]),
        }

    def finish(self) -> TemporalSAE:
        with torch.no_grad():
            self.sae.threshold.fill_(self.smallest / self.weight)
        self.sae.fold_scale(self.scale)
        self.sae.requires_grad_(False)
        return self.sae.eval()


def _batches(windows: Windows, batch_tokens: int, n_steps: int) -> Any:
    """Exactly n_steps batches, epoch after epoch."""
    step = epoch = 0
    while step < n_steps:
        for batch in windows.epoch(epoch, batch_tokens):
            if step == n_steps:
                return
            yield batch
            step += 1
        epoch += 1


def _only_site(store: ActivationStore) -> str:
    if len(store.sites) > 1:
        raise TsaeError(
            f"has the sites {', '.join(store.sites)}",
            where=store.path,
            fix="Name the one to train on (training.site).",
        )
    return store.sites[0]

"""Training a T-SAE on a store.

1. Norms are estimated on a sample of the mixture that is trained on (`TrainingConfig.balance`); tokens beyond the
   outlier limit are left out; x is scaled to mean norm √d_model. The decoder bias starts from such a sample too.
2. Adam on the loss of `tsae.sae.loss`; after every step decoder rows return to unit norm (their gradient's parallel
   part is removed before).
3. The inference threshold is the running mean of each batch's smallest active code.
4. The scale is folded into the saved weights, so that the SAE reads raw activations.

A run that is killed goes on from its last checkpoint and ends with the bits it would have had (on CPU, with the same
number of threads): the data's order is a function of seed and epoch, and nothing else is random after the start.

On several processes (`tsae.distributed`) a step takes the same batch, every process a share of its windows, and
the reconstruction terms are those of the whole batch. What is chosen or contrasted within a batch is so within a share:
BatchTopK keeps k codes per token of each share, a pair's InfoNCE negatives are the other pairs of its share, and AuxK
measures the residual against its share's variance. The threshold is the mean over the shares' smallest codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tsae.activations.source import Source
from tsae.activations.store import ActivationStore
from tsae.activations.windows import TokenBatch, Windows
from tsae.distributed import Processes, join
from tsae.errors import TsaeError
from tsae.sae.checkpointing import RunFolder
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.initial import initial_bias
from tsae.sae.loss import LossTerms, temporal_loss
from tsae.sae.model import TemporalSAE
from tsae.sae.tracking import start_wandb

_THRESHOLD_DECAY = 0.99


def train(
    store: Source | str | Path,
    sae: SAEConfig | None = None,
    *,
    to: str | Path | None = None,
    training: TrainingConfig | None = None,
    progress: bool = True,
) -> TemporalSAE:
    """Train a T-SAE on every reader of a store, leaving out every tenth problem for `tsae.sae.evaluation`.

    Args:
        store: activations, or a subset of them; a `LiveSource` has the models compute them.
        sae: what the SAE is; defaults of `SAEConfig`.
        to: folder for sae.safetensors, config.json, training.json and metrics.jsonl; None keeps it in memory. Where it
            holds a checkpoint of the same training, that goes on; where the training is finished, it is loaded.
            Processes of `torchrun` must all see it.
        training: how it is trained; defaults of `TrainingConfig`.
        progress: show a bar with tokens/s, FVE, L0 and the share of latents alive.

    Raises:
        TsaeError: for an unknown site, a store without adjacent tokens, activations or a loss that are not finite, a
            folder that holds another training, or a disk that is full.
    """
    store = store if isinstance(store, Source) else ActivationStore(store)
    config, training = sae or SAEConfig(), training or TrainingConfig()
    site = training.site or _only_site(store)
    if config.dead_after_tokens is None:
        config = replace(config, dead_after_tokens=min(10_000_000, max(training.tokens // 30, training.batch_tokens)))
    with join(training.device) as processes:
        if training.batch_tokens < 2 * training.window * processes.size:
            raise TsaeError(
                f"batch_tokens={training.batch_tokens} must hold two windows of window={training.window} tokens for "
                f"each of {processes.size} processes",
                where="TrainingConfig",
            )
        folder = None if to is None else RunFolder(to, config, training, store.identity(site, training.balance))
        if folder is not None:
            processes.first_does(folder.claim)
            if folder.finished:
                return TemporalSAE.load(folder.path, device=processes.device).requires_grad_(False)
        return _train(store, site, config, training, folder, processes, progress)


def _train(
    store: Source,
    site: str,
    config: SAEConfig,
    training: TrainingConfig,
    folder: RunFolder | None,
    processes: Processes,
    progress: bool,
) -> TemporalSAE:
    from tqdm.auto import tqdm

    windows = store.windows(
        site,
        span=training.span,
        window=training.window,
        held_out=False,
        max_norm=training.max_norm,
        partner=training.partner if config.temporal_weight > 0 else None,
        step_ends=training.step_ends,
        balance=training.balance,
        seed=training.seed,
    )
    wandb = None
    if training.wandb_project is not None and processes.first:
        shown = {
            "sae": asdict(config),
            "training": asdict(training),
            "inputs": store.identity(site, training.balance),
        }
        name, id = (None, None) if folder is None else (folder.path.name, folder.id)
        wandb = start_wandb(training.wandb_project, shown, name, id)
    trainer = _Trainer(windows, config, training, processes)
    state = None if folder is None else folder.load()
    if state is not None:
        trainer.restore(state)
    row: dict[str, float] = {}
    with tqdm(
        total=trainer.n_steps * training.batch_tokens,
        initial=trainer.steps * training.batch_tokens,
        desc="train",
        unit="token",
        unit_scale=True,
        disable=not (progress and processes.first),
    ) as bar:
        for batch in trainer.batches():
            metrics = trainer.step(batch)
            bar.update(training.batch_tokens)
            if metrics is not None:
                row = metrics
                bar.set_postfix_str(f"FVE {row['fve']:.3f}, L0 {row['l0']:.1f}, alive {row['alive']:.1%}")
                if folder is not None and processes.first:
                    folder.log(row)
                if wandb is not None:
                    wandb.log(row, step=int(row["step"]))
            if folder is not None and processes.first and trainer.steps % training.save_every_steps == 0:
                folder.save(trainer.steps, trainer.state())
    model = trainer.finish()
    model.training_info = {
        "training": asdict(training),
        "store": {
            "readers": store.readers,
            **{key: store.manifest[key] for key in ("rollouts", "dtype")},
            **({"subset": store.selection.as_dict()} if store.selection.as_dict() else {}),
        },
        "norms": asdict(windows.norms),
        "mixture": [cell.as_dict() for cell in windows.mixture.cells],
        "tokens_in_store": windows.n_tokens,
        "processes": processes.size,
        "last": row,
    }
    if folder is not None:
        if processes.first:
            folder.finish(model)
        processes.wait()
    if wandb is not None:
        wandb.finish()
    return model


class _Trainer:
    """Weights, optimizer and counters of one training.

    Attributes:
        steps: optimizer steps taken.
        epoch: number of the epoch that the next batch comes from.
        next_batch: its number there.
    """

    def __init__(self, windows: Windows, config: SAEConfig, training: TrainingConfig, processes: Processes) -> None:
        self.windows, self.config, self.training, self.processes = windows, config, training, processes
        self.device = processes.device
        self.n_steps = training.tokens // training.batch_tokens
        self.steps = self.epoch = self.next_batch = 0
        self.scale = windows.d_model**0.5 / windows.norms.mean
        sample = windows.sample(16_384)
        bias = torch.from_numpy(initial_bias(sample, training.initial_bias)) * self.scale
        generator = torch.Generator().manual_seed(training.seed)
        self.sae = TemporalSAE(windows.d_model, config, site=windows.site)
        self.sae.initialize(bias, generator)
        self.sae.to(self.device)
        self.learning_rate = training.learning_rate or 4e-4 * (16_384 / config.d_sae) ** 0.5
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=self.learning_rate, betas=(0.9, 0.999), fused=True)
        for parameter in self.sae.parameters():
            # As Adam would make it at its first step; made here, so that `state` has the same tensors at every step.
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.idle_tokens = torch.zeros(config.d_sae, dtype=torch.long, device=self.device)
        self.smallest, self.weight = 0.0, 0.0

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on. Weights, moments and idle tokens are the live tensors."""
        state = {f"sae.{name}": tensor for name, tensor in self.sae.state_dict().items()}
        for name, parameter in self.sae.named_parameters():
            state.update({f"adam.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()})
        state["idle_tokens"] = self.idle_tokens
        state["position"] = torch.tensor([self.steps, self.epoch, self.next_batch])
        state["running_threshold"] = torch.tensor([self.smallest, self.weight], dtype=torch.float64)
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, live in self.state().items():
            live.copy_(state[name])
        self.steps, self.epoch, self.next_batch = state["position"].tolist()
        self.smallest, self.weight = state["running_threshold"].tolist()

    def batches(self) -> Iterator[TokenBatch]:
        """This process's shares of the batches that are left, epoch after epoch."""
        share = (self.processes.rank, self.processes.size)
        while self.steps < self.n_steps:
            before = self.steps
            for batch in self.windows.epoch(self.epoch, self.training.batch_tokens, start=self.next_batch, share=share):
                self.next_batch = batch.number + 1
                # Outliers may leave a share without pairs: all processes then leave the batch out.
                needed = batch.x if self.windows.partner is None else batch.pairs
                if self.processes.size > 1 and self.processes.least(len(needed)) < 2:
                    continue
                yield batch
                if self.steps == self.n_steps:
                    return
            if self.steps == before and self.next_batch == 0:
                raise TsaeError("no batch has pairs of tokens", where=self.windows.store.path)
            self.epoch, self.next_batch = self.epoch + 1, 0

    def step(self, batch: TokenBatch) -> dict[str, float] | None:
        """One optimizer step; metrics every 25th step and at the last."""
        assert self.config.dead_after_tokens is not None
        x = torch.from_numpy(batch.x).to(self.device) * self.scale
        n_tokens = int(self.processes.sum(torch.tensor(len(x), device=self.device)))
        share = len(x) / n_tokens
        dead = self.idle_tokens >= self.config.dead_after_tokens
        pairs, trajectory = (torch.from_numpy(a).to(self.device) for a in (batch.pairs, batch.trajectory))
        others = None if batch.others is None else torch.from_numpy(batch.others).to(self.device) * self.scale
        terms = temporal_loss(self.sae, x, pairs, dead, trajectory, others)
        if not torch.isfinite(terms.total):
            raise TsaeError(
                f"the loss is not finite at step {self.steps}",
                where=self.windows.store.path,
                fix="Lower the learning rate, or check the activations.",
            )
        rate = self.learning_rate * self._schedule(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        (terms.total * share).backward()
        self.processes.sum_gradients(self.sae.parameters())
        self._project_gradient()
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            self.sae.W_dec.div_(self.sae.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-8))
        self.idle_tokens.add_(n_tokens)
        self.idle_tokens[self.processes.any(terms.fired)] = 0
        # Bias-corrected running mean: no warm-up in which the threshold would be too low.
        smallest = float(self.processes.sum(terms.smallest * share))
        self.smallest = _THRESHOLD_DECAY * self.smallest + (1 - _THRESHOLD_DECAY) * smallest
        self.weight = _THRESHOLD_DECAY * self.weight + (1 - _THRESHOLD_DECAY)
        self.steps += 1
        if (self.steps - 1) % 25 and self.steps != self.n_steps:
            return None
        with torch.no_grad():
            return self._metrics(x, terms, share, rate)

    def _schedule(self, step: int) -> float:
        """Share of the full learning rate: up, level, down."""
        warmup, decay = self.training.warmup_share * self.n_steps, self.training.decay_share * self.n_steps
        return min(1.0, (step + 1) / max(warmup, 1), (self.n_steps - step) / max(decay, 1))

    def _project_gradient(self) -> None:
        """Without its part along the rows, which renormalising would undo but Adam's moments would remember."""
        gradient, rows = self.sae.W_dec.grad, self.sae.W_dec.detach()
        assert gradient is not None
        gradient.sub_((gradient * rows).sum(1, keepdim=True) * rows)

    def _metrics(self, x: torch.Tensor, terms: LossTerms, share: float, rate: float) -> dict[str, float]:
        # At the threshold that inference would use now, not the k that the batch was given.
        l0 = (self.sae.preactivations(x) > self.smallest / self.weight).sum() / len(x)
        variance = (x - x.mean(0)).pow(2).mean()
        local = [terms.total, terms.reconstruction, terms.reconstruction_high, terms.temporal, terms.aux, l0, variance]
        total, everything, high, temporal, aux, l0, variance = self.processes.sum(torch.stack(local) * share)
        return {
            "step": self.steps - 1,
            "loss": total.item(),
            "fve": 1 - (everything / variance).item(),
            "fve_high": 1 - (high / variance).item(),
            "temporal": temporal.item(),
            "aux": aux.item(),
            "l0": l0.item(),
            "alive": (self.idle_tokens < (self.config.dead_after_tokens or 0)).float().mean().item(),
            "learning_rate": rate,
        }

    def finish(self) -> TemporalSAE:
        with torch.no_grad():
            self.sae.threshold.fill_(self.smallest / self.weight)
        self.sae.fold_scale(self.scale)
        self.sae.requires_grad_(False)
        return self.sae.eval()


def _only_site(store: Source) -> str:
    if len(store.sites) > 1:
        raise TsaeError(
            f"has the sites {', '.join(store.sites)}",
            where=store.path,
            fix="Name the one to train on (training.site).",
        )
    return store.sites[0]

"""Training a T-SAE on a store.

1. Norms are estimated on a sample of the mixture that is trained on (`TrainingConfig.balance`); tokens beyond the
   outlier limit are left out; x is scaled to mean norm √d_model. The decoder bias starts from such a sample too.
2. Adam on the loss of `tsae.sae.fitting.loss`; after every step decoder rows return to unit norm (their gradient's parallel
   part is removed before).
3. The inference threshold is calibrated at the end: on a sample of the problems that were left out, k codes are active
   on average (`tsae.sae.fitting.threshold`).
4. The scale is folded into the saved weights, so that the SAE reads raw activations.

A run that is killed goes on from its last checkpoint and ends with the bits it would have had (on CPU, with the same
number of threads): the data's order is a function of seed and epoch, and nothing else is random after the start.
Trainings that differ in seed alone may share every batch that is read (`tsae.sae.fitting.train_many`), and give the same bits.

On several processes (`tsae.base.distributed`) every process takes a share of the windows of a batch, and a step is that
of one process with the whole batch, up to the order in which floats are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.activations.source import Source
from tsae.activations.store import ActivationStore
from tsae.activations.windows import TokenBatch, Windows
from tsae.base.distributed import Processes, join
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.fitting.finetuning import trainable
from tsae.sae.fitting.initial_bias import initial_bias
from tsae.sae.fitting.loss import LossTerms, temporal_loss, variance
from tsae.sae.fitting.threshold import calibrate
from tsae.sae.fitting.training_plan import Plan
from tsae.sae.fitting.wandb_run import start_wandb
from tsae.sae.model import TemporalSAE


def train(
    store: Source | str | Path,
    sae: SAEConfig | None = None,
    *,
    start: TemporalSAE | str | Path | None = None,
    to: str | Path | None = None,
    training: TrainingConfig | None = None,
    progress: bool = True,
) -> TemporalSAE:
    """Train a T-SAE on every reader of a store. Every tenth problem is left out, for the threshold and for evaluation.

    Args:
        store: activations, or a subset of them; a `LiveSource` has the models compute them.
        sae: what the SAE is; defaults of `SAEConfig`, or the start's own config where there is a start.
        start: SAE that is fine-tuned in place of random weights, or its folder; of ours or of sae_lens. See
            `tsae.sae.fitting.finetuning`.
        to: folder for sae.safetensors, config.json, training.json and metrics.jsonl; None keeps it in memory. Where it
            holds a checkpoint of the same training, that goes on; where the training is finished, it is loaded.
            Processes of `torchrun` must all see it.
        training: how it is trained; defaults of `TrainingConfig`.
        progress: show a bar with tokens/s, FVE and the share of latents alive.

    Raises:
        TsaeError: for an unknown site, a store without adjacent tokens, activations or a loss that are not finite, a
            start that does not fit, a folder that holds another training, or a disk that is full.
    """
    store = store if isinstance(store, Source) else ActivationStore(store)
    plan = Plan.of(store, sae, training or TrainingConfig(), start=start, to=to)
    return train_plans(store, [plan], progress=progress)[0]


def train_plans(store: Source, plans: Sequence[Plan], *, progress: bool) -> list[TemporalSAE]:
    """Carry out trainings that differ in site, seed and folder alone: those of a site read every batch once."""
    from tqdm.auto import tqdm

    training = plans[0].training
    with join(training.device) as processes:
        folders = [plan.folder for plan in plans]
        for folder in folders:
            if folder is not None:
                processes.first_does(folder.claim)
        saes = {
            i: TemporalSAE.load(folder.path, device=processes.device).requires_grad_(False)
            for i, folder in enumerate(folders)
            if folder is not None and folder.finished
        }
        left = [i for i in range(len(plans)) if i not in saes]
        steps = [folder.steps for i in left if (folder := folders[i]) is not None]
        with tqdm(
            total=len(left) * (training.tokens // training.batch_tokens) * training.batch_tokens,
            initial=sum(steps) * training.batch_tokens,
            desc="train",
            unit="token",
            unit_scale=True,
            disable=not (progress and processes.first and left),
        ) as bar:
            windows: Windows | None = None
            for site in dict.fromkeys(plans[i].site for i in left):
                here = [i for i in left if plans[i].site == site]
                unseen = plans[here[0]].unseen(store)
                windows = plans[here[0]].windows(store) if windows is None else windows.at(site)
                saes.update(zip(here, _train(windows, unseen, [plans[i] for i in here], processes, bar), strict=True))
    return [saes[i] for i in range(len(plans))]


def _train(
    windows: Windows, unseen: np.ndarray | None, plans: Sequence[Plan], processes: Processes, bar: Any
) -> list[TemporalSAE]:
    runs = [_Run(windows, unseen, plan, processes) for plan in plans]
    # A kill may have left one behind: it reads what the others have seen, until it is where they are.
    reader = min((run.trainer for run in runs), key=lambda trainer: trainer.steps)
    for batch in reader.batches():
        steps = reader.steps
        due = [run for run in runs if run.trainer.steps == steps]
        for run in due:
            run.trainer.epoch, run.trainer.next_batch = reader.epoch, reader.next_batch
            run.step(batch)
        bar.update(len(due) * reader.training.batch_tokens)
        rows = [run.row for run in due if run.row.get("step") == steps]
        if rows:
            fve, alive = (sum(row[name] for row in rows) / len(rows) for name in ("fve", "alive"))
            bar.set_postfix_str(f"FVE {fve:.3f}, alive {alive:.1%}", refresh=False)
    return [run.finish() for run in runs]


class _Run:
    """One of the trainings that share batches: its trainer, and what is written of it.

    Attributes:
        row: its last metrics.
    """

    def __init__(self, windows: Windows, unseen: np.ndarray | None, plan: Plan, processes: Processes) -> None:
        self.windows, self.unseen, self.plan, self.processes = windows, unseen, plan, processes
        self.row: dict[str, float] = {}
        self.wandb = None
        if plan.training.wandb_project is not None and processes.first:
            shown = {"sae": asdict(plan.config), "training": asdict(plan.training), "inputs": plan.inputs}
            name, id = (None, None) if plan.folder is None else (plan.folder.path.name, plan.folder.id)
            self.wandb = start_wandb(plan.training.wandb_project, shown, name, id)
        self.trainer = _Trainer(windows, plan.config, plan.training, processes, plan.start)
        state = None if plan.folder is None else plan.folder.load()
        if plan.folder is not None and state is not None:
            self.trainer.restore(state)
            self.row = plan.folder.last_row()
            store = windows.store
            for reader, tokens in zip(store.readers, state["short_of_memory"].tolist(), strict=True):
                if tokens:
                    store.was_short(reader, tokens)

    def step(self, batch: TokenBatch) -> None:
        metrics, folder = self.trainer.step(batch), self.plan.folder
        if metrics is not None:
            self.row = metrics
            if folder is not None and self.processes.first:
                folder.log(metrics)
            if self.wandb is not None:
                self.wandb.log(metrics, step=int(metrics["step"]))
        steps = self.trainer.steps
        if folder is not None and self.processes.first and steps % self.plan.training.save_every_steps == 0:
            folder.save(steps, {**self.trainer.state(), "short_of_memory": self._shortages()})

    def _shortages(self) -> torch.Tensor:
        """(n_readers,) `Source.short_of_memory`; 0 for none."""
        store = self.windows.store
        return torch.tensor([store.short_of_memory.get(reader, 0) for reader in store.readers])

    def finish(self) -> TemporalSAE:
        store, folder = self.windows.store, self.plan.folder
        model = self.trainer.finish(self.windows.first_tokens if self.unseen is None else self.unseen)
        model.training_info = {
            "training": asdict(self.plan.training),
            "threshold_set_on": "training problems" if self.unseen is None else "problems left out",
            "store": {
                "readers": store.readers,
                **{key: store.manifest[key] for key in ("rollouts", "dtype")},
                **({"subset": store.selection.as_dict()} if store.selection.as_dict() else {}),
            },
            **({} if self.plan.start is None else {"start": self.plan.start.fingerprint}),
            "norms": asdict(self.windows.norms),
            "mixture": [cell.as_dict() for cell in self.windows.mixture.cells],
            "tokens_in_store": self.windows.n_tokens,
            "processes": self.processes.size,
            "last": self.row,
        }
        if store.short_of_memory:
            asked = store.manifest["config"]["batch_tokens"]
            model.training_info["short_of_memory"] = {
                reader: {"batch_tokens": asked, "went_on_with": store.short_of_memory[reader]}
                for reader in store.readers
                if reader in store.short_of_memory
            }
        if folder is not None:
            if self.processes.first:
                folder.finish(model)
            self.processes.wait()
        if self.wandb is not None:
            self.wandb.finish()
        return model


class _Trainer:
    """Weights, optimizer and counters of one training.

    Attributes:
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
        self.windows, self.config, self.training, self.processes = windows, config, training, processes
        self.device = processes.device
        self.n_steps = training.tokens // training.batch_tokens
        self.steps = self.epoch = self.next_batch = 0
        self.scale = windows.d_model**0.5 / windows.norms.mean
        # Computed now: a live source holds these tokens only at the start. `finish` may need them.
        sample = windows.first_tokens
        # A start has its high-level latents already.
        self.temporal_rise = training.temporal_rise_share * self.n_steps if start is None else 0
        if start is None:
            bias = torch.from_numpy(initial_bias(sample, training.initial_bias)) * self.scale
            generator = torch.Generator().manual_seed(training.seed)
            self.sae = TemporalSAE(windows.d_model, config, site=windows.site)
            self.sae.initialize(bias, generator)
        else:
            self.sae = trainable(start, config)
            self.sae.fold_scale(1 / self.scale)
        self.sae.to(self.device)
        self.learning_rate = training.learning_rate or _learning_rate(config.d_sae, self.n_steps, start)
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=self.learning_rate, betas=(0.9, 0.999), fused=True)
        for parameter in self.sae.parameters():
            # As Adam would make it at its first step; made here, so that `state` has the same tensors at every step.
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.idle_tokens = torch.zeros(config.d_sae, dtype=torch.long, device=self.device)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on. Weights, moments and idle tokens are the live tensors."""
        state = {f"sae.{name}": tensor for name, tensor in self.sae.state_dict().items()}
        for name, parameter in self.sae.named_parameters():
            state.update({f"adam.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()})
        state["idle_tokens"] = self.idle_tokens
        state["position"] = torch.tensor([self.steps, self.epoch, self.next_batch])
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` gave."""
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
                    f"no two tokens that make a pair have norms below {self.windows.norms.limit:g}",
                    where=self.windows.store.path,
                    fix="Raise max_norm (--max-norm), or choose another token span.",
                )
            self.epoch, self.next_batch = self.epoch + 1, 0

    def step(self, batch: TokenBatch) -> dict[str, float] | None:
        """One optimizer step; metrics every 25th step and at the last."""
        assert self.config.dead_after_tokens is not None
        x = batch.x.to(self.device).float() * self.scale
        dead = self.idle_tokens >= self.config.dead_after_tokens
        arrays = (batch.pairs, batch.trajectory, batch.copies)
        pairs, trajectory, copies = (torch.from_numpy(a).to(self.device) for a in arrays)
        others = None if batch.others is None else batch.others.to(self.device).float() * self.scale
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
            raise TsaeError(
                f"the loss is not finite at step {self.steps}",
                where=self.windows.store.path,
                fix="Lower the learning rate.",
            )
        self.steps += 1
        if (self.steps - 1) % 25 and self.steps != self.n_steps:
            return None
        with torch.no_grad():
            return self._metrics(x, terms, rate)

    def _schedule(self, step: int) -> float:
        """Share of the full learning rate: up, level, down."""
        warmup, decay = self.training.warmup_share * self.n_steps, self.training.decay_share * self.n_steps
        return min(1.0, (step + 1) / max(warmup, 1), (self.n_steps - step) / max(decay, 1))

    def _project_gradient(self) -> None:
        """Without its part along the rows, which renormalising would undo but Adam's moments would remember."""
        gradient, rows = self.sae.W_dec.grad, self.sae.W_dec.detach()
        assert gradient is not None
        gradient.sub_((gradient * rows).sum(1, keepdim=True) * rows)

    def _metrics(self, x: torch.Tensor, terms: LossTerms, rate: float) -> dict[str, float]:
        parts = [terms.total, terms.reconstruction, terms.reconstruction_high, terms.temporal, terms.aux]
        total, everything, high, temporal, aux = self.processes.sum(torch.stack(parts))
        var = variance(x, terms.n_tokens, self.processes)
        return {
            "step": self.steps - 1,
            "loss": total.item(),
            "fve": 1 - (everything / var).item(),
            "fve_high": 1 - (high / var).item(),
            "temporal": temporal.item(),
            "aux": aux.item(),
            "alive": (self.idle_tokens < (self.config.dead_after_tokens or 0)).float().mean().item(),
            "learning_rate": rate,
        }

    def finish(self, sample: np.ndarray) -> TemporalSAE:
        """The SAE of raw activations, with its threshold calibrated on (n, d_model) tokens."""
        self.sae.fold_scale(self.scale)
        self.sae.requires_grad_(False)
        calibrate(self.sae, torch.from_numpy(sample))
        return self.sae.eval()


def _learning_rate(d_sae: int, n_steps: int, start: TemporalSAE | None) -> float:
    """The default; see `TrainingConfig.learning_rate`."""
    short = min(2.0, max(1.0, (1500 / n_steps) ** 0.5)) if start is None else 1.0
    return 4e-4 * (16_384 / d_sae) ** 0.5 * short

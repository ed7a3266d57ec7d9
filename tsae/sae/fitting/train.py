"""Train a T-SAE on a store.

1. A sample of the training mixture (`TrainingConfig.balance`) gives the centre, the median of every dimension, and the
   norms about it. Tokens beyond the outlier limit are left out; x − centre is scaled to mean norm √d_model. Such a
   sample also gives the first decoder bias.
2. Adam minimises the loss of `tsae.sae.fitting.loss`. After every step decoder rows return to unit norm; the part of
   their gradient along the rows is removed before.
3. At the end the inference threshold is set: k codes are active on average on a sample of the problems that training
   left out (`tsae.sae.fitting.threshold`).
4. Scale and centre are folded into the saved weights, so that the SAE takes raw activations.

A run that was killed resumes from its last checkpoint and ends with the same bits as without the kill (on CPU, with the
same number of threads): the data's order is a function of seed and epoch, and nothing else is random after the start.
Trainings that differ in seed alone may share every batch (`tsae.sae.fitting.train_many`), with the same bits.

Training on several processes (`tsae.base.distributed`) gives the same result as on one, up to the order in which floats
are added: each process takes a share of a batch's windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.activations.batches import TokenBatch, Windows
from tsae.activations.store import ActivationStore, Pair, Source
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.distributed import Processes, join
from tsae.errors import TsaeError, public
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.crosscoder.crosscoder import OF_PAIR, Crosscoder
from tsae.sae.fitting.metric_logs import MetricLog, open_log
from tsae.sae.fitting.run_folder import RunFolder
from tsae.sae.fitting.trainer import Trainer
from tsae.sae.fitting.training_plan import Plan
from tsae.sae.fitting.warm_start import warm_start
from tsae.sae.model import TemporalSAE


def train(
    store: Source | str | Path,
    sae: SAEConfig | None = None,
    *,
    start: TemporalSAE | str | Path | None = None,
    init_from: TemporalSAE | str | Path | None = None,
    to: str | Path | None = None,
    training: TrainingConfig | None = None,
    progress: bool = True,
) -> TemporalSAE:
    """Train a T-SAE on every reader of a store. Every tenth problem is left out, for the threshold and for evaluation.

    Args:
        store: activations, or a subset of them; a `LiveSource` has the models compute them. A `Pair` gives a
            `Crosscoder` of two readers.
        sae: what the SAE is; defaults of `SAEConfig`, or the start's own config where there is a start.
        start: SAE that is fine-tuned in place of random weights, or its folder; of ours or of sae_lens. See
            `tsae.sae.fitting.finetuning`.
        init_from: published SAE from whose latents a T-SAE starts, sorted into its groups; as wide as `sae` or wider.
            See `tsae.sae.fitting.warm_start`.
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
    training = training or TrainingConfig()
    if init_from is not None:
        if start is not None:
            raise TsaeError("start and init_from are two beginnings", where="train", fix="Give one of them.")
        start = warm_start(init_from, store, sae)
        sae = start.config
    plan = Plan.of(store, sae, training, start=start, to=to)
    return train_plans(store, [plan], progress=progress)[0]


def train_plans(store: Source, plans: Sequence[Plan], *, progress: bool) -> list[TemporalSAE]:
    """Run trainings that differ only in site, seed and folder; those of one site share every batch."""
    from tqdm.auto import tqdm

    training = plans[0].training
    folders = [plan.folder for plan in plans]
    with ExitStack() as held, join(training.device) as processes:
        for folder in folders:
            if folder is not None:
                processes.first_does(partial(_claim, folder, held))
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
    return [Crosscoder.from_sae(saes[i]) if isinstance(store, Pair) else saes[i] for i in range(len(plans))]


def _claim(folder: RunFolder, held: ExitStack) -> None:
    held.enter_context(sole_writer(folder.path))
    folder.claim()


def _train(
    windows: Windows, unseen: np.ndarray | None, plans: Sequence[Plan], processes: Processes, bar: Any
) -> list[TemporalSAE]:
    runs = [_Run(windows, unseen, plan, processes) for plan in plans]
    # A kill may have left one run behind: its batches come first, until it has caught up with the others.
    leader = min((run.trainer for run in runs), key=lambda trainer: trainer.steps)
    for batch in leader.batches():
        steps = leader.steps
        due = [run for run in runs if run.trainer.steps == steps]
        for run in due:
            run.trainer.epoch, run.trainer.next_batch = leader.epoch, leader.next_batch
            run.step(batch)
        bar.update(len(due) * leader.training.batch_tokens)
        rows = [run.row for run in due if run.row.get("step") == steps]
        if rows:
            fve, alive = (sum(row[name] for row in rows) / len(rows) for name in ("fve", "alive"))
            bar.set_postfix_str(f"FVE {fve:.3f}, alive {alive:.1%}", refresh=False)
    return [run.finish() for run in runs]


class _Run:
    """One of the trainings that share batches: its trainer, folder and log.

    Attributes:
        row: its last metrics.
    """

    def __init__(self, windows: Windows, unseen: np.ndarray | None, plan: Plan, processes: Processes) -> None:
        self.windows, self.unseen, self.plan, self.processes = windows, unseen, plan, processes
        self.row: dict[str, float] = {}
        self.log: MetricLog | None = None
        if plan.training.log_to is not None and processes.first:
            shown = {"sae": asdict(plan.config), "training": asdict(plan.training), "inputs": public(plan.inputs)}
            name, id = (None, None) if plan.folder is None else (plan.folder.path.name, plan.folder.id)
            self.log = open_log(plan.training.log_to, shown, name, id)
        self.trainer = Trainer(windows, plan.config, plan.training, processes, plan.start)
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
            if self.log is not None:
                self.log.log(metrics, step=int(metrics["step"]))
        steps, every = self.trainer.steps, self.plan.training.save_every_steps
        if folder is not None and steps % every == 0 and self.processes.first:
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
            **({OF_PAIR: list(store.compared)} if isinstance(store, Pair) else {}),
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
        if self.log is not None:
            self.log.finish()
        return model

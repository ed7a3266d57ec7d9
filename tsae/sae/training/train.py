"""Train a T-SAE on a store, or several over the same data in one pass.

1. A sample of the training mixture (`TrainingConfig.balance`) gives the centre, the median of every dimension, and the
   norms about it. Tokens beyond the outlier limit are left out; x − centre is scaled to mean norm √d_model. Such a
   sample also gives the first decoder bias.
2. Adam minimises the loss of `tsae.sae.training.loss`. After every step decoder rows return to unit norm; the part of
   their gradient along the rows is removed before.
3. At the end the inference threshold is set: k codes are active on average on a sample of the problems that training
   left out (`calibrate`).
4. Scale and centre are folded into the saved weights, so that the SAE takes raw activations.

A killed run resumes from its last checkpoint and ends with the same bits as without the kill (on CPU, with the same
number of threads; on a GPU up to the order of sums): the data's order is a function of seed and epoch, and nothing else
is random after the start. Training on several processes (`tsae.base.distributed`) gives the same result as on one, up
to the order in which floats are added: each process takes a share of a batch's windows.

`train_many` trains several sites and seeds. A site's seeds share every batch: it is loaded, cut and checked once. This
saves disk traffic where a store is larger than memory. Sites come one after another and share only the index of
windows, as their activations lie in different datasets. Every run folder is what `train` alone writes with the same
seed and data_seed, bit for bit. The seeds share the data's order, so that they differ in initial weights alone;
stability across seeds is usually measured so (Paulo & Belrose, arXiv 2501.16615)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsae.activations.batches import TokenBatch, Windows
from tsae.activations.store import ActivationStore, Pair, Source
from tsae.activations.windows import kept_problems
from tsae.base.distributed import Processes, join
from tsae.base.files import as_path
from tsae.base.output_lock import output_lock
from tsae.base.progress import progress_bar
from tsae.errors import TsaeError, needing, public
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.crosscoder import OF_PAIR, Crosscoder
from tsae.sae.model import TemporalSAE
from tsae.sae.training.finetuning import starting_config, warm_start
from tsae.sae.training.run_folder import RunFolder
from tsae.sae.training.trainer import FEWEST, Trainer


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
            `tsae.sae.training.finetuning`.
        init_from: published SAE from whose latents a T-SAE starts, sorted into its groups; as wide as `sae` or wider.
            See `tsae.sae.training.finetuning`.
        to: folder for sae.safetensors, config.json, training.json and metrics.jsonl; None keeps it in memory. Where it
            holds a checkpoint of the same training, it resumes; a finished training is loaded.
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
        with progress_bar(
            "train",
            "token",
            total=len(left) * (training.tokens // training.batch_tokens) * training.batch_tokens,
            initial=sum(steps) * training.batch_tokens,
            shown=bool(progress and processes.first and left),
        ) as bar:
            windows: Windows | None = None
            for site in dict.fromkeys(plans[i].site for i in left):
                here = [i for i in left if plans[i].site == site]
                unseen = plans[here[0]].unseen(store)
                windows = plans[here[0]].windows(store) if windows is None else windows.at(site)
                saes.update(zip(here, _train(windows, unseen, [plans[i] for i in here], processes, bar), strict=True))
    return [Crosscoder.from_sae(saes[i]) if isinstance(store, Pair) else saes[i] for i in range(len(plans))]


def _claim(folder: RunFolder, held: ExitStack) -> None:
    held.enter_context(output_lock(folder.path))
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
        self.log: Any = None
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
            store = self.windows.store
            short = torch.tensor([store.short_of_memory.get(reader, 0) for reader in store.readers])
            folder.save(steps, {**self.trainer.state(), "short_of_memory": short})

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


def train_many(
    store: Source | str | Path,
    sae: SAEConfig | None = None,
    *,
    sites: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    to: str | Path | None = None,
    training: TrainingConfig | None = None,
    progress: bool = True,
) -> dict[tuple[str, int], TemporalSAE]:
    """Train an SAE for every site and seed, reading the data of a site once for all seeds.

    Args:
        store: activations.
        sae: what the SAEs are; defaults of `SAEConfig`.
        sites: TransformerLens names, in place of the training's; by default that one, or all of the store.
        seeds: of the initial weights; by default the training's. The data's order is that of the training's data_seed,
            or of its seed, for all of them.
        to: folder for one folder per training, `run_name` tells which; None keeps them in memory.
        training: how they are trained; defaults of `TrainingConfig`.
        progress: show one bar for all, with the mean of FVE and of the share of latents alive over the seeds.

    Returns:
        (site, seed) -> SAE.

    Raises:
        TsaeError: as `train`.
    """
    store = store if isinstance(store, Source) else ActivationStore(store)
    training = training or TrainingConfig()
    every = [training.site] if training.site else store.sites
    wanted = list(dict.fromkeys(every if sites is None else sites))
    numbers = list(dict.fromkeys([training.seed] if seeds is None else seeds))
    if not wanted or not numbers:
        raise TsaeError(f"{len(wanted)} sites and {len(numbers)} seeds make no training", where="train_many")
    data_seed = training.seed if training.data_seed is None else training.data_seed
    plans = {}
    for site in wanted:
        store.d_model(site)  # An unknown site is refused before anything is trained.
        for seed in numbers:
            one = replace(training, site=site, seed=seed, data_seed=data_seed)
            folder = None if to is None else as_path(to) / run_name(site, seed)
            plans[site, seed] = Plan.of(store, sae, one, to=folder)
    return dict(zip(plans, train_plans(store, list(plans.values()), progress=progress), strict=True))


def run_name(site: str, seed: int) -> str:
    """Name of a training's folder: blocks.14.hook_resid_post-seed0."""
    return f"{site}-seed{seed}".replace("/", "-")


@dataclass(frozen=True)
class Plan:
    """One training."""

    site: str
    config: SAEConfig
    training: TrainingConfig
    start: TemporalSAE | None
    """None for random weights."""
    inputs: dict[str, Any]
    """The training's inputs, as JSON."""
    folder: RunFolder | None
    """None for a training that is not written."""

    @classmethod
    def of(
        cls,
        store: Source,
        sae: SAEConfig | None,
        training: TrainingConfig,
        *,
        start: TemporalSAE | str | Path | None = None,
        to: str | Path | None = None,
    ) -> Plan:
        """The plan of a call of `train` with these arguments."""
        if start is None:
            site, config = training.site or _only_site(store), sae or SAEConfig()
        else:
            start = TemporalSAE.of(start)
            site, config = start.site, starting_config(start, store, sae, training.site)
        if config.dead_after_tokens is None:
            dead_after = min(10_000_000, max(training.tokens // 30, training.batch_tokens))
            config = replace(config, dead_after_tokens=dead_after)
        if training.data_seed is None:
            training = replace(training, data_seed=training.seed)
        inputs = store.identity(site, training.balance)
        if start is not None:
            inputs["start"] = start.fingerprint
        folder = None if to is None else RunFolder(to, config, training, inputs)
        return cls(site, config, training, start, inputs, folder)

    def windows(self, store: Source) -> Windows:
        """Windows of the problems to train on."""
        training, partner = self.training, self.training.partner if self.config.temporal_weight > 0 else None
        options = {"partner": partner, "step_ends": training.step_ends, **self._window_options()}
        return store.windows(self.site, held_out=False, **options)

    def unseen(self, store: Source) -> np.ndarray | None:
        """(n, d_model) tokens of the problems that training leaves out; None where these are too few to go by."""
        left_out = np.flatnonzero(kept_problems(store, True) & store.rows)
        problems = store.rollouts.table["problem_id"].take(left_out)
        if len(set(problems.to_pylist())) < FEWEST:
            return None
        # A live source computes them, into a buffer that is given back before the training's is filled.
        return store.windows(self.site, held_out=True, partner=None, **self._window_options()).first_tokens

    def _window_options(self) -> dict[str, Any]:
        """Options that both kinds of windows share."""
        shared = ("span", "window", "max_norm", "balance")
        return {name: getattr(self.training, name) for name in shared} | {"seed": self.training.data_seed}


def _only_site(store: Source) -> str:
    if len(store.sites) > 1:
        what = f"has the sites {', '.join(store.sites)}"
        raise TsaeError(what, where=store.path, fix="Name the one to train on (training.site).")
    return store.sites[0]


def open_log(target: str, config: Mapping[str, Any], name: str | None, id: str | None) -> Any:
    """A log of one training, with `log(metrics, step)` and `finish()`.

    Args:
        target: `TrainingConfig.log_to`.
        config: JSON to show beside the metrics.
        name: of the run; the tool's choice by default.
        id: of the training: if it was logged before, its run continues; a new run by default. TensorBoard and trackio
            know a run by its name.

    Raises:
        TsaeError: where the package is missing.
    """
    tool, _, where = target.partition(":")
    with needing(tool, f"logging to {target}", "TrainingConfig.log_to"):
        module = import_module("torch.utils.tensorboard" if tool == "tensorboard" else tool)
    if tool == "tensorboard":
        return _TensorBoard(module, Path(where) / (name or "sae"), config)
    settings: dict[str, Any] = {"project": where, "config": dict(config), "name": name}
    if tool == "trackio":
        return module.init(**settings, resume="allow" if id else "never")
    # Several trainings of one process are several runs.
    return module.init(**settings, id=id, resume="allow" if id else None, reinit="create_new")


class _TensorBoard:
    """Event files of one run."""

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._writer = module.SummaryWriter(str(folder))
        self._writer.add_text("config", "\n\n".join(f"{name}: {value}" for name, value in config.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()

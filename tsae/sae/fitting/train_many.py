"""Train several sites and seeds over the same data in one pass.

A site's seeds share every batch: it is loaded, cut and checked once. This saves disk traffic where a store is larger
than memory; from memory, loading is a small part of a step. Sites come one after another and share only the index of
windows, as their activations lie in different datasets.

Every run folder is what `train` alone writes with the same seed and data_seed, bit for bit, and a pass that was killed
resumes with the same bits; on a GPU up to the order of sums (`tsae.sae.fitting.run_folder`). The seeds share the data's
order, so that they differ in initial weights alone. Stability across seeds is usually measured so (Paulo & Belrose,
arXiv 2501.16615).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tsae.activations.store import ActivationStore, Source
from tsae.base.files import as_path
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.fitting.train import train_plans
from tsae.sae.fitting.training_plan import Plan
from tsae.sae.model import TemporalSAE


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
        sites: TransformerLens names; by default the training's, or all of the store.
        seeds: of the initial weights; by default the training's. The data's order is that of the training's data_seed,
            or of its seed, for all of them.
        to: folder for one folder per training, `run_name` tells which; None keeps them in memory.
        training: how they are trained; defaults of `TrainingConfig`.
        progress: show one bar for all, with the mean of FVE and of the share of latents alive over the seeds.

    Returns:
        (site, seed) -> SAE.

    Raises:
        TsaeError: as `train`; for no site or seed, and for sites beside a training's own.
    """
    store = store if isinstance(store, Source) else ActivationStore(store)
    training = training or TrainingConfig()
    if sites is not None and training.site is not None:
        what = f"both site={training.site} and sites={', '.join(sites)} are asked for"
        raise TsaeError(what, where="train_many", fix="Leave one out.")
    wanted = list(dict.fromkeys(sites if sites is not None else [training.site] if training.site else store.sites))
    numbers = list(dict.fromkeys(seeds if seeds is not None else [training.seed]))
    if not wanted or not numbers:
        raise TsaeError(f"{len(wanted)} sites and {len(numbers)} seeds make no training", where="train_many")
    data_seed = training.seed if training.data_seed is None else training.data_seed
    plans = {}
    for site in wanted:
        store.d_model(site)  # An unknown site is said before anything is trained.
        for seed in numbers:
            one = replace(training, site=site, seed=seed, data_seed=data_seed)
            folder = None if to is None else as_path(to) / run_name(site, seed)
            plans[site, seed] = Plan.of(store, sae, one, to=folder)
    return dict(zip(plans, train_plans(store, list(plans.values()), progress=progress), strict=True))


def run_name(site: str, seed: int) -> str:
    """Name of a training's folder: blocks.14.hook_resid_post-seed0.

    Raises:
        TsaeError: for a site whose name would lead elsewhere.
    """
    name = f"{site}-seed{seed}"
    if Path(name).name != name:
        raise TsaeError(f"the site {site!r} cannot name a folder", where="train_many")
    return name

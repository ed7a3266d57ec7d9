"""Options of the commands on SAEs: train, evaluate, encode, crosscoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from tsae.activations.config import LiveConfig, Subset
from tsae.commands.options.spread import Spread
from tsae.sae.config import SAEConfig, TrainingConfig


@dataclass(frozen=True)
class Live:
    """Activations straight from the checkpoints instead of a store: no disk, but a forward pass whenever they are
    needed."""

    series: Path | None = None
    """Folder of checkpoints, as for `tsae capture`."""
    rollouts: Path | None = None
    """Parquet file of rollouts, which the checkpoints read."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    config: Annotated[LiveConfig, arg(name="")] = field(default_factory=LiveConfig)


@dataclass(frozen=True)
class Train:
    """Train temporal SAEs on an activation store. Resumes an unfinished training.

    Fine-tune one with --start; train several in one pass with --seeds and --sites.

    On several processes: torchrun --nproc-per-node 2 -m tsae train …

    Without a store: tsae train --live.series SERIES --live.rollouts ROLLOUTS --site SITE …
    """

    to: Path
    """Folder for the SAE and its metrics; with --seeds or --sites, for one such folder each."""
    start: Path | None = None
    """SAE to fine-tune instead of random weights, ours or of sae_lens. SAE options then default to its config."""
    init_from: Path | None = None
    """Published SAE from whose latents a T-SAE starts: a path, org/name on the Hugging Face Hub, or saelens:RELEASE/ID.
    It may be wider than --d-sae; the latents with the most energy are kept, and the lasting ones become high-level."""
    seeds: tuple[int, ...] = ()
    """One SAE per seed of the initial weights, all trained on the same batches, which are read once."""
    sites: tuple[str, ...] = ()
    """TransformerLens names: SAEs for each site, one after another."""
    store: Path | None = None
    """Folder that `tsae capture` wrote."""
    live: Live = field(default_factory=Live)
    tokenizer: Path | None = None
    """Checkpoint whose tokenizer finds the tokens that end a step, for partner "step": those that contain step_text."""
    step_text: str | None = None
    """Text that ends a reasoning step; by default a newline."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    sae: OmitArgPrefixes[SAEConfig] = field(default_factory=SAEConfig)
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)


@dataclass(frozen=True)
class Evaluate:
    """Measure a temporal SAE: reconstruction by reader, band and span, L0, alive, smoothness.

    With the checkpoints also the loss that its reconstruction recovers, with a baseline temporal separation, with
    other seeds the stability of its latents.
    """

    sae: Path
    """Folder that `tsae train` wrote, or a published SAE (see `tsae encode`)."""
    store: Path
    """Folder that `tsae capture` wrote."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    span: Literal["response", "thinking", "answer", "prompt", "all"] = "all"
    """Tokens that count. Special tokens never do, nor response tokens that the policy did not sample."""
    max_norm: float | None = None
    """Leave out tokens whose norm about the centre exceeds this multiple of the median; by default beyond the limit
    that training stored, or 10 times the median where it stored none."""
    all_problems: bool = False
    """Measure on all problems, not only on those held out of training."""
    series: tuple[str, ...] = ()
    """The readers' checkpoints, as for capture: measures loss and KL with the reconstruction spliced in."""
    baseline: Path | None = None
    """Another SAE, such as a plain Matryoshka of the same data: probes how far each separates trajectory from token."""
    annotator: str | None = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, to probe as well; needs
    --series."""
    seeds: tuple[Path, ...] = ()
    """SAEs of the same training with other seeds: matches latents into stability.json, which `tsae encode` copies."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""


@dataclass(frozen=True)
class Encode:
    """Turn activations into sparse feature codes. Resumes an unfinished encoding.

    Without a store: tsae encode --sae SAE --live.series SERIES --live.rollouts ROLLOUTS --to FEATURES. Activations are
    encoded as the checkpoints compute them, and never stored.

    In parts that know nothing of each other: --parts 8 --workers 2 on this machine, --parts 8 --executor slurm on a
    cluster, or --part 2/8 wherever you start it.
    """

    sae: Path
    """Folder that `tsae train` wrote, or a published SAE: a path, org/name or org/name/folder on the Hugging Face Hub,
    or saelens:RELEASE/ID of sae_lens's list."""
    to: Path
    """Folder of the feature table."""
    store: Path | None = None
    """Folder that `tsae capture` wrote."""
    live: Live = field(default_factory=Live)
    device: str = "cpu"
    """Torch device of the SAE: cpu, cuda, cuda:1, …; --live.device is that of the checkpoints."""
    part: str | None = None
    """Encode only a part of the shards, such as 2/7. When all parts are done, the same command without this
    joins them."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    spread: OmitArgPrefixes[Spread] = field(default_factory=Spread)


@dataclass(frozen=True)
class Crosscoder:
    """Train a crosscoder of the base and another checkpoint, and say which latents are new, lost or shared.

    A second opinion beside `tsae diff`: it asks for directions that one checkpoint lacks, not for features whose use
    changed. Latent scaling tells artefacts from changes. Resumes an unfinished training.

    Of a published crosscoder of dictionary_learning: --published FOLDER.
    """

    store: Path
    """Folder that `tsae capture` wrote."""
    reader: str
    """Id of the checkpoint that is compared with the base, such as hard-150."""
    to: Path
    """Folder for the crosscoder."""
    published: Path | None = None
    """Crosscoder of dictionary_learning (model_final.pt, ae.pt or model.safetensors) in place of a training; its first
    model is the base. It is written to --to in the form of tsae."""
    all_problems: bool = False
    """Judge on all problems, not only on those held out of training."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    sae: OmitArgPrefixes[SAEConfig] = field(default_factory=lambda: SAEConfig(groups=(1.0,), temporal_weight=0.0))
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
